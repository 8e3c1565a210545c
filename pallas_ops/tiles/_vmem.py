"""How much VMEM a choice of blocks takes, before asking the compiler."""

import numpy as np

from .._hardware import find_generation
from ..kernels import MatmulProblem
from ._config import LANES, sublanes, TileConfig


_MIB = 1024 * 1024

SMALLEST_SCOPED_VMEM_LIMIT_BYTES = 16 * _MIB
"""The compiler's default limit on the generations that have least (v4, v5e, v5p)."""

COMPILER_MARGIN_BYTES = 4 * _MIB
"""What the compiler was seen to add to the blocks at most: spills, masks, copies for layouts."""


def _padded_bytes(rows: int, columns: int, dtype: np.dtype) -> int:
    """Bytes of one block in VMEM, where it fills whole tiles of sublanes by lanes."""
    tile_rows = sublanes(dtype)
    return -(-rows // tile_rows) * tile_rows * -(-columns // LANES) * LANES * dtype.itemsize


def estimate_vmem_bytes(problem: MatmulProblem, tile: TileConfig) -> int:
    """The VMEM that the kernel asks for: two buffers for each block, and the accumulator.

    The compiler adds up to `COMPILER_MARGIN_BYTES`, irregularly; only it can say that a tile fits.
    """
    m, k, n = tile.blocks
    lhs = (k, m) if problem.transpose_lhs else (m, k)
    rhs = (n, k) if problem.transpose_rhs else (k, n)
    blocks = (
        _padded_bytes(*lhs, problem.lhs_dtype)
        + _padded_bytes(*rhs, problem.rhs_dtype)
        + _padded_bytes(m, n, problem.out_dtype)
    )
    accumulator = _padded_bytes(m, n, problem.accumulator_dtype) if k < problem.k else 0
    return 2 * blocks + accumulator


def vmem_budget_bytes(device: str | None) -> int:
    """What `estimate_vmem_bytes` may reach on `device`; on an unknown one, on any generation."""
    generation = find_generation(device)
    limit = SMALLEST_SCOPED_VMEM_LIMIT_BYTES
    if generation is not None:
        limit = generation.scoped_vmem_limit_bytes
    return limit - COMPILER_MARGIN_BYTES
