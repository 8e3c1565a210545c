"""The store: what is written is found again, and no file that is there can hurt."""

import contextlib
import dataclasses
import errno
import gc
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops import _whole
from pallas_ops.tiles import (
    _autotune,
    _store,
    Entry,
    forget,
    problem_key,
    TileStore,
    versions,
)
from pallas_ops.tiles._sweep import Sweep

from .conftest import forget_what_this_process_knows
from .tools import RecordingTimer, ROOT, run_python, tile_problem


PROBLEM = tile_problem(8, 256, 8)
WINNER = po.TileConfig(8, 128, 8)
X, W = jnp.ones((8, 256)), jnp.ones((256, 8))

pytestmark = pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")


def entry_of(problem=PROBLEM, tile=WINNER, **fields):
    return Entry(key=problem_key(problem), versions=versions(), tile=tile, **fields)


def path_of(store, problem=PROBLEM):
    path = TileStore(store).path(problem_key(problem), versions())
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def call(tiles):
    """A call of a new function: the resolver is asked, with what this process remembers."""
    return jax.jit(lambda x, w: po.matmul(x, w, tiles=tiles, implementation="interpret"))(X, W)


def left_behind(store):
    return [path for path in store.rglob("*") if path.name.startswith(".new-")]


def test_an_entry_is_found_again_as_it_was_written(store):
    entry = entry_of(
        vmem_limit_bytes=1 << 25, reason="why", seconds=1.5e-5, failures={"8x256x8": "no"}
    )
    assert TileStore(store).put(entry)
    assert TileStore(store).get(entry.key, entry.versions) == entry
    assert [found for _, found in TileStore(store).entries()] == [entry]
    assert left_behind(store) == []


def test_two_calls_one_sweep():
    timer = RecordingTimer()
    for _ in range(2):
        call(po.AutotuneResolver(timer=timer))
    assert timer.sweeps == [PROBLEM]


def test_forget_asks_the_store_again(store):
    timer = RecordingTimer()
    tiles = po.AutotuneResolver(timer=timer)
    run = jax.jit(lambda x: po.matmul(x, W, tiles=tiles, implementation="interpret"))
    run(X)
    TileStore(store).clear()
    run(X)
    assert timer.sweeps == [PROBLEM]
    forget()
    run(X)
    assert timer.sweeps == [PROBLEM] * 2


def test_a_new_process_does_not_sweep_and_another_jax_does(store, monkeypatch):
    code = """
import sys, warnings, jax, jax.numpy as jnp, pallas_ops as po
warnings.simplefilter("ignore")
said = []

class Keeping:
    def resolve(self, problem):
        said.append(po.AutotuneResolver().resolve(problem).source)
        return po.StaticResolver().resolve(problem)

x = jnp.ones((8, 256))
tiles = Keeping() if "keep" in sys.argv else None  # what the environment says
f = jax.jit(lambda x: po.matmul(x, jnp.ones((256, 8)), tiles=tiles, implementation="interpret"))
print(f(x)[0, 0], said, [entry.source for _, entry in po.tiles.TileStore().entries()])
print(po.tiles.TileStore().directory, po.__file__)
"""
    first = run_python(code, PALLAS_OPS_TILES="autotune")
    second = run_python(code, "keep", PALLAS_OPS_TILES="static")
    assert first.splitlines()[0] == "256.0 [] ['autotune']"
    assert second.splitlines()[0] == "256.0 ['store'] ['autotune']"
    assert f"{store}/tiles {ROOT}" in second
    timer = RecordingTimer()
    tiles = po.AutotuneResolver(timer=timer)
    assert tiles.resolve(PROBLEM).source == "store"
    assert timer.calls == []
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    forget_what_this_process_knows()
    assert tiles.resolve(PROBLEM).source == "autotune"
    assert timer.sweeps == [PROBLEM]


@pytest.mark.parametrize(
    "change",
    [
        dict(device="v5e"),
        dict(implementation="mosaic"),
        dict(implementation="tpu_interpret"),
        dict(epilogue="relu"),
        dict(operator="other"),
        dict(matmul=tile_problem(8, 257, 8).matmul),
        dict(matmul=tile_problem(8, 256, 9).matmul),
        dict(matmul=tile_problem(9, 256, 8).matmul),
        dict(matmul=tile_problem(8, 256, 8, layout="NT").matmul),
        dict(matmul=tile_problem(8, 256, 8, "bfloat16").matmul),
        dict(matmul=tile_problem(8, 256, 8, rhs="bfloat16").matmul),
        dict(matmul=tile_problem(8, 256, 8, out="bfloat16").matmul),
        dict(matmul=tile_problem(8, 256, 8, precision=jax.lax.Precision.HIGHEST).matmul),
        dict(
            matmul=dataclasses.replace(
                PROBLEM.matmul, lhs_shape=(3, 8, 256), rhs_shape=(3, 256, 8), sum_leading=(False,)
            )
        ),
        dict(
            matmul=dataclasses.replace(
                PROBLEM.matmul, lhs_shape=(3, 8, 256), rhs_shape=(3, 256, 8), sum_leading=(True,)
            )
        ),
        dict(
            matmul=dataclasses.replace(
                PROBLEM.matmul, lhs_shape=(1, 8, 256), rhs_shape=(3, 256, 8), sum_leading=(False,)
            )
        ),
    ],
    ids=str,
)
def test_everything_a_tile_may_depend_on_is_in_the_key(store, change):
    other = dataclasses.replace(PROBLEM, **change)
    TileStore(store).put(entry_of())
    assert problem_key(other) != problem_key(PROBLEM)
    assert TileStore(store).get(problem_key(other), versions()) is None
    # The key is JSON, and comes back from JSON as it was.
    assert json.loads(json.dumps(problem_key(other))) == problem_key(other)


@pytest.mark.parametrize("what", ["jax", "libtpu", "kernel"])
def test_every_version_is_in_the_key(store, what):
    TileStore(store).put(entry_of())
    assert TileStore(store).get(problem_key(PROBLEM), versions()) is not None
    other = {**versions(), what: "another"}
    assert TileStore(store).get(problem_key(PROBLEM), other) is None


def test_timings_of_one_implementation_are_never_anothers(store):
    timers = {name: RecordingTimer() for name in ("interpret", "tpu_interpret")}
    for name, timer in timers.items():
        for _ in range(2):
            resolution = po.AutotuneResolver(timer=timer).resolve(
                dataclasses.replace(PROBLEM, implementation=name)
            )
            assert resolution.tile == WINNER
    assert [p.implementation for t in timers.values() for p in t.sweeps] == list(timers)
    stored = {entry.key["implementation"] for _, entry in TileStore(store).entries()}
    assert stored == set(timers)
    on_tpu = dataclasses.replace(PROBLEM, implementation="mosaic", can_be_timed=False)
    assert po.AutotuneResolver().resolve(on_tpu).source == "estimate"


def _with(**fields):
    return json.dumps({**entry_of().as_json(), **fields}).encode()


def _without(name):
    fields = entry_of().as_json()
    del fields[name]
    return json.dumps(fields).encode()


def _deep(levels):
    return _with(key="deep").replace(b'"deep"', b'{"a":' * levels + b"1" + b"}" * levels)


BAD = {
    "empty": b"",
    "truncated": _with()[:-20],
    "cut in half": _with()[: len(_with()) // 2],
    "binary": bytes(range(256)) * 4,
    "not utf-8": b'{"schema": "\xff"}',
    "a list": b"[]",
    "null": b"null",
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
    "not a number": b'{"schema": NaN}',
    "deep list": b"[" * 100_000,
    "deep key": _deep(100_000),
    "rather deep key": _deep(900),
    "deep key within bounds": _deep(300),
    "a number of a million digits": b"1" * 1_000_000,
    # What follows is not read either, so that this alone would be an entry.
    "huge": _with() + b" " * (1 << 20),
    "other schema": _with(schema=2),
    "no schema": _without("schema"),
    "a field too many": _with(more=1),
    "a field too few": _without("tile"),
    "tile of two": _with(tile=[8, 128]),
    "tile of five": _with(tile=[8, 128, 8, 8, 8]),
    "tile in no parts": _with(tile=[8, 128, 8, 0]),
    "tile of words": _with(tile=["8", "128", "8"]),
    "tile of floats": _with(tile=[8.0, 128.0, 8.0]),
    "tile of zero": _with(tile=[8, 0, 8]),
    "tile of true": _with(tile=[8, True, 8]),
    "tile of lists": _with(tile=[[8], [128], [8]]),
    "a negative limit": _with(vmem_limit_bytes=-1),
    "a limit of true": _with(vmem_limit_bytes=True),
    "a limit of words": _with(vmem_limit_bytes="all"),
    "an enormous limit": _with(vmem_limit_bytes=1 << 40),
    "seconds in words": _with(seconds="fast"),
    "failures in a list": _with(failures=[]),
    "failures in numbers": _with(failures={"8x8x8": 1}),
    "a source of none": _with(source=None),
    "another problem": json.dumps(entry_of(tile_problem(8, 512, 8)).as_json()).encode(),
    "another version": _with(versions={**versions(), "jax": "0.0.1"}),
    "no versions": _with(versions={}),
    "nan among versions": _with(versions={**versions(), "kernel": math.nan}),
    "a number without end": _with(seconds="?").replace(b'"?"', b"1e999"),
    "half a character": _with(reason="\ud800"),
    "a text that steers the terminal": _with(failures={"8x8x8": "\x1b[2J"}),
    "such a key": _with(failures={"\x1b[2J": "why"}),
}


def only_warning(caught):
    # Those of the interpreter apart, which the filter of this module does not reach here.
    (found,) = [w for w in caught if "tells nothing about a TPU" not in str(w.message)]
    return str(found.message)


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_that_is_no_entry_is_a_miss_and_one_warning(store, content):
    path_of(store).write_bytes(content)
    tile_store, key = TileStore(store), problem_key(PROBLEM)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [tile_store.get(key, versions()) for _ in range(2)] == [None, None]
    assert str(path_of(store)) in only_warning(caught)
    assert "pallas-ops tiles clear" in only_warning(caught)
    # It can be listed, replaced and cleared.
    assert len(list(tile_store.entries())) == 1
    assert tile_store.put(entry_of())
    assert tile_store.get(key, versions()) == entry_of()
    path_of(store).write_bytes(content)
    assert tile_store.clear() == 1


@pytest.mark.parametrize("resolver", [po.AutotuneResolver, po.CachedResolver])
def test_a_bad_file_is_replaced_by_what_is_found_anew(store, resolver):
    path_of(store).write_bytes(BAD["truncated"])
    timer = RecordingTimer()
    tuned = po.AutotuneResolver(timer=timer)
    tiles = tuned if resolver is po.AutotuneResolver else po.CachedResolver(fallback=tuned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_allclose(call(tiles), X @ W)
    assert timer.sweeps == [PROBLEM]
    assert "cannot be used" in str(caught[0].message)
    assert TileStore(store).get(problem_key(PROBLEM), versions()).tile == WINNER


def _directory_for_a_file(store, monkeypatch):
    path_of(store).mkdir()


def _file_for_a_directory(store, monkeypatch):
    store.mkdir()
    (store / "tiles").write_text("a file")


def _file_for_the_store(store, monkeypatch):
    store.write_text("a file")


def _link_to_itself(store, monkeypatch):
    path = path_of(store)
    path.symlink_to(path)


def _failing(monkeypatch, owner, name, code, only=""):
    """An operation of the system that fails for the store: tests may run as root, who may all."""
    real = getattr(owner, name)

    def fail(*args, **kwargs):
        if only in str([*args, *kwargs.values()]):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)


def _unreadable(store, monkeypatch):
    path_of(store).write_bytes(_with())
    _failing(monkeypatch, pathlib.Path, "open", errno.EACCES, only="tiles/matmul-")


def _read_error(store, monkeypatch):
    path_of(store).write_bytes(_with())
    _failing(monkeypatch, pathlib.Path, "open", errno.EIO, only="tiles/matmul-")


def _no_folder_may_be_made(store, monkeypatch):
    _failing(monkeypatch, pathlib.Path, "mkdir", errno.EROFS)


def _read_only_folder(store, monkeypatch):
    _failing(monkeypatch, os, "open", errno.EACCES, only=".new-")


def _no_rename(store, monkeypatch):
    _failing(monkeypatch, os, "replace", errno.EACCES)


class _FullDisk:
    """A file whose every byte is one too many."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, text):
        self.file.write(text[:3])
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _full_disk(store, monkeypatch):
    def full(path, mode, **settings):
        return _FullDisk(path.open(mode)) if mode == "r+b" else open(path, mode, **settings)

    monkeypatch.setattr(_whole, "open", full, raising=False)


BROKEN = [
    _directory_for_a_file,
    _file_for_a_directory,
    _file_for_the_store,
    _link_to_itself,
    _unreadable,
    _read_error,
    _no_folder_may_be_made,
    _read_only_folder,
    _no_rename,
    _full_disk,
]


def _only_ask_the_timer(problem, tiles, *, timer, **_):
    seconds = {tile: timer(problem, tile, None, 0.0) for tile in tiles}
    return Sweep(dict(sorted(seconds.items(), key=lambda pair: pair[1])))


@pytest.mark.parametrize("breaking", BROKEN)
def test_a_store_that_cannot_be_used_is_one_warning(store, monkeypatch, breaking):
    monkeypatch.setattr(_autotune, "sweep", _only_ask_the_timer)
    breaking(store, monkeypatch)
    timer = RecordingTimer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiles = po.AutotuneResolver(timer=timer)
        np.testing.assert_allclose(call(tiles), X @ W)
        # Once for the process: what is not stored is remembered.
        assert tiles.resolve(PROBLEM).tile == WINNER
        # And one warning for the store, not for each problem.
        other = dataclasses.replace(PROBLEM, device="v5e")
        tiles.resolve(other)
    monkeypatch.undo()
    assert timer.sweeps == [PROBLEM, other]
    assert str(store) in only_warning(caught)
    assert left_behind(store) == []


STRANGE = {
    "too long": "x/" * 2500,
    "with a zero": "a\0b",
    "no text": "\ud800",
    "a file": __file__,
    "in a file": f"{__file__}/x",
}


@pytest.mark.parametrize("directory", STRANGE.values(), ids=STRANGE)
def test_a_strange_place_is_one_warning_in_one_short_line(directory, monkeypatch, tmp_path):
    monkeypatch.setattr(_autotune, "sweep", _only_ask_the_timer)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cached = po.CachedResolver(directory, quiet=True).resolve(PROBLEM)
        tuned = po.AutotuneResolver(directory=directory, timer=RecordingTimer()).resolve(PROBLEM)
        assert not TileStore(directory).put(entry_of())
    assert (cached.source, tuned.tile) == ("estimate", WINNER)
    message = only_warning(caught)
    assert message.isprintable()
    assert len(message) < 700
    assert message.endswith("PALLAS_OPS_CACHE_DIR moves the store.")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_short_is_told_in_full():
    assert _store.shown(pathlib.Path("/home/żółć")) == "/home/żółć"
    assert _store.shown(pathlib.Path("a\nb\x1b[2J")) == "a?b?[2J"


@contextlib.contextmanager
def bound_by_permissions():
    """Root may read and write everything, and is nobody here. All that is needed is imported."""
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("mode", "may_read", "may_write"),
    [(0o000, False, False), (0o444, False, False), (0o555, True, False), (0o333, True, True)],
    ids=oct,
)
def test_a_folder_with_permissions_of_its_own(mode, may_read, may_write):
    # Not in pytest's folder, which is its owner's alone.
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        os.chmod(root, 0o755)
        path_of(root).write_bytes(_with())
        path_of(root).chmod(0o644)
        folder = TileStore(root).directory
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)
        folder.chmod(mode)
        patch.setattr(_autotune, "sweep", _only_ask_the_timer)
        with warnings.catch_warnings(record=True) as caught, bound_by_permissions():
            warnings.simplefilter("always")
            resolution = po.CachedResolver(root, quiet=True).resolve(PROBLEM)
            stored = TileStore(root).put(entry_of(tile_problem(8, 512, 8)))
            listed = None
            with contextlib.suppress(PermissionError):
                listed = [isinstance(found, Entry) for _, found in TileStore(root).entries()]
        folder.chmod(0o755)
        assert resolution.source == ("store" if may_read else "estimate")
        assert stored == may_write
        # Only a folder that may be read has a list, and only one that may be entered has entries.
        assert listed == {0o444: [False], 0o555: [True]}.get(mode)
        assert len(caught) == (0 if may_read and may_write else 1)
        assert all("Permission denied" in str(w.message) for w in caught)


def interrupted_before(step, call):
    """Calls with a `KeyboardInterrupt` before one of the instructions that the store runs for it.

    What this returns is whether there were so many, and whether it arrived.
    """
    came, arrived = 0, False

    def trace(frame, event, argument):
        nonlocal came
        if frame.f_code.co_filename not in (_store.__file__, _whole.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            came += 1
            if came == step:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # JAX has a callback for the collector of garbage, and Python drops what is raised there.
    gc.disable()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame when it begins
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        arrived = True
    finally:
        sys.settrace(before)
        gc.enable()
    return came >= step, arrived


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("breaking", [None, _no_rename, _full_disk])
def test_an_interrupt_anywhere_arrives_and_leaves_nothing(store, monkeypatch, breaking):
    """Before every single instruction of the store in turn."""
    tile_store = TileStore(store)
    old, new = entry_of(reason="old"), entry_of(reason="new")
    tile_store.put(old)
    file = path_of(store)
    content = file.read_bytes()
    if breaking is not None:
        breaking(store, monkeypatch)
    told, step, has_step, found = [], 0, True, set()
    monkeypatch.setattr(warnings, "warn", lambda *arguments, **_: told.append(arguments))
    monkeypatch.setattr(_store, "shown", str)  # which has some instructions for each character
    while has_step:
        step += 1
        file.write_bytes(content)
        forget_what_this_process_knows()
        _store._next_sweep.clear()  # it is looked for old files each time
        has_step, arrived = interrupted_before(step, lambda: tile_store.put(new))
        assert arrived == has_step
        assert left_behind(store) == [], step
        found.add(tile_store.get(new.key, new.versions).reason)
        # A warning is true.
        assert breaking is not None or told == []
    assert step > 300
    assert found == ({"old", "new"} if breaking is None else {"old"})
    assert bool(told) == (breaking is not None)


INTERRUPTED = """
import gc, os, signal, sys
from pallas_ops import TileConfig
from pallas_ops.tiles import Entry, TileStore
gc.disable()  # JAX has a callback for the collector, and Python drops what is raised there
store, delivered, k = TileStore(sys.argv[1]), 0, 0

def interrupt(*_):
    global delivered
    delivered += 1
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
print("ready", flush=True)
while sys.stdin.readline():
    delivered = 0
    try:
        os.write(1, b"go\\n")
        while not delivered:
            k += 1
            assert store.put(Entry({"operator": "matmul", "k": k}, {}, TileConfig(8, 8, 8)))
            os.write(2, b"%d\\n" % k)
        os.write(1, b"lost\\n")
    except KeyboardInterrupt:
        os.write(1, b"arrived\\n")
"""


def test_real_interrupts_at_any_time(store, tmp_path):
    acknowledged = tmp_path / "acknowledged"
    with acknowledged.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(store)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    said, left = [], []
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            for turn in range(100):
                process.stdin.write("go\n")
                process.stdin.flush()
                assert process.stdout.readline() == "go\n"
                time.sleep(turn % 20 * 1e-4)
                process.send_signal(signal.SIGINT)
                said.append(process.stdout.readline())
                left += left_behind(store)
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()
    assert (process.returncode, set(said), left) == (0, {"arrived\n"}, [])
    for k in map(int, acknowledged.read_text().split()):
        assert TileStore(store).get({"operator": "matmul", "k": k}, {}) is not None


STOPPED = """
import os, sys, time
from pallas_ops import TileConfig
from pallas_ops.tiles import Entry, TileStore

def stop(*_):
    print("stopped", flush=True)
    time.sleep(600)

os.replace = stop
TileStore(sys.argv[1]).put(Entry({"operator": "matmul"}, {}, TileConfig(8, 8, 8)))
"""


def test_what_a_killed_writer_left_is_removed_and_that_of_a_living_one_stays(store):
    def put():
        _store._next_sweep.clear()
        assert TileStore(store).put(entry_of())
        return left_behind(store)

    path_of(store).with_name(".new-0.tmp").write_text("half")
    path_of(store).with_name(".new-1.tmp").mkdir()  # not ours
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(store)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline() == b"stopped\n"
            living = [path for path in put() if path.is_file()]
            assert len(living) == 1
            os.utime(living[0], (0, 0))  # however old it is
            assert living[0] in put()
        finally:
            process.kill()
    assert [path.name for path in put()] == [".new-1.tmp"]


def test_a_folder_is_swept_the_less_often_the_longer_that_takes(store, monkeypatch):
    now = [0.0]
    sweeps = []

    def scandir(path, real=os.scandir):
        sweeps.append(now[0])
        now[0] += 2.0
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(_store, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(120):
        assert TileStore(store).put(entry_of())
        now[0] += 1.0
    # 2 s of 42 each.
    assert sweeps == [0.0, 42.0, 84.0]


@pytest.mark.parametrize("how", ["no module", "no locks"])
def test_without_locks_entries_are_stored_and_nothing_is_swept(store, monkeypatch, how):
    leftover = path_of(store).with_name(".new-0.tmp")
    leftover.write_text("half, or that of somebody who lives")
    if how == "no module":
        monkeypatch.setattr(_whole, "fcntl", None)
    else:
        _failing(monkeypatch, _whole.fcntl, "flock", errno.ENOLCK)
    assert TileStore(store).put(entry_of())
    assert TileStore(store).get(problem_key(PROBLEM), versions()) == entry_of()
    assert left_behind(store) == [leftover]


def test_an_entry_whose_unfinished_file_was_removed_is_written_again(store, monkeypatch):
    """As by `pallas-ops tiles clear`, or `rm`, at the same time."""
    real, turns = os.replace, []

    def replace(*paths):
        turns.append(paths)
        if len(turns) == 1:
            assert TileStore(store).clear() == 1
            TileStore(store).directory.rmdir()
        real(*paths)

    monkeypatch.setattr(os, "replace", replace)
    assert TileStore(store).put(entry_of())
    assert len(turns) == 2
    assert TileStore(store).get(problem_key(PROBLEM), versions()) == entry_of()


def test_what_cannot_be_read_is_no_reason_to_clear(store):
    """What the system refuses: `clear` would not help."""
    path_of(store).parent.mkdir(parents=True, exist_ok=True)
    path_of(store).mkdir()
    with pytest.warns(UserWarning, match="PALLAS_OPS_CACHE_DIR moves the store") as caught:
        assert TileStore(store).get(problem_key(PROBLEM), versions()) is None
    assert "clear" not in str(caught[0].message)


def test_whatever_a_compiler_says_is_read_again(store):
    entry = dataclasses.replace(entry_of(), reason="a\x1b[2Jb", failures={"8x8x8": "\ud800\nc"})
    assert TileStore(store).put(entry)
    found = TileStore(store).get(problem_key(PROBLEM), versions())
    assert (found.reason, found.failures) == ("a?[2Jb", {"8x8x8": "?\nc"})


def test_reading_makes_no_folder(store):
    assert TileStore(store).get(problem_key(PROBLEM), versions()) is None
    assert list(TileStore(store).entries()) == []
    assert TileStore(store).clear() == 0
    assert not store.exists()


WRITER = """
import sys, jax
from pallas_ops import TileConfig
from pallas_ops.tiles import Entry, TileStore
store, writer, count = TileStore(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for i, k in [(i, k) for i in range(count) for k in (i, [writer, i])]:
    key = {"operator": "matmul", "k": k}
    # The fields of one entry belong together: a torn one would mix two writers' numbers.
    entry = Entry(key, {}, TileConfig(writer, i + 1, writer), reason=str(writer) * 3000,
        seconds=float(writer))
    assert store.put(entry)
    found = store.get(key, {})
    assert found is not None, key
    assert found == entry or k == i
"""


def test_two_processes_write_at_once_and_nothing_is_lost_or_torn(store):
    """Keys that both write, and keys of their own, while a third process reads all of them."""
    count, writers = 100, (1, 2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store), str(writer), str(count)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for writer in writers
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    tile_store, seen = TileStore(store), 0
    while any(process.poll() is None for process in started):
        for _, entry in tile_store.entries():
            assert isinstance(entry, Entry), entry
            seen += 1
    for process in started:
        _, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
    assert seen
    entries = [entry for _, entry in tile_store.entries()]
    assert len(entries) == 3 * count
    for entry in entries:
        writer = entry.tile.block_m
        assert (entry.seconds, entry.reason) == (writer, str(writer) * 3000)
    assert left_behind(store) == []


def test_threads_that_ask_at_once_sweep_once():
    timer, barrier = RecordingTimer(), threading.Barrier(4)
    found = []

    def ask():
        barrier.wait()
        found.append(po.AutotuneResolver(timer=timer).resolve(PROBLEM))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {resolution.tile for resolution in found} == {WINNER}
    assert len(found) == 4
    assert timer.sweeps == [PROBLEM]


def test_a_known_problem_is_resolved_without_a_file(store):
    timer = RecordingTimer()
    tuned = po.AutotuneResolver(timer=timer)
    tuned.resolve(PROBLEM)
    resolvers = [tuned, po.CachedResolver(), po.StaticResolver()]
    forget_what_this_process_knows()
    for resolver in resolvers:
        resolver.resolve(PROBLEM)
    with watching_files() as opened:
        for resolver in resolvers:
            resolver.resolve(PROBLEM)
        assert opened == []
        # The watch sees what it should see.
        TileStore(store).get(problem_key(PROBLEM), versions())
        assert any("tiles/matmul-" in path for path in opened)
    assert timer.sweeps == [PROBLEM]


_watches = []


def _audit(event, args):
    if _watches and event in ("open", "os.listdir", "os.scandir"):
        _watches[-1].append(str(args[0]))


sys.addaudithook(_audit)


class watching_files:
    """Every path that Python opens or lists, whoever asks for it."""

    def __enter__(self):
        _watches.append([])
        return _watches[-1]

    def __exit__(self, *_):
        _watches.pop()


def test_default_folder(monkeypatch, tmp_path):
    import platformdirs

    assert TileStore().directory == tmp_path / "cache" / "tiles"
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", "")
    assert TileStore().directory == platformdirs.user_cache_path("pallas-ops") / "tiles"


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, folder in {
        "~/po": tmp_path / "po",
        "~": tmp_path,
        "~root/po": pathlib.Path(os.path.expanduser("~root")) / "po",
        "~nobodyhere/po": pathlib.Path("~nobodyhere/po"),  # a name like any other
        "po/~": pathlib.Path("po/~"),
    }.items():
        monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", text)
        assert TileStore().directory == folder / "tiles"
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", "~/po")
    assert TileStore().put(entry_of())
    assert po.CachedResolver(quiet=True).resolve(PROBLEM).source == "store"
    assert [path.name for path in tmp_path.iterdir()] == ["po"]
