"""The sums of lhs over k, as a second result of the kernel that reads all of it anyway."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ._problem import MatmulProblem, promoted_dtype
from ._prologue import grid_steps


def column_sums_type(problem: MatmulProblem) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the sums over k, and over the leading axes that are summed.

    The shape is `(*leading, 1, m)` with the leading axes of lhs; the dtype has 32 bits at least.
    """
    leading = zip(problem.lhs_shape[:-2], problem.sum_leading, strict=True)
    shape = (*(1 if summed else size for size, summed in leading), 1, problem.m)
    return shape, promoted_dtype(problem.lhs_dtype, np.dtype(np.float32))


def sum_columns(problem: MatmulProblem, lhs: jax.Array) -> jax.Array:
    """The sums by JAX's own operations: a pass over lhs, unless XLA fuses it with another."""
    _, dtype = column_sums_type(problem)
    axes = [axis for axis, summed in enumerate(problem.sum_leading) if summed]
    return jnp.sum(lhs.astype(dtype), axis=(*axes, lhs.ndim - 2), keepdims=True)


def kernel_sums_columns(
    problem: MatmulProblem, blocks: tuple[int, int, int], prologue_parts: int = 1
) -> bool:
    """Whether the kernel should return the sums as well.

    It adds to them at the first block of n, so the steps along n cannot be shared by two
    TensorCores. Where those are the only ones to share, one of the two would be idle. Steps along
    an axis that lhs does not have would all sum the same.
    """
    m_steps, _, n_steps = grid_steps(problem, blocks)
    leading = zip(problem.lhs_shape, problem.leading_shape, strict=False)
    is_shared = any(own != size for own, size in leading)
    return not is_shared and (m_steps > 1 or n_steps == 1 or prologue_parts > 1)


def with_column_sums(
    step: Callable[..., None],
    *,
    problem: MatmulProblem,
    block_k: int,
    grid: tuple[int, ...],
    n_axis: int,
) -> Callable[..., None]:
    """A step of the kernel that adds the columns of its block of lhs after it has multiplied.

    The vector unit takes about 40 cycles for 2**16 entries in bfloat16 on a v5e. Among the
    multiplications it would be idle otherwise, but there the compiler spills more for it than this
    costs: 1,444 cycles in each step with blocks of 1024 x 2048 x 1024, in place of 1,322 in those
    at the first block of n (v5e, libtpu 0.0.50.1).

    **Arguments:**

    - `step`: as of a `problem` without an epilogue.
    - `block_k`: of the blocks of lhs, which are stored by rows of k.
    - `grid`, `n_axis`: the grid's size, and its axis of n. All axes behind that are summed.
    """

    def kernel(
        lhs_ref: Any,
        rhs_ref: Any,
        out_ref: Any,
        sums_ref: Any,
        *scratch: Any,
        steps: Sequence[jax.Array] | None = None,
        **given: Any,
    ):
        steps = [pl.program_id(axis) for axis in range(len(grid))] if steps is None else steps
        step(lhs_ref, rhs_ref, out_ref, *scratch, steps=steps, **given)
        is_first = functools.reduce(jnp.logical_and, [at == 0 for at in steps[n_axis + 1 :]])
        left = problem.k - steps[-1] * block_k if problem.k % block_k else None

        @pl.when(steps[n_axis] == 0)
        def _():
            before = jnp.where(is_first, jnp.zeros((), sums_ref.dtype), sums_ref[...])
            sums_ref[...] = before + _sum_of_rows(lhs_ref, left)

    return kernel


# How many entries a loop adds in one round: with more, the compiler spills registers.
_ENTRIES_PER_ROUND = 2**16

# And in how many of them it keeps its sums. With fewer, additions wait for the one before them.
_ENTRIES_OF_SUMS = 2**13


def _sum_of_rows(ref: Any, left: jax.Array | None) -> jax.Array:
    """The sum of a block's rows in float32, of which only the first `left` are real."""
    rows, columns = ref.shape
    width = pl.next_power_of_2(max(columns, 128))
    per_round = max(_ENTRIES_PER_ROUND // width, 16)
    kept = max(_ENTRIES_OF_SUMS // width, 8)

    def read(start: Any, count: int) -> jax.Array:
        block = ref[pl.ds(start, count), :].astype(jnp.float32)
        if left is None:
            return block
        row = start + lax.broadcasted_iota(jnp.int32, block.shape, 0)
        return jnp.where(row < left, block, jnp.zeros_like(block))

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        block = read(pl.multiple_of(index * per_round, per_round), per_round)
        return sums + jnp.sum(block.reshape(per_round // kept, kept, columns), axis=0)

    rounds, rest = divmod(rows, per_round)
    total = jnp.zeros((1, columns), jnp.float32)
    if rounds:
        sums = lax.fori_loop(0, rounds, add, jnp.zeros((kept, columns), jnp.float32))
        total += jnp.sum(sums, axis=0, keepdims=True)
    if rest:
        total += jnp.sum(read(rounds * per_round, rest), axis=0, keepdims=True)
    return total
