"""Who chooses the tile: the resolver protocol, and what a call may say about it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ..kernels import MatmulProblem
from ._config import TileConfig


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A tile, and why it was chosen.

    **Arguments:**

    - `tile`: the blocks.
    - `source`: where they come from, in words: `"named by the call"`, `"static estimate"`.
    """

    tile: TileConfig
    source: str


@runtime_checkable
class TileResolver(Protocol):
    """Anything that chooses tiles. It must be hashable: it becomes part of `jax.jit`'s key."""

    def resolve(self, problem: MatmulProblem, device: str | None) -> Resolution:
        """Chooses the tile for one problem.

        **Arguments:**

        - `problem`: the shapes, dtypes and layout, final: batch axes are folded by now.
        - `device`: a device kind such as `"TPU v5 lite"`, or a generation such as `"v5e"`; `None`
            where it is not known, and then the tile must suit every generation.

        **Returns:**

        A [`pallas_ops.Resolution`][].
        """
        ...


_ROLES = ("forward", "lhs_cotangent", "rhs_cotangent")


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """What a call says about its tiles, as one hashable value.

    The forward product and the two products of the backward pass have different shapes and
    layouts, so that a tile for one says nothing about the others.

    **Arguments:**

    - `forward`, `lhs_cotangent`, `rhs_cotangent`: the tile of each, where it is named.
    - `resolver`: who chooses where none is named; `None` is the default resolver.
    """

    forward: TileConfig | None = None
    lhs_cotangent: TileConfig | None = None
    rhs_cotangent: TileConfig | None = None
    resolver: TileResolver | None = None

    def of_lhs_cotangent(self) -> "TileChoice":
        """The choice for the product that is the gradient of lhs."""
        return TileChoice(forward=self.lhs_cotangent, resolver=self.resolver)

    def of_rhs_cotangent(self) -> "TileChoice":
        """The choice for the product that is the gradient of rhs."""
        return TileChoice(forward=self.rhs_cotangent, resolver=self.resolver)


Tiles = TileConfig | TileChoice | TileResolver | Mapping[str, TileConfig] | None
"""What `tiles=` takes."""


def as_tile_choice(tiles: Any) -> TileChoice | None:
    """Reads what `tiles=` was given.

    **Arguments:**

    - `tiles`: a [`pallas_ops.TileConfig`][] for the forward product alone; a mapping with any of
        the keys `"forward"`, `"lhs_cotangent"` and `"rhs_cotangent"`; or a hashable
        [`pallas_ops.TileResolver`][] for all of them.

    **Returns:**

    The same as a hashable value, or `None` where nothing is said.

    **Raises:**

    `TypeError` or `ValueError` for anything else.
    """
    if tiles is None or isinstance(tiles, TileChoice):
        return tiles
    if isinstance(tiles, TileConfig):
        return TileChoice(forward=tiles)
    if isinstance(tiles, Mapping):
        unknown = sorted(set(tiles) - set(_ROLES), key=str)
        if unknown:
            raise ValueError(f"`tiles` has the keys {', '.join(_ROLES)}; got {unknown}.")
        for role, tile in tiles.items():
            if tile is not None and not isinstance(tile, TileConfig):
                raise TypeError(f"`tiles[{role!r}]` must be a TileConfig, got {tile!r}.")
        return TileChoice(**tiles)
    if isinstance(tiles, TileResolver) and not isinstance(tiles, type):
        try:
            hash(tiles)
        except TypeError as error:
            raise TypeError(
                f"A tile resolver must be hashable, because it becomes part of jax.jit's cache "
                f"key; {type(tiles).__name__} is not. A frozen dataclass is."
            ) from error
        return TileChoice(resolver=tiles)
    raise TypeError(
        f"`tiles` must be a TileConfig, a mapping from {', '.join(_ROLES)} to TileConfig, or a "
        f"tile resolver; got {tiles!r}. A tile is written TileConfig(block_m, block_k, block_n)."
    )
