"""The implementations of `matmul`, from a call's keywords to a kernel with its tile."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._hardware import find_generation, GENERATIONS, TpuGeneration
from ..kernels import (
    Epilogue,
    MatmulProblem,
    problem_of,
    run_kernel,
    sum_columns,
    xla_matmul,
)
from ..tiles import as_tile_choice, Resolution, resolve_tile, TileProblem, Tiles
from ._derivatives import lhs_cotangent, rhs_cotangent
from ._precision import resolve_precision
from ._registry import Implementation


# The first generation whose MXU multiplies integers; Mosaic refuses them on a v4 (E2001), and takes
# int8 apart there by way of memory, with 13,455 bundles where bfloat16 has 2,002 (8 x 256 x 4096).
_FIRST_GENERATION_WITH_INT8 = 5


def _lacks_int8(generation: TpuGeneration | None) -> bool:
    return generation is not None and generation.info.generation < _FIRST_GENERATION_WITH_INT8


def preferred(problem: MatmulProblem, device: str | None) -> str | None:
    """The implementation to take where none is named, if not the first that can."""
    return "xla" if problem.widens_int8 and _lacks_int8(find_generation(device)) else None


def _problem(
    lhs: Any,
    rhs: Any,
    *_columns: Any,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    sum_leading: tuple[bool, ...] | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    epilogue: Epilogue | None = None,
    column_sums: bool = False,
    tiles: Tiles = None,
    device: str | None = None,
    can_be_timed: bool = False,
) -> MatmulProblem:
    """The problem that one call to an implementation poses; how it is run is no part of it."""
    return problem_of(
        lhs,
        rhs,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        sum_leading=(False,) * (lhs.ndim - 2) if sum_leading is None else sum_leading,
        out_dtype=np.dtype(jnp.result_type(lhs, rhs) if out_dtype is None else out_dtype),
        precision=resolve_precision(precision),
        epilogue=epilogue,
    )


def _resolve(problem: MatmulProblem, implementation: str, call: dict[str, Any]) -> Resolution:
    asked = TileProblem(
        problem,
        device=call.get("device"),
        implementation=implementation,
        can_be_timed=call.get("can_be_timed", False),
    )
    return resolve_tile(asked, as_tile_choice(call.get("tiles")))


# The operands are lhs, rhs, and what the epilogue of the call reads; with one, all of its outputs
# are returned, and with `column_sums` the product and these.
def _kernel(*operands: jax.Array, implementation: str, **call: Any) -> Any:
    problem = _problem(*operands, **call)
    if problem.is_empty:
        return _xla(*operands, **call)
    resolution = _resolve(problem, implementation, call)
    return run_kernel(
        problem,
        resolution.tile.blocks,
        *operands,
        implementation=implementation,
        vmem_limit_bytes=resolution.vmem_limit_bytes,
        prologue_parts=int(resolution.tile.prologue_parts),
        column_sums=call.get("column_sums", False),
    )


def _xla(*operands: jax.Array, **call: Any) -> Any:
    problem = _problem(*operands, **call)
    choice = as_tile_choice(call.get("tiles"))
    named = choice is not None and choice.forward is not None
    if named and not problem.is_empty and problem.why_not_in_kernel() is None:
        # XLA has no use for a tile, but a test on a CPU should meet what a TPU would refuse.
        _resolve(problem, "xla", call)
    product = xla_matmul(problem, *operands)
    return (product, sum_columns(problem, operands[0])) if call.get("column_sums") else product


def _kernel_supports(*operands: Any, **call: Any) -> str | None:
    problem = _problem(*operands, **call)
    reason = problem.why_not_in_kernel()
    if reason is not None or not problem.multiplies_int8:
        return reason
    generation = find_generation(call.get("device"))
    if generation is None or not _lacks_int8(generation):
        return None
    others = [other.name for other in GENERATIONS.values() if not _lacks_int8(other)]
    return (
        f"the MXU of a TPU {generation.name} has no int8 products; {', '.join(others)} have. With "
        f"an lhs of bfloat16 or float32, int8 weights run on every TPU"
    )


def _kernel_implementation(name: str, platforms: tuple[str, ...] | None = None) -> Implementation:
    function = functools.partial(_kernel, implementation=name)
    return Implementation(name, function, _kernel_supports, platforms)


IMPLEMENTATIONS = (
    _kernel_implementation("mosaic", platforms=("tpu",)),
    Implementation("xla", _xla),
    _kernel_implementation("interpret"),
    _kernel_implementation("tpu_interpret"),
)


def _fwd(lhs, rhs, *, implementation: Implementation, **call):
    # With its rules again, for what is differentiated twice.
    return implementation(lhs, rhs, **call), (lhs, rhs)


def _bwd(residuals, cotangent, *, implementation: Implementation, **call):
    lhs, rhs = residuals
    layout = dict(
        transpose_lhs=call.pop("transpose_lhs", False),
        transpose_rhs=call.pop("transpose_rhs", False),
        tiles=as_tile_choice(call.pop("tiles", None)),
    )
    kept = {name: call[name] for name in ("precision", "device", "can_be_timed") if name in call}

    def product(lhs, rhs, **layout):
        return implementation(lhs, rhs, **layout, **kept)

    return (
        lhs_cotangent(product, cotangent, lhs, rhs, **layout),
        rhs_cotangent(product, cotangent, lhs, rhs, **layout),
    )


DERIVATIVES = (_fwd, _bwd)
