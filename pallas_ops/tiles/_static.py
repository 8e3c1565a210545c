"""`StaticResolver`: a sensible tile from the shape alone."""

import dataclasses
import math

from ..kernels import MatmulProblem
from ._config import block_granules, TileConfig
from ._resolver import Resolution
from ._vmem import estimate_vmem_bytes, vmem_budget_bytes


def _balanced_block(size: int, target: int, granule: int) -> int:
    """The block that cuts an axis into the fewest steps of at most `target`, evenly.

    1536 at a target of 1024 becomes twice 768, and not 1024 and a half-empty block.
    """
    if size <= target:
        return size
    steps = math.ceil(size / target)
    block = math.ceil(math.ceil(size / steps) / granule) * granule
    return min(block, size)


@dataclasses.dataclass(frozen=True)
class StaticResolver:
    """Cuts each axis evenly into blocks near 1024 x 1024 x 512, smaller where VMEM is short.

    It depends on nothing but the problem and the device: no file is read and nothing is measured.

    **Arguments:**

    - `block_m`, `block_k`, `block_n`: the blocks to aim for.

    **Raises:**

    `TypeError` or `ValueError` for a block that is not a positive integer.
    """

    block_m: int = 1024
    block_k: int = 1024
    block_n: int = 512

    def __post_init__(self):
        TileConfig(self.block_m, self.block_k, self.block_n)

    def resolve(self, problem: MatmulProblem, device: str | None) -> Resolution:
        """As in [`pallas_ops.TileResolver`][]; never fails."""
        sizes = (problem.m, problem.k, problem.n)
        granules = block_granules(problem)
        budget = vmem_budget_bytes(device)
        targets = [self.block_m, self.block_k, self.block_n]
        while True:
            blocks = map(_balanced_block, sizes, targets, granules)
            tile = TileConfig(*blocks)
            if estimate_vmem_bytes(problem, tile) <= budget:
                return Resolution(tile, "static estimate")
            # The longest block is halved, k first among equals: it costs least reuse of operands.
            shrinkable = [axis for axis in (1, 0, 2) if targets[axis] > granules[axis]]
            longest = max(shrinkable, key=lambda axis: min(targets[axis], sizes[axis]))
            targets[longest] = max(targets[longest] // 2, granules[longest])
