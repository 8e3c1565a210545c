"""How long a tile should take, by arithmetic alone: to choose and to order tiles by."""

import math
from typing import Any, NamedTuple, overload

import numpy as np

from .._hardware import find_generation
from ..compiler import Chip, chip
from ..kernels import MatmulProblem, mxu_passes
from ._config import LANES, sublanes, TileArray, TileConfig
from ._problem import TileProblem


class _Beside(NamedTuple):
    """What a step costs beside its MXU operations, in cycles.

    **Arguments:**

    - `always`: whatever it multiplies.
    - `transposed_lhs`: more where lhs is transposed.
    - `unfinished_sum`: for each entry of a sum that goes on in the next step.
    - `wide_operand`: for each entry of an operand of 32 bits.
    """

    always: int
    transposed_lhs: int
    unfinished_sum: float
    wide_operand: float


# By the size of the MXU; one of 256 outruns what stores sums and reads wide operands. Fitted to the
# schedules of libtpu 0.0.50 for the shapes of `pallas-ops bench default --seed 100`.
_BESIDE = {
    128: _Beside(250, 130, 0.0, 0.0),
    256: _Beside(220, 0, 0.24 / 1024, 0.07 / 1024),
}

_CYCLES_PER_PART = 150
"""What each further part of the first blocks costs beside its MXU operations."""

_UNKNOWN = "v5e"
"""What an unknown device is taken for."""


def _padded_bytes(rows: int, columns: int, dtype: np.dtype) -> int:
    """Bytes of a matrix in HBM, which fills whole tiles of 8 by 128."""
    return -(-rows // 8) * 8 * -(-columns // LANES) * LANES * dtype.itemsize


def _cycles(problem: MatmulProblem, blocks: tuple[Any, Any, Any], on: Chip) -> Any:
    """The cycles of one step, in which each MXU works on whole tiles of weights."""
    m, k, n = blocks
    # Rows come in whole registers. To load a tile of weights takes as long as a third of its rows.
    rows = sublanes(problem.lhs_dtype)
    filled_m = np.maximum(-(-m // rows) * rows, on.mxu_size // 3)
    filled_k, filled_n = (-(-size // on.mxu_size) for size in (k, n))
    native = problem.multiplies_int8 and on.multiplies_int8
    rate = on.rates[32] if native else on.rates[16] / mxu_passes(problem)
    multiplied = filled_m * filled_k * filled_n / (on.num_mxus * rate)
    beside = _BESIDE[on.mxu_size]
    wide = (problem.lhs_dtype.itemsize == 4) * m * k + (problem.rhs_dtype.itemsize == 4) * k * n
    return (
        multiplied
        + beside.always
        + beside.transposed_lhs * problem.transpose_lhs
        + beside.unfinished_sum * (k < problem.k) * m * n
        + beside.wide_operand * wide
    )


@overload
def estimate_seconds(problem: TileProblem, tile: TileConfig) -> float: ...
@overload
def estimate_seconds(problem: TileProblem, tile: TileArray) -> np.ndarray: ...
def estimate_seconds(problem: TileProblem, tile: TileConfig | TileArray) -> Any:
    """The time of one product with this tile, in seconds, roughly; for a `TileArray`, that of each.

    Each step takes the longer of its MXU operations and of fetching the blocks of the step after
    it, which the kernel does meanwhile. It is what `compiler.predict` simulates step by step, with
    a formula in place of the compiler's schedule. An unknown device is taken for a v5e.
    """
    matmul, device = problem.matmul, problem.device
    on = chip(device if find_generation(device) else _UNKNOWN)
    m, k, n = tile.blocks
    m_steps, k_steps, n_steps = -(-matmul.m // m), -(-matmul.k // k), -(-matmul.n // n)
    batch = math.prod(matmul.leading_shape)
    rows = batch * m_steps
    steps = rows * n_steps * k_steps
    compute = _cycles(matmul, tile.blocks, on) / on.clock_hertz

    # The time of moving one block, at full bandwidth: of an average one, since those at an edge
    # are smaller.
    def moving(shape: tuple[int, ...], dtype: np.dtype, blocks: Any) -> Any:
        *_, first, second = shape
        return _padded_bytes(first, second, dtype) / blocks / on.bytes_per_second

    lhs = moving(matmul.lhs_shape, matmul.lhs_dtype, m_steps * k_steps)
    rhs = moving(matmul.rhs_shape, matmul.rhs_dtype, k_steps * n_steps)
    out = moving(matmul.out_shape, matmul.out_dtype, m_steps * n_steps) * matmul.outputs
    latency = on.dma_latency_seconds

    def after_the_first(least: Any) -> Any:
        """All steps but the first, none of which is shorter than `least`.

        The grid goes over n inside m, and over k inside both: a block whose place does not change
        from one step to the next is not fetched again. Where k is one step, lhs is fetched where a
        row of blocks begins.
        """

        def pair(transfer: Any) -> Any:
            # Two transfers are under way at once, and that of the second of two steps is issued
            # when the step before the first one ends.
            return np.maximum(2 * np.maximum(least, transfer), compute + transfer + latency)

        rhs_moves = np.where(n_steps * k_steps > 1, rhs, 0)
        in_one = rows * (pair(lhs + rhs_moves + out) + (n_steps - 1) * pair(rhs + out))
        of_sum = (k_steps - 1) * pair(lhs + rhs) + pair(lhs + rhs + out)
        in_pairs = np.where(k_steps == 1, in_one, rows * n_steps * of_sum) / 2
        # The second step's blocks come right behind the first one's: they do not wait once more.
        alone = (steps - 1) % 2
        moved = np.where(k_steps > 1, lhs + rhs, np.where(n_steps > 1, rhs, lhs) + out)
        return in_pairs * (steps - 1 - alone) / steps + alone * np.maximum(least, moved)

    # Nothing is multiplied while the first blocks are fetched, and while the last one is stored.
    first, last = lhs + rhs, out + latency
    parts = tile.prologue_parts
    whole = latency + first + compute + after_the_first(compute)
    # Where they come in parts, only the first of these is waited for, if the rest is as fast.
    fetched = latency + first + after_the_first(0) + compute / np.where(steps == 1, parts, 1)
    of_parts = (parts - 1) * _CYCLES_PER_PART / on.clock_hertz
    computed = latency + first / parts + steps * compute + of_parts
    seconds = np.where(parts == 1, whole, np.maximum(fetched, computed)) + last
    return float(seconds) if isinstance(tile, TileConfig) else seconds
