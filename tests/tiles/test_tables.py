"""Tables of tiles: written and read, and asked between the store and the fallback."""

import dataclasses
import json
import os
import warnings

import pytest

import pallas_ops as po
from pallas_ops.tiles import (
    _tables,
    Entry,
    InvalidEntryError,
    problem_key,
    read_table,
    table_json,
    TileStore,
    versions,
)

from .tools import tile_problem


PROBLEM = tile_problem(8, 256, 8)
OTHER = tile_problem(8, 512, 8)
TILE = po.TileConfig(8, 128, 8)


def on(problem, device):
    return dataclasses.replace(problem, device=device)


def entry(problem=PROBLEM, tile=TILE, **fields):
    return Entry(**{**dict(key=problem_key(problem), versions=versions(), tile=tile), **fields})


def table(path, *entries):
    path.write_text(table_json(entries))
    return po.CachedResolver(table=path, quiet=True)


def test_a_table_is_read_as_it_was_written():
    entries = [entry(vmem_limit_bytes=1 << 25, reason="why"), entry(OTHER)]
    text = table_json(entries)
    read = read_table(text.encode())
    assert len(read) == 2
    assert all(entry in read for entry in entries)
    # The order of a folder must not be seen in a file that is committed.
    assert table_json(reversed(entries)) == text
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("entries"), "expected an object with a list `entries`"),
        (lambda t: t.update(schema=7), "schema 7, expected 1"),
        (lambda t: t["entries"].append(3), "entry 1: expected an object"),
        (lambda t: t["entries"][0].update(tile=[1, 2]), "entry 0: `tile` is"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(change, message):
    value = json.loads(table_json([entry()]))
    change(value)
    with pytest.raises(InvalidEntryError, match=message):
        read_table(json.dumps(value).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b"[" * 100_000])
def test_what_is_no_table(content):
    with pytest.raises(InvalidEntryError):
        read_table(content)


def test_store_then_table_then_fallback(store, tmp_path):
    resolver = table(tmp_path / "table.json", entry())
    found = resolver.resolve(PROBLEM)
    assert (found.tile, found.source) == (TILE, "table")
    assert resolver.resolve(OTHER).source == "estimate"
    TileStore(store).put(entry(tile=po.TileConfig(8, 256, 8)))
    found = resolver.resolve(PROBLEM)
    assert (found.tile.block_k, found.source) == (256, "store")


def test_a_table_outlives_a_jax_but_not_a_kernel(tmp_path):
    """It is somebody's decision; what the kernel made of a tile before says nothing now."""
    old_jax = entry(versions={**versions(), "jax": "0.0.1", "libtpu": None})
    assert table(tmp_path / "1.json", old_jax).resolve(PROBLEM).source == "table"
    old_kernel = entry(versions={**versions(), "kernel": 0})
    assert table(tmp_path / "2.json", old_kernel).resolve(PROBLEM).source == "estimate"


def test_a_tile_of_a_table_is_made_legal_for_the_actual_m(tmp_path):
    resolver = table(
        tmp_path / "table.json", entry(tile_problem(100, 256, 8), po.TileConfig(100, 128, 8))
    )
    found = resolver.resolve(tile_problem(120, 256, 8))
    assert (found.tile, found.source) == (po.TileConfig(96, 128, 8), "table")


def test_a_table_that_changes_is_read_again(tmp_path):
    path = tmp_path / "table.json"
    assert table(path, entry()).resolve(OTHER).source == "estimate"
    resolver = table(path, entry(), entry(OTHER))
    os.utime(path, (1, 1))  # one second in 1970: another stamp, however coarse the clock is
    assert resolver.resolve(OTHER).source == "table"


@pytest.mark.parametrize("path", ["a\0b", "x/" * 2500, "\ud800"], ids=["zero", "long", "no text"])
def test_a_path_that_can_be_none_is_one_warning(path):
    resolver = po.CachedResolver(table=path, quiet=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [resolver.resolve(p).source for p in (PROBLEM, OTHER)] == ["estimate"] * 2
    (warning,) = caught
    assert "cannot be used and is left out" in str(warning.message)
    assert str(warning.message).isprintable()
    assert len(str(warning.message)) < 500


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"schema": 2, "entries": []}', b"\xff"])
def test_a_table_that_cannot_be_used_is_one_warning(tmp_path, content):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    resolver = po.CachedResolver(table=path, quiet=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [resolver.resolve(p).source for p in (PROBLEM, OTHER)] == ["estimate"] * 2
    (warning,) = caught
    assert f"the table of tiles {path} cannot be used" in str(warning.message)


@pytest.fixture
def tables_read(monkeypatch):
    """Which tables of the package are read, by a process that has read none."""
    read = []
    files = _tables.importlib.resources.files

    class Folder:
        def __init__(self, path):
            self.path = path

        def __truediv__(self, name):
            return Folder(self.path / name)

        def is_file(self):
            return self.path.is_file()

        def read_bytes(self):
            read.append(self.path.name)
            return self.path.read_bytes()

    monkeypatch.setattr(_tables.importlib.resources, "files", lambda name: Folder(files(name)))
    _tables._read_shipped.cache_clear()
    yield read
    _tables._read_shipped.cache_clear()


def test_only_the_table_of_the_device_is_read_and_once(tables_read):
    for problem in (PROBLEM, OTHER):
        assert po.CachedResolver(quiet=True).look_up(on(problem, "v4")).source == "estimate"
    assert tables_read == ["v4.json"]
    assert po.CachedResolver(quiet=True).look_up(on(PROBLEM, "v6e")).source == "estimate"
    assert tables_read == ["v4.json", "v6e.json"]


@pytest.mark.parametrize("device", [None, "TPU v9", "../tables/v4"])
def test_no_table_is_read_for_a_device_that_has_none(tables_read, device):
    assert po.CachedResolver(quiet=True).look_up(on(PROBLEM, device)).source == "estimate"
    assert tables_read == []
