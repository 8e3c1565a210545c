"""`swap_linear` and `restore_linear`: every linear layer of a model at once."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..tiles import Tiles
from ._linear import checked, PallasLinear


Model = TypeVar("Model")


def _replace_layers(model: Any, cls: type, convert: Callable[[Any], Any]) -> tuple[Any, int]:
    """`model` with each node whose type is exactly `cls` converted, and how many there were."""
    found = 0

    def visit(node):
        nonlocal found
        if type(node) is not cls:
            return node
        found += 1
        return convert(node)

    new = jax.tree.map(visit, model, is_leaf=lambda node: type(node) is cls)
    return new, found


def swap_linear(
    model: Model,
    *,
    where: Callable[[Model], Any] | None = None,
    tiles: Tiles = None,
    implementation: str | None = None,
) -> Model:
    """Replaces every `equinox.nn.Linear` in a model by a `PallasLinear` with the same arrays.

    Any PyTree may be given, among them the state of an optimiser that was made for the model:
    swapping changes the tree's structure, so swap before `optim.init`, or swap the state as well.
    Subclasses of `equinox.nn.Linear` are left alone, so that swapping twice changes nothing.
    Layers out of reach of JAX's tree functions, such as one inside a closure, are not found.

    ```python
    model = pallas_ops.swap_linear(eqx.nn.MLP(64, 10, 128, 2, key=key))
    model = pallas_ops.swap_linear(model, where=lambda m: m.layers[1:], implementation="xla")
    ```

    **Arguments:**

    - `model`: a PyTree, such as an `equinox.Module`. It is not changed.
    - `where`: picks the parts to swap, as in `equinox.tree_at`: a function from the model to a
        layer, a part that holds layers, or a sequence of these. `None` is all of it.
    - `tiles`, `implementation`: as in [`pallas_ops.matmul`][], for every layer that is swapped.

    **Returns:**

    The new model. A call that finds no layer to swap warns, unless those there are `PallasLinear`
    already and nothing else is asked of them.

    **Raises:**

    `ValueError` or `TypeError` for an unknown implementation or tiles that are none.
    """
    checked(tiles, implementation)

    def convert(layer):
        return PallasLinear.from_linear(layer, tiles=tiles, implementation=implementation)

    asked = tiles is not None or implementation is not None
    return _swap(model, where, eqx.nn.Linear, PallasLinear, convert, "swap_linear", asked)


def restore_linear(model: Model, *, where: Callable[[Model], Any] | None = None) -> Model:
    """Replaces every `PallasLinear` in a model by an `equinox.nn.Linear` with the same arrays.

    **Arguments:**

    - `model`: a PyTree. It is not changed.
    - `where`: as in [`pallas_ops.swap_linear`][].

    **Returns:**

    The new model. `tiles` and `implementation` of the layers are forgotten.
    """
    return _swap(
        model, where, PallasLinear, eqx.nn.Linear, PallasLinear.to_linear, "restore_linear"
    )


def _swap(
    model: Any,
    where: Callable | None,
    old: type,
    new: type,
    convert: Callable,
    caller: str,
    asked: bool = False,
) -> Any:
    found, already = 0, 0

    def swap_part(part):
        nonlocal found, already
        already += _replace_layers(part, new, lambda layer: layer)[1]
        part, count = _replace_layers(part, old, convert)
        found += count
        return part

    if where is None:
        model = swap_part(model)
    else:
        model = eqx.tree_at(where, model, replace_fn=swap_part)
    if not found and not already:
        name = "PallasLinear" if old is PallasLinear else "equinox.nn.Linear"
        warnings.warn(
            f"pallas_ops.{caller} found no {name} in "
            f"{'the model' if where is None else 'what `where` picked'}, and changed nothing. "
            f"Layers inside closures and subclasses of it are out of reach.",
            stacklevel=3,
        )
    elif not found and asked:
        warnings.warn(
            f"pallas_ops.{caller} found only layers that are {new.__name__} already, and left "
            f"their `tiles` and `implementation` as they were. Use restore_linear first to set "
            f"them anew, or pallas_ops.options around the call.",
            stacklevel=3,
        )
    return model
