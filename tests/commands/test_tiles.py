"""`pallas-ops tiles`: what is stored, moving it, and why a tile is chosen."""

import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import pytest
from click.testing import CliRunner

import pallas_ops as po
from pallas_ops.commands import _files, _generating, _tiles, main
from pallas_ops.commands._entries import check_entry
from pallas_ops.commands._products import make_problem
from pallas_ops.commands._why import explain
from pallas_ops.kernels import run_kernel
from pallas_ops.tiles import (
    _store,
    Entry,
    InvalidEntryError,
    problem_key,
    table_json,
    TileStore,
    versions,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the store's files."""
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PALLAS_OPS_TILES", raising=False)
    return tmp_path / "cache" / "tiles"


def _run(*arguments, **settings):
    return CliRunner().invoke(main, ["tiles", *map(str, arguments)], **settings)


def _problem(m=64, k=512, n=256, *, device="v5e", implementation="mosaic", **fields):
    fields = dict(dtype="bfloat16", out_dtype=None, layout="NT", precision="default") | fields
    return make_problem("forward", m, k, n, device=device, implementation=implementation, **fields)


def _entry(problem, *blocks, **fields):
    tile = po.TileConfig(*(blocks or (64, 128, 128)))
    return Entry(problem_key(problem), versions(), tile, **dict(seconds=1.5e-5) | fields)


def _put(problem, *blocks, **fields):
    entry = _entry(problem, *blocks, **fields)
    assert TileStore().put(entry)
    return TileStore().path(entry.key, entry.versions)


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def _error(result):
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)  # an error of click's, and no traceback
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


def _listed():
    result = _run("list", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)["entries"]


# list and show


def test_list_of_nothing(folder):
    result = _run("list")
    assert (result.exit_code, result.stdout.count(str(folder))) == (0, 1)
    assert result.stdout.startswith("Nothing is stored in ")
    assert json.loads(_run("list", "--json").stdout) == {"directory": str(folder), "entries": []}


def test_list_has_a_row_for_each_entry(folder):
    path = _put(_problem(60))
    _put(_problem(device=None, implementation="interpret", dtype="float32", layout="TN"))
    result = _run("list")
    assert (result.exit_code, result.stderr) == (0, "")
    (row,) = [line for line in result.stdout.splitlines() if " v5e " in line]
    for part in (path.stem[-32:-24], "64", "512", "256", "NT", "mosaic", "64x128x128", "15 us"):
        assert part in row.split() or part in row
    (row,) = [line for line in result.stdout.splitlines() if " interpret " in line]
    assert {"TN", "any", "yes"} <= set(row.split())
    assert f"2 in {folder}" in result.stdout
    assert [one["status"] for one in _listed()] == ["used", "used"]


def _rewrite(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:50]), "it is no JSON"),
        (lambda path: path.write_bytes(b""), "it is no JSON"),
        (lambda path: path.write_bytes(b"\x80\xff\x00"), "it is no JSON"),
        (lambda path: _rewrite(path, schema=7), "schema 7, expected 1"),
        (lambda path: _rewrite(path, seconds=math.nan), "it is no JSON (the number nan)"),
        (lambda path: _rewrite(path, key={}), "parts of the key that are missing"),
        (lambda path: _rewrite(path, tile=[64, 100, 128]), "block_k=100 is neither a multiple"),
        (lambda path: path.rename(path.with_name("matmul-0.json")), "never looked for"),
    ],
)
def test_a_broken_file_is_listed_with_its_reason(spoil, reason, folder):
    _put(_problem(8))
    spoil(_put(_problem()))
    result = _run("list")
    assert (result.exit_code, result.stderr) == (0, "")
    (row,) = [line for line in result.stdout.splitlines() if "no: " in line]
    assert reason in row
    broken, good = sorted(_listed(), key=lambda one: one["status"])
    assert (broken["status"], good["status"]) == ("broken", "used")
    assert reason in broken["error"]


def test_an_entry_of_other_versions_is_told_from_one_that_is_used():
    entry = _entry(_problem())
    TileStore().put(dataclasses.replace(entry, versions=versions() | {"jax": "0.9.9"}))
    assert [one["status"] for one in _listed()] == ["other versions"]
    assert "no: found with jax 0.9.9" in _run("list").stdout


def test_show():
    path = _put(_problem(), failures={"8x8x8": "it broke"}, vmem_limit_bytes=2**25)
    result = _run("show", path.stem[-32:][:5])
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (str(path), "TileConfig(block_m=64", "15 us", "it broke", "32.0 MiB", "jax"):
        assert part in result.stdout
    shown = json.loads(_run("show", path.stem, "--json").stdout)
    assert shown["entry"] == json.loads(path.read_text())
    assert shown["file"] == str(path)


def test_show_what_is_not_one():
    assert "No stored tile has an id that begins with 'ab'" in _error(_run("show", "ab"))
    paths = [_put(_problem(m)) for m in (8, 16)]
    message = _error(_run("show", "matmul-"))
    assert "2 stored tiles have an id that begins with 'matmul-'" in message
    paths[0].write_bytes(b"{")
    result = _run("show", paths[0].stem)
    assert result.exit_code == 0
    assert "no: it is no JSON" in result.stdout


# export and import


def test_what_is_exported_and_imported_again_is_found(tmp_path, folder):
    problems = [_problem(64), _problem(64, layout="NN"), _problem(1, n=1, dtype="float32")]
    tiles = [(64, 128, 128), (32, 512, 256), (1, 512, 1)]
    for problem, blocks in zip(problems, tiles, strict=True):
        _put(problem, *blocks)
    before = _contents(folder)
    table = tmp_path / "table.json"
    result = _run("export", table)
    assert (result.exit_code, result.stdout) == (0, f"3 tiles written to {table}.\n")
    assert _run("clear", "--yes").exit_code == 0
    assert _contents(folder) == {}
    result = _run("import", table)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"3 tiles imported to {folder}.\n"
    assert {name: json.loads(text) for name, text in _contents(folder).items()} == {
        name: json.loads(text) for name, text in before.items()
    }
    for problem, blocks in zip(problems, tiles, strict=True):
        resolution = po.CachedResolver(quiet=True).resolve(problem)
        assert (resolution.source, resolution.tile.blocks) == ("store", blocks)


@pytest.mark.parametrize(
    "fields",
    [
        dict(weights="int8"),
        dict(weights="int8", dtype="int8"),
        dict(weights="int8", dtype="float32", out_dtype="bfloat16"),
    ],
    ids=["weights alone", "both", "float32"],
)
def test_tiles_of_scaled_products_are_exported_and_imported(fields, tmp_path, folder):
    """What a key says of an epilogue is enough to check the entry; `float32` from int8 needs it."""
    problem = _problem(64, **fields)
    assert problem.epilogue == "scale:float32 identity"
    _put(problem, 64, 128, 128)
    assert [one["status"] for one in _listed()] == ["used"]
    table = tmp_path / "table.json"
    assert _run("export", table).exit_code == 0
    assert _run("clear", "--yes").exit_code == 0
    assert _run("import", table).exit_code == 0
    resolution = po.CachedResolver(quiet=True).resolve(problem)
    assert (resolution.source, resolution.tile.blocks) == ("store", (64, 128, 128))
    checked = check_entry(_entry(problem))
    assert checked.matmul.epilogue is not None
    assert checked.matmul.columns == problem.matmul.columns
    assert checked.matmul.outputs == 1


def test_an_epilogue_of_unknown_dtype_is_no_entry():
    problem = _problem(weights="int8")
    key = problem_key(problem) | {"epilogue": "scale:float99 identity"}
    with pytest.raises(InvalidEntryError, match="float99"):
        check_entry(dataclasses.replace(_entry(problem), key=key))


def test_a_table_goes_through_pipes():
    _put(_problem())
    text = _run("export", "-").stdout
    assert len(json.loads(text)["entries"]) == 1
    _run("clear", "--yes")
    assert "1 tile imported" in _run("import", "-", input=text).stdout
    assert _run("export", "-").stdout == text


def test_export_of_one_device(tmp_path):
    _put(_problem(device="v5e"))
    _put(_problem(device="v6e"))
    text = _run("export", "-", "--device", "TPU v6 lite").stdout
    assert [row["key"]["device"] for row in json.loads(text)["entries"]] == ["v6e"]
    message = _error(_run("export", tmp_path / "table.json", "--device", "v4"))
    assert "Nothing for a v4 that could be used is stored" in message
    assert "Unknown TPU 'v9'" in _error(_run("export", "-", "--device", "v9"))
    assert not (tmp_path / "table.json").exists()


def test_export_takes_one_entry_for_each_problem_and_leaves_out_what_is_no_use():
    now, problem = versions(), _problem()
    for blocks, changed in (((64, 512, 256), {"jax": "0.9"}), ((64, 256, 256), {})):
        entry = dataclasses.replace(_entry(problem, *blocks), versions=now | changed)
        TileStore().put(entry)
    old_kernel = dataclasses.replace(_entry(_problem(8)), versions=now | {"kernel": -1})
    TileStore().put(old_kernel)
    _put(_problem(16)).write_bytes(b"{")
    _put(_problem(128), 128, 100, 128)  # no TPU takes that
    # The oldest file, and still the one that counts.
    os.utime(TileStore().path(problem_key(problem), now), (0, 0))
    (row,) = json.loads(_run("export", "-").stdout)["entries"]
    assert (row["tile"], row["versions"]) == ([64, 256, 256], now)


def test_export_writes_all_or_nothing(tmp_path, monkeypatch):
    _put(_problem())
    table = tmp_path / "table.json"
    table.write_text("old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        message = _error(_run("export", table))
    assert message == f"Error: {table} cannot be written: No space left on device."
    assert table.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "table.json"]
    assert "No such file" in _error(_run("export", tmp_path / "no" / "table.json"))
    assert _run("export", table).exit_code == 0
    assert json.loads(table.read_text())["schema"] == 1


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_export_leaves_the_old_table_or_the_new_one(after, tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    table.write_text("old")
    table.chmod(0o640)

    def replace(*paths, real=os.replace):
        if after:
            real(*paths)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            _files.write_whole(table, "new")
    assert table.read_text() == ("new" if after else "old")
    assert table.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("by_link", [False, True])
def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path, by_link):
    """Such as /dev/null, or the pipe of `>(less)`."""
    _put(_problem())
    pipe, name, read = tmp_path / "pipe", tmp_path / "pipe", []
    os.mkfifo(pipe)
    if by_link:
        name = tmp_path / "link"
        name.symlink_to(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    result = _run("export", name)
    reader.join(30)
    assert (result.exit_code, result.stdout) == (0, f"1 tile written to {name}.\n")
    assert pipe.is_fifo()
    assert len(json.loads(read[0])["entries"]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "pipe", name.name}


def test_standard_output_by_its_name_is_standard_output(monkeypatch):
    def never(path, text):
        raise AssertionError(f"{path} written")

    _put(_problem())
    monkeypatch.setattr(_tiles, "write_whole", never)
    result = _run("export", "/dev/stdout")
    assert len(json.loads(result.stdout)["entries"]) == 1


def test_a_file_that_is_open_already_is_added_to(tmp_path):
    """As of `/dev/fd/3` after `3>> log`: who opened it writes on where they were."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("a") as stream:
        _files.write_whole(pathlib.Path(f"/proc/self/fd/{stream.fileno()}"), "a table\n")
        stream.write("after\n")
    assert log.read_text() == "before\na table\nafter\n"


def test_a_table_that_could_not_be_written_is_not_begun(monkeypatch, tmp_path):
    def never(*arguments, **given):
        raise AssertionError("compiled")

    monkeypatch.setattr(_generating, "generate", never)
    monkeypatch.setattr(_generating, "shipped_problems", never)
    result = _run("generate", tmp_path / "missing" / "v5e.json", "--device", "v5e")
    assert result.exit_code == 2
    assert f"{tmp_path / 'missing'} is no folder. Make it first" in result.stderr


def test_a_table_of_other_versions_is_stored_under_those_of_now(tmp_path):
    problem = _problem()
    other = {"jax": "0.9", "libtpu": None, "kernel": versions()["kernel"]}
    found = dataclasses.replace(_entry(problem, reason="measured"), versions=other)
    old_kernel = dataclasses.replace(_entry(_problem(8)), versions=versions() | {"kernel": -1})
    table = tmp_path / "table.json"
    table.write_text(table_json([found, old_kernel]))
    result = _run("import", table)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 tile imported" in result.stdout
    assert "1 tile of another version of the kernel was left out." in result.stdout
    resolution = po.CachedResolver(quiet=True).resolve(problem)
    assert resolution.source == "store"
    assert "measured (imported; found with jax 0.9, " in resolution.reason
    table.write_text(table_json([old_kernel]))
    assert "of another version of the kernel" in _error(_run("import", table))
    assert len(_listed()) == 1


def test_an_import_takes_the_place_of_what_this_process_knew(tmp_path, folder):
    problem, resolver = _problem(), po.CachedResolver(quiet=True)
    _put(problem, 64, 128, 128)
    assert resolver.resolve(problem).tile.blocks == (64, 128, 128)
    table = tmp_path / "table.json"
    table.write_text(table_json([_entry(problem, 32, 256, 256), _entry(_problem(8))]))
    assert _run("import", table).stdout == (
        f"2 tiles imported to {folder}, 1 of them in place of another.\n"
    )
    assert resolver.resolve(problem).tile.blocks == (32, 256, 256)


def _key(**fields):
    return lambda row: row["key"].update(fields)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda row: row.update(schema=2), "schema 2, expected 1"),
        (lambda row: row.pop("reason"), "missing or unknown: reason"),
        (lambda row: row.update(tile=[64, 128]), "`tile` is [64, 128]"),
        (lambda row: row.update(tile=[64, 0, 128]), "block_k must be positive"),
        (lambda row: row.update(tile=[50, 100, 128]), "block_k=100 is neither a multiple of 128"),
        (lambda row: row.update(tile=[24, 128, 128]), "block_m=24 is neither a multiple of 16"),
        (lambda row: row.update(vmem_limit_bytes=2**30), "and a TPU v5e has at most 134217728"),
        (lambda row: row.update(vmem_limit_bytes=1), "the blocks need 163840 bytes of VMEM"),
        (lambda row: row.update(seconds=-1.0), "`seconds` is -1.0"),
        (lambda row: row["key"].pop("k"), "missing or unknown: k"),
        (_key(extra=1), "missing or unknown: extra"),
        (_key(operator="../../evil"), "there is no operator '../../evil'"),
        (_key(implementation="cuda"), "no implementation 'cuda'"),
        (_key(device="TPU v5 lite"), "`device` is 'TPU v5 lite', expected 'v5e'"),
        (_key(device=5), "`device` of the key is 5"),
        (_key(m=100), "`m` is 100, expected 128"),
        (_key(k=True), "`k` of the key is True"),
        (_key(n=-4), "`n` of the key is -4"),
        (_key(layout="NX"), "`layout` is 'NX'"),
        (_key(lhs_dtype="float99"), "float99"),
        (_key(lhs_dtype="float16"), "float16"),
        (_key(precision="BEST"), "`precision` is 'BEST'"),
        (_key(batch=[[2, 3, False]]), "operands that do not fit"),
        (_key(batch=[[2, 2, 0]]), "`batch` of the key is"),
    ],
)
def test_one_bad_entry_and_nothing_is_imported(spoil, reason, tmp_path, folder):
    _put(_problem(8), 8, 128, 128)
    before = _contents(folder)
    rows = json.loads(table_json([_entry(_problem(16)), _entry(_problem(64))]))
    assert [row["key"]["m"] for row in rows["entries"]] == [16, 64]
    spoil(rows["entries"][1])
    table = tmp_path / "table.json"
    table.write_text(json.dumps(rows))
    message = _error(_run("import", table))
    assert message.startswith(f"Error: {table}: entry 1: ")
    assert reason in message
    assert message.endswith("Nothing was imported.")
    assert _contents(folder) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is no JSON"),
        ("[]", "expected an object with a list `entries`"),
        ('{"schema": 9, "entries": []}', "schema 9, expected 1"),
        ('{"schema": 1, "entries": []}', "it holds no entries"),
    ],
)
def test_a_bad_table_says_what_is_wrong(text, reason, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(text)
    assert reason in _error(_run("import", table))


def test_two_answers_to_one_problem_are_refused(tmp_path, folder):
    table = tmp_path / "table.json"
    entries = [_entry(_problem(64), 64, 128, 128), _entry(_problem(60), 32, 128, 128)]
    table.write_text(table_json(entries))
    assert "entry 1 is for the same problem as entry 0" in _error(_run("import", table))
    assert _contents(folder) == {}


@pytest.mark.parametrize("block_m", [33, 64, 16, 100])
def test_a_block_that_is_the_whole_of_some_m_of_the_class_is_good(block_m):
    # 33 rows are the whole axis of m = 33, which the class of 64 serves; 100 are cut to the class.
    assert check_entry(_entry(_problem(64), block_m, 512, 128)).m in (33, 64)


def test_an_import_that_cannot_be_stored_is_an_error(tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    table.write_text(table_json([_entry(_problem())]))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "file"))
    message = _error(_run("import", table))
    assert "0 of 1 imported: tiles cannot be stored in" in message


# a store that cannot be used


def _denied(monkeypatch, folder):
    """A folder that may not be read, for whom it binds: tests may run as root, who may all."""

    def deny(owner, name):
        real = getattr(owner, name)

        def denied(path, *arguments, **settings):
            if str(path).startswith(str(folder)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **settings)

        monkeypatch.setattr(owner, name, denied)

    for owner, names in ((os, ("scandir", "mkdir")), (pathlib.Path, ("open", "lstat"))):
        for name in names:
            deny(owner, name)


PLACES = {
    "denied": (None, "Permission denied"),
    "a file": (__file__, "Not a directory"),
    "too long": ("/x" * 2500, "File name too long"),
}


@pytest.fixture(params=PLACES)
def refused(request, tmp_path, monkeypatch):
    """A store in a strange place, and what the system says of it."""
    place, reason = PLACES[request.param]
    if place is None:
        _denied(monkeypatch, tmp_path / "cache")
    else:
        monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", place)
    monkeypatch.setattr(_store, "_warned", set())
    return reason


@pytest.mark.parametrize(
    "arguments", [["list"], ["list", "--json"], ["show", "ab"], ["export", "-"], ["clear", "--yes"]]
)
def test_a_store_that_cannot_be_read_is_one_line(refused, arguments):
    result = _run(*arguments)
    message = _error(result)
    assert (result.stdout, result.stderr) == ("", f"{message}\n")
    assert f" cannot be read: {refused}. Make it a folder" in message
    assert "PALLAS_OPS_CACHE_DIR names another" in message
    assert len(message) < 500


def test_import_into_such_a_store(refused, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(table_json([_entry(_problem())]))
    message = _error(_run("import", table))
    assert "0 of 1 imported: tiles cannot be stored in" in message
    assert f"({refused})" in message
    assert "PALLAS_OPS_CACHE_DIR moves the store" in message


def test_why_of_such_a_store(refused):
    why = _why(64, 512, 256, "--device", "v5e")
    (store,) = [step for step in why["steps"] if step["asked"].startswith("the store, ")]
    assert store["answer"] == f"it cannot be read: {refused}"
    (warning,) = why["warnings"]
    assert f"cannot be used and is left out: {refused}. PALLAS_OPS_CACHE_DIR moves" in warning
    result = _run("why", 64, 512, 256, "--device", "v5e")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) < 700


def test_tune_for_such_a_store(refused):
    options = ["--product", "forward", "--implementation", "interpret", "--candidates", "1"]
    result = CliRunner().invoke(main, ["tune", "8", "128", "8", *options])
    assert _error(result) == "Error: No tile is stored for 1 of 1 problem after all."
    assert result.stdout.count(f"{refused}") == 1
    assert "PALLAS_OPS_CACHE_DIR moves the store" in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 700


def test_a_table_that_cannot_be_read_to_its_end_is_an_error(tmp_path, folder):
    """Such as a file of the system's that can be opened, or a disk that fails."""
    message = _error(_run("import", "/proc/self/mem"))
    assert message == "Error: /proc/self/mem: Input/output error. Nothing was imported."
    assert not folder.exists()


def test_a_folder_whose_name_is_no_text_is_printed(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "pallas_ops", "tiles", "list"],
        env={**os.environ, "PALLAS_OPS_CACHE_DIR": f"{tmp_path}/\udcff", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert f"Nothing is stored in {tmp_path}/\\udcff/tiles." in result.stdout


# clear


def test_clear_asks(folder):
    _put(_problem())
    _put(_problem(8)).write_bytes(b"broken")
    question = f"Remove 2 stored tiles from {folder}? [y/N]"
    result = _run("clear", input="n\n")
    assert result.exit_code == 1
    assert question in result.stdout
    assert _run("clear", input="").exit_code == 1  # nobody there to ask
    assert len(_contents(folder)) == 2
    result = _run("clear", input="y\n")
    assert (result.exit_code, _contents(folder)) == (0, {})
    assert "2 stored tiles removed." in result.stdout
    assert "Nothing is stored in" in _run("clear").stdout


def test_clear_removes_what_an_interrupted_write_left(folder):
    folder.mkdir(parents=True)
    (folder / ".new-abc.tmp").write_text("half")
    result = _run("clear", input="y\n")
    assert f"Remove 1 unfinished file from {folder}?" in result.stdout
    assert "1 unfinished file removed." in result.stdout
    assert _contents(folder) == {}


def test_clear_leaves_a_folder_and_goes_on(folder):
    _put(_problem())
    (folder / "matmul-0.json").mkdir()
    (folder / ".new-abc.tmp").write_text("half")
    result = _run("clear", "--yes")
    assert (result.exit_code, result.stdout) == (
        0,
        "1 stored tile and 1 unfinished file removed.\n",
    )
    assert [path.name for path in folder.iterdir()] == ["matmul-0.json"]
    assert "Nothing is stored in" in _run("clear").stdout


def test_clear_is_for_this_process_as_well():
    problem, resolver = _problem(), po.CachedResolver(quiet=True)
    _put(problem)
    assert resolver.resolve(problem).source == "store"
    _run("clear", "--yes")
    assert resolver.resolve(problem).source == "estimate"


# why


def _why(*arguments):
    result = _run("why", *arguments, "--no-compile", "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return json.loads(result.stdout)


def _asked(why):
    return [step["asked"].split(",")[0] for step in why["steps"]]


def test_why_of_what_is_nowhere(folder):
    result = _run("why", 2048, 512, 1152, "--device", "v5e", "--no-compile")
    assert (result.exit_code, result.stderr) == (0, "")
    path = TileStore().path(problem_key(_problem(2048, 512, 1152)), versions())
    assert f"the store, {path}: nothing\n" in result.stdout
    tile = po.StaticResolver().resolve(_problem(2048, 512, 1152)).tile
    m, n, k = 2048 // tile.block_m, 1152 // tile.block_n, 512 // tile.block_k
    assert f"Tile    block_m={tile.block_m}, block_k={tile.block_k}, " in result.stdout
    assert "Source  estimate: " in result.stdout
    assert "limit 16.0 MiB (the default), of 128.0 MiB in all" in result.stdout
    assert f"Grid    {m * n * k} steps: batch 1 x m {m} x n {n} x k {k}" in result.stdout
    assert "Time" not in result.stdout
    assert not folder.exists()


def test_why_says_where_xlas_dot_is_faster():
    """A poor tile is stored: its time stands beside XLA's, with what to do about it."""
    _put(_problem(), 8, 128, 128)
    arguments = ("why", 64, 512, 256, "--device", "v5e")
    result = _run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    told = re.search(r"Time    ([\d.]+) us predicted; XLA's dot ([\d.]+) us\n", result.stdout)
    ours, xla = map(float, told.groups())
    assert ours > 1.1 * xla
    assert 'more than a tenth faster than this tile: implementation="xla"' in result.stdout
    found = json.loads(_run(*arguments, "--json").stdout)
    assert found["xla_is_faster"]
    assert found["predicted_us"] == pytest.approx(ours, rel=1e-3)
    assert found["xla_us"] == pytest.approx(xla, rel=1e-3)


def test_why_of_what_is_shipped():
    why = _why(512, 512, 512, "--layout", "NN", "--dtype", "float32", "--device", "v5e")
    assert why["source"] == "table"
    assert why["reason"].startswith("found by compiler: predicted")
    assert _asked(why)[-1] == "the table for v5e that comes with the package"


@pytest.mark.parametrize("device", ["TPU v9", None])
def test_why_where_no_table_is_asked(device):
    problem = dataclasses.replace(_problem(implementation="interpret"), device=device)
    why = explain(problem, "cached")
    step = next(step for step in why.steps if "package" in step.asked)
    assert step.answer == f"there is none {f'for {device}' if device else 'where no TPU is named'}"


def test_why_of_what_is_stored():
    path = _put(_problem(), 64, 256, 128)
    why = _why(64, 512, 256, "--device", "v5e")
    assert _asked(why) == ["the call", "PALLAS_OPS_TILES", "the store"]
    assert str(path) in why["steps"][-1]["asked"]
    assert "TileConfig(block_m=64, block_k=256, block_n=128)" in why["steps"][-1]["answer"]
    assert (why["tile"], why["source"]) == ([64, 256, 128], "store")
    # Another device, dtype or layout is another problem.
    for other in (["v6e"], ["v5e", "--dtype", "float32"], ["v5e", "--layout", "NN"]):
        assert _why(64, 512, 256, "--device", *other)["source"] == "estimate"
    assert _why(64, 512, 256)["source"] == "estimate"


def test_why_of_a_file_that_cannot_be_used():
    _put(_problem()).write_bytes(b"\x00")
    why = _why(64, 512, 256, "--device", "v5e")
    assert why["steps"][2]["answer"] == "a file that cannot be used"
    assert why["source"] == "estimate"
    (warning,) = why["warnings"]
    assert "cannot be used and is left out: it is no JSON" in warning


def test_why_of_each_resolver(monkeypatch):
    _put(_problem())
    arguments = (64, 512, 256, "--device", "v5e")
    assert _why(*arguments, "--tiles", "cached")["source"] == "store"
    assert _why(*arguments, "--tiles", "autotune")["source"] == "store"
    static = _why(*arguments, "--tiles", "static")
    assert static["source"] == "estimate"
    assert _asked(static)[-1] == "the estimate by shape"
    assert "the store" not in _asked(static)
    monkeypatch.setenv("PALLAS_OPS_TILES", "static")
    named = _why(*arguments)
    assert (named["source"], _asked(named)[1]) == ("estimate", "PALLAS_OPS_TILES=static")
    assert _why(*arguments, "--tiles", "cached")["source"] == "store"
    monkeypatch.setenv("PALLAS_OPS_TILES", "compiler")
    assert _why(*arguments)["source"] == "store"
    monkeypatch.setenv("PALLAS_OPS_TILES", "fastest")
    assert "PALLAS_OPS_TILES='fastest' names no tile resolver" in _error(_run("why", 64, 512, 256))
    assert _why(*arguments, "--tiles", "cached")["source"] == "store"


def test_why_measures_nothing(folder):
    arguments = (64, 512, 256, "--tiles", "autotune")
    why = _why(*arguments)
    assert {"asked": "measuring", "answer": "cannot be done here, without a TPU"} in why["steps"]
    why = _why(*arguments, "--implementation", "interpret")
    (answer,) = [step["answer"] for step in why["steps"] if step["asked"] == "measuring"]
    assert "by the first call" in answer
    assert not folder.exists()


@pytest.mark.parametrize("product", ["forward", "lhs_cotangent", "rhs_cotangent"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_why_asks_for_what_a_program_asks_for(layout, product):
    asked = []

    class Asking:
        def resolve(self, problem):
            asked.append(problem)
            return po.StaticResolver().resolve(problem)

    flags = dict(transpose_lhs=layout[0] == "T", transpose_rhs=layout[1] == "T")
    lhs = jax.numpy.ones((40, 24) if flags["transpose_lhs"] else (24, 40))
    rhs = jax.numpy.ones((56, 40) if flags["transpose_rhs"] else (40, 56))

    def loss(lhs, rhs):
        call = dict(tiles=Asking(), implementation="interpret", **flags)
        return po.matmul(lhs, rhs, **call).sum()

    if product == "forward":
        jax.jit(loss).lower(lhs, rhs)
    else:
        gradient = jax.grad(loss, 0 if product == "lhs_cotangent" else 1)
        jax.jit(gradient).lower(lhs, rhs)
        # The forward product is in the program as well, until XLA drops it.
        asked = [one for one in asked if (one.m, one.k, one.n) != (24, 40, 56)]
    (problem,) = asked
    options = ("--dtype", "float32", "--implementation", "interpret")
    why = _why(24, 40, 56, "--layout", layout, "--product", product, *options)
    assert why["problem"] == json.loads(json.dumps(problem_key(problem))) | {"m": problem.m}


def test_the_grid_is_that_of_the_kernel():
    problem = _problem(100, 1000, 300, device=None, implementation="interpret")
    _put(problem, 32, 256, 128)
    why = _why(100, 1000, 300, "--implementation", "interpret")
    assert why["tile"] == [32, 256, 128]
    matmul = problem.matmul
    arrays = [
        jax.ShapeDtypeStruct(matmul.lhs_shape, matmul.lhs_dtype),
        jax.ShapeDtypeStruct(matmul.rhs_shape, matmul.rhs_dtype),
    ]
    program = jax.make_jaxpr(
        lambda *arrays: run_kernel(matmul, (32, 256, 128), *arrays, implementation="interpret")
    )(*arrays)
    (call,) = [e for e in program.eqns if e.primitive.name == "pallas_call"]
    grid = why["grid_steps"]
    assert call.params["grid_mapping"].grid == (grid["m"], grid["n"], grid["k"]) == (4, 3, 4)


def test_a_raised_limit_is_told():
    _put(_problem(4096, 4096, 4096), 1024, 4096, 512)
    why = _why(4096, 4096, 4096, "--device", "v5e")
    assert why["vmem_limit_is_raised"]
    assert 2**24 < why["vmem_estimate_bytes"] < why["vmem_limit_bytes"] < 2**27
    result = _run("why", 4096, 4096, 4096, "--device", "v5e", "--no-compile")
    assert "(raised for it), of 128.0 MiB in all" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([0, 4, 4], "0 is not in the range"),
        ([4, 4], "Missing argument 'N'"),
        ([4, 4, 4, "--device", "v9"], "Unknown TPU 'v9'. Known are"),
        ([4, 4, 4, "--implementation", "xla"], "'xla' is not one of 'mosaic'"),
        ([4, 4, 4, "--dtype", "float16"], "'float16' is not one of"),
        ([4, 4, 4, "--dtype", "int8", "--product", "lhs_cotangent"], "int8 has no gradients"),
        (
            [4, 4, 4, "--weights", "int8", "--product", "rhs_cotangent"],
            "int8 has no gradients, and 'rhs_cotangent' was asked for",
        ),
        ([4, 4, 4, "--weights", "bfloat16"], "'bfloat16' is not 'int8'"),
        ([4, 4, 4, "--tiles", "fastest"], "'fastest' is not one of"),
    ],
)
def test_bad_questions(arguments, message):
    result = _run("why", *arguments)
    assert message in _error(result)
    assert result.stdout == ""


def test_what_the_kernel_does_not_have():
    result = _run("why", 4, 4, 4, "--dtype", "int8", "--device", "v4")
    assert result.exit_code == 1
    assert "the MXU of a TPU v4 has no int8 products" in result.stderr


def test_as_a_person_runs_it(tmp_path):
    # The platform is left to JAX, which then loads libtpu and hears its complaints.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    result = subprocess.run(
        [sys.executable, "-m", "pallas_ops", "tiles", "why", "8", "128", "128"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert str(tmp_path / "cache" / "tiles") in result.stdout
