"""What a kernel does to a product before it rounds and stores it."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._elementwise import ElementwiseProgram


IDENTITY = ElementwiseProgram((), 0)
"""The function that changes nothing."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """An array with one entry for each column of a product.

    **Arguments:**

    - `shape`: `(*leading, 1, n)`; each leading axis as in the product, or 1.
    - `dtype`: of the entries.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """`function(product * scale + bias)` for each of several functions, each result an output.

    All of it happens to the accumulator: each output is rounded once.

    **Arguments:**

    - `scale`: the factors of the columns; `None` for none.
    - `bias`: what is added to the columns; `None` for none.
    - `functions`: one for each output, of single entries.
    """

    scale: Columns | None = None
    bias: Columns | None = None
    functions: tuple[ElementwiseProgram, ...] = (IDENTITY,)

    @property
    def columns(self) -> tuple[Columns, ...]:
        """The arrays that the kernel reads beside the operands, in their order."""
        return tuple(array for array in (self.scale, self.bias) if array is not None)

    @staticmethod
    def of_label(label: str, leading_axes: int, n: int) -> "Epilogue | None":
        """One that reads and returns as much as the one of this label; what it computes is lost.

        **Arguments:**

        - `label`: as of `Epilogue.label`; `""` is no epilogue.
        - `leading_axes`: how many there are before the rows and columns of the product.
        - `n`: columns of the product.

        **Raises:**

        `TypeError` for a dtype that is none.
        """
        if not label:
            return None
        named = dict(word.split(":", 1) for word in label.split() if ":" in word)
        columns = {
            name: Columns((*(1,) * leading_axes, 1, n), np.dtype(jnp.dtype(named[name])))
            for name in ("scale", "bias")
            if name in named
        }
        outputs = sum(":" not in word for word in label.split())
        return Epilogue(**columns, functions=(IDENTITY,) * max(outputs, 1))

    def by_name(self, arrays: Iterable[Any]) -> tuple[Any, Any]:
        """Scale and bias among what is there of them; `None` for one that is not."""
        given = iter(arrays)
        scale = None if self.scale is None else next(given)
        return scale, None if self.bias is None else next(given)

    def with_shapes(self, shapes: Iterable[tuple[int, ...]]) -> "Epilogue":
        """The same for arrays of other shapes, in the order of `columns`."""
        arrays = (
            dataclasses.replace(array, shape=shape)
            for array, shape in zip(self.columns, shapes, strict=True)
        )
        scale, bias = self.by_name(arrays)
        return dataclasses.replace(self, scale=scale, bias=bias)

    def of_columns(self, n: int) -> "Epilogue":
        """The same for a product of another number of columns."""
        return self.with_shapes((*array.shape[:-1], n) for array in self.columns)

    @functools.cached_property
    def label(self) -> str:
        """A name for the keys of stored tiles: what it reads, and a digest of what it computes."""
        read = [
            f"{name}:{array.dtype.name}"
            for name, array in (("scale", self.scale), ("bias", self.bias))
            if array is not None
        ]
        computed = [
            "identity"
            if function == IDENTITY
            else hashlib.sha256(repr(function).encode()).hexdigest()[:8]
            for function in self.functions
        ]
        return " ".join([*read, *computed])

    def apply(self, product: jax.Array, *columns: jax.Array) -> tuple[jax.Array, ...]:
        """The outputs, not rounded yet.

        **Arguments:**

        - `product`: the accumulator; integers where they have a scale.
        - `*columns`: scale and bias, as far as there are, of shapes that broadcast with it.
        """
        value = scale_and_shift(product, *self.by_name(columns))
        return tuple(function(value) for function in self.functions)


def scale_and_shift(
    product: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """`product * scale + bias`, as far as there are; integers that have a scale become float32."""
    if scale is not None:
        if jnp.issubdtype(product.dtype, jnp.integer):
            product = product.astype(jnp.float32)
        product = product * _broadcast(scale, product)
    return product if bias is None else product + _broadcast(bias, product)


def _broadcast(columns: jax.Array, product: jax.Array) -> jax.Array:
    return jnp.broadcast_to(columns.astype(product.dtype), product.shape)
