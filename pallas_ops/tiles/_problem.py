"""`TileProblem`: the question that a tile resolver answers."""

import dataclasses

import numpy as np

from .._hardware import find_generation
from ..kernels import MatmulProblem


@dataclasses.dataclass(frozen=True)
class TileProblem:
    """One matrix multiplication, and where and how it will run.

    The forward product and each of the two gradients is a problem of its own. Shapes are final:
    batch axes are folded by now.

    **Arguments:**

    - `matmul`: shapes, dtypes, layout and precision, a [`pallas_ops.MatmulProblem`][].
    - `device`: the TPU that the program is compiled for: a generation such as `"v5e"`, or the
        device kind of one that is not known here. A device kind that is known becomes its
        generation. `None` where JAX does not tell, and then the tile must suit every generation.
    - `implementation`: the implementation of the operator that will run.
    - `operator`: the operator's name.
    - `epilogue`: a name for what the kernel does to the product before it stores it; `""` is that
        of `matmul`.
    - `can_be_timed`: whether a program for this device can be run in this process, and so measured.
        A program that is exported, or compiled for a TPU that is not there, cannot. Problems that
        differ in this alone are equal: the best tile is the same.
    """

    matmul: MatmulProblem
    device: str | None = None
    implementation: str = "mosaic"
    operator: str = "matmul"
    epilogue: str = ""
    can_be_timed: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self):
        generation = find_generation(self.device)
        if generation is not None:
            object.__setattr__(self, "device", generation.name)
        if not self.epilogue and self.matmul.epilogue is not None:
            object.__setattr__(self, "epilogue", self.matmul.epilogue.label)

    @property
    def m(self) -> int:
        return self.matmul.m

    @property
    def k(self) -> int:
        return self.matmul.k

    @property
    def n(self) -> int:
        return self.matmul.n

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes that no fold could remove, those that are summed among them."""
        return self.matmul.leading_shape

    @property
    def layout(self) -> str:
        return self.matmul.layout

    @property
    def lhs_dtype(self) -> np.dtype:
        return self.matmul.lhs_dtype

    @property
    def rhs_dtype(self) -> np.dtype:
        return self.matmul.rhs_dtype

    @property
    def out_dtype(self) -> np.dtype:
        return self.matmul.out_dtype

    @property
    def precision(self) -> str:
        return self.matmul.precision.name

    @property
    def bare(self) -> "TileProblem":
        """The product alone, without its epilogue."""
        matmul = dataclasses.replace(self.matmul, epilogue=None)
        return dataclasses.replace(self, matmul=matmul, epilogue="")

    def describe(self) -> str:
        """One line for messages."""
        epilogue = f", epilogue {self.epilogue}" if self.epilogue else ""
        where = f"for {self.device or 'any TPU'} ({self.implementation})"
        return f"{self.matmul.describe()}{epilogue}, {where}"
