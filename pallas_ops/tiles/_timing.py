"""How long one product takes: the kernel, and not the dispatch around it."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ..kernels import MatmulProblem, run_kernel
from ._config import TileConfig


# A difference shorter than this is lost in the clock's and the scheduler's noise.
_SHORTEST_SECONDS = 2e-3
_MOST_CALLS = 1 << 14
_REPEATS = 3


def random_operands(problem: MatmulProblem) -> tuple[jax.Array, ...]:
    """Operands of one problem, and what its epilogue reads; the same each time."""
    generator = np.random.default_rng(0)

    def array(shape, dtype):
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.asarray(generator.integers(-100, 100, shape), dtype)
        return jnp.asarray(generator.standard_normal(shape, dtype=np.float32)).astype(dtype)

    return (
        array(problem.lhs_shape, problem.lhs_dtype),
        array(problem.rhs_shape, problem.rhs_dtype),
        *(array(columns.shape, columns.dtype) for columns in problem.columns),
    )


Operand = jax.Array | jax.ShapeDtypeStruct


def lower_chain(
    problem: MatmulProblem,
    tile: TileConfig,
    implementation: str,
    vmem_limit_bytes: int | None,
    operands: tuple[Operand, ...],
) -> jax.stages.Lowered:
    """A program of `count` products by the kernel, one after another, with operands from HBM.

    The count is an argument, so that one compiled program serves any length.
    """
    product = functools.partial(
        run_kernel,
        problem,
        tile.blocks,
        implementation=implementation,
        vmem_limit_bytes=vmem_limit_bytes,
        prologue_parts=int(tile.prologue_parts),
    )

    def from_hbm(lhs, rhs, *columns):
        # XLA would copy an operand of a loop into VMEM, once, and the kernel would read it there
        # for nothing. In a program of its own it reads what lies in HBM.
        lhs, rhs = (pltpu.with_memory_space_constraint(one, pltpu.HBM) for one in (lhs, rhs))
        return product(lhs, rhs, *columns)

    return lower_products(from_hbm if implementation == "mosaic" else product, problem, operands)


def lower_products(
    product: Callable[..., Any],
    problem: MatmulProblem,
    operands: tuple[Operand, ...],
) -> jax.stages.Lowered:
    """As `lower_chain`, for any function that computes the product.

    Where XLA puts the operands of that is its own affair: its dot has no way to say HBM.
    """

    def chain(count, *operands):
        def step(_, carry):
            operands, _ = carry
            out = product(*operands)
            # What passes through the barrier is no constant of the loop to XLA. Without it the
            # product is computed once, before the loop (seen for v5e, libtpu 0.0.50). That steps
            # follow one another is the loop's own order.
            return lax.optimization_barrier((operands, out))

        out = jnp.zeros(problem.out_shape, problem.out_dtype)
        start = (operands, out if problem.epilogue is None else (out,) * problem.outputs)
        return lax.fori_loop(0, count, step, start)[1]

    # The count says nothing of devices, so that operands which are only described say it.
    return jax.jit(chain).lower(jax.ShapeDtypeStruct((), jnp.int32), *operands)


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long one call takes, and whether it was measured to the end."""

    seconds: float
    abandoned: bool = False


def time_per_call(
    run: Callable[[int], Any],
    *,
    hopeless_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """The time of one call in a chain, in seconds.

    A chain of n calls is timed against one of 2 n: what they differ by is n calls, and all that is
    spent once, on dispatch and on waiting, is in neither.

    **Arguments:**

    - `run`: runs a chain of so many dependent calls, and returns when they are done.
    - `hopeless_seconds`: where one call takes longer than this, the first measurement will do.
    - `clock`: the time in seconds.
    """

    def elapsed(calls: int) -> float:
        start = clock()
        run(calls)
        return clock() - start

    run(1)  # The first call pays for things that no other one does.
    calls = 1
    while True:
        short, long = elapsed(calls), elapsed(2 * calls)
        difference = long - short
        # Both: a single delay in the longer chain makes a difference of its own.
        if min(short, difference) >= _SHORTEST_SECONDS or calls >= _MOST_CALLS:
            break
        calls *= 2
    first = difference / calls
    if first > hopeless_seconds:
        return Timing(first, abandoned=True)
    others = [(elapsed(2 * calls) - elapsed(calls)) / calls for _ in range(_REPEATS - 1)]
    return Timing(statistics.median([first, *others]))
