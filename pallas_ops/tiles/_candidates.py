"""The tiles worth trying for a problem, and the one that is taken where nothing is tried."""

import functools

import numpy as np

from .._hardware import find_generation
from ..kernels import step_size
from ._config import block_granules, LANES, TileArray, TileConfig
from ._estimate import estimate_seconds
from ._legal import balanced_block, shrink_to_fit
from ._problem import TileProblem
from ._vmem import (
    COMPILER_MARGIN_BYTES,
    estimate_vmem_bytes,
    most_added_bytes,
    scoped_vmem_limit_bytes,
)


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


def _fit(problem: TileProblem, tiles: TileArray, *, is_sure: bool) -> np.ndarray:
    """Which tiles VMEM may have room for.

    **Arguments:**

    - `is_sure`: whether the compiler must take them unasked.
    """
    needed = estimate_vmem_bytes(problem.matmul, tiles)
    limit, generation = scoped_vmem_limit_bytes(problem.device), find_generation(problem.device)
    if generation is not None and generation.info.vmem_capacity_bytes > limit:
        # The limit is raised for those that need it, by half as much again: see `vmem_limit_bytes`.
        return needed <= generation.info.vmem_capacity_bytes * 2 // 3 - COMPILER_MARGIN_BYTES
    if is_sure or generation is None:
        return needed + most_added_bytes(problem.matmul, tiles) <= limit
    return needed <= candidate_budget_bytes(limit)


# Of the first blocks: more only adds to what each costs, and less deep ones do not fill an MXU of
# 256 x 256.
_MOST_PARTS = 8
_LEAST_DEPTH_OF_A_PART = 256


def _every_tile(problem: TileProblem) -> TileArray:
    """Even blocks near each target along each axis, with the first ones in 1 to 8 parts.

    The arrays have an axis each for block_m, block_k, block_n and the parts.
    """
    matmul = problem.matmul
    of_m, of_k, of_n = block_granules(matmul)
    # Of k, whole tiles of an MXU's weights: less is multiplied in the time of a whole one.
    granules = (of_m, max(of_k, LANES), of_n)
    axes = (
        sorted({balanced_block(size, target, granule) for target in _TARGETS})
        for size, granule in zip((matmul.m, matmul.k, matmul.n), granules, strict=True)
    )
    parts = range(1, _MOST_PARTS + 1) if _may_come_in_parts(problem) else (1,)
    return TileArray(*np.ix_(*(np.array(axis, np.int64) for axis in (*axes, parts))))


def _may_come_in_parts(problem: TileProblem) -> bool:
    """Not where the grid may be shared between two TensorCores, or the device is not known."""
    generation = find_generation(problem.device)
    alone = generation is not None and not generation.chip_version.supports_megacore
    return alone and not problem.matmul.leading_shape


def _estimated(problem: TileProblem, *, is_sure: bool) -> tuple[TileArray, np.ndarray]:
    """Every tile, and the time of each, infinite where it is not worth a try.

    **Arguments:**

    - `is_sure`: as in `_fit`.
    """
    matmul, tiles = problem.matmul, _every_tile(problem)
    of_m, of_k, of_n = block_granules(matmul)
    in_parts = tiles.prologue_parts > 1
    depth = tiles.prologue_parts * max(of_k, _LEAST_DEPTH_OF_A_PART)
    # As `why_no_parts` has it: blocks that divide the axes, in parts of whole granules.
    divides = (
        (matmul.m % tiles.block_m == 0)
        & (matmul.k % tiles.block_k == 0)
        & (matmul.n % tiles.block_n == 0)
        & (tiles.block_m % of_m == 0)
        & (tiles.block_k % depth == 0)
        & (tiles.block_n % of_n == 0)
    )
    size = step_size(matmul, (1, 1, 1)) * tiles.block_m * tiles.block_k * tiles.block_n
    fits = _fit(problem, tiles, is_sure=is_sure)
    worth = fits & (~in_parts | divides) & (size <= _MOST_PER_STEP)
    return tiles, np.where(worth, estimate_seconds(problem, tiles), np.inf)


def _tile_at(tiles: TileArray, index: tuple[int, ...]) -> TileConfig:
    of_m, of_k, of_n, of_parts = index
    return TileConfig(
        tiles.block_m[of_m, 0, 0, 0],
        tiles.block_k[0, of_k, 0, 0],
        tiles.block_n[0, 0, of_n, 0],
        tiles.prologue_parts[0, 0, 0, of_parts],
    )


@functools.lru_cache(maxsize=1024)
def estimated_tile(problem: TileProblem) -> TileConfig:
    """The tile by shape alone: of those that the compiler is sure to take, the one whose estimated
    time is the shortest.

    The VMEM limit is raised for it where that generation has more; on a v4 and an unknown device it
    is within the default limit.
    """
    tiles, seconds = _estimated(problem, is_sure=True)
    best = tuple(map(int, np.unravel_index(np.argmin(seconds), seconds.shape)))
    if not np.isfinite(seconds[best]):  # not even the smallest of these blocks fits
        return shrink_to_fit(problem.matmul, (1, 1, 1), 0)
    return _tile_at(tiles, best)


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
    tiles, seconds = _estimated(problem, is_sure=False)
    # Of one choice of blocks, the best number of parts.
    parts = np.argmin(seconds, axis=-1)
    seconds = np.min(seconds, axis=-1)
    # A stable sort: of two that take as long, the one with smaller blocks.
    order = np.argsort(seconds, axis=None, kind="stable")[: np.isfinite(seconds).sum()]
    best = [
        _tile_at(tiles, (*map(int, index), int(parts[index])))
        for index in zip(*np.unravel_index(order[:most], seconds.shape), strict=True)
    ]
    safe = estimated_tile(problem)
    return tuple(best if safe in best else [*best[: most - 1], safe])
