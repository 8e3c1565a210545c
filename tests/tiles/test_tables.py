"""Tables of tiles: written and read, and asked between the store and the fallback."""

import json
import os
import warnings

import pytest

import pallas_ops as po
from pallas_ops.tiles import (
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
