"""How much VMEM a choice of blocks takes, before asking the compiler."""

from typing import Any, overload

import jax.numpy as jnp
import numpy as np

from .._hardware import find_generation
from ..kernels import (
    is_matrix_vector,
    MatmulProblem,
    multiplied_dtype,
    mxu_passes,
    piece_counts,
)
from ._config import LANES, sublanes, TileArray, TileConfig


_MIB = 1024 * 1024

SMALLEST_SCOPED_VMEM_LIMIT_BYTES = 16 * _MIB
"""The compiler's default limit on the generations that have least (v4, v5e, v5p)."""

COMPILER_MARGIN_BYTES = 4 * _MIB
"""What the compiler adds to the blocks, mostly: spills, masks, copies for layouts."""

_MARGIN_OF_ONE_DTYPE_BYTES = 5 * _MIB // 2
"""The same where both operands have one dtype, in one pass, beside a copy of lhs."""


def _padded_bytes(rows: Any, columns: Any, dtype: np.dtype) -> Any:
    """Bytes of one block in VMEM, where it fills whole tiles of sublanes by lanes."""
    tile_rows = sublanes(dtype)
    return -(-rows // tile_rows) * tile_rows * -(-columns // LANES) * LANES * dtype.itemsize


@overload
def estimate_vmem_bytes(problem: MatmulProblem, tile: TileConfig) -> int: ...
@overload
def estimate_vmem_bytes(problem: MatmulProblem, tile: TileArray) -> np.ndarray: ...
def estimate_vmem_bytes(problem: MatmulProblem, tile: TileConfig | TileArray) -> Any:
    """The VMEM that a kernel needs, in bytes; for a `TileArray`, that of each tile.

    Two buffers for each block, the accumulator, and the copies that a mixture of dtypes or a higher
    precision makes of a block. The compiler adds up to `most_added_bytes` to that, irregularly:
    only it can say that a tile fits.
    """
    m, k, n = tile.blocks
    lhs = (k, m) if problem.transpose_lhs else (m, k)
    rhs = (n, k) if problem.transpose_rhs else (k, n)
    # All of this is arithmetic, and has no branch on a tile: it holds for arrays of tiles as well.
    in_parts = tile.prologue_parts > 1
    # The kernel that fetches its operands itself has one buffer for a block that never moves.
    lhs_buffers = 2 - (in_parts & (m >= problem.m) & (k >= problem.k))
    rhs_buffers = 2 - (in_parts & (k >= problem.k) & (n >= problem.n))
    buffers = (
        lhs_buffers * _padded_bytes(*lhs, problem.lhs_dtype)
        + rhs_buffers * _padded_bytes(*rhs, problem.rhs_dtype)
        + 2 * problem.outputs * _padded_bytes(m, n, problem.out_dtype)
        + 2 * sum(_padded_bytes(1, n, columns.dtype) for columns in problem.columns)
    )
    sums_steps = (k < problem.k) | any(problem.sum_leading) | in_parts
    accumulator = sums_steps * _padded_bytes(m, n, problem.accumulator_dtype)
    # What is not of the dtype in which they are multiplied is copied to it, in all of its pieces.
    dtype = multiplied_dtype(problem)
    lhs_pieces, rhs_pieces = piece_counts(problem)
    lhs_copies = lhs_pieces * int(problem.lhs_dtype != dtype)
    rhs_copies = rhs_pieces * int(problem.rhs_dtype != dtype)
    if is_matrix_vector(problem):  # rhs is a row; for integers there are the products as well
        lhs_copies, rhs_copies = 1 + int(problem.multiplies_int8), 0
    copies = lhs_copies * _padded_bytes(*lhs, dtype) + rhs_copies * _padded_bytes(*rhs, dtype)
    # And half of the passes' products are there at once (libtpu 0.0.50, v5e: used is up to 1.6 MiB
    # more than this for blocks between 256 x 256 x 1024 and 1024 x 512 x 512).
    copies += mxu_passes(problem) // 2 * _padded_bytes(m, n, problem.accumulator_dtype)
    if problem.widens_int8:
        # On a v4, once more on the way from int8, and the product before it is added (14.9 MiB for
        # bfloat16 by int8 in blocks of 1024 x 1024 x 512, libtpu 0.0.42 and 0.0.50).
        narrow = lhs if problem.lhs_dtype == np.int8 else rhs
        copies += _padded_bytes(*narrow, dtype) + _padded_bytes(m, n, np.dtype(np.float32))
    if problem.transpose_lhs:
        # Masked at the edge of k and then transposed (16.3 of 16 MiB, bfloat16, libtpu 0.0.42).
        copies += (problem.k % k > 0) * _padded_bytes(*lhs, problem.lhs_dtype)
    return buffers + accumulator + copies


@overload
def most_added_bytes(problem: MatmulProblem, tile: TileConfig) -> int: ...
@overload
def most_added_bytes(problem: MatmulProblem, tile: TileArray) -> np.ndarray: ...
def most_added_bytes(problem: MatmulProblem, tile: TileConfig | TileArray) -> Any:
    """The most that the compiler is known to add to `estimate_vmem_bytes`, in bytes.

    For operands of float32 it is 2 MiB; those narrower than 32 bits it may keep a copy of lhs of,
    in bfloat16, and up to 2 MiB beside (536 kernels near the limit of a v4, and of every generation
    for generated shapes, libtpu 0.0.42 and 0.0.50).
    """
    m, k, _ = tile.blocks
    lhs = (k, m) if problem.transpose_lhs else (m, k)
    copied = problem.lhs_dtype.itemsize < 4
    plain = problem.lhs_dtype == problem.rhs_dtype and mxu_passes(problem) == 1
    beside = _MARGIN_OF_ONE_DTYPE_BYTES if plain else COMPILER_MARGIN_BYTES
    return beside + int(copied) * _padded_bytes(*lhs, np.dtype(jnp.bfloat16))


def scoped_vmem_limit_bytes(device: str | None) -> int:
    """The compiler's default limit on the VMEM of one kernel; on an unknown device, the least."""
    generation = find_generation(device)
    if generation is None:
        return SMALLEST_SCOPED_VMEM_LIMIT_BYTES
    return generation.scoped_vmem_limit_bytes
