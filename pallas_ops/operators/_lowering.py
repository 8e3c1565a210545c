"""From a bound product to its implementation, for the platform that a program is compiled for."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ..kernels import MatmulProblem
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


def lower_product(
    ctx: mlir.LoweringRuleContext,
    problem: MatmulProblem,
    *operands: Any,
    platform: str | None,
    params: dict[str, Any],
    column_sums: bool = False,
):
    """The program of one product: the kernel, or XLA's own.

    **Arguments:**

    - `problem`: the product, and what happens to it.
    - `*operands`: lhs, rhs, and what the epilogue reads.
    - `platform`: what is compiled for, as far as an implementation names it.
    - `params`: of the primitive; looked at are `tiles`, `implementation` and `device`.
    - `column_sums`: whether the sums of lhs are a second result.

    **Raises:**

    `ValueError` where the implementation that was named cannot run there.
    """
    operator = get_operator("matmul")
    name = params["implementation"]
    call = dict(
        transpose_lhs=problem.transpose_lhs,
        transpose_rhs=problem.transpose_rhs,
        sum_leading=problem.sum_leading,
        out_dtype=problem.out_dtype,
        precision=problem.precision,
        epilogue=problem.epilogue,
        column_sums=column_sums,
        tiles=params["tiles"],
        device=_device_kind(ctx) or params["device"],
        can_be_timed=_runs_here(ctx),
    )
    if name is None and platform == "tpu":
        name = preferred(problem, call["device"])
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
    avals: Sequence[Any] = ctx.avals_in
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    compute = functools.partial(implementation.function, **call)
    lower = mlir.lower_fun(compute, multiple_results=problem.epilogue is not None or column_sums)
    return lower(ctx.replace(avals_in=plain), *operands)
