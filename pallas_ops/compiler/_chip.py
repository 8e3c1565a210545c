"""What the time model knows of a chip."""

import dataclasses
import functools

from .._hardware import known_generation


DMA_LATENCY_SECONDS = 0.5e-6
"""How long after its issue a transfer arrives. Calibrated, on published timings of a v5e: see
`pallas-ops bench published --fit`."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the model knows of one TensorCore.

    **Arguments:**

    - `name`: the generation.
    - `clock_hertz`: cycles in a second.
    - `bytes_per_second`: of HBM.
    - `num_mxus`, `mxu_size`: how many MXUs there are, and the rows and columns of each.
    - `rows_per_cycle`: how many rows of bfloat16 or float32 an MXU takes in a cycle.
    - `narrow_factor`: how many times faster it takes those of 8 bits.
    - `multiplies_int8`: whether it takes int8 at all; where not, the compiler multiplies bfloat16.
    - `dma_latency_seconds`: how long after its issue a transfer begins to arrive.
    - `calibrated`: whether the model was compared with measurements on this generation.
    """

    name: str
    clock_hertz: float
    bytes_per_second: float
    num_mxus: int
    mxu_size: int
    rows_per_cycle: float
    narrow_factor: float
    multiplies_int8: bool
    dma_latency_seconds: float
    calibrated: bool

    @property
    def rates(self) -> dict[int, float]:
        """Rows per cycle by the rows in one register of operands."""
        wide, narrow = self.rows_per_cycle, self.rows_per_cycle * self.narrow_factor
        return {8: wide, 16: wide, 32: narrow, 64: 2 * narrow}


@functools.cache
def chip(device: str, *, dma_latency_seconds: float = DMA_LATENCY_SECONDS) -> Chip:
    """One TensorCore of a generation, by JAX's own hardware table.

    The table has no clock. An MXU of 128 x 128 takes one row in a cycle, and one of 256 x 256 two,
    which makes the clock out of the peak: 1.5 GHz on a v5e.
    """
    generation = known_generation(device)
    info = generation.info
    rows_per_cycle = info.mxu_column_size / 128
    per_cycle = 2 * info.num_mxus * info.mxu_column_size**2 * rows_per_cycle
    narrow = max(info.int8_ops_per_second, info.fp8_ops_per_second) or info.bf16_ops_per_second
    return Chip(
        name=generation.name,
        clock_hertz=info.bf16_ops_per_second / per_cycle,
        bytes_per_second=float(info.mem_bw_bytes_per_second),
        num_mxus=info.num_mxus,
        mxu_size=info.mxu_column_size,
        rows_per_cycle=rows_per_cycle,
        narrow_factor=narrow / info.bf16_ops_per_second,
        multiplies_int8=info.int8_ops_per_second > 0,
        dma_latency_seconds=dma_latency_seconds,
        calibrated=generation.is_calibrated,
    )
