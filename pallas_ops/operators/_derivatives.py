"""The derivatives of a product, written once: each cotangent is a product again.

Nothing here is transposed in memory: only the layout flags change. A cotangent is described here,
and computed by who asks: the primitive, or an implementation taken on its own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..kernels import MatmulProblem
from ..tiles import TileChoice
from ._call import MatmulCall


def lhs_cotangent(call: MatmulCall, dtype: np.dtype) -> tuple[MatmulCall, bool]:
    """`cotangent @ rhs.T`, stored as `lhs` is, in its dtype.

    **Arguments:**

    - `call`: the product, without an epilogue.
    - `dtype`: of the cotangent of its result.

    **Returns:**

    The call, and whether its operands are `(rhs, cotangent)`, and not `(cotangent, rhs)`.
    """
    problem, tiles = call.problem, call.options.tiles
    cotangent, rhs = (problem.out_shape, dtype), (problem.rhs_shape, problem.rhs_dtype)
    is_last = problem.transpose_lhs  # (k, m): rhs @ cotangent.T
    flags = (problem.transpose_rhs, True) if is_last else (False, not problem.transpose_rhs)
    operands = (rhs, cotangent) if is_last else (cotangent, rhs)
    own = (problem.lhs_shape, problem.lhs_dtype)
    tiles = None if tiles is None else tiles.of_lhs_cotangent()
    return _product(call, operands, own, flags, tiles), is_last


def rhs_cotangent(call: MatmulCall, dtype: np.dtype) -> tuple[MatmulCall, bool]:
    """`lhs.T @ cotangent`, stored as `rhs` is, in its dtype; as `lhs_cotangent`.

    **Returns:**

    The call, and whether its operands are `(lhs, cotangent)`, and not `(cotangent, lhs)`.
    """
    problem, tiles = call.problem, call.options.tiles
    cotangent, lhs = (problem.out_shape, dtype), (problem.lhs_shape, problem.lhs_dtype)
    is_last = not problem.transpose_rhs  # else (n, k): cotangent.T @ lhs
    flags = (not problem.transpose_lhs, False) if is_last else (True, problem.transpose_lhs)
    operands = (lhs, cotangent) if is_last else (cotangent, lhs)
    own = (problem.rhs_shape, problem.rhs_dtype)
    tiles = None if tiles is None else tiles.of_rhs_cotangent()
    return _product(call, operands, own, flags, tiles), is_last


_Type = tuple[tuple[int, ...], np.dtype]


def _product(
    call: MatmulCall,
    operands: Sequence[_Type],
    result: _Type,
    flags: tuple[bool, bool],
    tiles: TileChoice | None,
) -> MatmulCall:
    (lhs_shape, lhs_dtype), (rhs_shape, rhs_dtype) = operands
    shape, dtype = result
    axes = zip(shape[:-2], lhs_shape[:-2], rhs_shape[:-2], strict=True)
    problem = MatmulProblem(
        lhs_shape=lhs_shape,
        rhs_shape=rhs_shape,
        lhs_dtype=lhs_dtype,
        rhs_dtype=rhs_dtype,
        out_dtype=dtype,
        transpose_lhs=flags[0],
        transpose_rhs=flags[1],
        # The axes that the operand has not, and the product would have.
        sum_leading=tuple(size == 1 and (a != 1 or b != 1) for size, a, b in axes),
        precision=call.problem.precision,
    )
    options = dataclasses.replace(call.options, tiles=tiles)
    return dataclasses.replace(call, problem=problem, product_dtype=dtype, options=options)
