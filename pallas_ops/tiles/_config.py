"""`TileConfig`: one choice of blocks, and the check that a TPU takes it."""

import dataclasses

import numpy as np

from ..kernels import MatmulProblem, why_no_parts


LANES = 128
"""The last dimension of a TPU's vector registers, on every generation."""


def sublanes(dtype: np.dtype) -> int:
    """Rows of the smallest tile of `dtype`: 8 for 32 bits, 16 for 16 bits, 32 for 8 bits."""
    return 8 * 4 // min(dtype.itemsize, 4)


@dataclasses.dataclass(frozen=True, repr=False)
class TileConfig:
    """The block sizes of one matrix multiplication.

    A block larger than its axis is cut down to the whole axis.

    Nothing is multiplied while the first blocks are fetched, unless they come in parts: then each
    is multiplied while the next one is fetched. The steps of such a kernel run in order, on one
    TensorCore, where those of another may be shared between the two of a v4 or v5p. It is for
    products without leading axes, with blocks that divide m, k and n evenly and are multiples of
    what a TPU packs; anything else is computed as if `prologue_parts` were 1.

    **Arguments:**

    - `block_m`: rows of the left operand and of the result.
    - `block_k`: the part of the contracted axis that one step multiplies.
    - `block_n`: columns of the right operand and of the result.
    - `prologue_parts`: in how many parts of k the first blocks are fetched.

    **Raises:**

    `TypeError` where one is not an integer, `ValueError` where it is not positive. Whether a
    TPU takes the blocks depends on shapes, dtypes and layout, and is checked when the
    multiplication is compiled.
    """

    block_m: int | np.integer
    block_k: int | np.integer
    block_n: int | np.integer
    prologue_parts: int | np.integer = 1

    def __post_init__(self):
        for name, value in list(vars(self).items()):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"TileConfig.{name} must be an integer, got {value!r}.")
            if value < 1:
                raise ValueError(f"TileConfig.{name} must be positive, got {value!r}.")
            if type(value) is not int:
                object.__setattr__(self, name, int(value))

    @property
    def blocks(self) -> tuple[int, int, int]:
        return (int(self.block_m), int(self.block_k), int(self.block_n))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The blocks, and the parts of the first ones if there are several: as it is written."""
        return (*self.blocks, int(self.prologue_parts)) if self.prologue_parts > 1 else self.blocks

    @property
    def label(self) -> str:
        """The numbers in one word."""
        return "x".join(map(str, self.numbers))

    def __repr__(self) -> str:
        names = (field.name for field in dataclasses.fields(self))
        told = (f"{name}={number}" for name, number in zip(names, self.numbers, strict=False))
        return f"TileConfig({', '.join(told)})"

    def clipped_to(self, problem: MatmulProblem) -> "TileConfig":
        """These blocks, none of them larger than its axis, in parts where that can be."""
        axes = (problem.m, problem.k, problem.n)
        m, k, n = (min(pair) for pair in zip(self.blocks, axes, strict=True))
        parts = int(self.prologue_parts)
        can_be = why_no_parts(problem, (m, k, n), parts, block_granules(problem)) is None
        return TileConfig(m, k, n, parts if can_be else 1)


@dataclasses.dataclass(frozen=True, eq=False)
class TileArray:
    """Many tiles at once: what a `TileConfig` has, as an integer array of each.

    `estimate_vmem_bytes` and `estimate_seconds` take one in place of a `TileConfig`, and then
    answer for all of its tiles in the time that a few take one by one.

    **Arguments:**

    - `block_m`, `block_k`, `block_n`, `prologue_parts`: arrays of int64 that broadcast.
    """

    block_m: np.ndarray
    block_k: np.ndarray
    block_n: np.ndarray
    prologue_parts: np.ndarray

    @property
    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (self.block_m, self.block_k, self.block_n)


def block_granules(problem: MatmulProblem) -> tuple[int, int, int]:
    """What each of `block_m`, `block_k` and `block_n` must be a multiple of, or the whole axis.

    Mosaic wants the last dimension of a block to be a multiple of 128 lanes, and the one before it
    of the sublanes that the dtype packs, in each array that the block is cut from. All of these
    are powers of two, so the largest is the least common multiple.
    """
    lhs, rhs, out = map(sublanes, (problem.lhs_dtype, problem.rhs_dtype, problem.out_dtype))
    lhs_m, lhs_k = (LANES, lhs) if problem.transpose_lhs else (lhs, LANES)
    rhs_k, rhs_n = (LANES, rhs) if problem.transpose_rhs else (rhs, LANES)
    return max(lhs_m, out), max(lhs_k, rhs_k), max(rhs_n, LANES)


def why_illegal(problem: MatmulProblem, tile: TileConfig) -> str | None:
    """Why no TPU takes these blocks for this problem, or `None` where they are well formed.

    The same for every implementation, so that a test on a CPU meets what a TPU would refuse.
    """
    axes = ("m", "k", "n")
    sizes = (problem.m, problem.k, problem.n)
    parts = zip(axes, sizes, tile.blocks, block_granules(problem), strict=True)
    wrong = [
        f"block_{axis}={block} is neither a multiple of {granule} nor the whole axis {axis}={size}"
        for axis, size, block, granule in parts
        if block % granule != 0 and block != size
    ]
    return "; ".join(wrong) or None
