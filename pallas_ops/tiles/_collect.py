"""The problems in a program: what there is to tune."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from ..kernels import problem_of
from ._problem import TileProblem


# By name: the primitive is of a higher room.
_PRIMITIVE = "pallas_ops_matmul"
_FIELDS = ("transpose_lhs", "transpose_rhs", "sum_leading", "out_dtype", "precision")


def _equations(jaxpr: Any) -> Iterator[Any]:
    waiting = [jaxpr]
    while waiting:
        jaxpr = waiting.pop()
        for equation in jaxpr.eqns:
            yield equation
            waiting.extend(jex_core.jaxprs_in_params(equation.params))


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
    kernel does not have.
    """
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
        if equation.primitive.name != _PRIMITIVE:
            continue
        params = equation.params
        matmul = problem_of(
            *(operand.aval for operand in equation.invars),
            **{name: params[name] for name in _FIELDS},
        )
        if matmul.is_empty or matmul.why_not_in_kernel() is not None:
            continue
        named = params["implementation"]
        problem = TileProblem(
            matmul,
            device=params["device"] if device is None else device,
            implementation=named if named not in (None, "xla") else implementation,
        )
        found[problem] = None
    return tuple(found)
