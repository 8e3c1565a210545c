"""From what a call says to the tile that runs."""

from ..kernels import MatmulProblem
from ._config import TileConfig, why_illegal
from ._resolver import Resolution, TileChoice
from ._static import StaticResolver


def resolve_tile(
    problem: MatmulProblem, choice: TileChoice | None, device: str | None
) -> Resolution:
    """The tile for `problem`, checked.

    **Raises:**

    `ValueError` where the named tile, or the resolver's, is none that a TPU takes.
    """
    choice = TileChoice() if choice is None else choice
    if choice.forward is not None:
        resolution = Resolution(choice.forward, "named by the call")
    else:
        resolver = StaticResolver() if choice.resolver is None else choice.resolver
        resolution = resolver.resolve(problem, device)
        if not (isinstance(resolution, Resolution) and isinstance(resolution.tile, TileConfig)):
            raise TypeError(
                f"matmul: the tile resolver {resolver!r} returned {resolution!r}, expected a "
                f"pallas_ops.Resolution(tile=TileConfig(...), source='...')."
            )
    tile = resolution.tile.clipped_to(problem)
    reason = why_illegal(problem, tile)
    if reason is not None:
        raise ValueError(
            f"matmul: {resolution.tile} ({resolution.source}) is not a tile that a TPU takes for "
            f"{problem.describe()}: {reason}. Name other blocks, or leave `tiles` out."
        )
    return Resolution(tile, resolution.source)
