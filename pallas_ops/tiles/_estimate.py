"""How long a tile should take, roughly, from JAX's hardware table: to order candidates by."""

import math

from jax.experimental.pallas import tpu as pltpu

from .._hardware import find_generation, GENERATIONS
from ..kernels import MatmulProblem, mxu_passes
from ._config import TileConfig
from ._problem import TileProblem


# What a step costs beside its MXU operations, 245 cycles and 440 where lhs is transposed, and how
# long a DMA takes to begin: found in the TPU compiler's schedules for a v5e and fitted to published
# timings (the project's design, "The compiler without a TPU"). For an order of candidates only; it
# is no prediction.
_CYCLES_PER_STEP = {False: 245, True: 440}
_DMA_LATENCY_SECONDS = 0.5e-6


def _mxu_operations_per_second(problem: MatmulProblem, info: pltpu.TpuInfo) -> float:
    if problem.multiplies_int8 and info.int8_ops_per_second:
        return float(info.int8_ops_per_second)
    return info.bf16_ops_per_second / mxu_passes(problem)


def estimate_seconds(problem: TileProblem, tile: TileConfig) -> float:
    """The time of one product with this tile, in seconds, as an order of magnitude.

    Each step takes the longer of its MXU operations and of fetching the blocks of the step after
    it, which the kernel does meanwhile. An unknown device is taken for a v5e.
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
    # A weight tile of the MXU takes as long to load as a third as many rows to multiply.
    filled_m, filled_n = max(m, column // 3), -(-n // column) * column
    rate = _mxu_operations_per_second(matmul, info)
    cycles_per_second = info.bf16_ops_per_second / (2 * info.num_mxus * column**2)
    beside = _CYCLES_PER_STEP[matmul.transpose_lhs] / cycles_per_second
    compute = 2 * filled_m * k * filled_n / rate + beside
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
    transfer = moved / steps / info.mem_bw_bytes_per_second
    # Small ones wait for each other: two are under way at once, the second since the step before.
    fetch = max(transfer, (compute + transfer + _DMA_LATENCY_SECONDS) / 2)
    # Nothing is multiplied while the first blocks are fetched, and while the last one is stored.
    operands = m * k * matmul.lhs_dtype.itemsize + k * n * matmul.rhs_dtype.itemsize
    first = operands / info.mem_bw_bytes_per_second
    output = m * n * matmul.out_dtype.itemsize * matmul.outputs
    last = output / info.mem_bw_bytes_per_second
    parts = int(tile.prologue_parts)
    if parts == 1:
        return first + compute + (steps - 1) * max(compute, fetch) + last
    # Where they come in parts, only the first of these is waited for, if the rest is as fast.
    fetched = first + (steps - 1) * fetch + compute / (parts if steps == 1 else 1)
    computed = first / parts + steps * compute + (parts - 1) * beside
    return max(fetched, computed) + last
