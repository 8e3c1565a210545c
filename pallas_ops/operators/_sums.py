"""A product with the sums of its lhs over k: the gradients of a weight and of a bias, in one pass.

Its derivative rules are made of `matmul` and of JAX's own sum, which have all that follows from
them.
"""

import functools
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from ..kernels import column_sums_type, sum_columns
from ._lowering import is_made_by_a_kernel, lower_product
from ._primitive import (
    bind_folded,
    bind_like,
    bind_matmul,
    bound_problem,
    evaluate,
    mapped_first,
    matmul_p,
    reshaped,
    result_type,
)


matmul_with_sums_p = jex_core.Primitive("pallas_ops_matmul_with_sums")
"""Operands and parameters as of `matmul_p`, with a transposed lhs. Results are the product, and the
sums of lhs over k and over the leading axes that are summed: see `column_sums_type`."""
matmul_with_sums_p.multiple_results = True


def bind_with_sums(lhs: jax.Array, rhs: jax.Array, **call: Any) -> tuple[jax.Array, jax.Array]:
    """As `bind_matmul`, for a transposed lhs: the product, and the sums of lhs."""
    wanted, (product, sums) = bind_folded(matmul_with_sums_p, lhs, rhs, **call)
    sums_shape, _ = column_sums_type(wanted)
    return reshaped(product, wanted.out_shape), reshaped(sums, sums_shape)


matmul_with_sums_p.def_impl(functools.partial(evaluate, matmul_with_sums_p))


@matmul_with_sums_p.def_abstract_eval
def _abstract_eval(lhs, rhs, **params):
    problem = bound_problem(lhs, rhs, params)
    product = result_type(problem, lhs)
    shape, dtype = column_sums_type(problem)
    return [product, product.update(shape=shape, dtype=dtype)]


def _with_layout(bind: Any, lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> Any:
    """Any of the two products, of these operands."""
    names = ("transpose_lhs", "transpose_rhs", "sum_leading", "out_dtype", "tiles")
    return bind_like(params, bind)(lhs, rhs, **{name: params[name] for name in names})


def _jvp(primals, tangents, **params):
    """Tangents are made of what has rules for everything."""
    lhs, rhs = primals
    lhs_tangent, rhs_tangent = tangents
    product, sums = _with_layout(bind_with_sums, lhs, rhs, params)
    terms = []
    sums_tangent: Any = ad.Zero(jax.typeof(sums))
    if not isinstance(lhs_tangent, ad.Zero):
        terms.append(_with_layout(bind_matmul, lhs_tangent, rhs, params))
        sums_tangent = sum_columns(bound_problem(lhs, rhs, params), lhs_tangent)
    if not isinstance(rhs_tangent, ad.Zero):
        terms.append(_with_layout(bind_matmul, lhs, rhs_tangent, params))
    return [product, sums], [functools.reduce(jnp.add, terms), sums_tangent]


ad.primitive_jvps[matmul_with_sums_p] = _jvp


def _batch(operands, dims, **params):
    """A mapped axis becomes one more leading axis, which `bind_with_sums` folds away if it can."""
    lhs, rhs = mapped_first(operands, dims)
    params = {**params, "sum_leading": (False, *params["sum_leading"])}
    product, sums = _with_layout(bind_with_sums, lhs, rhs, params)
    if dims[0] is None:
        return [product, lax.squeeze(sums, [0])], [0, None]
    return [product, sums], [0, 0]


batching.primitive_batchers[matmul_with_sums_p] = _batch


def _dce(used: list[bool], *given: Any) -> Any:
    """Where one result is not used, as by who trains the biases alone, the other is left."""
    *_, equation = given  # behind which operands are needed elsewhere, since jax 0.12
    product_is_used, sums_are_used = used
    if product_is_used and sums_are_used:
        return [True, True], equation
    if product_is_used:
        return [True, True], equation.replace(primitive=matmul_p, outvars=equation.outvars[:1])
    if not sums_are_used:
        return [False, False], None
    lhs, rhs = equation.invars
    sums = jax.jit(
        functools.partial(sum_columns, bound_problem(lhs.aval, rhs.aval, equation.params))
    )
    (call,) = jax.make_jaxpr(sums)(lhs.aval).eqns
    return [True, False], call.replace(invars=[lhs], outvars=equation.outvars[1:])


pe.dce_rules[matmul_with_sums_p] = _dce


# They run the kernel for what it computes, and for no time that it saves.
_INTERPRETERS = ("interpret", "tpu_interpret")


def _lower(ctx, lhs, rhs, **params):
    """The kernel sums what XLA would read once more for that, and nothing else: it takes time."""
    lhs_aval, rhs_aval = ctx.avals_in
    problem = bound_problem(lhs_aval, rhs_aval, params)
    by_kernel = functools.partial(lower_product, ctx, problem, lhs, rhs, params=params)
    if is_made_by_a_kernel(ctx, lhs):
        return by_kernel(platform="tpu", column_sums=True)
    if params["implementation"] in _INTERPRETERS:
        return by_kernel(platform=None, column_sums=True)

    def apart(lhs, rhs):
        return matmul_p.bind(lhs, rhs, **params), sum_columns(problem, lhs)

    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(apart, multiple_results=True)(ctx.replace(avals_in=plain), lhs, rhs)


# Not to be cached, since it depends on what made lhs.
mlir.register_lowering(matmul_with_sums_p, _lower, cacheable=False)
