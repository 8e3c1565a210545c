"""What a compile worker is asked, and what it answers."""

import dataclasses

from ..kernels import MatmulProblem
from ._schedule import KernelSchedule
from ._xla import XlaSchedule


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """One program to compile for a TPU that need not be here.

    **Arguments:**

    - `problem`: the product.
    - `device`: the generation.
    - `blocks`: the block sizes of m, k and n for our kernel; `None` compiles XLA's own dot.
    - `vmem_limit_bytes`: the scoped VMEM limit in bytes; `None` is the compiler's default.
    - `textbook`: whether our kernel is as tutorials have it, as in `pallas_matmul`.
    - `prologue_parts`: in how many parts our kernel fetches its first blocks.
    """

    problem: MatmulProblem
    device: str
    blocks: tuple[int, int, int] | None = None
    vmem_limit_bytes: int | None = None
    textbook: bool = False
    prologue_parts: int = 1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the compiler says of one program.

    **Arguments:**

    - `compiles`: whether it takes it.
    - `error`: why not, in one line.
    - `vmem_bytes`: the VMEM that it takes, spills among it; of a program that is refused for it,
        what it would take. `None` where that is not told.
    - `schedule`: of our kernel; `None` where it does not compile or cannot be read.
    - `schedule_error`: why it cannot be read.
    - `xla_cycles`: XLA's own estimate of its program, in cycles; it gives none for our kernel.
    - `xla_schedule`: of XLA's own dot; `None` for our kernel, or where it cannot be read.
    - `transient`: whether the answer says nothing about the program: a worker was lost, a time
        limit or a full disk was met.
    - `blames_program`: whether it may be the program's fault all the same: it took longer than the
        time limit of one, or it ended two processes while their disk was not full.
    - `unavailable`: whether there is no compiler to ask.
    """

    compiles: bool
    error: str | None = None
    vmem_bytes: int | None = None
    schedule: KernelSchedule | None = None
    schedule_error: str | None = None
    xla_cycles: int | None = None
    xla_schedule: XlaSchedule | None = None
    transient: bool = False
    blames_program: bool = False
    unavailable: bool = False

    @property
    def unheard(self) -> bool:
        """Whether the compiler was not heard: then `compiles` says nothing either."""
        return self.transient and not self.compiles
