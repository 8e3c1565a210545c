"""The tiles worth trying for a problem, the most promising first."""

import dataclasses
import itertools

from .._hardware import find_generation
from ..kernels import step_size, why_no_parts
from ._config import block_granules, TileConfig
from ._estimate import estimate_seconds
from ._legal import balanced_block
from ._problem import TileProblem
from ._static import estimated_tile
from ._vmem import COMPILER_MARGIN_BYTES, estimate_vmem_bytes, scoped_vmem_limit_bytes


# Powers of two, and what cuts 1536, 4096, 8960, 14336 and 32000 evenly between them: such a block
# wastes less than a larger one with a ragged edge.
_TARGETS = (128, 256, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 4096)

# Beyond this many multiplications of bfloat16 in one step nothing is gained, and the compiler takes
# its time: 10 s for 1024 x 4096 x 512, 17 s for 2048 x 1024 x 2048, which is predicted to be
# slower, and 175 s to refuse 4096 x 4096 x 4096 (libtpu 0.0.50, v5e, two cores).
_MOST_PER_STEP = 2**31


# The compiler adds from 0.3 to 4 MiB to the blocks, irregularly (`pallas-ops bench vmem`). A tile
# that it may refuse is worth asking for: a refusal costs one compilation, and a tile that is never
# tried may be the best.
_LEAST_ADDED_BYTES = 1024 * 1024


def candidate_budget_bytes(limit: int) -> int:
    """What the estimate may reach so that a tile is worth a try within a VMEM limit, in bytes."""
    return limit - _LEAST_ADDED_BYTES


def _budget_bytes(problem: TileProblem) -> int:
    """What the estimate may reach: the VMEM of a device that is known, else the default limit."""
    generation = find_generation(problem.device)
    limit = scoped_vmem_limit_bytes(problem.device)
    if generation is None:
        return limit - COMPILER_MARGIN_BYTES
    capacity = generation.info.vmem_capacity_bytes
    if capacity > limit:
        # The compiler adds up to 30 % to large blocks (see `vmem_limit_bytes`).
        return capacity * 2 // 3 - COMPILER_MARGIN_BYTES
    return candidate_budget_bytes(limit)


# Of the first blocks: more only adds to what each costs, and less deep ones do not fill an MXU of
# 256 x 256.
_PARTS = range(2, 9)
_LEAST_DEPTH_OF_A_PART = 256


def _in_parts(problem: TileProblem, tile: TileConfig) -> TileConfig:
    """The tile with its first blocks in as many parts as are estimated to be best.

    In one where the grid may be shared between two TensorCores, or the device is not known.
    """
    generation = find_generation(problem.device)
    if generation is None or generation.chip_version.supports_megacore:
        return tile
    of_m, of_k, of_n = block_granules(problem.matmul)
    granules = (of_m, max(of_k, _LEAST_DEPTH_OF_A_PART), of_n)
    possible = [
        dataclasses.replace(tile, prologue_parts=parts)
        for parts in _PARTS
        if why_no_parts(problem.matmul, tile.blocks, parts, granules) is None
    ]
    return min([tile, *possible], key=lambda one: estimate_seconds(problem, one))


def candidates(problem: TileProblem, *, most: int = 64) -> tuple[TileConfig, ...]:
    """Legal tiles that may fit VMEM, by the estimated time of each, shortest first.

    **Arguments:**

    - `problem`: a [`pallas_ops.TileProblem`][].
    - `most`: how many at most.

    **Returns:**

    At least one tile, each of them once; the tile of [`pallas_ops.StaticResolver`][] is among them.
    """
    if most < 1:
        raise ValueError(f"candidates: `most` must be at least 1, got {most}.")
    matmul = problem.matmul
    axes = (
        {balanced_block(size, target, granule) for target in _TARGETS}
        for size, granule in zip(
            (matmul.m, matmul.k, matmul.n), block_granules(matmul), strict=True
        )
    )
    budget, safe = _budget_bytes(problem), estimated_tile(problem)
    fitting = {
        tile
        for tile in (_in_parts(problem, TileConfig(*sizes)) for sizes in itertools.product(*axes))
        if step_size(matmul, tile.blocks) <= _MOST_PER_STEP
        and estimate_vmem_bytes(matmul, tile) <= budget
    }
    # By blocks where the estimate is the same: the order must not depend on that of a set.
    ordered = sorted(
        fitting | {safe}, key=lambda tile: (estimate_seconds(problem, tile), tile.blocks)
    )
    best = ordered[:most]
    return tuple(best if safe in best else [*best[: most - 1], safe])
