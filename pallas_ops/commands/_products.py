"""From sizes on a command line to the problems that a program with them would pose."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._hardware import find_generation, known_generation
from ..operators import matmul, options, quantized_matmul
from ..tiles import collect, TileProblem


PRODUCTS = ("forward", "lhs_cotangent", "rhs_cotangent")

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "exact-gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""Some of what a kernel may apply, by the names of the command line."""


def device_name(device: str | None, platform: str) -> str | None:
    """The TPU that is meant: the one that is named, else the one that is here, else any.

    **Raises:**

    `ValueError` for a name that is none, or where another TPU is here than the one named and the
    kernel is to run.
    """
    if device is not None:
        return known_generation(device).name
    if platform != "tpu":
        return None
    kind = jax.devices()[0].device_kind
    generation = find_generation(kind)
    return kind if generation is None else generation.name


def kernel_problem(
    product: str, shape: tuple[int, int, int], *, dtype: str, device: str, layout: str = "NT"
) -> TileProblem:
    """`make_problem` for the kernel on a TPU, of one dtype and at the default precision."""
    return make_problem(
        product,
        *shape,
        dtype=dtype,
        out_dtype=None,
        layout=layout,
        precision="default",
        device=device,
        implementation="mosaic",
    )


def make_problem(
    product: str,
    m: int,
    k: int,
    n: int,
    *,
    dtype: str,
    out_dtype: str | None,
    layout: str,
    precision: str,
    device: str | None,
    implementation: str,
    weights: str | None = None,
    bias: bool = False,
    activation: str | None = None,
    derivative: bool = False,
) -> TileProblem:
    """The problem of a product with these sizes, or of one of its two gradients.

    It is read from a traced program, so that it is the one which that program would ask for.

    **Arguments:**

    - `product`: one of `PRODUCTS`.
    - `m`, `k`, `n`: the sizes of the forward product.
    - `device`: a generation, the kind of a TPU that is not known here, or `None`.
    - `weights`: `"int8"`, where K x N is that, with a scale for each column.
    - `bias`, `activation`: what the kernel of the forward product does to the sums; the activation
        is one of `ACTIVATIONS`.
    - `derivative`: whether it returns the activation's derivative too, as under `jax.grad`.

    **Raises:**

    `ValueError`, `TypeError` or [`pallas_ops.UnsupportedCallError`][] for what the kernel does not
    have.
    """
    transpose_lhs, transpose_rhs = (letter == "T" for letter in layout.upper())
    lhs = jax.ShapeDtypeStruct((k, m) if transpose_lhs else (m, k), jnp.dtype(dtype))
    rhs = jax.ShapeDtypeStruct((n, k) if transpose_rhs else (k, n), jnp.dtype(weights or dtype))
    default = "float32" if weights and dtype == "int8" else dtype
    out = jax.ShapeDtypeStruct((m, n), jnp.dtype(out_dtype or default))
    operand = {"lhs_cotangent": lhs, "rhs_cotangent": rhs}.get(product)
    if operand is not None and jnp.issubdtype(operand.dtype, jnp.integer):
        raise ValueError(
            f"a product of {operand.dtype} has no gradients, and {product!r} was asked for."
        )
    epilogue: dict[str, Any] = {}
    if bias:
        epilogue["bias"] = jnp.ones((n,), jnp.dtype(dtype))
    if activation is not None:
        epilogue["activation"] = ACTIVATIONS[activation]
    if epilogue and product != "forward":
        raise ValueError(
            f"bias and activation are the forward product's, and {product!r} has none."
        )
    if derivative and activation is None:
        raise ValueError("a derivative is that of an activation, and none was named.")
    forward = functools.partial(
        matmul if weights is None else functools.partial(_scaled, n=n),
        **epilogue,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        preferred_element_type=out.dtype,
        precision=precision,
    )

    def gradient_of_lhs(lhs, rhs, cotangent):
        return jax.vjp(lambda lhs: forward(lhs, rhs), lhs)[1](cotangent)

    def gradient_of_rhs(lhs, rhs, cotangent):
        return jax.vjp(lambda rhs: forward(lhs, rhs), rhs)[1](cotangent)

    def product_itself(lhs, rhs, _):
        if derivative:
            return jax.vjp(lambda lhs: forward(lhs, rhs), lhs)[0]
        return forward(lhs, rhs)

    functions = (product_itself, gradient_of_lhs, gradient_of_rhs)
    function = dict(zip(PRODUCTS, functions, strict=True))[product]
    known = device if find_generation(device) else None
    # A call that names its implementation is refused here for what the kernel does not have.
    with options(implementation=implementation, device=known):
        found = collect(function, lhs, rhs, out, device=device, implementation=implementation)
    return found[-1]  # after the product itself


def _scaled(lhs: jax.Array, rhs: jax.Array, *, n: int, **keywords: Any) -> jax.Array:
    return quantized_matmul(lhs, rhs, jnp.ones((n,), jnp.float32), **keywords)
