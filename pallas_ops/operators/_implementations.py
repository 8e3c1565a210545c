"""The implementations of `matmul`, from a call's keywords to a kernel with its tile."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._hardware import find_generation
from ..kernels import (
    MatmulProblem,
    pallas_matmul,
    problem_of,
    tpu_interpret_matmul,
    xla_matmul,
)
from ..tiles import as_tile_choice, resolve_tile, Tiles
from ._derivatives import lhs_cotangent, rhs_cotangent
from ._precision import resolve_precision
from ._registry import Implementation


# The first generation whose MXU multiplies integers; Mosaic refuses them on a v4 (E2001).
_FIRST_GENERATION_WITH_INT8 = 5


def _problem(
    lhs: Any,
    rhs: Any,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    sum_leading: tuple[bool, ...] | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    tiles: Tiles = None,
    device: str | None = None,
) -> MatmulProblem:
    """The problem that one call to an implementation poses; `tiles` and `device` are no part."""
    return problem_of(
        lhs,
        rhs,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        sum_leading=(False,) * (lhs.ndim - 2) if sum_leading is None else sum_leading,
        out_dtype=np.dtype(jnp.result_type(lhs, rhs) if out_dtype is None else out_dtype),
        precision=resolve_precision(precision),
    )


def _blocks(problem: MatmulProblem, call: dict[str, Any]) -> tuple[int, int, int]:
    choice = as_tile_choice(call.get("tiles"))
    return resolve_tile(problem, choice, call.get("device")).tile.blocks


def _kernel(lhs: jax.Array, rhs: jax.Array, call: dict[str, Any], interpret: bool) -> jax.Array:
    problem = _problem(lhs, rhs, **call)
    if problem.is_empty:
        return jnp.zeros(problem.out_shape, problem.out_dtype)
    return pallas_matmul(problem, *_blocks(problem, call), interpret=interpret)(lhs, rhs)


def _mosaic(lhs: jax.Array, rhs: jax.Array, **call: Any) -> jax.Array:
    return _kernel(lhs, rhs, call, interpret=False)


def _interpret(lhs: jax.Array, rhs: jax.Array, **call: Any) -> jax.Array:
    return _kernel(lhs, rhs, call, interpret=True)


def _tpu_interpret(lhs: jax.Array, rhs: jax.Array, **call: Any) -> jax.Array:
    problem = _problem(lhs, rhs, **call)
    if problem.is_empty:
        return jnp.zeros(problem.out_shape, problem.out_dtype)
    return tpu_interpret_matmul(problem, _blocks(problem, call), lhs, rhs)


def _xla(lhs: jax.Array, rhs: jax.Array, **call: Any) -> jax.Array:
    problem = _problem(lhs, rhs, **call)
    choice = as_tile_choice(call.get("tiles"))
    named = choice is not None and choice.forward is not None
    if named and not problem.is_empty and problem.why_not_in_kernel() is None:
        # XLA has no use for a tile, but a test on a CPU should meet what a TPU would refuse.
        resolve_tile(problem, choice, call.get("device"))
    return xla_matmul(problem, lhs, rhs)


def _kernel_supports(lhs: Any, rhs: Any, **call: Any) -> str | None:
    problem = _problem(lhs, rhs, **call)
    reason = problem.why_not_in_kernel()
    if reason is not None or problem.lhs_dtype != jnp.int8:
        return reason
    generation = find_generation(call.get("device"))
    if generation is None or generation.info.generation >= _FIRST_GENERATION_WITH_INT8:
        return None
    return f"the MXU of a TPU {generation.name} has no int8 products"


IMPLEMENTATIONS = (
    Implementation("mosaic", _mosaic, _kernel_supports, platforms=("tpu",)),
    Implementation("xla", _xla),
    Implementation("interpret", _interpret, _kernel_supports),
    Implementation("tpu_interpret", _tpu_interpret, _kernel_supports),
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
    kept = {name: call[name] for name in ("precision", "device") if name in call}

    def product(lhs, rhs, **layout):
        return implementation(lhs, rhs, **layout, **kept)

    return (
        lhs_cotangent(product, cotangent, lhs, rhs, **layout),
        rhs_cotangent(product, cotangent, lhs, rhs, **layout),
    )


DERIVATIVES = (_fwd, _bwd)
