"""What tracing, dispatching and importing cost against Equinox: `pallas-ops bench overhead`."""

import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..nn import swap_linear
from ..operators import matmul, options
from ..tiles import StaticResolver


_RUNS = 7
_EXAMPLES, _ROWS, _FEATURES, _HEADS, _LAYERS = 4, 128, 256, 4, 12


@dataclasses.dataclass(frozen=True)
class Against:
    """What something takes, here and without this package, in one run.

    **Arguments:**

    - `name`: what is done.
    - `theirs_seconds`, `ours_seconds`: the least of several runs, which took turns.
    - `target`: what the ratio of ours to theirs should be at most.
    """

    name: str
    theirs_seconds: float
    ours_seconds: float
    target: float

    @property
    def ratio(self) -> float:
        return self.ours_seconds / self.theirs_seconds


class _Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: list[eqx.nn.Linear]

    def __init__(self, key: jax.Array):
        attention, up, down = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(_FEATURES) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(_HEADS, _FEATURES, key=attention)
        self.mlp = [
            eqx.nn.Linear(_FEATURES, 4 * _FEATURES, key=up),
            eqx.nn.Linear(4 * _FEATURES, _FEATURES, key=down),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        before, after = (jax.vmap(norm) for norm in self.norms)
        up, down = self.mlp
        h = before(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(lambda row: down(jax.nn.gelu(up(row))))(after(x))


def _gradient(model: list[_Block]) -> Callable[[], Any]:
    """A function that traces a transformer's gradient anew and lowers it for a TPU."""
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    shape = jax.ShapeDtypeStruct((_EXAMPLES, _ROWS, _FEATURES), jnp.float32)

    def run() -> Any:
        def loss(parameters: Any, x: jax.Array) -> jax.Array:
            for block in eqx.combine(parameters, rest):
                x = jax.vmap(block)(x)
            return jnp.mean(x**2)

        with options(tiles=StaticResolver()):
            traced = jax.jit(jax.grad(loss)).trace(parameters, shape)
            return traced.lower(lowering_platforms=("tpu",))

    return run


def _least(theirs: Callable[[], Any], ours: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Processor seconds of one call, the least of several runs of so many calls."""
    least = [float("inf")] * 2
    for run in range(_RUNS + 1):
        for index, function in enumerate((theirs, ours)):
            gc.collect()
            start = time.process_time()
            for _ in range(calls):
                jax.block_until_ready(function())
            taken = (time.process_time() - start) / calls
            if run > 0:  # in the first all is compiled
                least[index] = min(least[index], taken)
    return least[0], least[1]


def _import_seconds(module: str, environment: dict[str, str]) -> float:
    code = (
        f"import time; start = time.process_time(); import {module}; "
        "print(time.process_time() - start)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _imports() -> tuple[float, float]:
    """Processor seconds to import Equinox, and this package, from bytecode that is there."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        found = [
            [_import_seconds(module, environment) for module in ("equinox", "pallas_ops")]
            for _ in range(max(_RUNS // 2, 1) + 1)
        ]
    theirs, ours = (min(times) for times in zip(*found[1:], strict=True))
    return theirs, ours


def measure_against(layers: int = _LAYERS) -> tuple[Against, ...]:
    """All rows; `layers` of a transformer are traced."""
    key = jax.random.key(0)
    model = [_Block(one) for one in jax.random.split(key, layers)]
    theirs = eqx.nn.Linear(_FEATURES, _FEATURES, key=key)
    ours = swap_linear(theirs)
    x = jnp.ones((_FEATURES, _FEATURES))
    row, weight = x[0], theirs.weight

    def loss(layer: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(jax.vmap(layer)(x)))

    gradient = eqx.filter_grad(loss)
    size = f"{_FEATURES} x {_FEATURES}"
    return (
        Against(
            f"trace and lower for a TPU: the gradient of a {layers}-layer transformer",
            *_least(_gradient(model), _gradient(swap_linear(model)), calls=1),
            target=1.3,
        ),
        Against(
            f"a layer of {size}, eagerly",
            *_least(lambda: theirs(row), lambda: ours(row), calls=50),
            target=5.0,
        ),
        Against(
            f"a product of {size} with gelu, eagerly",
            *_least(
                lambda: jax.nn.gelu(x @ weight),
                lambda: matmul(x, weight, activation=jax.nn.gelu),
                calls=20,
            ),
            target=5.0,
        ),
        Against(
            f"grad(vmap(layer)) of {size}, eagerly",
            *_least(lambda: gradient(theirs), lambda: gradient(ours), calls=10),
            target=1.5,
        ),
        Against("import, against Equinox", *_imports(), target=1.3),
    )
