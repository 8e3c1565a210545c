"""`CachedResolver`: the user's store, then tables, then a fallback."""

import dataclasses
import os
from collections.abc import Iterator

from ..kernels import promoted_dtype
from ._agree import agreed
from ._key import problem_key, versions
from ._legal import largest_sure_to_fit, nearest_legal, why_no_limit, why_too_large
from ._memory import recall, remember
from ._problem import TileProblem
from ._resolver import check_fallback, Resolution, TileResolver
from ._static import StaticResolver
from ._store import default_directory, Entry, TileStore, warn_once
from ._tables import load_table, shipped_table


AGREE_SECONDS = 60.0
"""How long a process waits for process 0, which may reach the same program somewhat later."""


DEFAULT_FALLBACK = StaticResolver()
"""Who is asked for what is nowhere: a tile by shape alone."""


def legal_again(problem: TileProblem, entry: Entry, source: str) -> Resolution | None:
    """A stored tile for the actual m, or `None` where it cannot be had.

    A block that was the whole axis of one m is illegal for another of the same class.
    """
    tile = nearest_legal(problem.matmul, entry.tile)
    if why_too_large(problem, tile) is not None:
        return None
    reason = f"found by {entry.source}" + (f": {entry.reason}" if entry.reason else "")
    limit = entry.vmem_limit_bytes
    if limit is not None and why_no_limit(problem, tile, limit) is not None:
        limit = None  # what the tile needs
    return Resolution(tile, source, limit, reason)


def stored_tile(
    problem: TileProblem, directory: str, *, measured: bool = False
) -> Resolution | None:
    """The tile in the store in `directory`, if there is one.

    **Arguments:**

    - `measured`: whether one that was predicted and not measured is none.
    """
    question = ("measured" if measured else "store", directory, problem)
    known = recall(question)
    if known is not None:
        return known
    entry = TileStore(directory).get(problem_key(problem), versions())
    if measured and entry is not None and entry.is_predicted:
        return None
    found = None if entry is None else legal_again(problem, entry, "store")
    return None if found is None else remember(question, found)


@dataclasses.dataclass(frozen=True)
class CachedResolver:
    """Tiles that were found before: in the user's store, in a table, or by a fallback.

    Nothing is measured. It is the default, and then quiet: only a kernel that is compiled for a TPU
    that is here warns, once, that nothing was stored for its shape.

    **Arguments:**

    - `directory`: the folder of the store; `None` is the user's, which the environment variable
        `PALLAS_OPS_CACHE_DIR` moves.
    - `table`: the path of a table, written by `pallas-ops tiles export`, to ask before those that
        come with the package.
    - `fallback`: who is asked for what is nowhere.
    - `quiet`: whether a miss is told only where the kernel runs on a real TPU.

    **Raises:**

    `TypeError` where `fallback` is no resolver.
    """

    directory: str | os.PathLike | None = None
    table: str | os.PathLike | None = None
    fallback: TileResolver = DEFAULT_FALLBACK
    quiet: bool = False

    def __post_init__(self):
        check_fallback("CachedResolver", self.fallback)

    def resolve(self, problem: TileProblem) -> Resolution:
        """As in [`pallas_ops.TileResolver`][]."""

        def decide():
            return self.look_up(problem)

        return agreed(problem, self, decide, decide, timeout_seconds=AGREE_SECONDS)

    def look_up(self, problem: TileProblem) -> Resolution:
        directory = os.fspath(default_directory() if self.directory is None else self.directory)
        found = self._found(problem, directory)
        if found is not None:
            return found
        for other, how in _near(problem):
            found = self._found(other, directory)
            if found is not None:
                return _of_another(problem, found, how)
        on_tpu = problem.can_be_timed and problem.implementation == "mosaic"
        if on_tpu or not self.quiet:
            warn_once(
                "miss",
                f"no tile is stored for {problem.describe()}: taken is the best by an "
                f"estimate. `pallas-ops tune` or AutotuneResolver may find a better one. "
                f"(Told once; `pallas-ops tiles why` tells it for each shape.)",
            )
        return self.fallback.resolve(problem)

    def _found(self, problem: TileProblem, directory: str) -> Resolution | None:
        """The tile in the store, or in a table."""
        found = stored_tile(problem, directory)
        if found is not None:
            return found
        own = None if self.table is None else load_table(self.table)
        key = problem_key(problem)
        for table in (own, shipped_table(problem.device)):
            entry = None if table is None else table.get(key)
            resolution = None if entry is None else legal_again(problem, entry, "table")
            if resolution is not None:
                return resolution
        return None


def _near(problem: TileProblem) -> Iterator[tuple[TileProblem, str]]:
    """Products whose tile serves until there is one for this, the nearest first, and in words."""
    bare = problem.bare
    if bare != problem:
        # What is done to the result hardly matters to the tile (`docs/tiles.md`).
        yield bare, "without its epilogue"
    if problem.matmul.widens_int8:
        # It multiplies the same, and waits for less.
        dtype = promoted_dtype(problem.matmul.lhs_dtype, problem.matmul.rhs_dtype)
        wide = dataclasses.replace(bare.matmul, lhs_dtype=dtype, rhs_dtype=dtype)
        yield dataclasses.replace(bare, matmul=wide), f"of {dtype.name} alone"


def _of_another(problem: TileProblem, found: Resolution, how: str) -> Resolution:
    """The tile of a product that is near, for this one.

    The further results of an epilogue have blocks of their own, for which there must be room.
    """
    tile = largest_sure_to_fit(problem, nearest_legal(problem.matmul, found.tile))
    reason = f"{found.reason} ({how})"
    return dataclasses.replace(found, tile=tile, vmem_limit_bytes=None, reason=reason)


DEFAULT_RESOLVER = CachedResolver(quiet=True)
"""Who is asked where nothing was said."""
