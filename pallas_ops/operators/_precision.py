"""`precision=`, read once when a call is bound."""

from typing import Any

import jax
from jax import lax


_ASCENDING = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


def resolve_precision(precision: Any) -> lax.Precision:
    """One precision for both operands, from all that `jax.lax.dot_general` takes for it.

    **Arguments:**

    - `precision`: `None`, a string, a `jax.lax.Precision`, or a pair of these. `None` is
        `jax.config.jax_default_matmul_precision`, or `HIGHEST` where that is a dot algorithm. Of a
        pair the higher counts, since the kernel has one precision: never less than was asked for.

    **Raises:**

    `TypeError` for a `jax.lax.DotAlgorithmPreset`, `ValueError` for an unknown name.
    """
    if precision is None:
        config: Any = jax.config  # its options are not typed in every version of JAX
        default = config.jax_default_matmul_precision
        if default in lax.DotAlgorithmPreset.__members__:
            return lax.Precision.HIGHEST  # not asked of this call, and never less
        return lax.Precision.DEFAULT if default is None else resolve_precision(default)
    if isinstance(precision, tuple | list):
        if len(precision) != 2:
            raise ValueError(
                f"matmul: `precision` as a pair has one entry for lhs and one for rhs, got "
                f"{precision!r}."
            )
        return max(map(resolve_precision, precision), key=_ASCENDING.index)
    if isinstance(precision, lax.Precision):
        return precision
    if isinstance(precision, str):
        try:
            return lax.Precision(precision)
        except ValueError:
            pass
    if isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset) or (
        isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__
    ):
        raise TypeError(
            f"matmul: a dot algorithm ({precision}) cannot be asked of a TPU kernel. Use "
            f"`precision=` DEFAULT, HIGH or HIGHEST, from jax.lax.Precision or as strings."
        )
    raise ValueError(
        f"matmul: unknown precision {precision!r}. It may be None, 'default', 'high' or 'highest' "
        f"(or jax's other names for them), a jax.lax.Precision, or a pair of these."
    )
