"""The product as a JAX primitive, and the rules of every transformation.

Its single parameter is a `MatmulCall`. Operands are lhs and rhs, then the scale and the bias of
the columns as far as there are; results are those of the call, in a list.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

from ..kernels import MatmulProblem, promoted_dtype, scale_and_shift, sum_columns
from ._call import applied, Asked, describe, MatmulCall
from ._derivatives import lhs_cotangent, rhs_cotangent
from ._fold import fold
from ._known import known
from ._lowering import lower, lower_with_sums


matmul_p = jex_core.Primitive("pallas_ops_matmul")
matmul_with_sums_p = jex_core.Primitive("pallas_ops_matmul_with_sums")
"""For calls with `sums`: JAX keeps how a primitive is lowered, or it does not, and how these are
depends on what made lhs. In all else it is the same primitive."""


def multiply(
    asked: Asked,
    lhs: jax.Array,
    rhs: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """`activation(lhs @ rhs * scale + bias)`, in one kernel where that can be.

    All that follows from types alone is settled once for each `asked` and the types: JAX keeps the
    program, with all that a trace depends on as the key, and at most so many of them. Called
    eagerly, it runs compiled; in a program that is traced, its equations stand as they are.

    **Arguments:**

    - `lhs`, `rhs`: as of `matmul`; lhs may also be one row, of shape `(k,)`.
    - `scale`: shape `(..., n)`, with leading axes that are some of the last ones of `rhs`.
    - `bias`: shape `(n,)`.
    """
    if asked.activation is None:
        return _program(asked, lhs, rhs, scale, bias)
    activation = known(asked.activation)
    if activation is None:  # to be looked at anew in each call, and not to be kept
        return _multiply(asked, lhs, rhs, scale, bias)
    return _program(dataclasses.replace(asked, activation=activation), lhs, rhs, scale, bias)


def _multiply(
    asked: Asked,
    lhs: jax.Array,
    rhs: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    call, is_whole = describe(asked, lhs, rhs, scale, bias)
    columns = [one for one in (scale, bias if is_whole else None) if one is not None]
    (out,) = bind(call, lhs, rhs, *columns)
    out = reshaped(out, out.shape[1:]) if lhs.ndim == 1 else out
    return out if is_whole else applied(out, bias, asked.activation)


# As `jax.numpy` has it for its own functions, which jax 0.10 calls True.
_INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
_program = jax.jit(_multiply, static_argnums=0, inline=_INLINED)


def bind(call: MatmulCall, *operands: jax.Array) -> list[jax.Array]:
    """Folds leading axes away, binds the primitive once, and gives the axes back."""
    refuse_explicit_sharding(call.problem, *operands)
    folded = fold(call.problem)
    pairs = zip(vary_alike(*operands), folded.operand_shapes, strict=True)
    primitive = matmul_with_sums_p if call.sums else matmul_p
    outs = primitive.bind(
        *(reshaped(operand, shape) for operand, shape in pairs),
        call=dataclasses.replace(call, problem=folded),
    )
    return [reshaped(out, shape) for out, (shape, _) in zip(outs, call.results, strict=True)]


def reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array if array.shape == shape else lax.reshape(array, shape)


def refuse_explicit_sharding(problem: MatmulProblem, *operands: jax.Array) -> None:
    """Explicit mesh axes are part of a type, and the type of the product would not have them."""
    names = {
        name
        for operand in operands
        for entry in jax.typeof(operand).sharding.spec
        if entry is not None
        for name in (entry if isinstance(entry, tuple) else (entry,))
    }
    if names:
        raise ValueError(
            f"matmul: an operand is sharded over the explicit mesh axes "
            f"{', '.join(map(repr, sorted(names)))}, and the operator does not partition itself. "
            f"Call it inside jax.shard_map, where it is a local product of each device's shards. "
            f"Given: {problem.describe()}."
        )


def vary_alike(*operands: jax.Array) -> list[jax.Array]:
    """All operands varying over the same manual axes of a `jax.shard_map`.

    JAX does this for its own primitives. The transpose of the cast is the sum over the axis, by
    which the gradient of a weight that is shared between the shards becomes whole.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    every = frozenset[str]().union(*varying)
    return [
        lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def _abstract_eval(*operands: jax.core.ShapedArray, call: MatmulCall) -> list[jax.core.ShapedArray]:
    """The types of the results: they vary over the manual axes that the operands vary over."""
    first, problem = operands[0], call.problem
    dtypes = (problem.lhs_dtype, problem.rhs_dtype, *(one.dtype for one in problem.columns))
    wanted = list(zip(problem.operand_shapes, dtypes, strict=True))
    if wanted != [(operand.shape, operand.dtype) for operand in operands]:
        raise TypeError(f"matmul: the operands {operands} are not those of the call {call}.")
    return [
        jax.core.ShapedArray(
            shape,
            dtype,
            # Of the mesh that is current, and over none of its axes that are not manual.
            sharding=NamedSharding(first.sharding.mesh, PartitionSpec(*(None for _ in shape))),
            manual_axis_type=first.manual_axis_type,
        )
        for shape, dtype in call.results
    ]


@functools.partial(jax.jit, static_argnums=0)
def _compiled(call: MatmulCall, *operands: jax.Array) -> list[jax.Array]:
    return (matmul_with_sums_p if call.sums else matmul_p).bind(*operands, call=call)


def _evaluate(*operands: jax.Array, call: MatmulCall) -> list[jax.Array]:
    """Outside of any transformation: a compiled program of one product."""
    # Where `jit` is off, or runs a program again to find a NaN, it would come straight back here.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        outs = _compiled(call, *operands)
    for flag, is_bad in (("jax_debug_nans", jnp.isnan), ("jax_debug_infs", jnp.isinf)):
        if getattr(jax.config, flag) and any(is_bad(out).any() for out in outs):
            raise FloatingPointError(f"matmul: {flag[-4:-1]} in the result.")
    return outs


def _alone(call: MatmulCall, lhs: jax.Array, rhs: jax.Array, dtype: Any = None) -> jax.Array:
    """The product without its epilogue, in its own dtype or in `dtype`."""
    dtype = call.product_dtype if dtype is None else dtype
    exact = jnp.issubdtype(promoted_dtype(lhs.dtype, rhs.dtype), jnp.integer)
    (out,) = bind(call.bare(np.dtype(np.int32) if exact else dtype), lhs, rhs)
    return out.astype(dtype)


def _afterwards(call: MatmulCall, *operands: jax.Array) -> list[jax.Array]:
    """The same results by JAX's own operations after a product, for what no kernel has.

    Scale and bias may have leading axes that no operand has.
    """
    lhs, rhs, *columns = operands
    product = _alone(call, lhs, rhs, call.summed_dtype)
    shape = jnp.broadcast_shapes(product.shape, *(array.shape for array in columns))
    scale, bias = call.epilogue.by_name(columns)
    value = scale_and_shift(jnp.broadcast_to(product, shape), scale, bias)
    results = [value]
    if call.activation is not None:
        results = [call.activation.derivative(order)(value) for order in call.orders]
    return [result.astype(call.problem.out_dtype) for result in results]


def _jvp(primals: Any, tangents: Any, *, call: MatmulCall) -> tuple[list[Any], list[Any]]:
    """Tangents of the results are those of the linear part, times the next derivatives.

    The kernel returns these beside the results, so that a backward pass has what it needs.
    """
    given = [None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents]
    if call.sums:
        outs = bind(call, *primals)
        tangent = _linear_tangent(dataclasses.replace(call, sums=False), primals, given)
        of_sums = ad.Zero(jax.typeof(outs[1]))
        return outs, [
            tangent,
            of_sums if given[0] is None else sum_columns(call.problem, given[0]),
        ]
    if call.activation is None:
        return bind(call, *primals), [_linear_tangent(call, primals, given)]
    wanted = tuple(sorted({*call.orders, *(order + 1 for order in call.orders)}))
    if call.activation.program(wanted[-1], call.summed_dtype) is None:
        whole = [
            ad.instantiate_zeros(tangent) if isinstance(tangent, ad.Zero) else tangent
            for tangent in tangents
        ]
        return jax.jvp(functools.partial(_afterwards, call), primals, whole)
    results = dict(zip(wanted, bind(call.with_orders(wanted), *primals), strict=True))
    linear = _linear_tangent(call, primals, given)
    return (
        [results[order] for order in call.orders],
        [results[order + 1] * linear for order in call.orders],
    )


def _linear_tangent(call: MatmulCall, primals: Any, tangents: Any) -> jax.Array:
    """The tangent of `lhs @ rhs * scale + bias`, where at least one of them has one."""
    lhs, rhs, *columns = primals
    lhs_tangent, rhs_tangent, *column_tangents = tangents
    scale, _ = call.epilogue.by_name(columns)
    scale_tangent, bias_tangent = call.epilogue.by_name(column_tangents)
    out_dtype = call.problem.out_dtype
    products, terms = [], []
    if lhs_tangent is not None:
        products.append(_alone(call, lhs_tangent, rhs))
    if rhs_tangent is not None and bias_tangent is not None and _sums_with_product(call):
        # The transpose of both at once reads the cotangent once.
        terms += bind(call, lhs, rhs_tangent, bias_tangent)
        bias_tangent = None
    elif rhs_tangent is not None:
        products.append(_alone(call, lhs, rhs_tangent))
    for product in products:
        product = product.astype(out_dtype)
        terms.append(product if scale is None else _scaled(product, scale))
    if scale_tangent is not None:
        # Without its scale it may be too large for a narrow dtype.
        product = _alone(call, lhs, rhs, call.summed_dtype)
        terms.append(_scaled(product, scale_tangent).astype(out_dtype))
    if bias_tangent is not None:
        terms.append(_as_rows(bias_tangent, call.results[0]))
    return functools.reduce(jnp.add, terms)


def _sums_with_product(call: MatmulCall) -> bool:
    """Whether the gradients of rhs and bias can be results of one kernel.

    They can where the result is linear in both, and its cotangent is what is multiplied, as a
    transposed lhs: the kernel sums the columns of no other operand.
    """
    problem = call.problem
    is_linear = call.activation is None and not problem.is_scaled
    return is_linear and problem.transpose_rhs and call.product_dtype == problem.out_dtype


def _as_rows(columns: jax.Array, like: tuple[tuple[int, ...], np.dtype]) -> jax.Array:
    """The same row for each row of a product.

    By way of 32 bits or more: so the transpose, which is the gradient of a bias, sums that wide.
    """
    shape, dtype = like
    wide = promoted_dtype(dtype, np.dtype(np.float32))
    return jnp.broadcast_to(columns.astype(wide), shape).astype(dtype)


def _scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    """The columns of a product times their factors, rounded once."""
    wide = promoted_dtype(product.dtype, np.dtype(np.float32))
    rows = jnp.broadcast_to(scale.astype(wide), product.shape)
    return (product.astype(wide) * rows).astype(product.dtype)


def _transpose(cotangents: Any, *operands: Any, call: MatmulCall) -> list[Any]:
    """With respect to one operand, or to several in which the results are linear together."""
    cotangent, *of_sums = cotangents
    lhs, rhs, *columns = operands
    scale, bias = call.epilogue.by_name(columns)
    wanted = [ad.is_undefined_primal(one) for one in (lhs, rhs, scale, bias)]
    if call.activation is not None or sum(wanted[:3]) > 1:
        raise NotImplementedError(f"matmul: {call} is not linear in what is to be transposed.")
    found: list[Any] = [None] * 4
    if not isinstance(cotangent, ad.Zero):
        found = _cotangents(call, cotangent, lhs, rhs, scale, bias, wanted)
    if wanted[0] and of_sums and not isinstance(of_sums[0], ad.Zero):
        rows = jnp.broadcast_to(of_sums[0], lhs.aval.shape).astype(lhs.aval.dtype)
        found[0] = rows if found[0] is None else found[0] + rows
    there = (True, True, scale is not None, bias is not None)
    return [one for one, is_there in zip(found, there, strict=True) if is_there]


def _cotangents(
    call: MatmulCall,
    cotangent: jax.Array,
    lhs: Any,
    rhs: Any,
    scale: Any,
    bias: Any,
    wanted: Sequence[bool],
) -> list[Any]:
    """The cotangents of lhs, rhs, scale and bias, of those that are wanted."""
    of_lhs, of_rhs, of_scale, of_bias = wanted
    found: list[Any] = [None] * 4
    sums = cotangent
    if of_scale:
        product = _alone(call, lhs, rhs, call.summed_dtype)
        found[2] = _summed_like(cotangent.astype(product.dtype) * product, scale.aval)
    if of_lhs or of_rhs:
        of_product = cotangent if scale is None else _scaled(cotangent, scale)
        of_product = of_product.astype(call.product_dtype)
        rule, other = (lhs_cotangent, rhs) if of_lhs else (rhs_cotangent, lhs)
        backward, is_last = rule(call.bare(), call.product_dtype)
        both = (other, of_product) if is_last else (of_product, other)
        # An axis that the bias has and rhs has not is summed for rhs alone.
        jointly = (
            of_rhs
            and of_bias
            and _sums_with_product(call)
            and all(
                b in (1, r) for r, b in zip(rhs.aval.shape[:-2], bias.aval.shape[:-2], strict=True)
            )
        )
        found[0 if of_lhs else 1], *more = bind(dataclasses.replace(backward, sums=jointly), *both)
        sums = more[0] if jointly else sums
    if of_bias:
        found[3] = _summed_like(sums, bias.aval)
    return found


def _summed_like(array: jax.Array, like: Any) -> jax.Array:
    """The sum over all axes that are longer than in `like`, in 32 bits or more, rounded once."""
    wide = promoted_dtype(array.dtype, np.dtype(np.float32))
    pairs = enumerate(zip(array.shape, like.shape, strict=True))
    axes = [axis for axis, (size, wanted) in pairs if size != wanted]
    if axes:
        array = jnp.sum(array.astype(wide), axis=axes, keepdims=True)
    return array.astype(like.dtype)


def _batch(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: MatmulCall
) -> tuple[list[jax.Array], list[int | None]]:
    """A mapped axis becomes one more leading axis, which `bind` folds away if it can."""
    mapped = [
        x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)
    ]
    if dims[0] is None and dims[1] is None:
        # One product serves all, with other columns each.
        outs = _afterwards(call, *mapped)
        return outs, [0] * len(outs)
    sizes = [1 if dim is None else x.shape[0] for x, dim in zip(mapped, dims, strict=True)]
    outs = bind(call.batched(sizes), *mapped)
    if call.sums and dims[0] is None:
        product, sums = outs
        return [product, lax.squeeze(sums, [0])], [0, None]
    return outs, [0] * len(outs)


def _dce(used: list[bool], *given: Any) -> Any:
    """Where one result is not used, as by who trains the biases alone, the other is left."""
    *_, equation = given  # behind which operands are needed elsewhere, since jax 0.12
    product_is_used, sums_are_used = used
    if product_is_used and sums_are_used:
        return [True, True], equation
    call = equation.params["call"]
    if product_is_used:
        alone = dict(call=dataclasses.replace(call, sums=False))
        outs = equation.outvars[:1]
        return [True, True], equation.replace(primitive=matmul_p, params=alone, outvars=outs)
    if not sums_are_used:
        return [False, False], None
    lhs, _ = equation.invars
    sums = jax.jit(functools.partial(sum_columns, call.problem))
    (of_lhs,) = jax.make_jaxpr(sums)(lhs.aval).eqns
    return [True, False], of_lhs.replace(invars=[lhs], outvars=equation.outvars[1:])


for _primitive in (matmul_p, matmul_with_sums_p):
    _primitive.multiple_results = True
    _primitive.def_impl(_evaluate)
    _primitive.def_abstract_eval(_abstract_eval)
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batch

pe.dce_rules[matmul_with_sums_p] = _dce
# A function in the lowered program, which is called by all products that are alike.
for _platform in (None, "tpu"):
    mlir.register_lowering(
        matmul_p, functools.partial(lower, platform=_platform), platform=_platform, inline=False
    )
mlir.register_lowering(
    matmul_with_sums_p,
    functools.partial(lower_with_sums, product=matmul_p.bind),
    cacheable=False,
)
