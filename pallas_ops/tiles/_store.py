"""The store of tiles: one small JSON file for each problem, that many processes may use at once."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import platformdirs

from .._whole import hold, UNFINISHED, write_whole
from ._config import TileConfig


CACHE_DIR_VARIABLE = "PALLAS_OPS_CACHE_DIR"
"""The environment variable that moves the store."""

COMPILER_SOURCE = "compiler"
"""The source of a tile that was predicted, and not measured."""

SCHEMA = 1
"""The form of a file; a file of another form is not read."""

# Beyond this a file is no entry of ours, and is not read into memory.
_MOST_BYTES = 1 << 20


# Looking for files that killed writers left takes at most this part of a process's time.
_SWEEPING_SHARE = 1 / 20

# Control characters but for tabs and new lines, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class InvalidEntryError(ValueError):
    """A file or a table holds something that is no entry of a store."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One stored answer.

    **Arguments:**

    - `key`: the problem, as JSON has it.
    - `versions`: of what the answer may depend on beside the problem.
    - `tile`: the answer.
    - `vmem_limit_bytes`: the limit to compile it with, in bytes; `None` for what the tile needs.
    - `source`: who found it: `"autotune"` or `"compiler"`.
    - `reason`: how, for people.
    - `seconds`: the measured time of one product, where it was measured.
    - `failures`: the tiles that failed on the way, in words, and why.
    """

    key: Mapping[str, Any]
    versions: Mapping[str, Any]
    tile: TileConfig
    vmem_limit_bytes: int | None = None
    source: str = "autotune"
    reason: str = ""
    seconds: float | None = None
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_predicted(self) -> bool:
        """Whether the TPU compiler's word is all that there is: nothing was measured."""
        return self.source == COMPILER_SOURCE

    def as_json(self) -> dict[str, Any]:
        """The entry as `from_json` reads it."""
        # The words of a compiler may hold anything, and no file with that is read again.
        failures = {tile: _UNPRINTABLE.sub("?", why) for tile, why in self.failures.items()}
        reason = _UNPRINTABLE.sub("?", self.reason)
        fields = dict(vars(self), tile=list(self.tile.numbers), reason=reason, failures=failures)
        return {"schema": SCHEMA, **fields}

    @staticmethod
    def from_json(value: Any) -> "Entry":
        """Reads an entry, trusting nothing.

        **Raises:**

        `InvalidEntryError` with what is wrong.
        """
        if not isinstance(value, dict):
            raise InvalidEntryError(f"expected an object, got {type(value).__name__}")
        if value.get("schema") != SCHEMA:
            raise InvalidEntryError(f"schema {value.get('schema')!r}, expected {SCHEMA}")
        fields = {name: field for name, field in value.items() if name != "schema"}
        wanted = {
            "key": dict,
            "versions": dict,
            "tile": list,
            "vmem_limit_bytes": int | None,
            "source": str,
            "reason": str,
            "seconds": int | float | None,
            "failures": dict,
        }
        if fields.keys() != wanted.keys():
            odd = sorted(fields.keys() ^ wanted.keys())
            raise InvalidEntryError(f"fields that are missing or unknown: {', '.join(odd)}")
        for name, kind in wanted.items():
            if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
                raise InvalidEntryError(f"`{name}` is {fields[name]!r}")
        if not all(isinstance(why, str) for why in fields["failures"].values()):
            raise InvalidEntryError(f"`failures` is {fields['failures']!r}")
        seconds = fields["seconds"]
        if seconds is not None and not 0 < seconds < 1e9:  # NaN, which JSON has not, among them
            raise InvalidEntryError(f"`seconds` is {seconds!r}")
        limit = fields["vmem_limit_bytes"]
        if limit is not None and not 0 < limit < 2**31:
            raise InvalidEntryError(f"`vmem_limit_bytes` is {limit!r}")
        numbers = fields["tile"]
        if len(numbers) not in (3, 4):
            raise InvalidEntryError(
                f"`tile` is {numbers!r}: expected block_m, block_k, block_n and, where there are "
                f"several, the parts of the first blocks"
            )
        try:
            fields["tile"] = TileConfig(*numbers)
        except (TypeError, ValueError) as error:
            raise InvalidEntryError(f"`tile` is {numbers!r}: {str(error).rstrip('.')}") from None
        return Entry(**fields)


def default_directory() -> pathlib.Path:
    """Where the user's store is: `PALLAS_OPS_CACHE_DIR`, else where the system keeps caches.

    A `~` that no shell has replaced, as in quotes or a service's file, is replaced here. As in a
    shell, that of a user who does not exist is a name like any other.
    """
    moved = os.environ.get(CACHE_DIR_VARIABLE)
    if not moved:
        return platformdirs.user_cache_path("pallas-ops")
    return pathlib.Path(os.path.expanduser(moved))


def shown(path: pathlib.Path) -> str:
    """A path that may be too long to be one, or hold what none can, as a part of one line."""
    text = "".join(one if one.isprintable() else "?" for one in str(path))
    return text if len(text) <= 300 else f"{text[:100]}... ({len(text)} characters)"


def why_not(error: Exception) -> str:
    """What the system says, without the path, which the text of an `OSError` repeats."""
    return getattr(error, "strerror", None) or str(error)


# When each folder is swept again, in the time of `time.monotonic`.
_next_sweep: dict[pathlib.Path, float] = {}

_warned: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warns, the first time in this process that it is about this topic."""
    if topic not in _warned:
        _warned.add(topic)
        warnings.warn(f"pallas_ops: {message}", stacklevel=2)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class TileStore:
    """A folder with one JSON file for each entry.

    No file that is there can hurt: one that cannot be read, or is no entry for what was asked, is
    a miss with one warning. Files are written whole and renamed, so that several processes may
    write the same entry at once; the last one stays.

    **Arguments:**

    - `directory`: the folder; it need not exist. `None` is the user's store.
    """

    def __init__(self, directory: str | os.PathLike | None = None):
        root = default_directory() if directory is None else pathlib.Path(directory)
        self.directory = root / "tiles"

    def path(self, key: Mapping[str, Any], versions: Mapping[str, Any]) -> pathlib.Path:
        """The file of one entry: its name is a digest of the problem and of the versions."""
        digest = hashlib.sha256(_canonical([key, versions]).encode()).hexdigest()
        return self.directory / f"{key['operator']}-{digest[:32]}.json"

    def get(self, key: Mapping[str, Any], versions: Mapping[str, Any]) -> Entry | None:
        """The entry for one problem, or `None`."""
        path = self.path(key, versions)
        try:
            entry = _read(path)
            if _canonical([entry.key, entry.versions]) != _canonical([key, versions]):
                raise InvalidEntryError("it is the entry of another problem or version")
        except FileNotFoundError:
            return None
        except InvalidEntryError as error:
            warn_once(
                str(path),
                f"the stored tile {path} cannot be used and is left out: {error}. "
                f"`pallas-ops tiles clear` removes what is stored.",
            )
            return None
        except (OSError, ValueError) as error:
            # What the system refuses for one file it will refuse for the others too.
            warn_once(
                f"store {self.directory}",
                f"the stored tile {shown(path)} cannot be used and is left out: {why_not(error)}. "
                f"{CACHE_DIR_VARIABLE} moves the store.",
            )
            return None
        return entry

    def put(self, entry: Entry) -> bool:
        """Writes an entry; a folder that cannot be written to is one warning, and `False`.

        An interrupt (`KeyboardInterrupt`) arrives, and leaves the entry as it was or all of the
        new one.
        """
        path = self.path(entry.key, entry.versions)
        # A line for each field. Where `json` indents it leaves garbage in cycles: who collects that
        # calls a function of JAX's, and an interrupt that comes in there is lost.
        lines = [
            f'"{name}": {json.dumps(value, sort_keys=True)}'
            for name, value in sorted(entry.as_json().items())
        ]
        data = "{{\n{}\n}}\n".format(",\n".join(lines)).encode()
        self._sweep()
        try:
            try:
                self._write(path, data)
            except FileNotFoundError:
                # What was not ready was removed: by `clear`, by `_sweep` before it was held, or by
                # that of another machine, where a file system has locks for each machine alone.
                self._write(path, data)
        except (OSError, ValueError) as error:
            warn_once(
                f"store {self.directory}",
                f"tiles cannot be stored in {shown(self.directory)} ({why_not(error)}), and will "
                f"be looked for again by the next process. {CACHE_DIR_VARIABLE} moves the store.",
            )
            return False
        return True

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def _sweep(self) -> None:
        """Removes what killed writers have left; that of a living one is held, and stays.

        The whole folder is looked through, but the less often the longer that takes.
        """
        begun = time.monotonic()
        if begun < _next_sweep.get(self.directory, begun):
            return
        # A folder that cannot be swept may still be written to.
        with contextlib.suppress(OSError, ValueError):
            for path in self._paths(*UNFINISHED):
                with contextlib.suppress(OSError), path.open("r+b") as file:
                    if hold(file):
                        path.unlink()
        ended = time.monotonic()
        _next_sweep[self.directory] = ended + (ended - begun) / _SWEEPING_SHARE

    def _paths(self, prefix: str, suffix: str, *, only_files: bool = True) -> list[pathlib.Path]:
        """What is in the folder, in order; nothing where it does not exist."""
        try:
            with os.scandir(self.directory) as found:
                return sorted(
                    pathlib.Path(one.path)
                    for one in found
                    if one.name.startswith(prefix)
                    and one.name.endswith(suffix)
                    # No folder is ours, whatever its name.
                    and not (only_files and one.is_dir(follow_symlinks=False))
                )
        except FileNotFoundError:
            return []

    def entries(self) -> Iterator[tuple[pathlib.Path, Entry | Exception]]:
        """Every file of the store with its entry, or with what is wrong with it.

        **Raises:**

        `OSError` where the folder cannot be listed.
        """
        for path in self._paths("", ".json", only_files=False):
            try:
                yield path, _read(path)
            except (OSError, InvalidEntryError) as error:
                yield path, error

    def files(self) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
        """What `clear` removes: the files of entries, and what interrupted writes have left.

        **Raises:**

        `OSError` where the folder cannot be listed.
        """
        return self._paths("", ".json"), self._paths(*UNFINISHED)

    def clear(self) -> int:
        """Removes every file of the store; returns how many there were.

        **Raises:**

        `OSError` where the folder cannot be listed, or a file cannot be removed.
        """
        paths = list(itertools.chain(*self.files()))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)


def _read(path: pathlib.Path) -> Entry:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise InvalidEntryError(f"it has more than {_MOST_BYTES} bytes")
    return Entry.from_json(parse_json(content))


def parse_json(content: bytes) -> Any:
    """JSON from a file that anybody may have written.

    **Raises:**

    `InvalidEntryError` for anything else.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidEntryError(f"it is no JSON ({error})") from None
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str) and _UNPRINTABLE.search(one):
            # It would be printed by `pallas-ops tiles show`, and steer the terminal or fail.
            raise InvalidEntryError(f"it holds a text with control characters: {ascii(one)[:100]}")
        elif isinstance(one, float) and not math.isfinite(one):  # Python reads NaN, and 1e999
            raise InvalidEntryError(f"it is no JSON (the number {one})")
    return value
