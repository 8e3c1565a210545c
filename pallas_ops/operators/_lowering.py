"""From a bound product to its implementation, for the platform that a program is compiled for."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ..kernels import sum_columns
from ._call import MatmulCall
from ._implementations import preferred
from ._registry import get_operator


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


def is_made_by_a_kernel(ctx: mlir.LoweringRuleContext, value: Any) -> bool:
    """Whether a TPU's kernel makes this value, so that XLA fuses nothing with what makes it."""
    made_by = value.owner
    name = getattr(made_by, "name", None)  # arguments of a function have a block for an owner
    if name in ("stablehlo.reshape", "stablehlo.transpose"):
        return is_made_by_a_kernel(ctx, made_by.operands[0])
    if name == "func.call":
        function = ctx.module_context.symbol_table[made_by.attributes["callee"].value]
        returned = function.regions[0].blocks[0].operations[-1].operands
        return is_made_by_a_kernel(ctx, returned[list(made_by.results).index(value)])
    target = "call_target_name"
    return name == "stablehlo.custom_call" and made_by.attributes[target].value == "tpu_custom_call"


def lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: MatmulCall, platform: str | None
) -> Any:
    """The program of one product: the kernel, or XLA's own.

    **Arguments:**

    - `*operands`: lhs, rhs, and what the epilogue reads.
    - `platform`: what is compiled for, as far as an implementation names it.

    **Raises:**

    `ValueError` where the implementation that was named cannot run there.
    """
    operator = get_operator("matmul")
    options = dataclasses.replace(call.options, device=_device_kind(ctx) or call.options.device)
    call = dataclasses.replace(call, options=options, can_be_timed=_runs_here(ctx))
    name = options.implementation
    if name is None and platform == "tpu":
        name = preferred(call.problem, options.device)
    implementation = operator.select(ctx.avals_in, dict(call=call), name=name, platform=platform)
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
            f"{call.problem.describe()}."
        )
    is_one = call.problem.epilogue is None and not call.sums
    compute = functools.partial(implementation.function, call=call)
    return _lowered(ctx, compute, *operands, is_one=is_one)


def _lowered(
    ctx: mlir.LoweringRuleContext, function: Callable, *operands: Any, is_one: bool = False
) -> Any:
    # Inside a `shard_map` the types also say over which mesh axes a value varies. That was checked
    # when the primitive was bound; Pallas' interpreter has no rules for it.
    avals: Sequence[Any] = ctx.avals_in
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    rule = mlir.lower_fun(function, multiple_results=not is_one)
    return rule(ctx.replace(avals_in=plain), *operands)


# They run the kernel for what it computes, and for no time that it saves.
_INTERPRETERS = ("interpret", "tpu_interpret")


def lower_with_sums(
    ctx: mlir.LoweringRuleContext,
    lhs: Any,
    rhs: Any,
    *,
    call: MatmulCall,
    product: Callable[..., list[jax.Array]],
) -> Any:
    """The kernel sums what XLA would read once more for that, and nothing else: it takes time.

    `product` binds the primitive whose lowering is the same wherever it stands.
    """
    if is_made_by_a_kernel(ctx, lhs) or call.options.implementation in _INTERPRETERS:
        return _lowered(ctx, functools.partial(product, call=call), lhs, rhs)
    alone = dataclasses.replace(call, sums=False)

    def apart(lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
        return [*product(lhs, rhs, call=alone), sum_columns(call.problem, lhs)]

    return _lowered(ctx, apart, lhs, rhs)
