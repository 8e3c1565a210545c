"""`PallasLinear`: `eqx.nn.Linear` by way of the operator."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray, Shaped

from ..operators import get_operator
from ..operators._matmul import linear
from ..tiles import as_tile_choice, TileChoice, Tiles


class PallasLinear(eqx.nn.Linear):
    """A drop-in for `equinox.nn.Linear` whose products are [`pallas_ops.matmul`][].

    Same constructor, same fields, same initial values from the same key, and a subclass, so that
    `isinstance(layer, eqx.nn.Linear)` holds. Beyond it: leading batch axes may be given directly,
    and an input whose last axis is not `in_features` is an error, where `eqx.nn.Linear` would
    broadcast some of them.
    """

    tiles: TileChoice | None = eqx.field(static=True, default=None)
    implementation: str | None = eqx.field(static=True, default=None)

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: PRNGKeyArray,
        tiles: Tiles = None,
        implementation: str | None = None,
    ):
        """**Arguments:**

        - `in_features`: the input size, or `"scalar"` for inputs of shape `()`.
        - `out_features`: the output size, or `"scalar"` for outputs of shape `()`.
        - `use_bias`: whether to add a bias.
        - `dtype`: the dtype of weight and bias; `None` is JAX's default floating-point dtype.
        - `key`: a `jax.random.PRNGKey` for the initial values, which are those of
            `eqx.nn.Linear`, bit for bit. (Keyword only.)
        - `tiles`, `implementation`: as in [`pallas_ops.matmul`][]. (Keyword only.)

        **Raises:**

        `ValueError` for an unknown implementation, `TypeError` for tiles that are none.
        """
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        self.tiles, self.implementation = checked(tiles, implementation)

    @classmethod
    def from_linear(
        cls, layer: eqx.nn.Linear, *, tiles: Tiles = None, implementation: str | None = None
    ) -> "PallasLinear":
        """The same layer as a `PallasLinear`, sharing its arrays.

        Whatever stands in `layer.weight` and `layer.bias` is taken as it is: stacked arrays of an
        ensemble, or the placeholders of `eqx.nn.Shared` and `eqx.filter`.

        **Arguments:**

        - `layer`: an `equinox.nn.Linear`.
        - `tiles`, `implementation`: as in [`pallas_ops.matmul`][].

        **Returns:**

        A `PallasLinear`.
        """
        if not isinstance(layer, eqx.nn.Linear):
            raise TypeError(
                f"PallasLinear.from_linear takes an equinox.nn.Linear, got a "
                f"{type(layer).__name__}."
            )
        tiles, implementation = checked(tiles, implementation)
        return _rebuild(cls, layer, tiles=tiles, implementation=implementation)

    def to_linear(self) -> eqx.nn.Linear:
        """The same layer as an `equinox.nn.Linear`, sharing its arrays."""
        return _rebuild(eqx.nn.Linear, self)

    @jax.named_scope("pallas_ops.PallasLinear")
    def __call__(
        self, x: Shaped[ArrayLike, "..."], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "..."]:
        """**Arguments:**

        - `x`: shape `(..., in_features)`, or `(...)` if `in_features="scalar"`. Leading axes are
            batch axes; `jax.vmap` does the same, at the same cost.
        - `key`: ignored; there for compatibility with the rest of Equinox. (Keyword only.)

        **Returns:**

        Shape `(..., out_features)`, or `(...)` if `out_features="scalar"`. The dtype is that of
        `x @ weight.T + bias` in `jax.numpy`.

        **Raises:**

        `ValueError` where the last axis of `x` is not `in_features`.
        """
        x = as_input(self, x)
        out = linear(x, self.weight, self.bias, self.tiles, self.implementation)
        return as_output(self, out)


def as_input(layer: Any, x: Any) -> jax.Array:
    """The input of a layer with the fields of `eqx.nn.Linear`, checked: shape `(..., in)`."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")) and not isinstance(
        x, int | float | complex
    ):
        raise TypeError(f"{_named(layer)}: the input must be an array, got {x!r}.")
    if layer.weight.ndim != 2:
        raise ValueError(
            f"{_named(layer)}: the weight must have shape (out_features, in_features), got "
            f"{layer.weight.dtype}{list(layer.weight.shape)}. Layers that are stacked into an "
            f"ensemble are called under equinox.filter_vmap."
        )
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if layer.in_features == "scalar":
        return x.reshape(*x.shape, 1)
    if x.ndim == 0 or x.shape[-1] != layer.in_features:
        raise ValueError(
            f"{_named(layer)}: expected an input of shape (..., {layer.in_features}), with any "
            f"leading batch axes; got {x.dtype}{list(x.shape)}."
        )
    return x


def as_output(layer: Any, out: jax.Array) -> jax.Array:
    """The result of a layer, of shape `(..., out)`, without that axis for `"scalar"`."""
    return out.reshape(out.shape[:-1]) if layer.out_features == "scalar" else out


def _named(layer: Any) -> str:
    features = f"in_features={layer.in_features}, out_features={layer.out_features}"
    return f"{type(layer).__name__}({features})"


def checked(tiles: Any, implementation: Any) -> tuple[TileChoice | None, str | None]:
    if implementation is not None:
        get_operator("matmul").check_implementation(implementation)
    return as_tile_choice(tiles), implementation


_LINEAR_FIELDS = ("weight", "bias", "in_features", "out_features", "use_bias")


def _rebuild(cls: type, layer: eqx.nn.Linear, **extra: Any) -> Any:
    """An instance of `cls` with the fields of `layer`, and no check run on what they hold.

    As JAX rebuilds a module from its leaves, which may be anything.
    """
    new: Any = object.__new__(cls)
    values = {name: getattr(layer, name) for name in _LINEAR_FIELDS} | extra
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new
