"""An error that waits until a program is compiled, for the platforms that nothing runs on."""

from typing import Any, NoReturn

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad, batching, mlir


_refuse_p = jex_core.Primitive("pallas_ops_refuse")
"""The identity, except that it can be neither lowered nor evaluated."""


def refuse(error: Exception, *arrays: Any) -> tuple[jax.Array, ...]:
    """The arrays, in a program that raises `error` when it is compiled, not when it is traced.

    Only the platform that a program is compiled for decides which branch of
    `jax.lax.platform_dependent` is, and all of them are traced.
    """
    return tuple(_refuse_p.bind(array, error=error) for array in arrays)


def _raise(*_: Any, error: Exception) -> NoReturn:
    raise error


def _transpose(cotangent, _, *, error):
    return refuse(error, cotangent)


def _batch(operands, dims, *, error):
    return _refuse_p.bind(*operands, error=error), *dims


_refuse_p.def_impl(_raise)
_refuse_p.def_abstract_eval(lambda array, *, error: array)
ad.deflinear2(_refuse_p, _transpose)
batching.primitive_batchers[_refuse_p] = _batch
mlir.register_lowering(_refuse_p, _raise)
