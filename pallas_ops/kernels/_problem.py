"""What a kernel is asked to compute: shapes, dtypes and layout, and nothing about how."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._epilogue import Columns, Epilogue


# In any mixture: blocks become one dtype in VMEM.
_KERNEL_OPERANDS = frozenset({"float32", "bfloat16", "int8"})


@functools.cache
def promoted_dtype(one: np.dtype, other: np.dtype) -> np.dtype:
    """The dtype that holds both, whatever promotion the user allows in their own code."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(one, other))


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """One matrix multiplication, bound to its shapes, dtypes and layout.

    Both operands have the same rank: some leading axes, then a matrix. Each leading axis is
    either of the same size in both operands, or of size 1 in one of them. What becomes of it is
    one of four roles, and the derivative of each role is another of the four, which is why the
    backward pass needs no other kernel:

    | lhs | rhs | summed | role | the axis in the output |
    |---|---|---|---|---|
    | b | b | no | batch | b |
    | b | 1 | no | rhs is shared | b |
    | 1 | b | no | lhs is shared | b |
    | b | b | yes | contracted, like k | 1 |

    **Arguments:**

    - `lhs_shape`: `(*leading, m, k)`, or `(*leading, k, m)` where `transpose_lhs`.
    - `rhs_shape`: `(*leading, k, n)`, or `(*leading, n, k)` where `transpose_rhs`.
    - `lhs_dtype`, `rhs_dtype`: the operands' dtypes.
    - `out_dtype`: the dtype to which the accumulator is rounded, once.
    - `transpose_lhs`, `transpose_rhs`: the layout of each operand.
    - `sum_leading`: one flag for each leading axis: whether it is summed over.
    - `precision`: as in `jax.lax.dot_general`, resolved to one value for both operands.
    - `epilogue`: what happens to the accumulator before it is rounded; `None` for nothing. With
        one, there are as many results as it has functions.
    """

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    sum_leading: tuple[bool, ...] = ()
    precision: lax.Precision = lax.Precision.DEFAULT
    epilogue: Epilogue | None = None

    def __post_init__(self):
        lhs_leading, rhs_leading = self.lhs_shape[:-2], self.rhs_shape[:-2]
        fits = (
            min(len(self.lhs_shape), len(self.rhs_shape)) >= 2
            and len(lhs_leading) == len(rhs_leading) == len(self.sum_leading)
            and self.k == self.rhs_shape[-1 if self.transpose_rhs else -2]
            and all(a == b or 1 in (a, b) for a, b in zip(lhs_leading, rhs_leading, strict=True))
        )
        if not fits:
            raise ValueError(
                f"matmul: operands that do not fit: {self.describe()}, {len(self.sum_leading)} "
                f"leading axes. Both need one rank, one size k, and leading axes of one size or 1."
            )
        for columns in self.columns:
            whole = (*self.out_shape[:-2], 1, self.n)
            if (
                len(columns.shape) != len(whole)
                or columns.shape[-1] != self.n
                or not all(a in (1, b) for a, b in zip(columns.shape, whole, strict=True))
            ):
                raise ValueError(
                    f"matmul: an epilogue's array of shape {columns.shape} does not fit "
                    f"{self.describe()}: it has an entry for each column of {self.out_shape}."
                )

    @property
    def m(self) -> int:
        return self.lhs_shape[-1 if self.transpose_lhs else -2]

    @property
    def k(self) -> int:
        return self.lhs_shape[-2 if self.transpose_lhs else -1]

    @property
    def n(self) -> int:
        return self.rhs_shape[-2 if self.transpose_rhs else -1]

    @property
    def layout(self) -> str:
        """`"NN"`, `"NT"`, `"TN"` or `"TT"`: T where an operand is stored transposed."""
        return "NT"[self.transpose_lhs] + "NT"[self.transpose_rhs]

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """The leading axes' sizes before any of them is summed."""
        pairs = zip(self.lhs_shape[:-2], self.rhs_shape[:-2], strict=True)
        return tuple(lhs if rhs == 1 else rhs for lhs, rhs in pairs)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """`(*leading, m, n)`; a leading axis that is summed stays, with size 1."""
        leading = zip(self.leading_shape, self.sum_leading, strict=True)
        return (*(1 if summed else size for size, summed in leading), self.m, self.n)

    @property
    def columns(self) -> tuple[Columns, ...]:
        """The arrays that the epilogue reads."""
        return () if self.epilogue is None else self.epilogue.columns

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of lhs and rhs, and of what the epilogue reads."""
        return (self.lhs_shape, self.rhs_shape, *(columns.shape for columns in self.columns))

    def with_shapes(
        self, operand_shapes: Sequence[tuple[int, ...]], sum_leading: tuple[bool, ...]
    ) -> "MatmulProblem":
        """The same for operands of other shapes, which are as `operand_shapes` has them."""
        lhs_shape, rhs_shape, *column_shapes = operand_shapes
        return dataclasses.replace(
            self,
            lhs_shape=lhs_shape,
            rhs_shape=rhs_shape,
            sum_leading=sum_leading,
            epilogue=None if self.epilogue is None else self.epilogue.with_shapes(column_shapes),
        )

    @property
    def is_scaled(self) -> bool:
        """Whether the columns of the sums are multiplied by factors."""
        return self.epilogue is not None and self.epilogue.scale is not None

    @property
    def multiplies_int8(self) -> bool:
        """Whether both operands are int8, so that the products are of integers."""
        return self.lhs_dtype == self.rhs_dtype == np.int8

    @property
    def has_vector_rhs(self) -> bool:
        """Whether Pallas would take the product for one of a matrix and a vector."""
        return self.layout == "NT" and self.n == 1

    @property
    def widens_int8(self) -> bool:
        """Whether one operand is int8, and becomes the dtype of the other in VMEM."""
        return self.lhs_dtype != self.rhs_dtype and np.int8 in (self.lhs_dtype, self.rhs_dtype)

    @property
    def outputs(self) -> int:
        """How many results there are, all of `out_shape` and `out_dtype`."""
        return 1 if self.epilogue is None else len(self.epilogue.functions)

    @property
    def accumulator_dtype(self) -> np.dtype:
        """The dtype of the sums: that of operands or result if it is wide, else 32 bits."""
        # Not by promotion, which JAX has none of for the floats of 8 bits.
        operands, out = promoted_dtype(self.lhs_dtype, self.rhs_dtype), self.out_dtype
        if operands.itemsize >= 4:
            wide = operands
        elif jnp.issubdtype(operands, jnp.inexact):
            wide = np.dtype(jnp.float32)
        elif jnp.issubdtype(operands, jnp.unsignedinteger):
            wide = np.dtype(jnp.uint32)
        else:
            wide = np.dtype(jnp.int32)
        if jnp.issubdtype(wide, jnp.integer) and jnp.issubdtype(out, jnp.inexact):
            if self.is_scaled:  # exact sums, and then real numbers
                return wide
            return out if out.itemsize >= 4 else np.dtype(jnp.float32)
        return out if out.itemsize > wide.itemsize else wide

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to multiply: the result is zeros, if it has any entries."""
        return 0 in (self.m, self.k, self.n, *self.leading_shape)

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations: a multiplication and an addition each."""
        return 2 * math.prod(self.leading_shape) * self.m * self.k * self.n

    @property
    def bytes_accessed(self) -> int:
        """Bytes of all that is read and of all results, each once: the least that can move."""
        parts = (
            (self.lhs_shape, self.lhs_dtype),
            (self.rhs_shape, self.rhs_dtype),
            *((self.out_shape, self.out_dtype) for _ in range(self.outputs)),
        )
        operands = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
        return operands + sum(columns.nbytes for columns in self.columns)

    def why_not_in_kernel(self) -> str | None:
        """Why the Pallas kernel cannot compute this on any TPU, or `None` where it can."""
        pair = (self.lhs_dtype.name, self.rhs_dtype.name)
        if not all(isinstance(size, int) for size in (*self.lhs_shape, *self.rhs_shape)):
            return f"the kernel's blocks need sizes that are numbers: {self.describe()}"
        if not _KERNEL_OPERANDS.issuperset(pair):
            return (
                f"the kernel multiplies float32, bfloat16, int8 and mixtures of these, and was "
                f"given {pair[0]} with {pair[1]}"
            )
        exact = self.multiplies_int8 and not self.is_scaled
        allowed = ("int8", "int32") if exact else ("float32", "bfloat16")
        if self.out_dtype.name not in allowed:
            return (
                f"the kernel returns {' or '.join(allowed)} from {pair[0]} with {pair[1]}, and "
                f"was asked for {self.out_dtype.name}"
            )
        return None

    def describe(self) -> str:
        """One line for error messages."""
        lhs, rhs = (
            f"{dtype.name}{list(shape)}"
            for dtype, shape in (
                (self.lhs_dtype, self.lhs_shape),
                (self.rhs_dtype, self.rhs_shape),
            )
        )
        return f"lhs {lhs} and rhs {rhs}, layout {self.layout}, to {self.out_dtype.name}"


def problem_of(lhs: Any, rhs: Any, **layout: Any) -> MatmulProblem:
    """The `MatmulProblem` of two arrays (or of anything with a `shape` and a `dtype`)."""
    return MatmulProblem(
        lhs_shape=tuple(lhs.shape),
        rhs_shape=tuple(rhs.shape),
        lhs_dtype=np.dtype(lhs.dtype),
        rhs_dtype=np.dtype(rhs.dtype),
        **layout,
    )
