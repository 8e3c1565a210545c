"""The problems in a program: what there is to tune."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from .._hardware import find_generation, known_generation
from ._problem import TileProblem


PRIMITIVES = ("pallas_ops_matmul", "pallas_ops_matmul_with_sums")
"""By name: the primitives are of a higher room."""

# Those that run the kernel, and have tiles.
_IMPLEMENTATIONS = ("mosaic", "interpret", "tpu_interpret")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _check(device: str | None, implementation: str) -> None:
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"collect: `implementation` is one that runs the kernel, of "
            f"{', '.join(map(repr, _IMPLEMENTATIONS))}; got {implementation!r}."
        )
    if device is None or find_generation(device) is not None:
        return
    # One that is too new to be known may be here all the same.
    if all(here.platform != "tpu" or here.device_kind != device for here in jax.devices()):
        known_generation(device)


def collect(
    function: Callable,
    *args: Any,
    device: str | None = None,
    implementation: str = "mosaic",
    **kwargs: Any,
) -> tuple[TileProblem, ...]:
    """Every matrix multiplication that a function's program makes of [`pallas_ops.matmul`][].

    The function is traced and not run. Those of its gradients are there where it computes
    gradients, each with its own shape and layout.

    ```python
    problems = pallas_ops.tiles.collect(step, model, x, y)
    ```

    **Arguments:**

    - `function`: what to trace.
    - `*args`, `**kwargs`: its arguments: PyTrees of arrays, of `jax.ShapeDtypeStruct`, or of
        anything else, which is left as it is.
    - `device`: the TPU to tune for, as in [`pallas_ops.options`][].
    - `implementation`: the implementation to tune, where a call names none.

    **Returns:**

    The problems in the order of the program, each once; none that is empty, or of dtypes that the
    kernel does not have, or which a call leaves to XLA by name.

    **Raises:**

    `ValueError` for a TPU or an implementation that is none.
    """
    _check(device, implementation)
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def run(arrays):
        given = iter(arrays)
        all_leaves = [
            next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(tree, all_leaves)
        # What a function returns may hold anything, such as an `equinox.Module` with functions.
        out = jax.tree.leaves(function(*args, **kwargs))
        return [leaf for leaf in out if isinstance(leaf, jax.Array)]

    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    found: dict[TileProblem, None] = {}
    for equation in _equations(jax.make_jaxpr(run)(arrays).jaxpr):
        if equation.primitive.name not in PRIMITIVES:
            continue
        call = equation.params["call"]
        matmul, options = call.problem, call.options
        left_to_xla = options.implementation == "xla" or matmul.why_not_in_kernel() is not None
        if left_to_xla or matmul.is_empty:
            continue
        problem = TileProblem(
            matmul,
            device=options.device if device is None else device,
            implementation=options.implementation or implementation,
        )
        found[problem] = None
    return tuple(found)
