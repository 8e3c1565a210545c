"""From what a call says to the tile that runs."""

import dataclasses
import functools

from ._cached import DEFAULT_RESOLVER
from ._config import TileConfig
from ._legal import check_tile, vmem_limit_bytes
from ._problem import TileProblem
from ._resolver import Resolution, TileChoice, TileResolver


# The check takes longer than a resolver that knows its answer.
@functools.lru_cache(maxsize=1024)
def _checked_limit(problem: TileProblem, tile: TileConfig, named_by: str) -> int | None:
    check_tile(problem, tile, named_by)
    return vmem_limit_bytes(problem, tile)


def _check_words(problem: TileProblem, resolver: TileResolver, resolution: Resolution) -> None:
    """Checks all of a resolution but its tile: somebody else wrote the resolver."""
    limit = resolution.vmem_limit_bytes
    if limit is not None and (type(limit) is not int or limit < 1):
        wrong, expected = "vmem_limit_bytes", "a positive int of bytes or None"
    elif not isinstance(resolution.source, str):
        wrong, expected = "source", "a str"
    elif not isinstance(resolution.reason, str):
        wrong, expected = "reason", "a str"
    else:
        return
    raise TypeError(
        f"{problem.operator}: the tile resolver {resolver!r} returned a Resolution with "
        f"{wrong}={getattr(resolution, wrong)!r}, expected {expected}."
    )


def resolve_tile(problem: TileProblem, choice: TileChoice | None) -> Resolution:
    """The tile for `problem`, cut to its axes and checked, with the VMEM limit that it needs.

    **Raises:**

    `ValueError` where the named tile, or the resolver's, is none that a TPU takes; `TypeError`
    where a resolver returns no [`pallas_ops.Resolution`][], or one whose fields are none.
    """
    choice = TileChoice() if choice is None else choice
    if choice.forward is not None:
        resolution = Resolution(choice.forward, "call", reason="named by the call")
    else:
        resolver = DEFAULT_RESOLVER if choice.resolver is None else choice.resolver
        resolution = resolver.resolve(problem)
        if not (isinstance(resolution, Resolution) and isinstance(resolution.tile, TileConfig)):
            raise TypeError(
                f"{problem.operator}: the tile resolver {resolver!r} returned {resolution!r}, "
                f"expected a pallas_ops.Resolution(tile=TileConfig(...), source='...')."
            )
        _check_words(problem, resolver, resolution)
    tile = resolution.tile.clipped_to(problem.matmul)
    needed = _checked_limit(problem, tile, resolution.reason or resolution.source)
    limit = resolution.vmem_limit_bytes
    return dataclasses.replace(
        resolution,
        tile=tile,
        vmem_limit_bytes=needed if limit is None else limit,
    )
