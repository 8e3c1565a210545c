"""The derivative rules of `matmul`, written once: each cotangent is the same kernel again.

A product function `product(lhs, rhs, *, transpose_lhs, transpose_rhs, sum_leading, out_dtype,
tiles)` is a parameter, so that the primitive and each implementation taken on its own share them.
Nothing here is transposed in memory: only the layout flags change.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from ..tiles import TileChoice


_Result = TypeVar("_Result")


def _sum_to(size_of: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]):
    """Which leading axes to sum, to get `size_of` from a product of `one` and `other`."""
    axes = zip(size_of[:-2], one[:-2], other[:-2], strict=True)
    return tuple(size == 1 and (a != 1 or b != 1) for size, a, b in axes)


def lhs_cotangent(
    product: Callable[..., jax.Array],
    cotangent: jax.Array,
    lhs: Any,
    rhs: jax.Array,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    tiles: TileChoice | None,
) -> jax.Array:
    """`cotangent @ rhs.T`, stored as `lhs` is, in its dtype. Only lhs' shape and dtype are read."""
    call = dict(
        sum_leading=_sum_to(lhs.shape, cotangent.shape, rhs.shape),
        out_dtype=lhs.dtype,
        tiles=None if tiles is None else tiles.of_lhs_cotangent(),
    )
    if transpose_lhs:  # (k, m): rhs @ cotangent.T
        return product(rhs, cotangent, transpose_lhs=transpose_rhs, transpose_rhs=True, **call)
    return product(cotangent, rhs, transpose_lhs=False, transpose_rhs=not transpose_rhs, **call)


def rhs_cotangent(
    product: Callable[..., _Result],
    cotangent: jax.Array,
    lhs: jax.Array,
    rhs: Any,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    tiles: TileChoice | None,
) -> _Result:
    """`lhs.T @ cotangent`, stored as `rhs` is, in its dtype. Only rhs' shape and dtype are read.

    Where rhs is transposed, the cotangent is the lhs of `product`, transposed as well.
    """
    call = dict(
        sum_leading=_sum_to(rhs.shape, lhs.shape, cotangent.shape),
        out_dtype=rhs.dtype,
        tiles=None if tiles is None else tiles.of_rhs_cotangent(),
    )
    if transpose_rhs:  # (n, k): cotangent.T @ lhs
        return product(cotangent, lhs, transpose_lhs=True, transpose_rhs=transpose_lhs, **call)
    return product(lhs, cotangent, transpose_lhs=not transpose_lhs, transpose_rhs=False, **call)
