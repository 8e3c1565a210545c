"""The road from an operator's checked arguments to the primitives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels import Activation, Columns, Epilogue, MatmulProblem, promoted_dtype
from ..tiles import as_tile_choice, environment_resolver, Tiles
from ._fused import bind_fused
from ._options import ambient_options, CallOptions
from ._precision import resolve_precision
from ._primitive import bind_matmul, with_leading_ones
from ._registry import get_operator


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    out_dtype: np.dtype,
    precision: Any,
    tiles: Tiles,
    implementation: str | None,
) -> jax.Array:
    """`activation(lhs @ rhs * scale + bias)`, in one kernel where that can be.

    **Arguments:**

    - `scale`: shape `(..., n)`, with leading axes that are some of the last ones of `rhs`.
    - `out_dtype`: the dtype of the scaled product; bias and activation may change it.

    All others are those of `matmul`, checked.
    """
    rank = max(lhs.ndim, rhs.ndim)
    lhs, rhs = with_leading_ones(lhs, rank - lhs.ndim), with_leading_ones(rhs, rank - rhs.ndim)
    columns: tuple[jax.Array, ...] = ()
    if scale is not None:
        rows = scale.reshape(*scale.shape[:-1], 1, scale.shape[-1])
        columns = (with_leading_ones(rows, rank - rows.ndim),)

    call = CallOptions(implementation, as_tile_choice(tiles)).or_else(ambient_options())
    call = call.or_else(CallOptions(tiles=as_tile_choice(environment_resolver())))
    layout = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    precision = resolve_precision(precision)
    if call.implementation is not None:
        operator = get_operator("matmul")
        operator.check_implementation(call.implementation)
        keywords = dict(out_dtype=out_dtype, precision=precision, device=call.device, **layout)
        if scale is not None:
            keywords["epilogue"] = Epilogue(Columns(columns[0].shape, columns[0].dtype))
        operator.select((lhs, rhs, *columns), keywords, name=call.implementation)

    sum_leading = (False,) * (rank - 2)

    def fused(*more: jax.Array, biased: bool, **epilogue: Any) -> jax.Array:
        (out,) = bind_fused(
            lhs,
            rhs,
            *columns,
            *more,
            **layout,
            **epilogue,
            sum_leading=sum_leading,
            precision=precision,
            tiles=call.tiles,
            implementation=call.implementation,
            device=call.device,
            scaled=scale is not None,
            biased=biased,
            orders=(0,),
            product_dtype=out_dtype,
        )
        return out

    def product() -> jax.Array:
        if scale is not None:
            return fused(biased=False, activation=None, out_dtype=out_dtype)
        return bind_matmul(
            lhs,
            rhs,
            **layout,
            sum_leading=sum_leading,
            out_dtype=out_dtype,
            tiles=call.tiles,
            precision=precision,
            options=call,
        )

    if bias is None and activation is None:
        return product()
    epilogue = _as_epilogue(lhs, rhs, scale, bias, activation, jax.eval_shape(product))
    if epilogue is None:
        return applied(product(), bias, activation)
    more = () if bias is None else (with_leading_ones(bias, rank - 1),)
    return fused(*more, biased=bias is not None, **epilogue)


def applied(
    product: jax.Array,
    bias: jax.Array | None,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Bias and activation on a product that is rounded already."""
    if bias is not None:
        product = product + jnp.broadcast_to(bias, product.shape)
    return product if activation is None else activation(product)


def _as_epilogue(
    lhs: jax.Array,
    rhs: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    activation: Callable[[jax.Array], jax.Array] | None,
    product: jax.ShapeDtypeStruct,
) -> dict[str, Any] | None:
    """What `bind_fused` needs to know of an epilogue; `None` where it must be applied afterwards.

    Afterwards are applied: what looks at more than one entry, or holds arrays; and anything to
    integers and complex numbers, which no kernel sums in floating point.
    """
    # As the user's own promotion rules have it, and with their errors.
    wanted = jax.eval_shape(functools.partial(applied, activation=activation), product, bias)
    dtypes = [product.dtype, wanted.dtype] if isinstance(wanted, jax.ShapeDtypeStruct) else []
    if scale is None:
        dtypes.append(promoted_dtype(lhs.dtype, rhs.dtype))
    if bias is not None:
        dtypes.append(bias.dtype)
    is_array = isinstance(wanted, jax.ShapeDtypeStruct) and wanted.shape == product.shape
    if is_array and wanted.dtype == jnp.float16 != product.dtype:
        return None  # which no kernel stores
    if not is_array or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return None
    found = None
    if activation is not None:
        summed = MatmulProblem((1, 1), (1, 1), lhs.dtype, rhs.dtype, wanted.dtype)
        biased = jax.eval_shape(functools.partial(applied, activation=None), product, bias)
        found = Activation.of(activation, summed.accumulator_dtype, biased)
        if found is None:
            return None
    return dict(out_dtype=np.dtype(wanted.dtype), activation=found)
