"""How long a tile should take, roughly, from JAX's hardware table: to order candidates by."""

import math

from jax.experimental.pallas import tpu as pltpu

from .._hardware import find_generation, GENERATIONS
from ..kernels import MatmulProblem, mxu_passes
from ._config import TileConfig
from ._problem import TileProblem


# What a step costs beside its MXU operations, and how long a DMA takes to begin: found in the TPU
# compiler's schedules and fitted to published timings on a v5e (the project's design, "The compiler
# without a TPU"). For an order of candidates only; it is no prediction.
_CYCLES_PER_STEP = 100
_DMA_LATENCY_SECONDS = 0.5e-6

# What it costs to read, add to and store the accumulator beside the MXU's work, for each vector
# register of 8 x 128: from the same schedules, 185 TFLOP/s for 1024 x 1024 x 512 at 4096 where
# 1024 x 4096 x 512, which has nothing to accumulate, has 190.6.
_CYCLES_PER_ACCUMULATED_REGISTER = 0.5
_REGISTER_ENTRIES = 8 * 128


def _mxu_operations_per_second(problem: MatmulProblem, info: pltpu.TpuInfo) -> float:
    if problem.multiplies_int8 and info.int8_ops_per_second:
        return float(info.int8_ops_per_second)
    return info.bf16_ops_per_second / mxu_passes(problem)


def estimate_seconds(problem: TileProblem, tile: TileConfig) -> float:
    """The time of one product with this tile, in seconds, as an order of magnitude.

    Each step takes the longer of its MXU operations and of fetching its blocks, which the kernel
    does during the step before. An unknown device is taken for a v5e.
    """
    matmul = problem.matmul
    info = (find_generation(problem.device) or GENERATIONS["v5e"]).info
    m, k, n = tile.blocks
    m_steps, k_steps, n_steps = (
        -(-size // block)
        for size, block in zip((matmul.m, matmul.k, matmul.n), tile.blocks, strict=True)
    )
    batch = math.prod(matmul.leading_shape)
    steps = batch * m_steps * k_steps * n_steps
    column = info.mxu_column_size
    # A weight tile of the MXU takes as long to load as this many rows to multiply.
    filled_m, filled_n = max(m, column), -(-n // column) * column
    rate = _mxu_operations_per_second(matmul, info)
    cycles_per_second = info.bf16_ops_per_second / (2 * info.num_mxus * column**2)
    accumulate = _CYCLES_PER_ACCUMULATED_REGISTER * m * n / _REGISTER_ENTRIES * (k_steps > 1)
    compute = (
        2 * filled_m * k * filled_n / rate + (_CYCLES_PER_STEP + accumulate) / cycles_per_second
    )
    # The grid goes over n inside m, and over k inside both: a block whose place does not change
    # from one step to the next is not fetched again.
    lhs_fetches = batch * m_steps * (n_steps * k_steps if k_steps > 1 else 1)
    rhs_fetches = steps if n_steps * k_steps > 1 else batch
    moved = (
        lhs_fetches * m * k * matmul.lhs_dtype.itemsize
        + rhs_fetches * k * n * matmul.rhs_dtype.itemsize
        + math.prod(matmul.out_shape[:-2])
        * m_steps
        * n_steps
        * (m * n * matmul.out_dtype.itemsize * matmul.outputs)
    )
    fetch = moved / steps / info.mem_bw_bytes_per_second + _DMA_LATENCY_SECONDS
    # Nothing is multiplied while the first blocks are fetched, and while the last one is stored.
    ends = (
        m * k * matmul.lhs_dtype.itemsize
        + k * n * matmul.rhs_dtype.itemsize
        + m * n * matmul.out_dtype.itemsize * matmul.outputs
    )
    return ends / info.mem_bw_bytes_per_second + steps * max(compute, fetch)
