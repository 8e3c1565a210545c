"""What resolvers cost, and the road to a kernel, for `pallas-ops bench overhead`."""

import dataclasses
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..operators import matmul
from ..tiles import (
    AutotuneResolver,
    CachedResolver,
    collect,
    Entry,
    problem_key,
    resolve_tile,
    StaticResolver,
    TileChoice,
    TileConfig,
    TileProblem,
    TileResolver,
    TileStore,
    versions,
)
from ._against import Against, measure_against


TARGET_MICROSECONDS = 50.0
"""What a known problem may cost."""

_RUNS = 20

_ROWS, _FEATURES = 8, 256
_IMPLEMENTATION = "interpret"  # the kernel, and so its tile, on every platform


@dataclasses.dataclass(frozen=True)
class Resolving:
    """What one resolver takes for one problem, in microseconds.

    **Arguments:**

    - `name`: the resolver, in words.
    - `first_microseconds`: the first time in this run.
    - `known_microseconds`: the resolver alone, afterwards.
    - `checked_microseconds`: all that is paid, afterwards: the resolver, and the check of its tile.
    - `is_known`: whether the problem is one that the resolver knows.
    """

    name: str
    first_microseconds: float
    known_microseconds: float
    checked_microseconds: float
    is_known: bool = True

    @property
    def is_within_target(self) -> bool:
        return not self.is_known or self.checked_microseconds < TARGET_MICROSECONDS


@dataclasses.dataclass(frozen=True)
class Dispatching:
    """What one call of a jitted step takes.

    **Arguments:**

    - `name`: where its tiles come from.
    - `microseconds`: one call, until its result is there.
    - `ratio`: that against the same step with named tiles.
    - `same_program`: whether the compiled program is that one's, to the letter.
    """

    name: str
    microseconds: float
    ratio: float
    same_program: bool


@dataclasses.dataclass(frozen=True)
class Overhead:
    """All of it, and where it was measured."""

    resolving: tuple[Resolving, ...]
    dispatching: tuple[Dispatching, ...]
    against: tuple[Against, ...]
    where: str

    def as_json(self) -> dict[str, Any]:
        ratios = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.against]
        found = dataclasses.asdict(self) | {"against": ratios}
        return {"target_microseconds": TARGET_MICROSECONDS} | found


def _seconds_each(function: Callable[[], Any], calls: int) -> float:
    """The least over several runs of many calls: what it takes where nothing comes between."""
    taken = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        taken.append((time.perf_counter() - start) / calls)
    return min(taken)


def measure_resolving(
    name: str, resolver: TileResolver, problem: TileProblem, *, is_known: bool = True
) -> Resolving:
    """What `resolver` takes for `problem`, the first time and later."""
    choice = TileChoice(resolver=resolver)
    start = time.perf_counter()
    resolver.resolve(problem)
    first = time.perf_counter() - start
    known = _seconds_each(lambda: resolver.resolve(problem), calls=50)
    checked = _seconds_each(lambda: resolve_tile(problem, choice), calls=50)
    return Resolving(name, first * 1e6, known * 1e6, checked * 1e6, is_known)


def make_step(tiles: Any) -> Any:
    """A small step, jitted: a loss and its gradients, three products."""

    def loss(weight, x):
        product = matmul(x, weight, transpose_rhs=True, tiles=tiles, implementation=_IMPLEMENTATION)
        return jnp.mean(product**2)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def measure_dispatching(steps: dict[str, Any], *, calls: int = 1000) -> tuple[Dispatching, ...]:
    """One call of a step for each way to say its tiles; the first is what others are held against.

    The steps take turns, call by call and in a new order each time: whatever else the machine does
    meets them all alike.
    """
    arguments = (jnp.ones((_FEATURES, _FEATURES)), jnp.ones((_ROWS, _FEATURES)))
    functions = {name: make_step(tiles) for name, tiles in steps.items()}
    programs = {name: step.lower(*arguments).as_text() for name, step in functions.items()}
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for step in functions.values():
        jax.block_until_ready(step(*arguments))
    order, generator = list(functions.items()), random.Random(0)
    for _ in range(calls):
        generator.shuffle(order)
        for name, step in order:
            start = time.perf_counter()
            jax.block_until_ready(step(*arguments))
            taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    base = next(iter(medians))
    return tuple(
        Dispatching(name, median * 1e6, median / medians[base], programs[name] == programs[base])
        for name, median in medians.items()
    )


def _where() -> str:
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f" ({device.device_kind})"
    return (
        f"{device.platform.upper()}{kind}, {platform.machine()}, {os.cpu_count()} cores, "
        f"jax {jax.__version__}, Python {platform.python_version()}, implementation "
        f"{_IMPLEMENTATION!r}"
    )


def _stored(directory: str, problems: tuple[TileProblem, ...]) -> None:
    for problem in problems:
        entry = Entry(
            key=problem_key(problem),
            versions=versions(),
            tile=StaticResolver().resolve(problem).tile,
            reason="put there to be measured",
        )
        TileStore(directory).put(entry)


def measure() -> Overhead:
    """All that `pallas-ops bench overhead` shows; the user's store is not touched."""
    shapes = (
        jax.ShapeDtypeStruct((_FEATURES, _FEATURES), jnp.float32),
        jax.ShapeDtypeStruct((_ROWS, _FEATURES), jnp.float32),
    )
    problems = tuple(
        dataclasses.replace(problem, can_be_timed=True)
        for problem in collect(make_step(None), *shapes, implementation=_IMPLEMENTATION)
    )
    problem = problems[0]
    named = TileConfig(_ROWS, _FEATURES, _FEATURES)
    mapping = {(found.m, found.k, found.n): named for found in problems}
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as empty:
        _stored(directory, problems)
        cached, autotune = CachedResolver(directory), AutotuneResolver(directory=directory)
        resolving = tuple(
            measure_resolving(name, resolver, problem, is_known=not name.endswith("not stored"))
            for name, resolver in (
                ("StaticResolver, one tile", StaticResolver(named)),
                ("StaticResolver, a mapping", StaticResolver(mapping)),
                ("StaticResolver, by shape", StaticResolver()),
                ("CachedResolver, stored", cached),
                ("CachedResolver, not stored", CachedResolver(empty, quiet=True)),
                ("AutotuneResolver, stored", autotune),
            )
        )
        tiles = [StaticResolver().resolve(found).tile for found in problems]
        roles = ("forward", "lhs_cotangent", "rhs_cotangent")
        dispatching = measure_dispatching(
            {
                "named tiles": _by_role(problems, roles, tiles),
                "StaticResolver": StaticResolver(),
                "CachedResolver": cached,
                "AutotuneResolver": autotune,
            }
        )
    return Overhead(resolving, dispatching, measure_against(), _where())


def _by_role(problems, roles, tiles) -> dict[str, TileConfig]:
    """The tiles by their product's name: forward NT, then NN for lhs, TN for rhs."""
    layouts = dict(zip(("NT", "NN", "TN"), roles, strict=True))
    return {layouts[found.layout]: tile for found, tile in zip(problems, tiles, strict=True)}
