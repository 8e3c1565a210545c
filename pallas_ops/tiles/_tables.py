"""Tables: many stored tiles in one file, to commit, to ship, and to import again."""

import functools
import importlib.resources
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from .._hardware import GENERATIONS
from ..kernels import KERNEL_VERSION
from ._store import Entry, InvalidEntryError, parse_json, SCHEMA, shown, warn_once, why_not


def table_json(entries: Iterable[Entry]) -> str:
    """The entries as the text of a table: a line for each, in an order of their own."""
    rows = sorted((entry.as_json() for entry in entries), key=lambda row: _canonical(row["key"]))
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    return f'{{"schema": {SCHEMA}, "entries": [\n{lines}\n]}}\n'


def read_table(content: bytes) -> list[Entry]:
    """The entries of a table.

    **Raises:**

    `InvalidEntryError` where any of it is wrong, naming the entry.
    """
    value = parse_json(content)
    if not (isinstance(value, dict) and isinstance(value.get("entries"), list)):
        raise InvalidEntryError("expected an object with a list `entries`")
    if value.get("schema") != SCHEMA:
        raise InvalidEntryError(f"schema {value.get('schema')!r}, expected {SCHEMA}")
    entries = []
    for number, row in enumerate(value["entries"]):
        try:
            entries.append(Entry.from_json(row))
        except InvalidEntryError as error:
            raise InvalidEntryError(f"entry {number}: {error}") from None
    return entries


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


class Table:
    """The entries of one table by problem.

    The versions of JAX and libtpu do not count here, as they do in the store: a table is somebody's
    decision. That of the kernel does.
    """

    def __init__(self, entries: Iterable[Entry]):
        self._entries = {
            _canonical(entry.key): entry
            for entry in entries
            if entry.versions.get("kernel") == KERNEL_VERSION
        }

    def get(self, key: Mapping[str, Any]) -> Entry | None:
        return self._entries.get(_canonical(key))


@functools.lru_cache(maxsize=64)
def _load(path: str, _stamp: tuple[int, int]) -> Table:
    return Table(read_table(pathlib.Path(path).read_bytes()))


def load_table(path: str | os.PathLike) -> Table:
    """The table in a file, read again when the file changes.

    A table that cannot be read is one warning, and empty.
    """
    path = os.fspath(path)
    try:
        found = os.stat(path)
        return _load(path, (found.st_mtime_ns, found.st_size))
    except (OSError, ValueError) as error:  # of these a path that can be none, and a bad entry
        reason = f"{shown(pathlib.Path(path))} cannot be used and is left out: {why_not(error)}"
        warn_once(path, f"the table of tiles {reason}")
        return Table([])


def shipped_table(device: str | None) -> Table | None:
    """The table that comes with the package for one TPU.

    **Arguments:**

    - `device`: a generation's name, as a problem has it; for any other there is none.
    """
    return _read_shipped(device) if device in GENERATIONS else None


@functools.cache
def _read_shipped(device: str) -> Table | None:
    file = importlib.resources.files(__package__) / "tables" / f"{device}.json"
    return Table(read_table(file.read_bytes())) if file.is_file() else None
