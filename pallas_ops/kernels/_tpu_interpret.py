"""`"tpu_interpret"`: the kernel under Pallas' TPU interpreter, which simulates DMA and memory."""

import functools
import threading
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ._pallas import pallas_matmul
from ._problem import MatmulProblem
from ._sums import column_sums_type


# The interpreter keeps its simulated memory in global state: one call at a time.
_lock = threading.Lock()


@functools.lru_cache(maxsize=256)
def _jitted_call(
    problem: MatmulProblem, blocks: tuple[int, int, int], prologue_parts: int, column_sums: bool
) -> Callable:
    params = pltpu.InterpretParams(out_of_bounds_reads="uninitialized")
    kernel = pallas_matmul(
        problem, *blocks, interpret=params, prologue_parts=prologue_parts, column_sums=column_sums
    )
    return jax.jit(kernel)


def tpu_interpret_matmul(
    problem: MatmulProblem,
    blocks: tuple[int, int, int],
    *operands: jax.Array,
    prologue_parts: int = 1,
    column_sums: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """The product, computed on the host in a callback.

    The interpreter's effects are ordered, and JAX cannot lower those inside a primitive that has
    none; so the interpreter runs as a program of its own.
    """

    def on_host(*operands):
        cpu = jax.local_devices(backend="cpu")[0]
        with _lock, jax.default_device(cpu):
            call = _jitted_call(problem, blocks, prologue_parts, column_sums)
            return jax.tree.map(np.asarray, call(*operands))

    out = jax.ShapeDtypeStruct(problem.out_shape, problem.out_dtype)
    outs = out if problem.epilogue is None else (out,) * problem.outputs
    if column_sums:
        outs = (out, jax.ShapeDtypeStruct(*column_sums_type(problem)))
    return jax.pure_callback(
        on_host,
        outs,
        *operands,
        vmap_method="sequential",  # for an implementation taken on its own
    )
