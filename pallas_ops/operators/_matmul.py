"""`matmul`: the function that people call, and its entry in the registry."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Num, Shaped

from ..kernels import Activation, MatmulProblem, promoted_dtype
from ..tiles import as_tile_choice, environment_resolver, Tiles
from ._fused import bind_fused
from ._implementations import DERIVATIVES, IMPLEMENTATIONS
from ._options import ambient_options, CallOptions
from ._precision import resolve_precision
from ._primitive import bind_matmul, with_leading_ones
from ._registry import get_operator, Operator, register_operator


def matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    bias: ArrayLike | None = None,
    activation: Callable[[Array], Array] | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    tiles: Tiles = None,
    implementation: str | None = None,
) -> Array:
    """`activation(lhs @ rhs + bias)`, by a tiled Pallas kernel where the program runs on a TPU.

    Products are summed in float32 (int8: in int32) and rounded once. The gradients are the same
    kernel on the same arrays, read transposed and never copied; each has its operand's dtype. It
    composes with every transformation of JAX; a batch axis that only `lhs` has, whether written or
    from `jax.vmap`, becomes more rows of one product.

    **Arguments:**

    - `lhs`: shape `(..., m, k)`, or `(..., k, m)` with `transpose_lhs`.
    - `rhs`: shape `(..., k, n)`, or `(..., n, k)` with `transpose_rhs`. The leading axes of both
        are broadcast as in `jax.numpy.matmul`.
    - `transpose_lhs`, `transpose_rhs`: whether an operand is stored transposed.
    - `bias`: shape `(n,)`, added to every row; `None` for none.
    - `activation`: a function of one array, applied last; `None` for none. If each entry of its
        result depends on the same entry alone (`jax.nn.gelu`, and not `jax.nn.softmax`), the kernel
        applies it, and bias and activation come before the rounding.
    - `preferred_element_type`: the dtype of the product. `None` is what `jax.numpy.matmul` gives,
        which for two int8 operands is int8: ask for `jax.numpy.int32` to keep the sums.
    - `precision`: as in `jax.lax.dot_general`, for float32; `None` is
        `jax.config.jax_default_matmul_precision`. Dot algorithms are not taken.
    - `tiles`: a [`pallas_ops.TileConfig`][] for the forward product; a mapping from any of
        `"forward"`, `"lhs_cotangent"` and `"rhs_cotangent"` to one; or a
        [`pallas_ops.TileResolver`][]. `None` is what the environment variable `PALLAS_OPS_TILES`
        names, else [`pallas_ops.CachedResolver`][].
    - `implementation`: `"mosaic"`, `"interpret"`, `"tpu_interpret"` or `"xla"`. `None` is the
        kernel on a TPU, for the dtypes that it has, and XLA's matmul everywhere else.

    What `tiles` and `implementation` leave open, [`pallas_ops.options`][] may say.

    **Returns:**

    An array of shape `(..., m, n)`.

    **Raises:**

    `ValueError` for operands of rank 0 or 1, shapes that do not fit, an illegal tile or an unknown
    implementation; `TypeError` for arguments of the wrong type, and for mixtures of dtypes that
    `jax.numpy_dtype_promotion("strict")` refuses; [`pallas_ops.UnsupportedCallError`][] where the
    implementation that was named has no such dtypes.
    """
    lhs, rhs = _as_array("lhs", lhs), _as_array("rhs", rhs)
    _check_shapes(lhs, rhs, transpose_lhs, transpose_rhs)
    n = rhs.shape[-2 if transpose_rhs else -1]
    if bias is not None:
        bias = _as_array("bias", bias)
        if bias.shape != (n,):
            raise ValueError(
                f"matmul: `bias` must have shape ({n},), one entry for each column of the result; "
                f"got {_describe(bias)}. {_given(lhs, rhs, transpose_lhs, transpose_rhs)}"
            )
    if activation is not None and not callable(activation):
        raise TypeError(
            f"matmul: `activation` must be a function of one array, such as jax.nn.relu, got "
            f"{activation!r}."
        )
    lhs, rhs, out_dtype = _promote(lhs, rhs, preferred_element_type)
    rank = max(lhs.ndim, rhs.ndim)
    lhs, rhs = with_leading_ones(lhs, rank - lhs.ndim), with_leading_ones(rhs, rank - rhs.ndim)

    call = CallOptions(implementation, as_tile_choice(tiles)).or_else(ambient_options())
    call = call.or_else(CallOptions(tiles=as_tile_choice(environment_resolver())))
    layout = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    precision = resolve_precision(precision)
    if call.implementation is not None:
        operator = get_operator("matmul")
        operator.check_implementation(call.implementation)
        keywords = dict(out_dtype=out_dtype, precision=precision, device=call.device, **layout)
        operator.select((lhs, rhs), keywords, name=call.implementation)

    sum_leading = (False,) * (rank - 2)

    def product() -> jax.Array:
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

    fused = _as_fused(lhs, rhs, bias, activation, jax.eval_shape(product))
    if fused is None:
        return _applied(product(), bias, activation)
    (out,) = bind_fused(
        lhs,
        rhs,
        *(() if bias is None else (with_leading_ones(bias, rank - 1),)),
        **layout,
        sum_leading=sum_leading,
        precision=precision,
        tiles=call.tiles,
        implementation=call.implementation,
        device=call.device,
        scaled=False,
        biased=bias is not None,
        product_dtype=out_dtype,
        **fused,
    )
    return out


def _applied(
    product: jax.Array, bias: jax.Array | None, activation: Callable[[Array], Array] | None
) -> jax.Array:
    """Bias and activation on a product that is rounded already."""
    if bias is not None:
        product = product + jnp.broadcast_to(bias, product.shape)
    return product if activation is None else activation(product)


def _as_fused(
    lhs: jax.Array,
    rhs: jax.Array,
    bias: jax.Array | None,
    activation: Callable[[Array], Array] | None,
    product: jax.ShapeDtypeStruct,
) -> dict[str, Any] | None:
    """What `bind_fused` needs to know of an epilogue; `None` where it must be applied afterwards.

    Afterwards are applied: what looks at more than one entry, or holds arrays; and anything to
    integers and complex numbers, which no kernel sums in floating point.
    """
    # As the user's own promotion rules have it, and with their errors.
    wanted = jax.eval_shape(functools.partial(_applied, activation=activation), product, bias)
    arrays = [lhs, rhs, product, wanted, *([] if bias is None else [bias])]
    is_array = isinstance(wanted, jax.ShapeDtypeStruct) and wanted.shape == product.shape
    if not is_array or not all(jnp.issubdtype(array.dtype, jnp.floating) for array in arrays):
        return None
    found = None
    if activation is not None:
        summed = MatmulProblem((1, 1), (1, 1), lhs.dtype, rhs.dtype, wanted.dtype)
        found = Activation.of(activation, summed.accumulator_dtype)
        if found is None:
            return None
    return dict(out_dtype=np.dtype(wanted.dtype), activation=found, orders=(0,))


def _as_array(name: str, value: Any) -> jax.Array:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"matmul: `{name}` must be an array, got {value!r}.")
    if not _is_numeric(value.dtype):
        raise TypeError(f"matmul: `{name}` must be an array of numbers, got dtype {value.dtype}.")
    return jnp.asarray(value)


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _as_dtype(preferred: DTypeLike) -> np.dtype:
    try:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
    except TypeError:
        dtype = np.dtype(object)
    if not _is_numeric(dtype):
        raise TypeError(
            f"matmul: `preferred_element_type` must be a dtype of numbers, such as "
            f"jax.numpy.float32, got {preferred!r}."
        )
    return dtype


def _describe(array: jax.Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _given(lhs: jax.Array, rhs: jax.Array, transpose_lhs: bool, transpose_rhs: bool) -> str:
    flags = f"transpose_lhs={transpose_lhs}, transpose_rhs={transpose_rhs}"
    return f"Given: lhs {_describe(lhs)}, rhs {_describe(rhs)}, {flags}."


def _check_shapes(lhs: jax.Array, rhs: jax.Array, transpose_lhs: bool, transpose_rhs: bool) -> None:
    given = _given(lhs, rhs, transpose_lhs, transpose_rhs)
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if operand.ndim < 2:
            raise ValueError(
                f"matmul: `{name}` must have rank 2 or more, got rank {operand.ndim}. Write a "
                f"vector as a matrix of one row ({name}[None, :]) or column ({name}[:, None]). "
                f"{given}"
            )
    lhs_k = lhs.shape[-2 if transpose_lhs else -1]
    rhs_k = rhs.shape[-1 if transpose_rhs else -2]
    if lhs_k != rhs_k:
        lhs_form = "(..., k, m)" if transpose_lhs else "(..., m, k)"
        rhs_form = "(..., n, k)" if transpose_rhs else "(..., k, n)"
        raise ValueError(
            f"matmul: the contracting size k differs: lhs {lhs_form} has {lhs_k}, rhs {rhs_form} "
            f"has {rhs_k}. {given}"
        )
    pairs = zip(reversed(lhs.shape[:-2]), reversed(rhs.shape[:-2]), strict=False)
    if not all(left == right or left == 1 or right == 1 for left, right in pairs):
        raise ValueError(
            f"matmul: the leading axes {lhs.shape[:-2]} of lhs and {rhs.shape[:-2]} of rhs do not "
            f"broadcast: each pair must be equal, or one of them 1. {given}"
        )


def _promote(
    lhs: jax.Array, rhs: jax.Array, preferred: DTypeLike | None
) -> tuple[jax.Array, jax.Array, np.dtype]:
    """The operands, and the dtype of their product by the rules of `jax.numpy.matmul`.

    Operands of two dtypes stay as they are: the kernel mixes them without copies. One with a weak
    type (made from Python numbers) takes the dtype of the other.
    """
    if preferred is None:
        out_dtype = np.dtype(jnp.result_type(lhs, rhs))
    else:
        out_dtype = _as_dtype(preferred)
    if lhs.dtype != rhs.dtype and (lhs.weak_type or rhs.weak_type):
        common = jnp.result_type(lhs, rhs)
        lhs, rhs = lhs.astype(common), rhs.astype(common)
    operands = promoted_dtype(lhs.dtype, rhs.dtype)
    for family, name in ((jnp.complexfloating, "complex"), (jnp.floating, "floating-point")):
        if jnp.issubdtype(operands, family) and not jnp.issubdtype(out_dtype, jnp.inexact):
            raise TypeError(
                f"matmul: `preferred_element_type` {out_dtype.name} cannot hold the product of "
                f"{name} operands {lhs.dtype} and {rhs.dtype}."
            )
    return lhs, rhs, out_dtype


def _signature(
    lhs: Shaped[Array, "*#batch lhs_rows lhs_columns"],
    rhs: Shaped[Array, "*#batch rhs_rows rhs_columns"],
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    bias: Num[Array, " n"] | None = None,
    activation: Callable | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    tiles: Any = None,
) -> Shaped[Array, "*out m n"]:
    raise NotImplementedError("a signature is read, and never called")


register_operator(Operator("matmul", _signature, IMPLEMENTATIONS, vjp=DERIVATIVES, entry=matmul))
