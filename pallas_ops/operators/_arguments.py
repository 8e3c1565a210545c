"""What is asked of arguments, whichever operator they are given to.

`operator` is its name, for the messages.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


# What nearly all arrays are of: to ask JAX whether a dtype is one of numbers takes a while.
_COMMON = frozenset(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.int8)))


def as_array(operator: str, name: str, value: Any) -> jax.Array:
    """The value as JAX's array, where it is an array of numbers."""
    if isinstance(value, jax.Array) and value.dtype in _COMMON:
        return value
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{operator}: `{name}` must be an array, got {value!r}.")
    if not _is_numeric(value.dtype):
        raise TypeError(
            f"{operator}: `{name}` must be an array of numbers, got dtype {value.dtype}."
        )
    return jnp.asarray(value)


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def as_dtype(operator: str, preferred: DTypeLike) -> np.dtype:
    try:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
    except TypeError:
        dtype = np.dtype(object)
    if not _is_numeric(dtype):
        raise TypeError(
            f"{operator}: `preferred_element_type` must be a dtype of numbers, such as "
            f"jax.numpy.float32, got {preferred!r}."
        )
    return dtype


def describe(array: jax.Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def given(lhs: jax.Array, rhs: jax.Array, transpose_lhs: bool, transpose_rhs: bool) -> str:
    flags = f"transpose_lhs={transpose_lhs}, transpose_rhs={transpose_rhs}"
    return f"Given: lhs {describe(lhs)}, rhs {describe(rhs)}, {flags}."


def check_shapes(
    operator: str, lhs: jax.Array, rhs: jax.Array, transpose_lhs: bool, transpose_rhs: bool
) -> None:
    what = given(lhs, rhs, transpose_lhs, transpose_rhs)
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if operand.ndim < 2:
            raise ValueError(
                f"{operator}: `{name}` must have rank 2 or more, got rank {operand.ndim}. Write a "
                f"vector as a matrix of one row ({name}[None, :]) or column ({name}[:, None]). "
                f"{what}"
            )
    lhs_k = lhs.shape[-2 if transpose_lhs else -1]
    rhs_k = rhs.shape[-1 if transpose_rhs else -2]
    if lhs_k != rhs_k:
        lhs_form = "(..., k, m)" if transpose_lhs else "(..., m, k)"
        rhs_form = "(..., n, k)" if transpose_rhs else "(..., k, n)"
        raise ValueError(
            f"{operator}: the contracting size k differs: lhs {lhs_form} has {lhs_k}, rhs "
            f"{rhs_form} has {rhs_k}. {what}"
        )
    pairs = zip(reversed(lhs.shape[:-2]), reversed(rhs.shape[:-2]), strict=False)
    if not all(left == right or left == 1 or right == 1 for left, right in pairs):
        raise ValueError(
            f"{operator}: the leading axes {lhs.shape[:-2]} of lhs and {rhs.shape[:-2]} of rhs do "
            f"not broadcast: each pair must be equal, or one of them 1. {what}"
        )


def as_bias(
    operator: str,
    bias: Any,
    lhs: jax.Array,
    rhs: jax.Array,
    transpose_lhs: bool,
    transpose_rhs: bool,
) -> jax.Array | None:
    if bias is None:
        return None
    bias, n = as_array(operator, "bias", bias), rhs.shape[-2 if transpose_rhs else -1]
    if bias.shape != (n,):
        raise ValueError(
            f"{operator}: `bias` must have shape ({n},), one entry for each column of the result; "
            f"got {describe(bias)}. {given(lhs, rhs, transpose_lhs, transpose_rhs)}"
        )
    return bias


def check_activation(operator: str, activation: Callable | None) -> None:
    if activation is not None and not callable(activation):
        raise TypeError(
            f"{operator}: `activation` must be a function of one array, such as jax.nn.relu, got "
            f"{activation!r}."
        )
