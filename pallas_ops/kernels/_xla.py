"""`"xla"`: XLA's own matmul, the reference and the choice wherever there is no TPU."""

import jax
import jax.numpy as jnp
from jax import lax

from ._problem import MatmulProblem, promoted_dtype


def xla_matmul(
    problem: MatmulProblem, lhs: jax.Array, rhs: jax.Array, *columns: jax.Array
) -> jax.Array | tuple[jax.Array, ...]:
    """The product by `jax.lax.dot_general`, with the kernel's accumulation and rounding.

    With an epilogue, all of its outputs.
    """
    product = _product(problem, lhs, rhs)
    if problem.epilogue is None:
        return product.astype(problem.out_dtype)
    outputs = problem.epilogue.apply(product, *columns)
    return tuple(output.astype(problem.out_dtype) for output in outputs)


def _product(problem: MatmulProblem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The sums, not rounded yet."""
    if problem.is_empty:
        return jnp.zeros(problem.out_shape, problem.accumulator_dtype)
    operands = promoted_dtype(problem.lhs_dtype, problem.rhs_dtype)
    integers = jnp.issubdtype(operands, jnp.integer)
    narrow = operands == jnp.bool_ or (integers and jnp.iinfo(operands).bits < 8)
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    mixed = [jnp.issubdtype(operands, kind) for kind in kinds] != [
        jnp.issubdtype(problem.accumulator_dtype, kind) for kind in kinds
    ]
    if narrow or mixed:
        # XLA on a CPU has no wider sums of these, and none sums numbers of one kind in another.
        operands = problem.accumulator_dtype
    axes = range(len(problem.sum_leading))
    shared_by = {
        axis: "lhs" if problem.rhs_shape[axis] == 1 else "rhs"
        for axis in axes
        if problem.lhs_shape[axis] != problem.rhs_shape[axis]
    }
    # An axis that only one operand has is one more free dimension of that operand.
    lhs_axes = [axis for axis in axes if shared_by.get(axis) != "rhs"]
    rhs_axes = [axis for axis in axes if shared_by.get(axis) != "lhs"]
    lhs = lax.squeeze(lhs, [axis for axis in axes if axis not in lhs_axes]).astype(operands)
    rhs = lax.squeeze(rhs, [axis for axis in axes if axis not in rhs_axes]).astype(operands)
    both = [axis for axis in axes if axis not in shared_by]
    batch = [axis for axis in both if not problem.sum_leading[axis]]
    summed = [axis for axis in both if problem.sum_leading[axis]]

    def dimensions(own_axes: list[int], k_first: bool) -> tuple[list[int], list[int]]:
        k = len(own_axes) + (0 if k_first else 1)
        return [*map(own_axes.index, summed), k], [*map(own_axes.index, batch)]

    lhs_contract, lhs_batch = dimensions(lhs_axes, k_first=problem.transpose_lhs)
    rhs_contract, rhs_batch = dimensions(rhs_axes, k_first=not problem.transpose_rhs)
    product = lax.dot_general(
        lhs,
        rhs,
        ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)),
        precision=problem.precision,
        preferred_element_type=problem.accumulator_dtype,
    )
    # dot_general returns (*batch, *free of lhs, m, *free of rhs, n).
    lhs_free = [axis for axis in lhs_axes if axis in shared_by]
    rhs_free = [axis for axis in rhs_axes if axis in shared_by]
    returned = [*batch, *lhs_free, "m", *rhs_free, "n"]
    wanted = [*(axis for axis in axes if axis in returned), "m", "n"]
    if returned != wanted:
        product = lax.transpose(product, [returned.index(axis) for axis in wanted])
    return product.reshape(problem.out_shape)
