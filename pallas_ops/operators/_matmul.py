"""`matmul`: the function that people call, and its entry in the registry."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Num, Shaped

from ..kernels import promoted_dtype
from ..tiles import Tiles
from ._arguments import as_array, as_bias, as_dtype, check_activation, check_shapes
from ._call import Asked
from ._implementations import DERIVATIVES, IMPLEMENTATIONS
from ._options import read_options
from ._precision import resolve_precision
from ._primitive import multiply
from ._registry import Operator, register_operator


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
    lhs, rhs = as_array("matmul", "lhs", lhs), as_array("matmul", "rhs", rhs)
    check_shapes("matmul", lhs, rhs, transpose_lhs, transpose_rhs)
    bias = as_bias("matmul", bias, lhs, rhs, transpose_lhs, transpose_rhs)
    check_activation("matmul", activation)
    lhs, rhs, out_dtype = _promoted(lhs, rhs, preferred_element_type)
    asked = Asked(
        out_dtype,
        bool(transpose_lhs),
        bool(transpose_rhs),
        activation,
        resolve_precision(precision),
        read_options(implementation, tiles),
    )
    return multiply(asked, lhs, rhs, None, bias)


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tiles: Tiles,
    implementation: str | None,
) -> jax.Array:
    """`x @ weight.T + bias`, which is `matmul` for a layer that has checked the shape of `x`.

    **Arguments:**

    - `x`: shape `(..., k)`, of any rank but 0; one row alone needs no reshape in this way.
    - `weight`: shape `(n, k)`.

    All others are those of `matmul`.
    """
    x, weight = as_array("matmul", "lhs", x), as_array("matmul", "rhs", weight)
    bias = as_bias("matmul", bias, x, weight, False, True)
    x, weight, out_dtype = _promoted(x, weight, None)
    options = read_options(implementation, tiles)
    asked = Asked(out_dtype, False, True, None, resolve_precision(None), options)
    return multiply(asked, x, weight, None, bias)


def _promoted(
    lhs: jax.Array, rhs: jax.Array, preferred: DTypeLike | None
) -> tuple[jax.Array, jax.Array, np.dtype]:
    """The operands, and the dtype of their product by the rules of `jax.numpy.matmul`.

    Operands of two dtypes stay as they are: the kernel mixes them without copies. One with a weak
    type (made from Python numbers) takes the dtype of the other.
    """
    if preferred is None and lhs.dtype == rhs.dtype:
        return lhs, rhs, np.dtype(lhs.dtype)
    if preferred is None:
        out_dtype = np.dtype(jnp.result_type(lhs, rhs))
    else:
        out_dtype = as_dtype("matmul", preferred)
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
