"""Measuring the tiles of problems one after another, for `pallas-ops tune`."""

import contextlib
import dataclasses
import importlib.util
import inspect
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..compiler import CompilePool
from ..tiles import (
    AutotuneResolver,
    candidates,
    collect,
    Entry,
    nearest_legal,
    problem_key,
    StaticResolver,
    TileConfig,
    TileProblem,
    TileStore,
    versions,
    why_too_large,
)
from ..tiles._compiler import compiler_entry
from ..tiles._ranking import rank
from ..tiles._sweep import Timer
from ..tiles._timing import time_per_call
from ._console import told_warnings
from ._entries import canonical_key


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What came of one problem.

    **Arguments:**

    - `problem`: what was tuned.
    - `path`: the file in the store.
    - `status`: `"tuned"`; `"known"` where it was stored before; `"failed"` where nothing could be
        measured, or `"not stored"` where it could not be written.
    - `entry`: what was found.
    - `estimate`: the tile that would be taken without measuring.
    - `estimate_seconds`: the time of that one, where it was measured as well.
    - `told`: what there is to say about it.
    - `predicted_seconds`: the time that was predicted, where it was compiled and not measured.
    """

    problem: TileProblem
    path: pathlib.Path
    status: str
    entry: Entry | None
    estimate: TileConfig
    estimate_seconds: float | None = None
    told: tuple[str, ...] = ()
    predicted_seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "problem": problem_key(self.problem) | {"m": self.problem.m},
            "status": self.status,
            "file": str(self.path),
            "tile": None if entry is None else list(entry.tile.numbers),
            "source": None if entry is None else entry.source,
            "seconds": None if entry is None else entry.seconds,
            "predicted_seconds": self.predicted_seconds,
            "estimate_tile": list(self.estimate.numbers),
            "estimate_seconds": self.estimate_seconds,
            "reason": None if entry is None else entry.reason,
            "warnings": list(self.told),
        }


def one_for_each_entry(problems: Iterable[TileProblem]) -> list[TileProblem]:
    """Of problems that one entry serves, which differ in m alone, the largest."""
    largest: dict[tuple, TileProblem] = {}
    for problem in problems:
        key = canonical_key(problem_key(problem))
        if key not in largest or largest[key].m < problem.m:
            largest[key] = problem
    return list(largest.values())


def tune(
    problem: TileProblem,
    *,
    budget_seconds: float,
    most_candidates: int,
    again: bool,
    timer: Timer | None = None,
) -> Tuned:
    """Measures one problem and stores the fastest tile, as `AutotuneResolver` does.

    **Arguments:**

    - `problem`: what to tune.
    - `budget_seconds`, `most_candidates`: as in [`pallas_ops.AutotuneResolver`][].
    - `again`: whether to measure what is stored already.
    - `timer`: measures in place of `time_per_call`.
    """
    problem = dataclasses.replace(problem, can_be_timed=True)
    store, key = TileStore(), problem_key(problem)
    path = store.path(key, versions())
    estimate = StaticResolver().resolve(problem).tile
    told: list[str] = []
    if not again:
        with told_warnings(told):
            known = store.get(key, versions())
        if known is not None and not why_too_large(
            problem, nearest_legal(problem.matmul, known.tile)
        ):
            return Tuned(problem, path, "known", known, estimate, told=tuple(told))

    seconds: dict[TileConfig, float] = {}

    def recording(problem, tile, run, hopeless_seconds):
        if timer is None:
            taken = time_per_call(run, hopeless_seconds=hopeless_seconds).seconds
        else:
            taken = timer(problem, tile, run, hopeless_seconds)
        if math.isfinite(taken) and taken > 0:
            seconds[tile] = taken
        return taken

    # Into a store aside: an old entry is asked there by nobody, and stays until a new one is found.
    with tempfile.TemporaryDirectory() as aside, told_warnings(told):
        resolver = AutotuneResolver(
            budget_seconds=budget_seconds,
            most_candidates=most_candidates,
            directory=aside,
            timer=recording,
        )
        resolver.resolve(problem)
        entry = TileStore(aside).get(key, versions())
        stored = entry is not None and store.put(entry)
    # What the command says of an interpreter it says once, for all problems.
    told = [message for message in told if "tells nothing about a TPU" not in message]
    status = "failed" if entry is None else "tuned" if stored else "not stored"
    return Tuned(problem, path, status, entry, estimate, seconds.get(estimate), tuple(told))


def tune_without_tpu(
    problem: TileProblem,
    pool: CompilePool,
    *,
    budget_seconds: float,
    most_candidates: int,
    again: bool,
) -> Tuned:
    """Asks the TPU compiler for one problem and stores its tile, as `CompilerResolver` does.

    A tile that was measured stays: a prediction never replaces it.

    **Arguments:**

    - `problem`: what to tune, for a known TPU.
    - `pool`: where it is compiled.
    - `budget_seconds`, `most_candidates`: as in [`pallas_ops.CompilerResolver`][].
    - `again`: whether to compile for what is stored already.
    """
    store, key = TileStore(), problem_key(problem)
    path = store.path(key, versions())
    estimate = StaticResolver().resolve(problem).tile
    told: list[str] = []
    with told_warnings(told):
        known = store.get(key, versions())
    if known is not None and not why_too_large(problem, nearest_legal(problem.matmul, known.tile)):
        if again and not known.is_predicted:
            told.append("it was measured, and stays: a prediction does not replace it.")
        if not (again and known.is_predicted):
            return Tuned(problem, path, "known", known, estimate, told=tuple(told))
    tiles = candidates(problem, most=most_candidates)
    (ranking,) = rank([problem], [tiles], pool, budget_seconds=budget_seconds)
    if not ranking.may_be_stored:
        told.append(ranking.why_not_stored())
        return Tuned(problem, path, "failed", None, estimate, told=tuple(told))
    entry = compiler_entry(problem, ranking)
    with told_warnings(told):
        stored = store.put(entry)
    prediction = ranking.judgements[0][1].prediction
    return Tuned(
        problem,
        path,
        "tuned" if stored else "not stored",
        entry,
        estimate,
        told=tuple(told),
        predicted_seconds=None if prediction is None else prediction.seconds,
    )


class SourceError(Exception):
    """The function to tune for cannot be had; the message says why."""


@contextlib.contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def load_function(source: str) -> Callable[[], Any]:
    """The function that `path.py:function` names.

    **Raises:**

    `SourceError` where there is none, it cannot be called without arguments, or the file ends the
    program. Errors of the file itself are its own.
    """
    path_text, _, name = source.rpartition(":")
    expected = "expected path.py:function, such as train.py:step"
    if not (path_text and name):
        raise SourceError(f"{source!r} names no function: {expected}.")
    path = pathlib.Path(path_text)
    if not path.is_file():
        raise SourceError(f"{path} is no file: {expected}.")
    # As `python path.py` would: its neighbours can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    module_name = f"pallas_ops_tuned_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} is no Python file: {expected}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # a dataclass looks its module up
    try:
        # As of a script that is started without arguments: those here are not meant for it.
        with _arguments([str(path)]):
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise SourceError(
            f"{path} ended with SystemExit({error.code!r}) when it was loaded. It is imported and "
            f"not run as a script: put what a script does under `if __name__ == '__main__':`."
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            found
            for found, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        ]
        raise SourceError(
            f"{path} has no function {name!r}. It has: {', '.join(functions) or 'none'}."
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise SourceError(
            f"{name!r} of {path} is called without arguments, and that does not fit: {error}. "
            f"Write a function that makes what it needs, such as "
            f"`def tune(): return step(model, jnp.zeros((32, 64)))`."
        ) from None
    except ValueError:  # no signature to be had, as of some builtins
        pass
    return function


def collect_from(
    function: Callable[[], Any], *, device: str | None, implementation: str
) -> list[TileProblem]:
    """Every problem in the program of `function()`, for one implementation.

    A call that names another implementation of the kernel is left out.

    **Raises:**

    `SourceError` where the function ends the program.
    """
    try:
        problems = collect(function, device=device, implementation=implementation)
    except SystemExit as error:
        name = getattr(function, "__name__", repr(function))
        file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", "its file")
        raise SourceError(
            f"{name!r} of {file} ended with SystemExit({error.code!r}) when it was traced. It must "
            f"return: put what a script does under `if __name__ == '__main__':`."
        ) from None
    return [problem for problem in problems if problem.implementation == implementation]
