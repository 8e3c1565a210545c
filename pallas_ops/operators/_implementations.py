"""The implementations of `matmul`, from a described call to a kernel with its tile."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._hardware import find_generation, GENERATIONS, TpuGeneration
from ..kernels import MatmulProblem, problem_of, run_kernel, sum_columns, xla_matmul
from ..tiles import as_tile_choice, Resolution, resolve_tile, TileProblem, Tiles
from ._call import MatmulCall
from ._derivatives import lhs_cotangent, rhs_cotangent
from ._options import CallOptions
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


def _described(
    lhs: Any,
    rhs: Any,
    *_columns: Any,
    call: MatmulCall | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    precision: Any = None,
    tiles: Tiles = None,
    device: str | None = None,
) -> MatmulCall:
    """The call that an implementation is given, by the lowering or, in keywords, by a person."""
    if call is not None:
        return call
    out_dtype = np.dtype(jnp.result_type(lhs, rhs) if out_dtype is None else out_dtype)
    problem = problem_of(
        lhs,
        rhs,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        sum_leading=(False,) * (lhs.ndim - 2),
        out_dtype=out_dtype,
        precision=resolve_precision(precision),
    )
    options = CallOptions(tiles=as_tile_choice(tiles), device=device)
    return MatmulCall(problem, out_dtype, options=options)


def _resolve(call: MatmulCall, implementation: str) -> Resolution:
    asked = TileProblem(
        call.problem,
        device=call.options.device,
        implementation=implementation,
        can_be_timed=call.can_be_timed,
    )
    return resolve_tile(asked, call.options.tiles)


# The operands are lhs, rhs, and what the epilogue of the call reads; with one, all of its outputs
# are returned, and with `sums` the product and these.
def _kernel(*operands: jax.Array, implementation: str, **given: Any) -> Any:
    call = _described(*operands, **given)
    if call.problem.is_empty:
        return _xla(*operands, call=call)
    resolution = _resolve(call, implementation)
    return run_kernel(
        call.problem,
        resolution.tile.blocks,
        *operands,
        implementation=implementation,
        vmem_limit_bytes=resolution.vmem_limit_bytes,
        prologue_parts=int(resolution.tile.prologue_parts),
        column_sums=call.sums,
    )


def _xla(*operands: jax.Array, **given: Any) -> Any:
    call = _described(*operands, **given)
    problem, choice = call.problem, call.options.tiles
    named = choice is not None and choice.forward is not None
    if named and not problem.is_empty and problem.why_not_in_kernel() is None:
        # XLA has no use for a tile, but a test on a CPU should meet what a TPU would refuse.
        _resolve(call, "xla")
    product = xla_matmul(problem, *operands)
    return (product, sum_columns(problem, operands[0])) if call.sums else product


def _kernel_supports(*operands: Any, **given: Any) -> str | None:
    call = _described(*operands, **given)
    reason = call.problem.why_not_in_kernel()
    if reason is not None or not call.problem.multiplies_int8:
        return reason
    generation = find_generation(call.options.device)
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


def _fwd(lhs, rhs, *, implementation: Implementation, **given):
    # With its rules again, for what is differentiated twice.
    return implementation(lhs, rhs, **given), (lhs, rhs)


def _bwd(residuals, cotangent, *, implementation: Implementation, **given):
    call, cotangents = _described(*residuals, **given), []
    for rule, other in ((lhs_cotangent, residuals[1]), (rhs_cotangent, residuals[0])):
        backward, is_last = rule(call, cotangent.dtype)
        operands = (other, cotangent) if is_last else (cotangent, other)
        cotangents.append(implementation(*operands, call=backward))
    return tuple(cotangents)


DERIVATIVES = (_fwd, _bwd)
