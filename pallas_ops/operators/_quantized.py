"""`quantized_matmul`: a product with a matrix of int8 and its scales, and `quantize_int8`."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int8, Num, Shaped

from ..tiles import Tiles
from ._arguments import (
    as_array,
    as_bias,
    as_dtype,
    check_activation,
    check_shapes,
    describe,
    given,
)
from ._call import applied, Asked
from ._implementations import IMPLEMENTATIONS
from ._options import read_options
from ._precision import resolve_precision
from ._primitive import multiply
from ._registry import Implementation, Operator, register_operator, UnsupportedCallError


_NAME = "quantized_matmul"
_LARGEST = 127  # -128 has no counterpart


def quantize_int8(
    array: ArrayLike, axis: SupportsIndex | Sequence[SupportsIndex] = -1
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Rounds numbers to int8, with one scale for all entries along `axis`.

    `array` is near `values * scale`, with `scale` back in its place along `axis`: no entry is off
    by more than half of its scale. Symmetric: zero stays zero, and the largest magnitude becomes
    127. Gradients do not pass; differentiate what is done with `scale`.

    ```python
    values, scale = pallas_ops.quantize_int8(weight)  # (out, in): one scale for each output
    y = pallas_ops.quantized_matmul(x, values, scale, transpose_rhs=True)
    ```

    **Arguments:**

    - `array`: of real floating-point numbers.
    - `axis`: the axis, or axes, that share a scale. For the right operand of a product it is the
        one that is summed over: the last of a weight `(out, in)`, the last but one of `(k, n)`.

    **Returns:**

    The values, of int8, and the scales, of float32 and without `axis`. Where all entries are zero,
    or too small for float32 to hold their scale, values are 0 and the scale is 1.

    **Raises:**

    `TypeError` for other dtypes, `ValueError` for an axis that is none, and for NaN and infinity.
    Under `jax.jit` their scale is NaN, and so is what is computed with it.
    """
    array = as_array("quantize_int8", "array", array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"quantize_int8: `array` must be of floating-point numbers, got {describe(array)}."
        )
    try:
        axes = tuple(map(operator.index, axis if isinstance(axis, tuple | list) else (axis,)))
    except TypeError:
        raise TypeError(
            f"quantize_int8: `axis` must be an integer or a tuple of them, got {axis!r}."
        ) from None
    if not axes or not all(-array.ndim <= one < array.ndim for one in axes):
        raise ValueError(f"quantize_int8: there is no axis {axis} in {describe(array)}.")
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.float32)
    largest = jnp.max(jnp.abs(array), axis=axes, keepdims=True, initial=0)
    scale = (largest / _LARGEST).astype(jnp.float32)
    finite = jnp.isfinite(scale)
    if not isinstance(finite, jax.core.Tracer) and not finite.all():
        raise ValueError(
            f"quantize_int8: {describe(array)} has entries that are NaN, infinite or beyond "
            f"float32."
        )
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.float32(1), scale)
    scale = jnp.where(finite, scale, jnp.float32(np.nan))
    scaled = array / jnp.broadcast_to(scale, array.shape).astype(array.dtype)
    inside = jnp.clip(jnp.where(jnp.isnan(scaled), 0, scaled), -_LARGEST, _LARGEST)
    values = jnp.round(inside).astype(jnp.int8)
    return values, jax.lax.stop_gradient(jnp.squeeze(scale, axes))


def quantized_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    scale: ArrayLike | None,
    *,
    lhs_scale: ArrayLike | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    bias: ArrayLike | None = None,
    activation: Callable[[Array], Array] | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    tiles: Tiles = None,
    implementation: str | None = None,
) -> Array:
    """`activation((lhs @ rhs) * scale + bias)`, where `rhs` is of int8.

    Two ways to use int8:

    - **Weights alone**, for `lhs` of bfloat16 or float32: the kernel reads the weights as int8,
      converts each block where it lies, in VMEM, and multiplies in the dtype of `lhs`. It runs on
      every TPU.
    - **Both**, for `lhs` of int8: the products are of integers, summed in int32. A v5e, v5p or v6e
      multiplies these faster than bfloat16. Without scales the result is those sums.

    The scales multiply the sums in float32, before bias, activation and the one rounding. The
    result is differentiable with respect to a floating-point `lhs`, to both scales and to `bias`.

    **Arguments:**

    - `lhs`: shape `(..., m, k)`, or `(..., k, m)` with `transpose_lhs`: floating-point, or int8.
    - `rhs`: int8, shape `(..., k, n)`, or `(..., n, k)` with `transpose_rhs`, as a linear layer has
        it. Leading axes as in [`pallas_ops.matmul`][].
    - `scale`: what the columns of the product are multiplied by, floating-point: shape `(n,)`, `()`
        for one number, or `(..., n)` with the leading axes of `rhs`; `None` for none.
        [`pallas_ops.quantize_int8`][] returns it.
    - `lhs_scale`: the same for the rows, where `lhs` is int8: shape `()`, or `(..., m)` with the
        leading axes of `lhs`. That of rows is applied after the kernel, which then returns float32,
        and so are bias and activation.
    - `transpose_lhs`, `transpose_rhs`: whether an operand is stored transposed.
    - `bias`: shape `(n,)`, added to every row; `None` for none.
    - `activation`: a function of one array, applied last; `None` for none.
    - `preferred_element_type`: the dtype of the scaled product. `None` is that of a floating-point
        `lhs`; for int8 that of the scales, or int32 without any.
    - `precision`, `tiles`, `implementation`: as in [`pallas_ops.matmul`][].

    **Returns:**

    An array of shape `(..., m, n)`.

    **Raises:**

    As [`pallas_ops.matmul`][]. `TypeError` also for operands of other dtypes, `ValueError` for
    scales of other shapes; [`pallas_ops.UnsupportedCallError`][] where the kernel is named, and a
    TPU that has no integer products (v4) would have to multiply two int8 operands.
    """
    lhs, rhs = as_array(_NAME, "lhs", lhs), as_array(_NAME, "rhs", rhs)
    weight_only = bool(jnp.issubdtype(lhs.dtype, jnp.floating))
    if rhs.dtype != jnp.int8 or not (weight_only or lhs.dtype == jnp.int8):
        raise TypeError(
            f"{_NAME}: `rhs` must be int8 and `lhs` floating-point or int8; "
            f"pallas_ops.quantize_int8 makes int8 of other numbers. "
            f"{given(lhs, rhs, transpose_lhs, transpose_rhs)}"
        )
    check_shapes(_NAME, lhs, rhs, transpose_lhs, transpose_rhs)
    bias = as_bias(_NAME, bias, lhs, rhs, transpose_lhs, transpose_rhs)
    check_activation(_NAME, activation)
    m, n = lhs.shape[-1 if transpose_lhs else -2], rhs.shape[-2 if transpose_rhs else -1]
    columns = _as_scale("scale", scale, "column", rhs, n)
    rows = _as_scale("lhs_scale", lhs_scale, "row", lhs, m)
    if rows is not None and weight_only:
        raise ValueError(
            f"{_NAME}: `lhs_scale` is for an int8 `lhs`, and this one is {describe(lhs)}."
        )
    out_dtype = _out_dtype(
        lhs, [one for one in (columns, rows) if one is not None], preferred_element_type
    )
    if columns is None and not weight_only and jnp.issubdtype(out_dtype, jnp.floating):
        columns = jnp.ones((), jnp.float32)  # the kernel makes floats of integers by a scale alone
    if columns is not None and columns.ndim == 0:
        columns = jnp.broadcast_to(columns, (n,))
    if columns is not None and rows is not None and rows.ndim == 0:
        columns, rows = columns * jnp.broadcast_to(rows, columns.shape), None
    asked = Asked(
        out_dtype,
        bool(transpose_lhs),
        bool(transpose_rhs),
        activation,
        resolve_precision(precision),
        read_options(implementation, tiles),
    )
    if rows is None:
        return multiply(asked, lhs, rhs, columns, bias)
    # A kernel's epilogue has factors of columns alone.
    alone = dataclasses.replace(asked, out_dtype=np.dtype(np.float32), activation=None)
    wide = multiply(alone, lhs, rhs, columns, None)
    wide = wide * jnp.broadcast_to(rows.astype(wide.dtype)[..., None], wide.shape)
    result = jax.ShapeDtypeStruct(wide.shape, out_dtype)
    wanted = jax.eval_shape(functools.partial(applied, activation=activation), result, bias)
    bias = None if bias is None else bias.astype(wide.dtype)
    return applied(wide, bias, activation).astype(wanted.dtype)


def _as_scale(name: str, value: Any, what: str, operand: jax.Array, size: int) -> jax.Array | None:
    """The scale of the `size` rows or columns that an operand makes of the product."""
    if value is None:
        return None
    scale = jnp.float32(value) if isinstance(value, int | float) else as_array(_NAME, name, value)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"{_NAME}: `{name}` must be floating-point, got {describe(scale)}.")
    shapes = [(size,), (*operand.shape[:-2], size)]
    if scale.shape not in ((), *shapes):
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(
            f"{_NAME}: `{name}` must have shape {allowed}, one entry for each {what} of the "
            f"result, or () for one number; got {describe(scale)}."
        )
    return scale


def _out_dtype(lhs: jax.Array, scales: list[jax.Array], preferred: DTypeLike | None) -> np.dtype:
    floats = [lhs] if jnp.issubdtype(lhs.dtype, jnp.floating) else scales
    if preferred is None:
        return np.dtype(jnp.result_type(*floats) if floats else jnp.int32)
    dtype = as_dtype(_NAME, preferred)
    if floats and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{_NAME}: `preferred_element_type` {dtype.name} cannot hold a product of "
            f"floating-point numbers, and `{'lhs' if floats[0] is lhs else 'scale'}` is "
            f"{describe(floats[0])}."
        )
    return dtype


def _signature(
    lhs: Num[Array, "*#batch lhs_rows lhs_columns"],
    rhs: Int8[Array, "*#batch rhs_rows rhs_columns"],
    scale: Float[Array, "..."] | None,
    *,
    lhs_scale: Float[Array, "..."] | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    bias: Num[Array, " n"] | None = None,
    activation: Callable | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    tiles: Any = None,
) -> Shaped[Array, "*out m n"]:
    raise NotImplementedError("a signature is read, and never called")


def _implementation(of_matmul: Implementation) -> Implementation:
    """The implementation of this name: the kernel is `matmul`'s."""
    function = functools.partial(quantized_matmul, implementation=of_matmul.name)

    def why_not(*arrays: Any, **static: Any) -> str | None:
        try:
            jax.eval_shape(functools.partial(function, **static), *arrays)
        except UnsupportedCallError as error:
            return str(error)
        return None

    return Implementation(of_matmul.name, function, why_not, of_matmul.platforms)


register_operator(
    Operator(_NAME, _signature, map(_implementation, IMPLEMENTATIONS), entry=quantized_matmul)
)
