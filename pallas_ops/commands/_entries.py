"""Entries of the store of tiles as people see them, and tables before they are let in."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..kernels import Epilogue, KERNEL_VERSION, MatmulProblem
from ..operators import get_operator, list_operators
from ..tiles import (
    Entry,
    InvalidEntryError,
    problem_key,
    read_table,
    TileProblem,
    TileStore,
    versions,
    why_illegal,
    why_too_large,
)
from ..tiles._key import m_class
from ..tiles._legal import nearest_that_fits, why_no_limit


_TEXTS = (
    "operator",
    "implementation",
    "layout",
    "lhs_dtype",
    "rhs_dtype",
    "out_dtype",
    "precision",
    "epilogue",
)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_axis(value: Any) -> bool:
    """Whether this is how a key holds a leading axis: both sizes, and whether it is summed."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(map(_is_size, value[:2]))
        and isinstance(value[2], bool)
    )


def problem_of_key(key: Mapping[str, Any]) -> TileProblem:
    """The problem that a key stands for, the largest of its class.

    **Raises:**

    `InvalidEntryError` where the key is none of this version's.
    """
    wanted = {*_TEXTS, "device", "batch", "m", "k", "n"}
    if key.keys() != wanted:
        odd = ", ".join(sorted(map(str, key.keys() ^ wanted)))
        raise InvalidEntryError(f"parts of the key that are missing or unknown: {odd}")
    batch, device = key["batch"], key["device"]
    fits = {name: isinstance(key[name], str) for name in _TEXTS}
    fits |= {name: _is_size(key[name]) for name in ("m", "k", "n")}
    fits["device"] = device is None or isinstance(device, str)
    fits["batch"] = isinstance(batch, list) and all(map(_is_axis, batch))
    for name, good in fits.items():
        if not good:
            raise InvalidEntryError(f"`{name}` of the key is {key[name]!r}")
    # The operator is part of a file's name: only one that exists may be.
    if key["operator"] not in list_operators():
        known = ", ".join(map(repr, list_operators()))
        raise InvalidEntryError(f"there is no operator {key['operator']!r}; there are: {known}")
    if key["layout"] not in ("NN", "NT", "TN", "TT"):
        raise InvalidEntryError(f"`layout` is {key['layout']!r}, expected NN, NT, TN or TT")
    transpose_lhs, transpose_rhs = (letter == "T" for letter in key["layout"])
    m, k, n = key["m"], key["k"], key["n"]
    try:
        get_operator(key["operator"]).check_implementation(key["implementation"])
        problem = TileProblem(
            MatmulProblem(
                lhs_shape=(*(axis[0] for axis in batch), *((k, m) if transpose_lhs else (m, k))),
                rhs_shape=(*(axis[1] for axis in batch), *((n, k) if transpose_rhs else (k, n))),
                lhs_dtype=jnp.dtype(key["lhs_dtype"]),
                rhs_dtype=jnp.dtype(key["rhs_dtype"]),
                out_dtype=jnp.dtype(key["out_dtype"]),
                transpose_lhs=transpose_lhs,
                transpose_rhs=transpose_rhs,
                sum_leading=tuple(axis[2] for axis in batch),
                precision=lax.Precision[key["precision"]],
                epilogue=Epilogue.of_label(key["epilogue"], len(batch), n),
            ),
            device=device,
            implementation=key["implementation"],
            operator=key["operator"],
            epilogue=key["epilogue"],
        )
    except KeyError:
        raise InvalidEntryError(f"`precision` is {key['precision']!r}") from None
    except (ValueError, TypeError) as error:
        raise InvalidEntryError(str(error)) from None
    reason = problem.matmul.why_not_in_kernel()
    if reason is not None:
        raise InvalidEntryError(reason)
    for name, value in problem_key(problem).items():
        # Such as a device by another of its names: no lookup would ever ask for that.
        if value != key[name]:
            raise InvalidEntryError(f"`{name}` is {key[name]!r}, expected {value!r}")
    return problem


def check_entry(entry: Entry) -> TileProblem:
    """The problem of an entry whose tile a TPU takes for it.

    **Raises:**

    `InvalidEntryError` for any other.
    """
    problem = problem_of_key(entry.key)
    tile = entry.tile
    if m_class(tile.blocks[0]) == problem.m:
        # The class has an m for which this block is the whole axis.
        matmul, m = problem.matmul, tile.blocks[0]
        rows = (matmul.k, m) if matmul.transpose_lhs else (m, matmul.k)
        matmul = dataclasses.replace(matmul, lhs_shape=(*matmul.lhs_shape[:-2], *rows))
        problem = dataclasses.replace(problem, matmul=matmul)
    tile = tile.clipped_to(problem.matmul)
    what = f"{tile} is no tile for {problem.describe()}"
    reason = why_illegal(problem.matmul, tile)
    if reason is not None:
        nearest = nearest_that_fits(problem, tile)
        raise InvalidEntryError(f"{what}: {reason}. The nearest that a TPU takes is {nearest}")
    reason = why_too_large(problem, tile)
    if reason is not None:
        raise InvalidEntryError(f"{what}: {reason}")
    limit = entry.vmem_limit_bytes
    reason = None if limit is None else why_no_limit(problem, tile, limit)
    if reason is not None:
        raise InvalidEntryError(f"`vmem_limit_bytes` is {limit}, and {reason}")
    return problem


@dataclasses.dataclass(frozen=True)
class Stored:
    """One file of the store.

    **Arguments:**

    - `path`: the file.
    - `entry`: what it holds, if it can be read.
    - `problem`: what it answers, if it can be used.
    - `error`: what is wrong with it.
    """

    path: pathlib.Path
    entry: Entry | None = None
    problem: TileProblem | None = None
    error: str | None = None

    @property
    def id(self) -> str:
        """The digest in the file's name; of a file with another name, all of it."""
        return self.path.stem.rpartition("-")[2]

    @property
    def status(self) -> str:
        """`"used"`, `"other versions"` where this process does not look for it, or `"broken"`."""
        if self.entry is None or self.error is not None:
            return "broken"
        return "used" if self.entry.versions == versions() else "other versions"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "file": str(self.path),
            "status": self.status,
            "error": self.error,
            "entry": None if self.entry is None else self.entry.as_json(),
        }


def read_store(store: TileStore) -> Iterator[Stored]:
    """Every file of the store, those that are no use among them."""
    for path, found in store.entries():
        if not isinstance(found, Entry):
            yield Stored(path, error=str(found))
            continue
        try:
            problem = check_entry(found)
        except InvalidEntryError as error:
            yield Stored(path, found, error=str(error))
            continue
        if store.path(found.key, found.versions).name != path.name:
            reason = "the file's name is not that of its entry, so that it is never looked for"
            yield Stored(path, found, problem, reason)
        else:
            yield Stored(path, found, problem)


def describe_versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def canonical_key(key: Mapping[str, Any]) -> tuple:
    """A key as a hashable value."""
    return tuple(sorted((name, repr(value)) for name, value in key.items()))


def entries_to_export(stored: list[Stored], device: str | None) -> list[Entry]:
    """The entries that a table would serve: those of this kernel, one for each problem.

    Of several versions of JAX and libtpu those of now are taken, else the latest file.
    """
    now = versions()

    def rank(one: Stored) -> tuple[bool, float]:
        assert one.entry is not None
        return one.entry.versions == now, one.path.stat().st_mtime

    fitting = [
        one
        for one in stored
        if one.entry is not None
        and one.error is None
        and one.entry.versions.get("kernel") == KERNEL_VERSION
        and device in (None, one.entry.key["device"])
    ]
    chosen: dict[tuple, Entry] = {}
    for one in sorted(fitting, key=rank):
        assert one.entry is not None
        chosen[canonical_key(one.entry.key)] = one.entry
    return list(chosen.values())


@dataclasses.dataclass(frozen=True)
class Import:
    """A table that was read and found good.

    **Arguments:**

    - `entries`: what to store, under the versions of now.
    - `left_out`: how many are of another version of the kernel.
    """

    entries: tuple[Entry, ...]
    left_out: int


def read_import(content: bytes) -> Import:
    """A table's entries as this process would look for them.

    A table is somebody's decision: with which JAX and libtpu its tiles were found does not matter,
    and is kept in words. Tiles of another version of the kernel are answers to another question.

    **Raises:**

    `InvalidEntryError` where any entry is wrong, naming it.
    """
    now = versions()
    entries: list[Entry] = []
    seen: dict[tuple, int] = {}
    left_out = 0
    for number, entry in enumerate(read_table(content)):
        if entry.versions.get("kernel") != KERNEL_VERSION:
            left_out += 1
            continue
        try:
            check_entry(entry)
        except InvalidEntryError as error:
            raise InvalidEntryError(f"entry {number}: {error}") from None
        key = canonical_key(entry.key)
        if key in seen:
            raise InvalidEntryError(f"entry {number} is for the same problem as entry {seen[key]}")
        seen[key] = number
        reason = entry.reason
        if entry.versions != now:
            found = f"imported; found with {describe_versions(entry.versions)}"
            reason = f"{reason} ({found})" if reason else found
        entries.append(dataclasses.replace(entry, versions=now, reason=reason))
    return Import(tuple(entries), left_out)
