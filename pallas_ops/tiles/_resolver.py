"""Who chooses the tile: the resolver protocol, and what a call may say about it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ._config import TileConfig
from ._problem import TileProblem


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A tile, and why it was chosen.

    **Arguments:**

    - `tile`: the blocks.
    - `source`: where they come from, in a word or two: `"call"`, `"static"`, `"store"`, `"table"`,
        `"autotune"`, `"compiler"`, `"estimate"`.
    - `vmem_limit_bytes`: the scoped VMEM limit to compile the kernel with, in bytes; `None` is the
        compiler's default, or what the tile needs beyond it.
    - `reason`: the same at length, for people.
    """

    tile: TileConfig
    source: str
    vmem_limit_bytes: int | None = None
    reason: str = ""


@runtime_checkable
class TileResolver(Protocol):
    """Anything that chooses tiles. It must be hashable: it becomes part of `jax.jit`'s key."""

    def resolve(self, problem: TileProblem) -> Resolution:
        """Chooses the tile for one problem.

        It is called when a program is lowered, once for each product in it, and may then compile
        and run other programs on arrays of its own.

        **Arguments:**

        - `problem`: a [`pallas_ops.TileProblem`][].

        **Returns:**

        A [`pallas_ops.Resolution`][]. Blocks that are larger than their axis are cut down to it; a
        tile that no TPU takes is an error.
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

    def or_else(self, other: "TileChoice") -> "TileChoice":
        """This choice, and what `other` says of that which this one leaves open.

        A resolver leaves nothing open.
        """
        if self.resolver is not None:
            return self
        own = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(other, **own)

    def of_lhs_cotangent(self) -> "TileChoice":
        """The choice for the product that is the gradient of lhs."""
        return TileChoice(forward=self.lhs_cotangent, resolver=self.resolver)

    def of_rhs_cotangent(self) -> "TileChoice":
        """The choice for the product that is the gradient of rhs."""
        return TileChoice(forward=self.rhs_cotangent, resolver=self.resolver)


def check_fallback(owner: str, fallback: Any) -> None:
    """Raises `TypeError` where a resolver's `fallback` is no resolver."""
    if isinstance(fallback, type) or not isinstance(fallback, TileResolver):
        raise TypeError(
            f"{owner}: `fallback` must be a tile resolver, such as StaticResolver() or "
            f"StaticResolver(TileConfig(...)); got {fallback!r}."
        )


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
