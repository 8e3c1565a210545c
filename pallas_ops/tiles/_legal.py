"""Whether a tile can run: the two checks that every path makes, and the tile that would pass."""

import functools
import math

from .._hardware import find_generation, GENERATIONS
from ..kernels import MatmulProblem
from ._config import block_granules, TileConfig, why_illegal
from ._problem import TileProblem
from ._vmem import (
    COMPILER_MARGIN_BYTES,
    estimate_vmem_bytes,
    most_added_bytes,
    scoped_vmem_limit_bytes,
)


_MIB = 1024 * 1024


def balanced_block(size: int, target: int, granule: int) -> int:
    """The block that cuts an axis into the fewest steps of at most `target`, evenly.

    1536 at a target of 1024 becomes twice 768, and not 1024 and a half-empty block.
    """
    if size <= target:
        return size
    steps = math.ceil(size / target)
    block = math.ceil(math.ceil(size / steps) / granule) * granule
    return min(block, size)


def nearest_legal(problem: MatmulProblem, tile: TileConfig) -> TileConfig:
    """The blocks rounded to what a TPU takes; those that are legal stay as they are."""
    sizes = (problem.m, problem.k, problem.n)
    blocks = []
    for size, block, granule in zip(sizes, tile.blocks, block_granules(problem), strict=True):
        if block < size and block % granule:
            below = block // granule * granule
            legal = {min(max(below, granule), size), min(below + granule, size), size}
            # The smaller one of two that are as near: it takes less VMEM.
            block = min(legal, key=lambda near: (abs(near - block), near))
        blocks.append(min(block, size))
    m, k, n = blocks
    return TileConfig(m, k, n, tile.prologue_parts).clipped_to(problem)


def shrink_to_fit(problem: MatmulProblem, targets: tuple[int, int, int], budget: int) -> TileConfig:
    """Evenly cut blocks of at most `targets`, shrunk until the VMEM estimate is within `budget`.

    A budget that even the smallest blocks exceed gets the smallest blocks.
    """
    sizes, granules = (problem.m, problem.k, problem.n), block_granules(problem)
    goal = list(targets)
    while True:
        tile = TileConfig(*map(balanced_block, sizes, goal, granules))
        # The longest block is halved, k first among equals: it costs least reuse of operands.
        shrinkable = [axis for axis in (1, 0, 2) if goal[axis] > granules[axis]]
        if not shrinkable or estimate_vmem_bytes(problem, tile) <= budget:
            return tile
        longest = max(shrinkable, key=lambda axis: min(goal[axis], sizes[axis]))
        goal[longest] = max(goal[longest] // 2, granules[longest])


@functools.cache
def _most_vmem_bytes(device: str | None) -> int:
    """The VMEM of `device`, in bytes; where it is unknown, of the generation that has most."""
    generation = find_generation(device)
    found = GENERATIONS.values() if generation is None else [generation]
    return max(known.info.vmem_capacity_bytes for known in found)


def _where(problem: TileProblem) -> str:
    return f"a TPU {problem.device}" if problem.device else "any TPU"


def largest_sure_to_fit(problem: TileProblem, tile: TileConfig) -> TileConfig:
    """The blocks, shrunk as far as the compiler might refuse them for their size unasked."""
    budget = _most_vmem_bytes(problem.device) - COMPILER_MARGIN_BYTES
    if estimate_vmem_bytes(problem.matmul, tile) <= budget:
        return tile
    return shrink_to_fit(problem.matmul, tile.blocks, budget)


def why_too_large(problem: TileProblem, tile: TileConfig) -> str | None:
    """Why the blocks fit no VMEM that they could get, or `None` where they may."""
    needed, capacity = (
        estimate_vmem_bytes(problem.matmul, tile),
        _most_vmem_bytes(problem.device),
    )
    if needed <= capacity:
        return None
    largest = largest_sure_to_fit(problem, tile)
    return (
        f"the blocks need {needed / _MIB:.1f} MiB of VMEM by estimate, and {_where(problem)} has "
        f"at most {capacity / _MIB:g} MiB. The largest of this form that fits is {largest}"
    )


def nearest_that_fits(problem: TileProblem, tile: TileConfig) -> TileConfig:
    """The nearest blocks that a TPU takes; where they are too large, the largest that fit."""
    nearest = nearest_legal(problem.matmul, tile)
    if why_too_large(problem, nearest) is None:
        return nearest
    return largest_sure_to_fit(problem, nearest)


def vmem_limit_bytes(problem: TileProblem, tile: TileConfig) -> int | None:
    """The scoped VMEM limit that a tile needs, in bytes; `None` where the default is enough.

    The limit takes nothing from other kernels, so more is asked for than the compiler is known to
    need: half as much again as the blocks, or all that it may add to them. A v4 has no more than
    the default.
    """
    needed = estimate_vmem_bytes(problem.matmul, tile)
    added = most_added_bytes(problem.matmul, tile)
    default, capacity = scoped_vmem_limit_bytes(problem.device), _most_vmem_bytes(problem.device)
    if needed + added <= default or capacity <= default:
        return None
    return min(needed + max(added, needed // 2 + COMPILER_MARGIN_BYTES), capacity)


def why_no_limit(problem: TileProblem, tile: TileConfig, limit: int) -> str | None:
    """Why the kernel cannot be compiled with this VMEM limit, or `None` where it may."""
    needed, capacity = estimate_vmem_bytes(problem.matmul, tile), _most_vmem_bytes(problem.device)
    if limit < needed:
        return f"the blocks need {needed} bytes of VMEM by estimate"
    if limit > capacity:
        return f"{_where(problem)} has at most {capacity}"
    return None


def check_tile(problem: TileProblem, tile: TileConfig, named_by: str) -> None:
    """Raises `ValueError` where no TPU takes the blocks, with the nearest that one would take."""
    reason = why_illegal(problem.matmul, tile)
    if reason is not None:
        raise ValueError(
            f"{problem.operator}: {tile} ({named_by}) is not a tile that a TPU takes for "
            f"{problem.matmul.describe()}: {reason}. The nearest that it takes is "
            f"{nearest_that_fits(problem, tile)}."
        )
    reason = why_too_large(problem, tile)
    if reason is not None:
        raise ValueError(
            f"{problem.operator}: {tile} ({named_by}) is too large for "
            f"{problem.matmul.describe()}: {reason}."
        )
