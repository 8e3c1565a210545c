"""A product with its epilogue as a JAX primitive: scale, bias and activation before the rounding.

It is not bilinear, so it has derivative rules of its own, which are made of `matmul`'s.
"""

import functools
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from ..kernels import (
    columns_by_name,
    fused_problem_of,
    MatmulProblem,
    problem_of,
    promoted_dtype,
    scale_and_shift,
)
from ._derivatives import rhs_cotangent
from ._fold import fold
from ._lowering import lower_product
from ._primitive import (
    bind_like,
    evaluate,
    mapped_first,
    refuse_explicit_sharding,
    reshaped,
    result_type,
    vary_alike,
)
from ._sums import bind_with_sums


fused_matmul_p = jex_core.Primitive("pallas_ops_fused_matmul")
"""Operands are lhs and rhs as of `matmul_p`, then scale and bias as far as there are.

Parameters beside those of `matmul_p`:

- `scaled`, `biased`: whether there is a scale, and a bias.
- `activation`: an `Activation`, or `None`.
- `orders`: which of the activation's derivatives are returned, in ascending order.
- `product_dtype`: the dtype of the product where it stands alone, as in the derivatives.
"""
fused_matmul_p.multiple_results = True


def bind_fused(
    lhs: jax.Array,
    rhs: jax.Array,
    *columns: jax.Array,
    sum_leading: tuple[bool, ...],
    **params: Any,
) -> list[jax.Array]:
    """Folds leading axes away, binds the primitive once, and gives the axes back.

    **Arguments:**

    - `lhs`, `rhs`, `sum_leading`: as in `bind_matmul`.
    - `*columns`: scale and bias, as far as there are, each of shape `(*leading, 1, n)`; a leading
        axis that one of them has, an operand has too.
    - `**params`: those of the primitive.

    **Returns:**

    One array for each of `orders`.
    """
    params["sum_leading"] = tuple(sum_leading)
    wanted = _problem((lhs, rhs, *columns), params)
    refuse_explicit_sharding(wanted, lhs, rhs, *columns)
    folded = fold(
        lhs.shape,
        rhs.shape,
        sum_leading,
        **_of(params, ("transpose_lhs", "transpose_rhs")),
        column_shapes=[array.shape for array in columns],
    )
    shapes = (folded.lhs_shape, folded.rhs_shape, *folded.column_shapes)
    operands = zip(vary_alike(lhs, rhs, *columns), shapes, strict=True)
    params["sum_leading"] = folded.sum_leading
    outs = fused_matmul_p.bind(*(reshaped(one, shape) for one, shape in operands), **params)
    return [reshaped(out, wanted.out_shape) for out in outs]


_LAYOUT = ("transpose_lhs", "transpose_rhs", "sum_leading")
_BARE = (*_LAYOUT, "out_dtype", "precision")
_EPILOGUE = ("scaled", "biased", "activation", "orders")


def _of(params: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: params[name] for name in names}


def _problem(operands: Any, params: dict[str, Any]) -> MatmulProblem:
    return fused_problem_of(*operands, **_of(params, (*_BARE, *_EPILOGUE)))


def _accumulator_dtype(operands: Any, params: dict[str, Any]) -> np.dtype:
    """What the activation is applied to."""
    return problem_of(*operands[:2], **_of(params, _BARE)).accumulator_dtype


fused_matmul_p.def_impl(functools.partial(evaluate, fused_matmul_p))


@fused_matmul_p.def_abstract_eval
def _abstract_eval(*operands, **params):
    problem = _problem(operands, params)
    return [result_type(problem, operands[0]) for _ in range(problem.outputs)]


def _alone(lhs: jax.Array, rhs: jax.Array, dtype: Any, params: dict[str, Any]) -> jax.Array:
    """The product without its epilogue, in `dtype`."""
    product = functools.partial(bind_like(params), lhs, rhs, **_of(params, (*_LAYOUT, "tiles")))
    if jnp.issubdtype(promoted_dtype(lhs.dtype, rhs.dtype), jnp.integer):
        return product(out_dtype=np.dtype(np.int32)).astype(dtype)  # the kernel's exact sums
    return product(out_dtype=dtype)


def _afterwards(operands: Any, params: dict[str, Any]) -> list[jax.Array]:
    """The same results by JAX's own operations after a product, for what no kernel has.

    Scale and bias may have leading axes that no operand has.
    """
    lhs, rhs, *columns = operands
    dtype = _accumulator_dtype(operands, params)
    product = _alone(lhs, rhs, dtype, params)
    shape = jnp.broadcast_shapes(product.shape, *(array.shape for array in columns))
    named = columns_by_name(columns, **_of(params, ("scaled", "biased")))
    value = scale_and_shift(jnp.broadcast_to(product, shape), **named)
    activation = params["activation"]
    if activation is None:
        return [value.astype(params["out_dtype"])]
    results = (activation.derivative(order)(value) for order in params["orders"])
    return [result.astype(params["out_dtype"]) for result in results]


def _jvp(primals, tangents, **params):
    """Tangents of the results are those of the linear part, times the next derivatives.

    The kernel returns these beside the results, so that a backward pass has what it needs.
    """
    activation, orders = params["activation"], params["orders"]
    if activation is not None:
        wanted = tuple(sorted({*orders, *(order + 1 for order in orders)}))
        if activation.program(wanted[-1], _accumulator_dtype(primals, params)) is None:
            whole = [
                ad.instantiate_zeros(tangent) if isinstance(tangent, ad.Zero) else tangent
                for tangent in tangents
            ]
            return jax.jvp(lambda *operands: _afterwards(operands, params), primals, whole)
        found = bind_fused(*primals, **{**params, "orders": wanted})
        results = dict(zip(wanted, found, strict=True))
    else:
        results = dict(zip(orders, bind_fused(*primals, **params), strict=True))
    outs = [results[order] for order in orders]
    linear = _linear_tangent(primals, tangents, params)
    if activation is None:
        return outs, [linear]
    return outs, [results[order + 1] * linear for order in orders]


def _linear_tangent(primals: Any, tangents: Any, params: dict[str, Any]) -> jax.Array:
    """The tangent of `lhs @ rhs * scale + bias`, where at least one of them has one."""
    lhs, rhs, *columns = primals
    lhs_tangent, rhs_tangent, *column_tangents = (
        None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents
    )
    flags = _of(params, ("scaled", "biased"))
    scale = columns_by_name(columns, **flags)["scale"]
    tangent_of = columns_by_name(column_tangents, **flags)
    dtype = params["product_dtype"]
    bias_tangent = tangent_of["bias"]
    products, terms = [], []
    if lhs_tangent is not None:
        products.append(_alone(lhs_tangent, rhs, dtype, params))
    if rhs_tangent is not None and bias_tangent is not None and _sums_with_product(params):
        # The transpose of both at once reads the cotangent once.
        terms += bind_fused(lhs, rhs_tangent, bias_tangent, **params)
        bias_tangent = None
    elif rhs_tangent is not None:
        products.append(_alone(lhs, rhs_tangent, dtype, params))
    for product in products:
        product = product.astype(params["out_dtype"])
        terms.append(product if scale is None else _scaled(product, scale))
    if tangent_of["scale"] is not None:
        # Without its scale it may be too large for a narrow dtype.
        product = _alone(lhs, rhs, _accumulator_dtype(primals, params), params)
        terms.append(_scaled(product, tangent_of["scale"]).astype(params["out_dtype"]))
    if bias_tangent is not None:
        out = jax.ShapeDtypeStruct(_problem(primals, params).out_shape, params["out_dtype"])
        terms.append(_as_rows(bias_tangent, out))
    return functools.reduce(jnp.add, terms)


def _sums_with_product(params: dict[str, Any]) -> bool:
    """Whether the gradients of rhs and bias can be results of one kernel.

    They can where the result is linear in both, and its cotangent is what is multiplied, as a
    transposed lhs: the kernel sums the columns of no other operand.
    """
    is_linear = params["activation"] is None and not params["scaled"]
    return is_linear and params["transpose_rhs"] and params["product_dtype"] == params["out_dtype"]


def _transpose(cotangents, lhs, rhs, bias, **params):
    """Of `lhs @ rhs + bias` with respect to rhs and bias, which `_linear_tangent` binds."""
    (cotangent,) = cotangents
    if isinstance(cotangent, ad.Zero):
        return [None, None, None]
    of_rhs, of_bias = ad.is_undefined_primal(rhs), ad.is_undefined_primal(bias)
    to_rhs, to_bias = None, None
    sums = cotangent
    if of_rhs:
        # An axis that the bias has and rhs has not is summed for rhs alone.
        jointly = of_bias and all(
            b in (1, r) for r, b in zip(rhs.aval.shape[:-2], bias.aval.shape[:-2], strict=True)
        )
        product = bind_like(params, bind_with_sums) if jointly else bind_like(params)
        layout = _of(params, ("transpose_lhs", "transpose_rhs", "tiles"))
        to_rhs = rhs_cotangent(product, cotangent, lhs, rhs.aval, **layout)
        if jointly:
            to_rhs, sums = to_rhs
    if of_bias:
        to_bias = _summed_like(sums, bias.aval)
    return [None, to_rhs, to_bias]


ad.primitive_transposes[fused_matmul_p] = _transpose


def _summed_like(array: jax.Array, like: Any) -> jax.Array:
    """The sum over all axes that are longer than in `like`, in 32 bits or more, rounded once."""
    wide = promoted_dtype(array.dtype, np.dtype(np.float32))
    pairs = enumerate(zip(array.shape, like.shape, strict=True))
    axes = [axis for axis, (size, wanted) in pairs if size != wanted]
    if axes:
        array = jnp.sum(array.astype(wide), axis=axes, keepdims=True)
    return array.astype(like.dtype)


def _as_rows(columns: jax.Array, like: Any) -> jax.Array:
    """The same row for each row of a product.

    By way of 32 bits or more: so the transpose, which is the gradient of a bias, sums that wide.
    """
    wide = promoted_dtype(like.dtype, np.dtype(np.float32))
    return jnp.broadcast_to(columns.astype(wide), like.shape).astype(like.dtype)


def _scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    """The columns of a product times their factors, rounded once."""
    wide = promoted_dtype(product.dtype, np.dtype(np.float32))
    rows = jnp.broadcast_to(scale.astype(wide), product.shape)
    return (product.astype(wide) * rows).astype(product.dtype)


ad.primitive_jvps[fused_matmul_p] = _jvp


def _batch(operands, dims, **params):
    """A mapped axis becomes one more leading axis, which `bind_fused` folds away if it can."""
    sum_leading = (False, *params["sum_leading"])
    params = {**params, "sum_leading": sum_leading}
    mapped = mapped_first(operands, dims)
    if dims[0] is None and dims[1] is None:
        # One product serves all, with other columns each.
        outs = _afterwards(mapped, params)
    else:
        outs = bind_fused(*mapped, **params)
    return outs, (0,) * len(outs)


batching.primitive_batchers[fused_matmul_p] = _batch


def _lower(ctx, *operands, platform: str | None, **params):
    problem = _problem(ctx.avals_in, params)
    return lower_product(ctx, problem, *operands, platform=platform, params=params)


mlir.register_lowering(fused_matmul_p, functools.partial(_lower, platform=None))
mlir.register_lowering(fused_matmul_p, functools.partial(_lower, platform="tpu"), platform="tpu")
