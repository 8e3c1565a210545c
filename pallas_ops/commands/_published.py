"""Timings that others published, and how well they are predicted: `pallas-ops bench published`."""

import csv
import dataclasses
import importlib.resources
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..compiler import (
    Chip,
    chip,
    CompileJob,
    CompilePool,
    predict,
    roofline_seconds,
    Verdict,
    xla_time,
)
from ..compiler._schedule import STEPS
from ..kernels import MatmulProblem
from ..tiles import TileConfig, TileProblem, vmem_limit_bytes


@dataclasses.dataclass(frozen=True)
class Published:
    """One published timing.

    **Arguments:**

    - `source`: who published it.
    - `problem`: the product.
    - `blocks`: the tile of a Pallas kernel; `None` for XLA's dot, or where it was not published.
    - `implementation`: what was timed, in the source's words.
    - `wall_seconds`: the time of one call, dispatch included.
    """

    source: str
    problem: MatmulProblem
    blocks: tuple[int, int, int] | None
    implementation: str
    wall_seconds: float

    @property
    def can_be_predicted(self) -> bool:
        return self.blocks is not None or self.implementation == "xla"


def published() -> list[Published]:
    """The timings on a v5e in `published_v5e.csv`, which names its sources."""
    text = (importlib.resources.files(__package__) / "published_v5e.csv").read_text()
    rows = []
    for row in csv.DictReader(text.splitlines()):
        m, k, n = (int(row[axis]) for axis in "mkn")
        transposed = [letter == "T" for letter in row["layout"]]
        dtype = np.dtype(jnp.dtype(row["dtype"]))
        # That source's kernel adds to an output block of float32.
        out = np.dtype(np.float32) if "accumulated in f32" in row["source"] else dtype
        problem = MatmulProblem(
            (k, m) if transposed[0] else (m, k),
            (n, k) if transposed[1] else (k, n),
            dtype,
            dtype,
            out,
            transpose_lhs=transposed[0],
            transpose_rhs=transposed[1],
        )
        named = [row[f"block_{axis}"] for axis in "mkn"]
        rows.append(
            Published(
                source=row["source"],
                problem=problem,
                blocks=(int(named[0]), int(named[1]), int(named[2])) if all(named) else None,
                implementation=row["implementation"],
                wall_seconds=float(row["wall_ms"]) * 1e-3,
            )
        )
    return rows


def compile_published(rows: Sequence[Published], device: str = "v5e") -> list[Verdict]:
    """The compiler's verdict on each row's program: of a tile, the kernel as tutorials have it.

    **Raises:**

    `RuntimeError` where one cannot be had.
    """
    jobs = []
    for row in rows:
        limit = None
        if row.blocks is not None:
            limit = vmem_limit_bytes(TileProblem(row.problem, device), TileConfig(*row.blocks))
        jobs.append(
            CompileJob(row.problem, device, row.blocks, limit, textbook=row.blocks is not None)
        )
    unique = list(dict.fromkeys(jobs))
    with CompilePool() as pool:
        said = dict(zip(unique, pool.ask(unique), strict=True))
    verdicts = []
    for job in jobs:
        verdict = said[job]
        if verdict is None or (verdict.schedule is None and verdict.xla_cycles is None):
            reason = None if verdict is None else verdict.error or verdict.schedule_error
            raise RuntimeError(f"{job.problem.describe()}, blocks {job.blocks}: {reason}")
        verdicts.append(verdict)
    return verdicts


Model = Callable[[Published, Verdict], float]


def our_model(on: Chip) -> Model:
    def seconds(row: Published, verdict: Verdict) -> float:
        if row.blocks is None:
            xla = xla_time(row.problem, verdict, on)
            assert xla is not None
            return xla.seconds
        assert verdict.schedule is not None
        return predict(row.problem, row.blocks, verdict.schedule, on).seconds

    return seconds


def bundle_counts(on: Chip) -> Model:
    """The bundles of all steps, each a cycle: what the schedule alone says."""

    def seconds(row: Published, verdict: Verdict) -> float:
        if row.blocks is None:
            return our_model(on)(row, verdict)
        assert verdict.schedule is not None
        sizes = (row.problem.m, row.problem.k, row.problem.n)
        m, k, n = (-(-size // block) for size, block in zip(sizes, row.blocks, strict=True))
        step = verdict.schedule
        first, last = step.first.bundles, step.last.bundles
        sums = first + last + (k - 2) * step.middle.bundles if k > 1 else step.middle.bundles
        return m * n * sums / on.clock_hertz

    return seconds


def roofline(on: Chip) -> Model:
    return lambda row, _: roofline_seconds(row.problem, on)


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well a model explains timings, with one dispatch constant for each source.

    **Arguments:**

    - `name`: the model.
    - `predicted`: its seconds for each row, without dispatch.
    - `dispatch`: the fitted seconds of dispatch by source.
    - `errors`: of each row, relative to the published time.
    - `spearman`: rank correlation over the tiles of one problem that most tiles were timed for.
        `None` for a model to which all are alike.
    - `best_regret`: how much slower the predicted best of these tiles was than the true best; of
        several that are predicted alike, the slowest.
    """

    name: str
    predicted: tuple[float, ...]
    dispatch: dict[str, float]
    errors: tuple[float, ...]
    spearman: float | None
    best_regret: float

    @property
    def mean_error(self) -> float:
        return statistics.fmean(map(abs, self.errors))


def fit(name: str, model: Model, rows: Sequence[Published], verdicts: Sequence[Verdict]) -> Fit:
    """Predicts all rows and fits the dispatch constants, by the mean relative error."""
    predicted = [model(row, verdict) for row, verdict in zip(rows, verdicts, strict=True)]
    dispatch = {}
    for source in dict.fromkeys(row.source for row in rows):
        own = [
            (p, r.wall_seconds) for p, r in zip(predicted, rows, strict=True) if r.source == source
        ]

        def error(constant: float, own=own) -> float:
            return sum(abs(seconds + constant - wall) / wall for seconds, wall in own)

        # A sum of absolute values has its minimum where one of them is zero.
        dispatch[source] = min((max(0.0, wall - seconds) for seconds, wall in own), key=error)
    errors = tuple(
        (seconds + dispatch[row.source] - row.wall_seconds) / row.wall_seconds
        for seconds, row in zip(predicted, rows, strict=True)
    )
    sweep = most_tiles(rows)
    times = [(predicted[index], rows[index].wall_seconds) for index in sweep]
    fastest = min(seconds for seconds, _ in times)
    chosen = max(wall for seconds, wall in times if seconds == fastest)
    return Fit(
        name=name,
        predicted=tuple(predicted),
        dispatch=dispatch,
        errors=errors,
        spearman=spearman([p for p, _ in times], [w for _, w in times]),
        best_regret=chosen / min(wall for _, wall in times) - 1,
    )


def most_tiles(rows: Sequence[Published]) -> list[int]:
    """The rows of the source and problem that most tiles were timed for."""
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        if row.blocks is not None:
            groups.setdefault((row.source, row.problem), []).append(index)
    return max(groups.values(), key=len)


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The correlation of the ranks of two sequences; equal values share their mean rank.

    (`statistics.correlation(method="ranked")` is of Python 3.12.)
    """

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    if 1 in (len(set(left)), len(set(right))):
        return None
    return statistics.correlation(ranks(left), ranks(right))


def biggest_tile_regret(rows: Sequence[Published]) -> float:
    """How much slower the biggest tile is than the best: what a rule by size alone costs.

    Of several that are as big, the slowest: the rule does not say which.
    """
    own = [rows[index] for index in most_tiles(rows)]

    def size(row: Published) -> int:
        assert row.blocks is not None
        return row.blocks[0] * row.blocks[1] * row.blocks[2]

    biggest = max(map(size, own))
    worst = max(row.wall_seconds for row in own if size(row) == biggest)
    return worst / min(row.wall_seconds for row in own) - 1


@dataclasses.dataclass(frozen=True)
class Variant:
    """The time model with other constants, and how well it explains the timings.

    **Arguments:**

    - `latency_seconds`: of a DMA.
    - `bandwidth`: the part of HBM's bandwidth that transfers get.
    - `step_cycles`: what each step of the grid takes beside its bundles.
    - `mean_error`, `best_regret`: as in `Fit`.
    """

    latency_seconds: float
    bandwidth: float
    step_cycles: int
    mean_error: float
    best_regret: float


LATENCIES = tuple(step * 1e-7 for step in range(9))
_BANDWIDTHS = (1.0, 0.9, 0.8)
_STEP_CYCLES = (0, 150, 300)


def try_constants(
    rows: Sequence[Published],
    verdicts: Sequence[Verdict],
    on: Chip,
    latencies: Sequence[float] = LATENCIES,
) -> Iterator[Variant]:
    """The model with other constants: whether those that it has are the best, and all that it
    could do with others."""
    for latency, bandwidth, cycles in itertools.product(latencies, _BANDWIDTHS, _STEP_CYCLES):
        other = dataclasses.replace(
            on,
            dma_latency_seconds=latency,
            bytes_per_second=on.bytes_per_second * bandwidth,
        )
        slower = [_with_slower_steps(verdict, cycles) for verdict in verdicts]
        found = fit("", our_model(other), rows, slower)
        yield Variant(latency, bandwidth, cycles, found.mean_error, found.best_regret)


def _with_slower_steps(verdict: Verdict, cycles: int) -> Verdict:
    if verdict.schedule is None:
        return verdict
    steps = {
        kind: dataclasses.replace(cost, cycles=cost.cycles + cycles)
        for kind, cost in ((kind, getattr(verdict.schedule, kind)) for kind in STEPS)
    }
    return dataclasses.replace(verdict, schedule=dataclasses.replace(verdict.schedule, **steps))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All models on all rows that can be predicted."""

    rows: tuple[Published, ...]
    fits: tuple[Fit, ...]
    biggest_regret: float
    variants: tuple[Variant, ...]

    def as_json(self) -> dict[str, Any]:
        ours = self.fits[0]
        return {
            "models": [
                {
                    "name": one.name,
                    "mean_error": one.mean_error,
                    "spearman": one.spearman,
                    "best_regret": one.best_regret,
                    "dispatch_us": {name: s * 1e6 for name, s in one.dispatch.items()},
                }
                for one in self.fits
            ],
            "biggest_tile_regret": self.biggest_regret,
            "rows": [
                {
                    "source": row.source,
                    "m": row.problem.m,
                    "k": row.problem.k,
                    "n": row.problem.n,
                    "layout": row.problem.layout,
                    "implementation": row.implementation,
                    "tile": None if row.blocks is None else list(row.blocks),
                    "published_us": row.wall_seconds * 1e6,
                    "predicted_us": ours.predicted[index] * 1e6,
                    "dispatch_us": ours.dispatch[row.source] * 1e6,
                    "error": ours.errors[index],
                }
                for index, row in enumerate(self.rows)
            ],
            "variants": [
                {
                    "latency_us": variant.latency_seconds * 1e6,
                    "bandwidth": variant.bandwidth,
                    "step_cycles": variant.step_cycles,
                    "mean_error": variant.mean_error,
                    "best_regret": variant.best_regret,
                }
                for variant in self.variants
            ],
        }


def compare(*, latencies: Sequence[float] = ()) -> Comparison:
    """Compiles every published program and lets each model predict it.

    **Arguments:**

    - `latencies`: other DMA latencies to try, in seconds, each with other bandwidths and costs of a
        step.
    """
    rows = [row for row in published() if row.can_be_predicted]
    verdicts = compile_published(rows)
    on = chip("v5e")
    fits = (
        fit("schedule and time model", our_model(on), rows, verdicts),
        fit("bundle counts", bundle_counts(on), rows, verdicts),
        fit("roofline", roofline(on), rows, verdicts),
    )
    variants = tuple(try_constants(rows, verdicts, on, latencies))
    return Comparison(tuple(rows), fits, biggest_tile_regret(rows), variants)
