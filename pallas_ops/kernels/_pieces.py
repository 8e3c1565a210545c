"""float32 as pieces of bfloat16, which an MXU multiplies: precision `HIGH` and `HIGHEST`.

Mosaic can do that too, but makes NaN of infinities, takes as many passes for a mixture with
bfloat16, and has no `HIGH` before jax 0.12.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._problem import MatmulProblem


_FLOAT32 = np.dtype(np.float32)

# Three pieces of 8 bits are a float32. What two leave out is of the order of 2^-16.
_PIECES = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2, lax.Precision.HIGHEST: 3}


def piece_counts(problem: MatmulProblem) -> tuple[int, int]:
    """Into how many pieces lhs and rhs are cut. Of bfloat16 and int8 one is exact."""
    if problem.has_vector_rhs:
        return 1, 1  # Pallas multiplies it in float32, without an MXU
    count = _PIECES[problem.precision]
    lhs, rhs = (
        count if dtype == _FLOAT32 else 1 for dtype in (problem.lhs_dtype, problem.rhs_dtype)
    )
    return lhs, rhs


def multiplied_pieces(problem: MatmulProblem) -> list[tuple[int, int]]:
    """Which piece of lhs each pass multiplies with which of rhs, the smallest products first.

    Pieces are numbered from 0, the largest. The products that are left out are as small as what
    the pieces leave out. So XLA has it too: bfloat16_3x and 6x of `jax.lax.DotAlgorithmPreset`.
    """
    lhs, rhs = piece_counts(problem)
    pairs = [(i, j) for i in range(lhs) for j in range(rhs) if i + j < max(lhs, rhs)]
    return sorted(pairs, key=sum, reverse=True)


def mxu_passes(problem: MatmulProblem) -> int:
    """How many times the MXU goes through the operands."""
    return len(multiplied_pieces(problem))


def cut_to_pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """Arrays of bfloat16 whose sum is `x`, as far as so many can be; the largest first.

    All but the last are cut off and not rounded, which would make infinity of the largest numbers.

    **Arguments:**

    - `x`: of float32, unless `count` is 1.
    """
    pieces = []
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        top = lax.bitcast_convert_type(bits, jnp.float32)
        pieces.append(top.astype(jnp.bfloat16))
        x = x - top
    return [*pieces, x.astype(jnp.bfloat16)]


def product_of_pieces(
    lhs: jax.Array,
    rhs: jax.Array,
    problem: MatmulProblem,
    dot: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The product of two blocks, in one or several passes.

    **Arguments:**

    - `problem`: of which the dtypes, the layout and the precision are looked at.
    - `dot`: multiplies two blocks of bfloat16, and returns float32.
    """
    lhs_pieces, rhs_pieces = map(cut_to_pieces, (lhs, rhs), piece_counts(problem))
    *small, largest = (dot(lhs_pieces[i], rhs_pieces[j]) for i, j in multiplied_pieces(problem))
    if not small:
        return largest
    rest = functools.reduce(jnp.add, small)
    # What is left of an infinity is NaN, and infinity times a piece that is zero is NaN too. The
    # product of the largest pieces alone is what the whole would be then, NaN included.
    # NaN is what is not equal to itself; not `jnp.isnan`: see `_not_equal` in `_elementwise.py`.
    return jnp.where(rest == rest, rest, jnp.zeros_like(rest)) + largest
