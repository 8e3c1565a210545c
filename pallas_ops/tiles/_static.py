"""`StaticResolver`: tiles that are said beforehand, or the best by an estimate."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ._candidates import estimated_tile
from ._config import TileConfig
from ._problem import TileProblem
from ._resolver import Resolution


def _freeze(tiles: Any) -> Any:
    if tiles is None or isinstance(tiles, TileConfig):
        return tiles
    if isinstance(tiles, Mapping):
        for key, tile in tiles.items():
            is_sizes = (
                isinstance(key, tuple)
                and len(key) == 3
                and all(isinstance(size, int) and size > 0 for size in key)
            )
            if not (is_sizes or isinstance(key, TileProblem)):
                raise TypeError(
                    f"StaticResolver: a key of the mapping is (m, k, n) or a TileProblem, got "
                    f"{key!r}."
                )
            if not isinstance(tile, TileConfig):
                raise TypeError(
                    f"StaticResolver: the mapping's value for {key!r} is no TileConfig: {tile!r}."
                )
        return frozenset(tiles.items())
    if callable(tiles) and not isinstance(tiles, type):
        return tiles
    raise TypeError(
        f"StaticResolver takes a TileConfig, a mapping from (m, k, n) to TileConfig, a function "
        f"from a TileProblem to TileConfig or None, or nothing; got {tiles!r}."
    )


@dataclasses.dataclass(frozen=True)
class StaticResolver:
    """Tiles that are said beforehand: no file is read and nothing is measured.

    ```python
    tile = pallas_ops.TileConfig(512, 1024, 1024)
    resolver = pallas_ops.StaticResolver({(2048, 4096, 4096): tile})
    with pallas_ops.options(tiles=resolver):
        loss, gradients = step(model, x, y)
    ```

    **Arguments:**

    - `tiles`: one [`pallas_ops.TileConfig`][] for every problem; a mapping to one from `(m, k, n)`
        or from a [`pallas_ops.TileProblem`][]; or a hashable function from a
        [`pallas_ops.TileProblem`][] to one, or to `None`. What it leaves open, and all of it where
        it is left out, gets the tile whose estimated time is the shortest of those that the
        compiler is sure to take.

    **Raises:**

    `TypeError` for anything else.
    """

    tiles: TileConfig | Mapping | Callable[[TileProblem], TileConfig | None] | None = None
    # A mapping as it was said. What is hashed and compared is its items, in which nothing is found.
    _mapping: Mapping | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self):
        if isinstance(self.tiles, Mapping):
            object.__setattr__(self, "_mapping", dict(self.tiles))
        object.__setattr__(self, "tiles", _freeze(self.tiles))

    def _said(self, problem: TileProblem) -> TileConfig | None:
        tiles: Any = self.tiles
        if self._mapping is not None:
            sizes = (problem.m, problem.k, problem.n)
            return self._mapping.get(problem) or self._mapping.get(sizes)
        if callable(tiles):
            tile = tiles(problem)
            if tile is not None and not isinstance(tile, TileConfig):
                raise TypeError(
                    f"StaticResolver: {tiles!r} must return a TileConfig or None, and "
                    f"returned {tile!r} for {problem.describe()}."
                )
            return tile
        return tiles

    def resolve(self, problem: TileProblem) -> Resolution:
        """As in [`pallas_ops.TileResolver`][]."""
        tile = self._said(problem)
        if tile is not None:
            return Resolution(tile, "static", reason="said to StaticResolver")
        return Resolution(
            estimated_tile(problem),
            "estimate",
            reason="the shortest estimated time of all blocks that are sure to fit VMEM",
        )
