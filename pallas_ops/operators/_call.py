"""What is asked of a product, and `MatmulCall`: everything about it, as one hashable value."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..kernels import (
    Activation,
    column_sums_type,
    Columns,
    Epilogue,
    IDENTITY,
    MatmulProblem,
    promoted_dtype,
)
from ._options import CallOptions
from ._registry import get_operator


_NOTHING = CallOptions()


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a person asks for, beside the arrays; checked.

    **Arguments:**

    - `out_dtype`: the dtype of the scaled product; bias and activation may change it.
    - `activation`: a function of one array, applied last; `None` for none.

    All others are those of `matmul`.
    """

    out_dtype: np.dtype
    transpose_lhs: bool
    transpose_rhs: bool
    activation: Callable[[jax.Array], jax.Array] | None
    precision: lax.Precision
    options: CallOptions


@dataclasses.dataclass(frozen=True)
class MatmulCall:
    """One product: the parameter of the primitive, and what an implementation is given.

    **Arguments:**

    - `problem`: shapes, dtypes, layout and precision, and what the kernel does to the sums.
    - `product_dtype`: the dtype of the product where it stands alone, as in the derivatives.
    - `activation`: what is applied last; `None` for nothing. `problem.epilogue` has the programs of
        its derivatives of `orders`.
    - `orders`: which derivatives of the activation are returned, in ascending order.
    - `sums`: whether the sums of a transposed lhs over k, and over the leading axes that are
        summed, are one more result: see `column_sums_type`.
    - `options`: the implementation, the tiles of this product and of its gradients, the device.
    - `can_be_timed`: as in `TileProblem`; known when the product is lowered.
    """

    problem: MatmulProblem
    product_dtype: np.dtype
    activation: Activation | None = None
    orders: tuple[int, ...] = (0,)
    sums: bool = False
    options: CallOptions = _NOTHING
    can_be_timed: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.problem, self.activation, self.sums, self.options))

    def __hash__(self) -> int:
        """Computed once: JAX looks a call up many times."""
        return self._hash

    def __repr__(self) -> str:
        """As it stands in the text of a jaxpr."""
        epilogue = self.problem.epilogue
        parts = [self.problem.describe()]
        parts += [f"epilogue {epilogue.label}"] if epilogue is not None else []
        parts += ["and the sums of lhs"] if self.sums else []
        named = self.options.implementation
        parts += [f"by {named}"] if named is not None else []
        return f"({', '.join(parts)})"

    @property
    def results(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each result."""
        product = (self.problem.out_shape, self.problem.out_dtype)
        sums = [column_sums_type(self.problem)] if self.sums else []
        return [product] * self.problem.outputs + sums

    @property
    def epilogue(self) -> Epilogue:
        """That of the kernel; one that changes nothing where there is none."""
        return self.problem.epilogue or Epilogue()

    @property
    def summed_dtype(self) -> np.dtype:
        """The dtype of what the activation is applied to."""
        return dataclasses.replace(self.problem, epilogue=None).accumulator_dtype

    def bare(self, dtype: np.dtype | None = None) -> "MatmulCall":
        """The product of the same operands alone, in its own dtype or in `dtype`."""
        dtype = self.product_dtype if dtype is None else dtype
        problem = dataclasses.replace(self.problem, epilogue=None, out_dtype=dtype)
        return MatmulCall(problem, dtype, options=self.options)

    def with_orders(self, orders: tuple[int, ...]) -> "MatmulCall":
        """The same with other derivatives of the activation."""
        functions: tuple[Any, ...] = (IDENTITY,)
        if self.activation is not None:
            functions = tuple(self.activation.program(order, self.summed_dtype) for order in orders)
        epilogue = dataclasses.replace(self.epilogue, functions=functions)
        problem = dataclasses.replace(self.problem, epilogue=epilogue)
        return dataclasses.replace(self, problem=problem, orders=orders)

    def batched(self, sizes: list[int]) -> "MatmulCall":
        """The same with one more leading axis, of these sizes in the operands, or of 1."""
        pairs = zip(sizes, self.problem.operand_shapes, strict=True)
        problem = self.problem.with_shapes(
            [(size, *shape) for size, shape in pairs], (False, *self.problem.sum_leading)
        )
        return dataclasses.replace(self, problem=problem)


def describe(
    asked: Asked,
    lhs: jax.Array,
    rhs: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> tuple[MatmulCall, bool]:
    """The call of `multiply` with these arguments, of which it reads the types.

    **Returns:**

    The call, and whether it holds bias and activation, or they are to be applied after it.
    """
    rank = max(lhs.ndim, rhs.ndim)
    problem = MatmulProblem(
        lhs_shape=_padded(lhs.shape, rank),
        rhs_shape=_padded(rhs.shape, rank),
        lhs_dtype=np.dtype(lhs.dtype),
        rhs_dtype=np.dtype(rhs.dtype),
        out_dtype=asked.out_dtype,
        transpose_lhs=asked.transpose_lhs,
        transpose_rhs=asked.transpose_rhs,
        sum_leading=(False,) * (rank - 2),
        precision=asked.precision,
        epilogue=None if scale is None else Epilogue(scale=_columns(scale, rank)),
    )
    call = MatmulCall(problem, asked.out_dtype, options=asked.options)
    if (name := asked.options.implementation) is not None:
        operands = [lhs, rhs] if scale is None else [lhs, rhs, scale]
        get_operator("matmul").select(operands, dict(call=call), name=name)
    if bias is None and asked.activation is None:
        return call, True
    fused = _with_epilogue(call, bias, asked.activation)
    return (call, False) if fused is None else (fused, True)


def _padded(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """More leading axes of size 1, which move no data and fold away again."""
    return (*(1,) * (rank - len(shape)), *shape)


def _columns(array: jax.Array, rank: int) -> Columns:
    """What has an entry for each column, beside operands of `rank`."""
    return Columns(_padded((*array.shape[:-1], 1, array.shape[-1]), rank), np.dtype(array.dtype))


def applied(
    product: jax.Array,
    bias: jax.Array | None,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Bias and activation on a product that is rounded already."""
    if bias is not None:
        product = product + jnp.broadcast_to(bias, product.shape)
    return product if activation is None else activation(product)


def _with_epilogue(
    call: MatmulCall,
    bias: jax.Array | None,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> MatmulCall | None:
    """The call with bias and activation in its kernel; `None` where they must be applied after it.

    After it are applied: what looks at more than one entry, or holds arrays; and anything to
    integers and complex numbers, which no kernel sums in floating point.
    """
    problem = call.problem
    product = jax.ShapeDtypeStruct(problem.out_shape, problem.out_dtype)
    # As the user's own promotion rules have it, and with their errors.
    biased = jax.eval_shape(functools.partial(applied, activation=None), product, bias)
    wanted = biased if activation is None else jax.eval_shape(activation, biased)
    dtypes = [product.dtype, wanted.dtype] if isinstance(wanted, jax.ShapeDtypeStruct) else []
    if not problem.is_scaled:
        dtypes.append(promoted_dtype(problem.lhs_dtype, problem.rhs_dtype))
    if bias is not None:
        dtypes.append(bias.dtype)
    is_array = isinstance(wanted, jax.ShapeDtypeStruct) and wanted.shape == product.shape
    if is_array and wanted.dtype == jnp.float16 != product.dtype:
        return None  # which no kernel stores
    if not is_array or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return None
    found = None
    if activation is not None:
        alone = dataclasses.replace(problem, epilogue=None, out_dtype=np.dtype(wanted.dtype))
        found = Activation.of(activation, alone.accumulator_dtype, biased)
        if found is None:
            return None
    rank = len(problem.lhs_shape)
    epilogue = dataclasses.replace(
        call.epilogue, bias=None if bias is None else _columns(bias, rank)
    )
    problem = dataclasses.replace(problem, out_dtype=np.dtype(wanted.dtype), epilogue=epilogue)
    return dataclasses.replace(call, problem=problem, activation=found).with_orders((0,))
