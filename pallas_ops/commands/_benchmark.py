"""The matmul of this package beside XLA's, for `pallas-ops bench`: predicted, or measured."""

import csv
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compiler import (
    chip,
    CompileJob,
    CompilePool,
    CompilerUnavailableError,
    judge,
    Judgement,
    roofline_seconds,
    Verdict,
    xla_estimate_seconds,
    xla_time,
)
from ..compiler._judge import mxu_seconds
from ..kernels import xla_matmul
from ..tiles import CachedResolver, candidates, TileConfig, TileProblem, vmem_limit_bytes
from ..tiles._ranking import compile_job, rank
from ..tiles._timing import lower_chain, lower_products, random_operands, time_per_call
from ._console import microseconds
from ._products import kernel_problem, PRODUCTS


PRODUCT_NAMES = dict(zip(PRODUCTS, ("forward", "lhs_grad", "rhs_grad"), strict=True))
"""What a row calls each product."""

PROVIDERS = ("tile128", "tuned", "xla")
"""Tiles of 128, as a first kernel has them; the tile that this package chooses; XLA's own dot."""

_BUDGET_SECONDS = 120.0
_CANDIDATES = 12
_AT_ONCE = 6


@dataclasses.dataclass(frozen=True)
class Row:
    """One product by one provider.

    **Arguments:**

    - `m`, `k`, `n`: the sizes of the forward product.
    - `dtype`: of operands and result.
    - `product`: `"forward"`, or which gradient of it.
    - `provider`: out of `PROVIDERS`.
    - `tile`: the numbers of the product's own tile; `None` for XLA.
    - `seconds`: of one product, without dispatch; `None` where there is none to be had.
    - `flops`: of the product.
    - `kind`: `"predicted"` or `"measured"`.
    - `roofline_seconds`: the least that the chip could take.
    - `roofline_bound`: whose time that is, `"mxu"` or `"hbm"`.
    - `calibrated`: whether the model that predicts was compared with timings of this TPU.
    - `static_mxu_use`: the part of a step in which the busiest MXU works, where that was compiled.
    - `xla_estimate_seconds`: for XLA's dot, its own estimate.
    - `note`: why there is no time, or what it leaves out.
    - `unread`: how many candidates for the tile compiled and could not be read, and were ranked by
        the estimate.
    """

    m: int
    k: int
    n: int
    dtype: str
    product: str
    provider: str
    tile: tuple[int, ...] | None
    seconds: float | None
    flops: int
    kind: str
    roofline_seconds: float
    roofline_bound: str
    calibrated: bool
    static_mxu_use: float | None = None
    xla_estimate_seconds: float | None = None
    note: str = ""
    unread: int = 0

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def tflops(self) -> float | None:
        return None if self.seconds is None else self.flops / self.seconds / 1e12

    def as_json(self) -> dict[str, Any]:
        return {
            "m": self.m,
            "k": self.k,
            "n": self.n,
            "dtype": self.dtype,
            "product": self.product,
            "provider": self.provider,
            "tile": None if self.tile is None else list(self.tile),
            "time_us": microseconds(self.seconds),
            "tflops": self.tflops,
            "kind": self.kind,
            "calibrated": self.calibrated,
            "roofline_us": self.roofline_seconds * 1e6,
            "roofline_bound": self.roofline_bound,
            "static_mxu_use": self.static_mxu_use,
            "xla_estimate_us": microseconds(self.xla_estimate_seconds),
            "note": self.note,
            "unread": self.unread,
        }


def rows_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV; a tile is its numbers with x between them."""
    text = io.StringIO()
    names = list(rows[0].as_json()) if rows else []
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        tile = "" if row.tile is None else "x".join(map(str, row.tile))
        writer.writerow(row.as_json() | {"tile": tile})
    return text.getvalue()


def by_product(rows: Iterable[Row]) -> dict[tuple, dict[str, Row]]:
    """The rows of each product, m x k x n, dtype and name, by their providers."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        product = (row.m, row.k, row.n, row.dtype, row.product)
        found.setdefault(product, {})[row.provider] = row
    return found


@dataclasses.dataclass(frozen=True)
class _Case:
    """One product of one shape."""

    shape: tuple[int, int, int]
    dtype: str
    product: str
    problem: TileProblem

    @property
    def device(self) -> str:
        assert self.problem.device is not None
        return self.problem.device

    def row(self, provider: str, kind: str, **fields: Any) -> Row:
        m, k, n = self.shape
        on = chip(self.device)
        least = roofline_seconds(self.problem.matmul, on)
        return Row(
            m=m,
            k=k,
            n=n,
            dtype=self.dtype,
            product=PRODUCT_NAMES[self.product],
            provider=provider,
            flops=self.problem.matmul.flops,
            kind=kind,
            roofline_seconds=least,
            roofline_bound="hbm" if least > mxu_seconds(self.problem.matmul, on) else "mxu",
            calibrated=on.calibrated,
            **fields,
        )


def _cases(
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[str],
    products: Sequence[str],
    layout: str,
    device: str,
) -> list[_Case]:
    return [
        _Case(
            shape,
            dtype,
            product,
            kernel_problem(product, shape, dtype=dtype, device=device, layout=layout),
        )
        for shape in shapes
        for dtype in dtypes
        for product in products
    ]


def tile_128(problem: TileProblem) -> TileConfig:
    """Blocks of 128 along every axis, or the whole axis where that is shorter."""
    return TileConfig(128, 128, 128).clipped_to(problem.matmul)


class _NotStored:
    """A fallback that says so."""

    def resolve(self, problem: TileProblem) -> Any:
        raise LookupError(problem.describe())


def known_tile(problem: TileProblem) -> tuple[TileConfig, int | None] | None:
    """A tile of the store or of a table, with its VMEM limit; `None` where there is none."""
    try:
        found = CachedResolver(fallback=_NotStored(), quiet=True).look_up(problem)
    except LookupError:
        return None
    tile = found.tile.clipped_to(problem.matmul)
    return tile, found.vmem_limit_bytes or vmem_limit_bytes(problem, tile)


def predicted_rows(
    shapes: Sequence[tuple[int, int, int]],
    *,
    device: str,
    dtypes: Sequence[str] = ("bfloat16",),
    products: Sequence[str] = PRODUCTS,
    layout: str = "NT",
    search: bool = False,
) -> Iterator[list[Row]]:
    """The rows of each product, as the TPU compiler and the time model have them.

    **Arguments:**

    - `shapes`: m, k and n of the forward product.
    - `device`: the TPU.
    - `products`: out of `PRODUCTS`.
    - `layout`: of the forward product.
    - `search`: whether to look for a tile by the compiler although one is stored.

    **Raises:**

    [`pallas_ops.compiler.CompilerUnavailableError`][] where there is no compiler that answers.
    """
    cases = _cases(shapes, dtypes, products, layout, device)
    stand_ins: dict[CompileJob, Verdict] = {}
    with CompilePool() as pool:
        for first in range(0, len(cases), _AT_ONCE):
            yield from _predicted(cases[first : first + _AT_ONCE], pool, search, stand_ins)


def _predicted(
    cases: Sequence[_Case],
    pool: CompilePool,
    search: bool,
    stand_ins: dict[CompileJob, Verdict],
) -> Iterator[list[Row]]:
    """The rows of several products, whose programs are compiled together.

    **Arguments:**

    - `stand_ins`: what the compiler said of tiles of 128, in smaller products: those of one layout
        have one schedule.
    """
    # XLA's own dots first: they tell whether there is a compiler, before tiles are looked for.
    dots = [CompileJob(case.problem.matmul, case.device) for case in cases]
    verdicts = pool.ask(dots)
    for verdict in verdicts:
        if verdict is not None and verdict.unavailable:
            raise CompilerUnavailableError(verdict.error)
    small = [compile_job(case.problem, tile_128(case.problem)) for case in cases]
    tuned = [_tuned_job(case.problem, pool, search) for case in cases]
    judged = _judged([job for job, _ in tuned if isinstance(job, CompileJob)], pool)
    judged_small = _judged(small, pool, stand_ins)
    asked = zip(cases, small, tuned, verdicts, strict=True)
    for case, small_job, (tuned_job, unread), verdict in asked:
        yield [
            _own_row(case, "tile128", small_job, judged_small),
            dataclasses.replace(_own_row(case, "tuned", tuned_job, judged), unread=unread),
            _xla_row(case, verdict),
        ]


def _judged(
    jobs: Sequence[CompileJob], pool: CompilePool, shared: dict[CompileJob, Verdict] | None = None
) -> dict[CompileJob, Judgement | None]:
    once = list(dict.fromkeys(jobs))
    return dict(zip(once, judge(once, pool, shared=shared), strict=True))


def _tuned_job(
    problem: TileProblem, pool: CompilePool, search: bool
) -> tuple[CompileJob | str, int]:
    """The kernel with the tile that this package chooses, or why there is none.

    Beside it how many candidates could not be read.
    """
    assert problem.device is not None
    known = None if search else known_tile(problem)
    if known is not None:
        return dataclasses.replace(compile_job(problem, known[0]), vmem_limit_bytes=known[1]), 0
    tiles = candidates(problem, most=_CANDIDATES)
    (ranking,) = rank([problem], [tiles], pool, budget_seconds=_BUDGET_SECONDS)
    if not ranking.judgements:
        return ranking.why_not_stored(), ranking.unread
    return ranking.judgements[0][1].job, ranking.unread


def _own_row(
    case: _Case,
    provider: str,
    job: CompileJob | str,
    judged: Mapping[CompileJob, Judgement | None],
) -> Row:
    """Our kernel with one tile, or why there is none."""
    if isinstance(job, str):
        return case.row(provider, "predicted", tile=None, seconds=None, note=job)
    judgement = judged[job]
    assert job.blocks is not None
    numbers = TileConfig(*job.blocks, job.prologue_parts).numbers
    if judgement is None or judgement.prediction is None:
        reason = "" if judgement is None else judgement.error or ""
        return case.row(provider, "predicted", tile=numbers, seconds=None, note=reason)
    assert judgement.verdict.schedule is not None
    return case.row(
        provider,
        "predicted",
        tile=numbers,
        seconds=judgement.prediction.seconds,
        static_mxu_use=judgement.verdict.schedule.middle.mxu_use,
    )


# Where the time of XLA's dot comes from, by `XlaTime.source`.
_XLA_NOTES = {
    "schedule": "its schedule, by the same model",
    "estimate": "XLA's own estimate",
    "transfers": "its transfers, at full bandwidth",
}


def _xla_row(case: _Case, verdict: Verdict | None) -> Row:
    """XLA's own dot."""
    on = chip(case.device)
    found = None if verdict is None else xla_time(case.problem.matmul, verdict, on)
    if verdict is None or found is None:
        error = None if verdict is None else verdict.error
        note = error or "XLA's program carries no cycles"
        return case.row("xla", "predicted", tile=None, seconds=None, note=note)
    loop = None if verdict.xla_schedule is None else verdict.xla_schedule.loop
    unread = verdict.schedule_error if found.source == "estimate" else None
    return case.row(
        "xla",
        "predicted",
        tile=None,
        seconds=found.seconds,
        static_mxu_use=None if loop is None else loop.middle.mxu_use,
        xla_estimate_seconds=xla_estimate_seconds(verdict, on),
        note=_XLA_NOTES[found.source] + (f": {unread}" if unread else ""),
    )


def measured_rows(
    shapes: Sequence[tuple[int, int, int]],
    *,
    device: str,
    dtypes: Sequence[str] = ("bfloat16",),
    products: Sequence[str] = PRODUCTS,
    layout: str = "NT",
    implementation: str = "mosaic",
    timer: Callable[[Callable[[int], None]], float] | None = None,
) -> Iterator[list[Row]]:
    """The rows of each product, timed here: the kernel or the dot alone, without dispatch.

    **Arguments:**

    - `shapes`, `device`, `dtypes`, `products`, `layout`: as in `predicted_rows`.
    - `implementation`: what runs the kernel.
    - `timer`: measures in place of `time_per_call`.
    """
    for case in _cases(shapes, dtypes, products, layout, device):
        problem = dataclasses.replace(case.problem, implementation=implementation)
        operands = random_operands(problem.matmul)
        known = known_tile(case.problem)
        tuned, limit = known or (candidates(problem, most=1)[0], None)
        rows = []
        for provider, tile in (("tile128", tile_128(problem)), ("tuned", tuned), ("xla", None)):
            own_limit = limit if provider == "tuned" else None
            lower = functools.partial(_lower, problem, tile, own_limit, operands)
            seconds, note = _time(lower, operands, timer)
            numbers = None if tile is None else tile.numbers
            rows.append(case.row(provider, "measured", tile=numbers, seconds=seconds, note=note))
        yield rows


def _lower(
    problem: TileProblem,
    tile: TileConfig | None,
    limit: int | None,
    operands: tuple[jax.Array, ...],
) -> jax.stages.Lowered:
    matmul = problem.matmul
    if tile is None:
        return lower_products(functools.partial(xla_matmul, matmul), matmul, operands)
    limit = limit or vmem_limit_bytes(problem, tile)
    return lower_chain(matmul, tile, problem.implementation, limit, operands)


def _time(
    lower: Callable[[], jax.stages.Lowered],
    operands: tuple[jax.Array, ...],
    timer: Callable[[Callable[[int], None]], float] | None,
) -> tuple[float | None, str]:
    try:
        compiled = lower().compile()

        def run(count: int) -> None:
            jax.block_until_ready(compiled(jnp.int32(count), *operands))

        if timer is not None:
            return timer(run), ""
        return time_per_call(run).seconds, ""
    except Exception as error:  # such as a tile that the compiler refuses: the others go on
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
