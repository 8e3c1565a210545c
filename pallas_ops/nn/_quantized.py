"""`QuantizedPallasLinear`: a linear layer whose weights are int8."""

from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, ArrayLike, Float, Int8, PRNGKeyArray, Shaped

from ..operators import quantize_int8, quantized_matmul
from ..tiles import TileChoice, Tiles
from ._linear import as_input, as_output, checked


class QuantizedPallasLinear(eqx.Module):
    """A linear layer with int8 weights, and one scale for each output.

    Its product is [`pallas_ops.quantized_matmul`][]: the weights are read as int8, and are never
    stored in any wider dtype. Made by `from_linear`, for inference, or to train what stands before
    and around it: `equinox.filter_grad` gives gradients of its input, of `scale` and of `bias`.

    ```python
    layer = pallas_ops.QuantizedPallasLinear.from_linear(linear)
    ```
    """

    weight: Int8[Array, "*stack out in"]
    scale: Float[Array, "*stack out"]
    bias: Float[Array, "*stack out"] | None
    in_features: int | Literal["scalar"] = eqx.field(static=True)
    out_features: int | Literal["scalar"] = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    tiles: TileChoice | None = eqx.field(static=True, default=None)
    implementation: str | None = eqx.field(static=True, default=None)

    @classmethod
    def from_linear(
        cls, layer: eqx.nn.Linear, *, tiles: Tiles = None, implementation: str | None = None
    ) -> "QuantizedPallasLinear":
        """A linear layer with its weights rounded by [`pallas_ops.quantize_int8`][].

        No weight is off by more than half of its output's scale. An ensemble of layers, stacked
        under `equinox.filter_vmap`, is taken too.

        **Arguments:**

        - `layer`: an `equinox.nn.Linear`, such as a [`pallas_ops.PallasLinear`][], of real
            floating-point numbers. Its bias is shared.
        - `tiles`, `implementation`: as in [`pallas_ops.matmul`][].

        **Returns:**

        A `QuantizedPallasLinear`.

        **Raises:**

        `TypeError` for what is no linear layer, and for other dtypes; `ValueError` for weights that
        are not finite.
        """
        if not isinstance(layer, eqx.nn.Linear):
            raise TypeError(
                f"{cls.__name__}.from_linear takes an equinox.nn.Linear, got a "
                f"{type(layer).__name__}."
            )
        choice, implementation = checked(tiles, implementation)
        weight, scale = quantize_int8(layer.weight)
        return cls(
            weight,
            scale,
            layer.bias,
            layer.in_features,
            layer.out_features,
            layer.use_bias,
            choice,
            implementation,
        )

    @jax.named_scope("pallas_ops.QuantizedPallasLinear")
    def __call__(
        self, x: Shaped[ArrayLike, "..."], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "..."]:
        """**Arguments:**

        - `x`: floating-point or int8, shape `(..., in_features)`, or `(...)` if
            `in_features="scalar"`. Leading axes are batch axes; `jax.vmap` does the same, at the
            same cost.
        - `key`: ignored; there for compatibility with the rest of Equinox. (Keyword only.)

        **Returns:**

        Shape `(..., out_features)`, or `(...)` if `out_features="scalar"`. The dtype is that of
        `x + bias` in `jax.numpy`; for an int8 `x`, of `scale + bias`.

        **Raises:**

        `ValueError` where the last axis of `x` is not `in_features`, `TypeError` for an `x` of
        other numbers.
        """
        x = as_input(self, x)
        out = quantized_matmul(
            x[None] if x.ndim == 1 else x,
            self.weight,
            self.scale,
            transpose_rhs=True,
            bias=self.bias,
            tiles=self.tiles,
            implementation=self.implementation,
        )
        return as_output(self, out[0] if x.ndim == 1 else out)
