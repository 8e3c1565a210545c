"""`matmul` as a JAX primitive: abstract evaluation, derivatives, batching and lowering."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..kernels import MatmulProblem, problem_of
from ..tiles import TileChoice
from ._derivatives import lhs_cotangent, rhs_cotangent
from ._fold import fold
from ._lowering import lower_product
from ._options import CallOptions


matmul_p = jex_core.Primitive("pallas_ops_matmul")
"""Operands as in `MatmulProblem`, in `layout` and to the dtype that the parameters say."""


def bind_folded(
    primitive: jex_core.Primitive,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    sum_leading: tuple[bool, ...],
    out_dtype: Any,
    tiles: TileChoice | None,
    precision: lax.Precision,
    options: CallOptions,
) -> tuple[MatmulProblem, Any]:
    """Folds leading axes away, and binds a primitive with the parameters of `matmul_p`, once.

    **Arguments:**

    - `lhs`, `rhs`: operands of one rank; each leading axis of one size in both, or 1 in one.
    - `sum_leading`: which leading axes are summed over; they stay, with size 1.
    - `tiles`: what is said of the tiles of this product and of its gradients.
    - `options`: the implementation and the device; its own `tiles` are not looked at.

    **Returns:**

    The product that was asked for, and what the primitive returns for the folded one.
    """
    layout: dict[str, Any] = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    out_dtype = np.dtype(out_dtype)
    wanted = problem_of(lhs, rhs, **layout, sum_leading=tuple(sum_leading), out_dtype=out_dtype)
    refuse_explicit_sharding(wanted, lhs, rhs)
    folded = fold(lhs.shape, rhs.shape, sum_leading, **layout)
    lhs, rhs = vary_alike(lhs, rhs)
    out = primitive.bind(
        reshaped(lhs, folded.lhs_shape),
        reshaped(rhs, folded.rhs_shape),
        **layout,
        sum_leading=folded.sum_leading,
        out_dtype=out_dtype,
        precision=precision,
        tiles=tiles,
        implementation=options.implementation,
        device=options.device,
    )
    return wanted, out


def bind_matmul(lhs: jax.Array, rhs: jax.Array, **call: Any) -> jax.Array:
    """The product, of which `call` says what `bind_folded` asks."""
    wanted, out = bind_folded(matmul_p, lhs, rhs, **call)
    return reshaped(out, wanted.out_shape)


def reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array if array.shape == shape else lax.reshape(array, shape)


def with_leading_ones(array: jax.Array, count: int) -> jax.Array:
    """`count` more leading axes of size 1, which move no data and fold away again."""
    return reshaped(array, (*(1,) * count, *array.shape))


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


def bound_problem(lhs: Any, rhs: Any, params: dict[str, Any]) -> MatmulProblem:
    """What a primitive with the parameters of `matmul_p` is asked for."""
    fields = ("transpose_lhs", "transpose_rhs", "sum_leading", "out_dtype", "precision")
    return problem_of(lhs, rhs, **{field: params[field] for field in fields})


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: jex_core.Primitive, params: tuple[tuple[str, Any], ...]):
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def evaluate(primitive: jex_core.Primitive, *operands: jax.Array, **params: Any) -> Any:
    """Outside of any transformation: a compiled program of one product."""
    # Where `jit` is off, or runs a program again to find a NaN, it would come straight back here.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        out = _jitted(primitive, tuple(sorted(params.items())))(*operands)
    for flag, is_bad in (("jax_debug_nans", jnp.isnan), ("jax_debug_infs", jnp.isinf)):
        if getattr(jax.config, flag) and any(is_bad(x).any() for x in jax.tree.leaves(out)):
            raise FloatingPointError(f"matmul: {flag[-4:-1]} in the result.")
    return out


matmul_p.def_impl(functools.partial(evaluate, matmul_p))


@matmul_p.def_abstract_eval
def _abstract_eval(lhs, rhs, **params):
    return result_type(bound_problem(lhs, rhs, params), lhs)


def result_type(problem: MatmulProblem, lhs: jax.core.ShapedArray) -> jax.core.ShapedArray:
    """The type of one result: it varies over the manual axes that the operands vary over."""
    return jax.core.ShapedArray(
        problem.out_shape,
        problem.out_dtype,
        # Of the mesh that is current, and over none of its axes that are not manual.
        sharding=NamedSharding(
            lhs.sharding.mesh, PartitionSpec(*(None for _ in problem.out_shape))
        ),
        manual_axis_type=lhs.manual_axis_type,
    )


def bind_like(params: dict[str, Any], bind: Callable[..., Any] = bind_matmul):
    """The product function for the derivative rules: all that a call said stays said."""
    options = CallOptions(params["implementation"], device=params["device"])
    return functools.partial(bind, precision=params["precision"], options=options)


def _layout(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("transpose_lhs", "transpose_rhs", "tiles")}


def _transpose_lhs(cotangent, lhs, rhs, **params):
    return lhs_cotangent(bind_like(params), cotangent, lhs.aval, rhs, **_layout(params))


def _transpose_rhs(cotangent, lhs, rhs, **params):
    return rhs_cotangent(bind_like(params), cotangent, lhs, rhs.aval, **_layout(params))


ad.defbilinear(matmul_p, _transpose_lhs, _transpose_rhs)


def mapped_first(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """The operands with the mapped axis first; of size 1 in those that are not mapped."""
    return [
        with_leading_ones(x, 1) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]


def _batch(operands, dims, **params):
    """A mapped axis becomes one more leading axis, which `bind_matmul` folds away if it can."""
    lhs, rhs = mapped_first(operands, dims)
    out = bind_like(params)(
        lhs,
        rhs,
        **_layout(params),
        sum_leading=(False, *params["sum_leading"]),
        out_dtype=params["out_dtype"],
    )
    return out, 0


batching.primitive_batchers[matmul_p] = _batch


def _lower(ctx, *operands, platform: str | None, **params):
    lhs, rhs = ctx.avals_in
    problem = bound_problem(lhs, rhs, params)
    return lower_product(ctx, problem, *operands, platform=platform, params=params)


mlir.register_lowering(matmul_p, functools.partial(_lower, platform=None))
mlir.register_lowering(matmul_p, functools.partial(_lower, platform="tpu"), platform="tpu")
