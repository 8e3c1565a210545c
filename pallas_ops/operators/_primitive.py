"""`matmul` as a JAX primitive: abstract evaluation, derivatives, batching and lowering."""

import functools
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
from ._options import CallOptions
from ._registry import get_operator


matmul_p = jex_core.Primitive("pallas_ops_matmul")
"""Operands as in `MatmulProblem`, in `layout` and to the dtype that the parameters say."""


def bind_matmul(
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
) -> jax.Array:
    """Folds leading axes away, binds the primitive once, and gives the axes back.

    **Arguments:**

    - `lhs`, `rhs`: operands of one rank; each leading axis of one size in both, or 1 in one.
    - `sum_leading`: which leading axes are summed over; they stay, with size 1.
    - `tiles`: what is said of the tiles of this product and of its gradients.
    - `options`: the implementation and the device; its own `tiles` are not looked at.
    """
    layout = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    wanted = problem_of(
        lhs, rhs, **layout, sum_leading=tuple(sum_leading), out_dtype=np.dtype(out_dtype)
    )
    _refuse_explicit_sharding(wanted, lhs, rhs)
    folded = fold(lhs.shape, rhs.shape, sum_leading, **layout)
    lhs, rhs = _vary_alike(lhs, rhs)
    out = matmul_p.bind(
        _reshape(lhs, folded.lhs_shape),
        _reshape(rhs, folded.rhs_shape),
        **layout,
        sum_leading=folded.sum_leading,
        out_dtype=np.dtype(out_dtype),
        precision=precision,
        tiles=tiles,
        implementation=options.implementation,
        device=options.device,
    )
    return _reshape(out, wanted.out_shape)


def _reshape(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array if array.shape == shape else lax.reshape(array, shape)


def with_leading_ones(array: jax.Array, count: int) -> jax.Array:
    """`count` more leading axes of size 1, which move no data and fold away again."""
    return _reshape(array, (*(1,) * count, *array.shape))


def _refuse_explicit_sharding(problem: MatmulProblem, *operands: jax.Array) -> None:
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


def _vary_alike(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both operands varying over the same manual axes of a `jax.shard_map`.

    JAX does this for its own primitives. The transpose of the cast is the sum over the axis, by
    which the gradient of a weight that is shared between the shards becomes whole.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in (lhs, rhs)]
    both = varying[0] | varying[1]
    lhs, rhs = (
        lax.pcast(x, tuple(sorted(both - own)), to="varying") if both - own else x
        for x, own in zip((lhs, rhs), varying, strict=True)
    )
    return lhs, rhs


def _problem(lhs: Any, rhs: Any, params: dict[str, Any]) -> MatmulProblem:
    fields = ("transpose_lhs", "transpose_rhs", "sum_leading", "out_dtype", "precision")
    return problem_of(lhs, rhs, **{field: params[field] for field in fields})


@functools.lru_cache(maxsize=1024)
def _jitted(params: tuple[tuple[str, Any], ...]):
    return jax.jit(functools.partial(matmul_p.bind, **dict(params)))


@matmul_p.def_impl
def _evaluate(lhs, rhs, **params):
    """Outside of any transformation: a compiled program of one product."""
    # Where `jit` is off, or runs a program again to find a NaN, it would come straight back here.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        out = _jitted(tuple(sorted(params.items())))(lhs, rhs)
    for flag, is_bad in (("jax_debug_nans", jnp.isnan), ("jax_debug_infs", jnp.isinf)):
        if getattr(jax.config, flag) and is_bad(out).any():
            raise FloatingPointError(f"matmul: {flag[-4:-1]} in the result.")
    return out


@matmul_p.def_abstract_eval
def _abstract_eval(lhs, rhs, **params):
    problem = _problem(lhs, rhs, params)
    return jax.core.ShapedArray(
        problem.out_shape,
        problem.out_dtype,
        # Of the mesh that is current, and over none of its axes that are not manual.
        sharding=NamedSharding(
            lhs.sharding.mesh, PartitionSpec(*(None for _ in problem.out_shape))
        ),
        manual_axis_type=lhs.manual_axis_type,
    )


def _bind_like(params: dict[str, Any]):
    """The product function for the derivative rules: all that a call said stays said."""
    options = CallOptions(params["implementation"], device=params["device"])
    return functools.partial(bind_matmul, precision=params["precision"], options=options)


def _layout(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("transpose_lhs", "transpose_rhs", "tiles")}


def _transpose_lhs(cotangent, lhs, rhs, **params):
    return lhs_cotangent(_bind_like(params), cotangent, lhs.aval, rhs, **_layout(params))


def _transpose_rhs(cotangent, lhs, rhs, **params):
    return rhs_cotangent(_bind_like(params), cotangent, lhs, rhs.aval, **_layout(params))


ad.defbilinear(matmul_p, _transpose_lhs, _transpose_rhs)


def _batch(operands, dims, **params):
    """A mapped axis becomes one more leading axis, which `bind_matmul` folds away if it can."""
    lhs, rhs = (
        with_leading_ones(x, 1) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    )
    out = _bind_like(params)(
        lhs,
        rhs,
        **_layout(params),
        sum_leading=(False, *params["sum_leading"]),
        out_dtype=params["out_dtype"],
    )
    return out, 0


batching.primitive_batchers[matmul_p] = _batch


def _device_kind(ctx: mlir.LoweringRuleContext) -> str | None:
    """The TPU that is compiled for, where the lowering knows it; `jax.export` does not."""
    backend = ctx.module_context.get_backend(optional=True)
    if backend is None or backend.platform != "tpu":
        return None
    return backend.devices()[0].device_kind


def _runs_here(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program is for devices of this process, and not exported or only compiled."""
    backend = ctx.module_context.get_backend(optional=True)
    return backend is not None and backend.devices()[0] in jax.devices()


def _automatic_devices(ctx: mlir.LoweringRuleContext) -> int:
    """Over how many devices XLA partitions this program by itself; 1 inside a `shard_map`."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        sizes = context.mesh.shape
        return int(np.prod([sizes[axis] for axis in sizes if axis not in context.manual_axes]))
    return getattr(context, "num_devices", None) or 1


def _lower(ctx, lhs, rhs, *, platform: str | None, **params):
    lhs_aval, rhs_aval = ctx.avals_in
    problem = _problem(lhs_aval, rhs_aval, params)
    operator = get_operator("matmul")
    name = params["implementation"]
    device = _device_kind(ctx) or params["device"]
    call = dict(
        transpose_lhs=problem.transpose_lhs,
        transpose_rhs=problem.transpose_rhs,
        sum_leading=problem.sum_leading,
        out_dtype=problem.out_dtype,
        precision=problem.precision,
        tiles=params["tiles"],
        device=device,
        can_be_timed=_runs_here(ctx),
    )
    implementation = operator.select(ctx.avals_in, call, name=name, platform=platform)
    if implementation.platforms is not None and platform not in implementation.platforms:
        raise ValueError(
            f"matmul: implementation {implementation.name!r} runs on "
            f"{', '.join(implementation.platforms)}, and this program is compiled for another "
            f"platform. Use implementation='interpret' to run the same kernel anywhere, or leave "
            f"it out to use XLA's matmul there."
        )
    if implementation.name != "xla" and (devices := _automatic_devices(ctx)) > 1:
        raise ValueError(
            f"matmul: the kernel ({implementation.name!r}) cannot be partitioned automatically, "
            f"and this program runs on {devices} devices. Call it inside jax.shard_map, where it "
            f"is a local product of each device's shards, or use implementation='xla'. Given: "
            f"{problem.describe()}."
        )
    # Inside a `shard_map` the types also say over which mesh axes a value varies. That was checked
    # when the primitive was bound; Pallas' interpreter has no rules for it.
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    compute = functools.partial(implementation.function, **call)
    return mlir.lower_fun(compute, multiple_results=False)(ctx.replace(avals_in=plain), lhs, rhs)


mlir.register_lowering(matmul_p, functools.partial(_lower, platform=None))
mlir.register_lowering(matmul_p, functools.partial(_lower, platform="tpu"), platform="tpu")
