"""`AutotuneResolver`: measures on the first call."""

import concurrent.futures
import dataclasses
import os
import threading
from typing import Any

import jax

from .._hardware import find_generation
from ..compiler import kept_pool
from ._agree import agreed
from ._budget import check_budget
from ._cached import AGREE_SECONDS, CachedResolver, DEFAULT_FALLBACK, stored_tile
from ._candidates import candidates, estimated_tile
from ._config import TileConfig
from ._failures import failures_told
from ._key import problem_key, versions
from ._memory import is_measuring, lock, measuring, recall, remember
from ._problem import TileProblem
from ._ranking import rank
from ._resolver import check_fallback, Resolution, TileResolver
from ._store import default_directory, Entry, TileStore, warn_once
from ._sweep import reason_of, Sweep, sweep, Timer


# How many candidates are compiled for their predicted time, and how many of those are timed.
_COMPILED = 16
_MEASURED = 6


@dataclasses.dataclass(frozen=True)
class AutotuneResolver:
    """Measures tiles the first time that a problem is compiled, and stores the fastest.

    What is measured is the kernel alone, on operands of its own, outside of whatever is being
    traced. A program that cannot run in this process, because it is exported or compiled for a TPU
    that is not here, gets the tile of [`pallas_ops.CachedResolver`][]. With several processes
    (`jax.distributed`), process 0 measures and all take its tiles.

    Without a TPU the implementations that interpret the kernel are measured, which is good for
    tests and tells nothing about a TPU; their tiles are stored as theirs.

    **Arguments:**

    - `budget_seconds`: no tile is begun after so long, for each problem.
    - `most_candidates`: how many tiles are tried at most, the most promising first. On a TPU whose
        compiler can be asked, those that its schedules predict to be fastest are measured, six at
        most, and the tile by shape alone.
    - `directory`: the folder of the store, as in [`pallas_ops.CachedResolver`][].
    - `fallback`: who is asked where nothing can be measured, or nothing works.
    - `timer`: `timer(problem, tile, run, hopeless_seconds)` returns the seconds of one product;
        `run(n)` runs `n` of them in a chain, and a tile that takes longer than `hopeless_seconds`
        need not be measured with care. `None` takes the difference of two chains.

    **Raises:**

    `ValueError` for a budget that is not positive, `TypeError` for one that is no number, or a
    `fallback` that is no resolver.
    """

    budget_seconds: float | int = 60.0
    most_candidates: int = 24
    directory: str | os.PathLike | None = None
    fallback: TileResolver = DEFAULT_FALLBACK
    timer: Timer | None = None

    def __post_init__(self):
        check_budget("AutotuneResolver", self.budget_seconds, self.most_candidates)
        if self.timer is not None and not callable(self.timer):
            raise TypeError(f"AutotuneResolver: `timer` must be a function, got {self.timer!r}.")
        check_fallback("AutotuneResolver", self.fallback)

    def resolve(self, problem: TileProblem) -> Resolution:
        """As in [`pallas_ops.TileResolver`][]."""
        directory = os.fspath(default_directory() if self.directory is None else self.directory)

        def without_measuring():
            return CachedResolver(directory, fallback=self.fallback, quiet=True).look_up(problem)

        def measured():
            before = stored_tile(problem, directory, measured=True)
            before = before or recall((self, directory, problem))
            return before or self._measure(problem, directory)

        # A timer's own product is answered at once: who started the timer holds the lock and waits.
        if not problem.can_be_timed or is_measuring():
            return without_measuring()
        with lock:
            return agreed(
                problem,
                self,
                measured,
                without_measuring,
                timeout_seconds=2 * self.budget_seconds + AGREE_SECONDS,
            )

    def _measure(self, problem: TileProblem, directory: str) -> Resolution:
        if problem.implementation != "mosaic":
            warn_once(
                "interpreter",
                f"AutotuneResolver times {problem.implementation!r}, which tells nothing about a "
                f"TPU. Its tiles are stored for {problem.implementation!r} alone.",
            )
        tiles = self._worth_measuring(problem)
        try:
            # In a thread of its own: here, a trace is under way, and the user's contexts are open.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                stop = threading.Event()
                future = pool.submit(
                    _sweep_in_thread,
                    problem,
                    tiles,
                    budget_seconds=self.budget_seconds,
                    timer=self.timer,
                    stop=stop,
                )
                try:
                    result = future.result()
                finally:
                    stop.set()  # where the person has interrupted it, the pool waits for one tile
        except Exception as error:  # no fault of any tile
            result = Sweep(error=reason_of(error))
        if result.winner is None:
            why = f" {result.error}" if result.error else failures_told(result.failures)
            warn_once(
                f"sweep {problem}",
                f"no tile could be measured for {problem.describe()}; taken is the fallback's."
                f"{why}",
            )
            # Not stored: another process may have more luck. Not tried again in this one.
            return remember((self, directory, problem), self.fallback.resolve(problem))
        seconds = result.seconds[result.winner]
        tried = f"fastest of {len(result.seconds)} measured, {len(result.failures)} failed"
        if result.left_out:
            tried += f", {result.left_out} left out by the budget"
        entry = Entry(
            key=problem_key(problem),
            versions=versions(),
            tile=result.winner,
            source="autotune",
            reason=f"{seconds * 1e6:.4g} us at m={problem.m}: {tried}",
            seconds=seconds,
            failures={tile.label: why for tile, why in result.failures.items()},
        )
        TileStore(directory).put(entry)
        resolution = Resolution(result.winner, "autotune", reason=entry.reason)
        # For the first time and for every later one, even where nothing can be stored.
        remember(("store", directory, problem), resolution)
        return remember(("measured", directory, problem), resolution)

    def _worth_measuring(self, problem: TileProblem) -> tuple[TileConfig, ...]:
        """The candidates; for a TPU the few that its compiler's schedules predict to be fastest."""
        tiles = candidates(problem, most=self.most_candidates)
        if problem.implementation != "mosaic" or find_generation(problem.device) is None:
            return tiles
        with kept_pool() as pool:
            (ranking,) = rank(
                [problem], [tiles[:_COMPILED]], pool, budget_seconds=self.budget_seconds / 2
            )
        if not ranking.judgements:  # no compiler to ask: in the order of the estimate
            return tiles
        best = tuple(tile for tile, _ in ranking.judgements[:_MEASURED])
        # What would be taken without measuring is measured too: no sweep makes things worse.
        safe = estimated_tile(problem)
        return best if safe in best else (*best, safe)


def _sweep_in_thread(*args: Any, **kwargs: Any) -> Sweep:
    # A thread begins with the settings that the person made for the whole process. They are about
    # the person's program: operands are made on the host, and only what is compiled can be timed.
    with measuring(), jax.transfer_guard("allow"), jax.disable_jit(False):
        return sweep(*args, **kwargs)
