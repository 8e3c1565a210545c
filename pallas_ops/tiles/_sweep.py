"""Trying tiles one after another, and keeping the fastest that computes the right thing."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels import run_kernel, xla_matmul
from ._config import TileConfig
from ._legal import vmem_limit_bytes
from ._problem import TileProblem
from ._timing import lower_chain, random_operands, time_per_call, Timing


Timer = Callable[[TileProblem, TileConfig, Callable[[int], None], float], float]
"""`timer(problem, tile, run, hopeless_seconds)` returns the seconds of one product; `run(n)` runs n
of them, each waiting for the one before."""

# How much longer than the best so far one call may take and still be measured with care.
_HOPELESS = 2.0

# The largest error relative to the norm of the result: a kernel that computes something else is far
# beyond, one that rounds to bfloat16, or multiplies float32 in one pass of it, far within.
_RELATIVE_ERROR = 2e-2


@dataclasses.dataclass
class Sweep:
    """What came of trying tiles.

    **Arguments:**

    - `seconds`: the time of one product for each tile that was measured, fastest first.
    - `failures`: why each of the others is out.
    - `left_out`: how many tiles the budget had no time for.
    - `error`: why nothing could be tried, where that is no fault of a tile.
    """

    seconds: dict[TileConfig, float] = dataclasses.field(default_factory=dict)
    failures: dict[TileConfig, str] = dataclasses.field(default_factory=dict)
    left_out: int = 0
    error: str | None = None

    @property
    def winner(self) -> TileConfig | None:
        return next(iter(self.seconds), None)


def reason_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _advancing(tiles: Sequence[TileConfig], title: str) -> Iterator[TileConfig]:
    """The tiles, with a progress bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(
        track(tiles, title, console=console, transient=True, disable=not sys.stderr.isatty())
    )


def _is_right(problem: TileProblem, tile: TileConfig, operands) -> bool:
    """Whether a tile's results are XLA's, within what rounding explains."""
    matmul = problem.matmul
    found = run_kernel(
        matmul,
        tile.blocks,
        *operands,
        implementation=problem.implementation,
        vmem_limit_bytes=vmem_limit_bytes(problem, tile),
        prologue_parts=int(tile.prologue_parts),
    )
    expected = jax.jit(functools.partial(xla_matmul, matmul))(*operands)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(_is_same(*pair) for pair in pairs)


def _is_same(found: jax.Array, expected: jax.Array) -> bool:
    if jnp.issubdtype(found.dtype, jnp.integer):
        return np.array_equal(found, expected)
    one, other = (np.asarray(array.astype(jnp.float32)) for array in (found, expected))
    known = np.isfinite(other)  # an activation, such as a logarithm, may have no value there
    error = np.linalg.norm(one[known] - other[known])
    return bool(error <= _RELATIVE_ERROR * np.linalg.norm(other[known]))


def sweep(
    problem: TileProblem,
    tiles: Sequence[TileConfig],
    *,
    budget_seconds: float | int,
    timer: Timer | None = None,
    clock: Callable[[], float] = time.monotonic,
    stop: threading.Event | None = None,
) -> Sweep:
    """Compiles tiles in parallel and times them one by one, until the budget is spent.

    **Arguments:**

    - `problem`: a [`pallas_ops.TileProblem`][].
    - `tiles`: the candidates, the most promising first.
    - `budget_seconds`: no tile is begun after so long; the first one always is.
    - `timer`: measures in place of `time_per_call`.
    - `clock`: the time in seconds.
    - `stop`: once it is set, no tile is begun either.
    """
    end = clock() + budget_seconds
    result = Sweep()
    try:
        operands = random_operands(problem.matmul)
    except Exception as error:  # such as no memory for them
        result.error = f"its operands could not be made: {reason_of(error)}"
        return result
    timings: dict[TileConfig, Timing] = {}

    def lower(tile):
        limit = vmem_limit_bytes(problem, tile)
        return lower_chain(problem.matmul, tile, problem.implementation, limit, operands)

    def measure(tile, compiled):
        def run(count):
            jax.block_until_ready(compiled(jnp.int32(count), *operands))

        best = min((timing.seconds for timing in timings.values()), default=math.inf)
        if timer is not None:
            # `float`: what a timer says may be of NumPy, or no number at all.
            return Timing(float(timer(problem, tile, run, _HOPELESS * best)))
        return time_per_call(run, hopeless_seconds=_HOPELESS * best)

    # In batches: while one tile is timed no other is compiled, and little is compiled in vain when
    # the budget ends. Tracing is not for several threads; what takes long, the compiler, is.
    workers = min(4, os.cpu_count() or 1)
    compiling: dict[TileConfig, concurrent.futures.Future] = {}

    def compile_batch(pool, batch):
        for tile in batch:
            try:
                compiling[tile] = pool.submit(lower(tile).compile)
            except Exception as error:
                result.failures[tile] = reason_of(error)
        concurrent.futures.wait(compiling.values())

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for number, tile in enumerate(_advancing(tiles, "Timing tiles")):
            if (number and clock() > end) or (stop is not None and stop.is_set()):
                result.left_out = sum(rest not in result.failures for rest in tiles[number:])
                break
            if number % workers == 0:
                compile_batch(pool, tiles[number : number + workers])
            if tile in result.failures:
                continue
            try:
                timing = measure(tile, compiling.pop(tile).result())
            except Exception as error:
                result.failures[tile] = reason_of(error)
                continue
            if math.isfinite(timing.seconds) and timing.seconds > 0:
                timings[tile] = timing
            else:
                result.failures[tile] = f"the timer says {timing.seconds!r} seconds"

    for tile in sorted(timings, key=lambda tile: timings[tile].seconds):
        # Only until one is right: the others are there for comparison.
        if not result.seconds:
            try:
                right = _is_right(problem, tile, operands)
            except Exception as error:
                result.failures[tile] = reason_of(error)
                continue
            if not right:
                result.failures[tile] = "its product differs from XLA's"
                continue
        result.seconds[tile] = timings[tile].seconds
    return result
