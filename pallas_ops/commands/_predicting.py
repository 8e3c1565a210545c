"""What `pallas-ops predict` finds out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..compiler import (
    chip,
    CompileJob,
    CompilePool,
    judge,
    Judgement,
    roofline_seconds,
    xla_estimate_seconds,
    xla_time,
    XlaTime,
)
from ..compiler._topology import libtpu_version
from ..kernels import why_no_parts
from ..tiles import (
    block_granules,
    candidates as tile_candidates,
    estimate_seconds,
    nearest_legal,
    TileConfig,
    TileProblem,
    vmem_limit_bytes,
    why_illegal,
    why_too_large,
)
from ..tiles._ranking import compile_job, scaled_estimates
from ..tiles._vmem import scoped_vmem_limit_bytes
from ._console import microseconds


@dataclasses.dataclass(frozen=True)
class Row:
    """One tile.

    **Arguments:**

    - `blocks`: block_m, block_k and block_n.
    - `prologue_parts`: of the first blocks.
    - `compiles`: whether the compiler takes it; `None` where it gave no verdict: there is no
        compiler, say, or its process was lost.
    - `error`: why not, or why there is no time.
    - `vmem_bytes`, `vmem_limit_bytes`: what it takes, and what it may take.
    - `static_mxu_use`: the part of a step in which the busiest MXU works, in the middle of the sum.
    - `spills`: registers stored and loaded for want of registers in that step.
    - `seconds`: the predicted time.
    - `flops`: of the product.
    - `bound`: by what.
    - `analytic_seconds`: the time by the analytic estimate, which asks no compiler.
    - `estimated_seconds`: the same, scaled to be ranked beside tiles that have a time, of one that
        compiles and whose schedule could not be read.
    - `hbm_bytes`: what its transfers move.
    """

    blocks: tuple[int, int, int]
    vmem_limit_bytes: int
    flops: int
    prologue_parts: int = 1
    compiles: bool | None = None
    error: str | None = None
    vmem_bytes: int | None = None
    static_mxu_use: float | None = None
    spills: int | None = None
    seconds: float | None = None
    bound: str | None = None
    analytic_seconds: float | None = None
    estimated_seconds: float | None = None
    hbm_bytes: int | None = None

    @property
    def label(self) -> str:
        """The tile in one word."""
        return TileConfig(*self.blocks, self.prologue_parts).label

    @property
    def tflops(self) -> float | None:
        return None if self.seconds is None else self.flops / self.seconds / 1e12

    def as_json(self) -> dict[str, Any]:
        return {
            **dict(zip(("block_m", "block_k", "block_n"), self.blocks, strict=True)),
            "prologue_parts": self.prologue_parts,
            "compiles": self.compiles,
            "error": self.error,
            "vmem_bytes": self.vmem_bytes,
            "vmem_limit_bytes": self.vmem_limit_bytes,
            "static_mxu_use": self.static_mxu_use,
            "spills": self.spills,
            "predicted_us": microseconds(self.seconds),
            "tflops": self.tflops,
            "bound": self.bound,
            "analytic_us": microseconds(self.analytic_seconds),
            "estimated_us": microseconds(self.estimated_seconds),
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """What is said of one problem.

    **Arguments:**

    - `problem`: for one TPU.
    - `rows`: the tiles, fastest first, then those that do not compile.
    - `calibrated`: whether the model was compared with timings of this TPU.
    - `roofline_seconds`: the least that the chip could take.
    - `xla_estimate_seconds`: XLA's own estimate of its dot.
    - `xla`: the time of XLA's dot, by the model that predicts the tiles where it can.
    - `libtpu`: which compiler.
    - `xla_error`: why XLA's dot has neither, where it was not compiled.
    - `xla_unread`: why its schedule could not be read, where it was.
    - `no_compiler`: why there is none.
    """

    problem: TileProblem
    rows: tuple[Row, ...]
    calibrated: bool
    roofline_seconds: float
    xla_estimate_seconds: float | None
    xla: XlaTime | None
    libtpu: str
    xla_error: str | None = None
    xla_unread: str | None = None
    no_compiler: str | None = None

    def as_json(self, best: int | None = None) -> dict[str, Any]:
        problem = self.problem
        return {
            "device": problem.device,
            "m": problem.m,
            "k": problem.k,
            "n": problem.n,
            "dtype": problem.lhs_dtype.name,
            "rhs_dtype": problem.rhs_dtype.name,
            "out_dtype": problem.out_dtype.name,
            "layout": problem.layout,
            "precision": problem.precision,
            "calibrated": self.calibrated,
            "kind": "predicted" if self.no_compiler is None else "analytic estimate",
            "libtpu": self.libtpu,
            "no_compiler": self.no_compiler,
            "roofline_us": self.roofline_seconds * 1e6,
            "xla_estimate_us": microseconds(self.xla_estimate_seconds),
            "xla_us": None if self.xla is None else microseconds(self.xla.seconds),
            "xla_source": None if self.xla is None else self.xla.source,
            "xla_error": self.xla_error,
            "xla_unread": self.xla_unread,
            "tiles": [row.as_json() for row in self.rows[:best]],
        }


def xla_is_faster(seconds: float | None, xla_seconds: float | None) -> bool:
    """Whether XLA's dot is more than a tenth faster than ours: then a person is told so."""
    return seconds is not None and xla_seconds is not None and seconds > 1.1 * xla_seconds


def libtpu_name() -> str:
    version = libtpu_version()
    return "no libtpu" if version is None else f"libtpu {version}"


def why_not_compiled(problem: TileProblem, tile: TileConfig) -> str | None:
    """Why a tile is not even given to the compiler, which may take minutes to refuse it."""
    reason = why_illegal(problem.matmul, tile)
    if reason is not None:
        return f"{reason}; the nearest legal tile is {nearest_legal(problem.matmul, tile)}"
    return why_too_large(problem, tile)


def _row(problem: TileProblem, tile: TileConfig, judgement: Judgement | None) -> Row:
    default = scoped_vmem_limit_bytes(problem.device)
    limit = vmem_limit_bytes(problem, tile) or default
    row = Row(tile.blocks, limit, problem.matmul.flops, int(tile.prologue_parts))
    if judgement is None:
        return dataclasses.replace(row, compiles=False, error=why_not_compiled(problem, tile))
    verdict, prediction = judgement.verdict, judgement.prediction
    analytic = estimate_seconds(problem, tile)
    row = dataclasses.replace(
        row,
        compiles=None if verdict.unheard else verdict.compiles,
        error=judgement.error,
        vmem_bytes=verdict.vmem_bytes,
        analytic_seconds=analytic,
    )
    if prediction is None or verdict.schedule is None:
        return row
    return dataclasses.replace(
        row,
        static_mxu_use=verdict.schedule.middle.mxu_use,
        spills=verdict.schedule.middle.spills,
        seconds=prediction.seconds,
        bound=prediction.bound,
        hbm_bytes=prediction.hbm_bytes,
    )


def _with_estimates(problem: TileProblem, rows: Mapping[TileConfig, Row]) -> list[Row]:
    """The rows, those that could not be read with an estimate to be ranked by."""
    read = {tile: row.seconds for tile, row in rows.items() if row.seconds is not None}
    unread = [tile for tile, row in rows.items() if row.compiles and tile not in read]
    estimates = scaled_estimates(problem, read, unread)
    return [
        dataclasses.replace(row, estimated_seconds=estimates.get(tile))
        for tile, row in rows.items()
    ]


def _named_tile(problem: TileProblem, tile: TileConfig) -> TileConfig:
    """The tile as the kernel takes it, where it takes the parts of its first blocks."""
    clipped, granules = tile.clipped_to(problem.matmul), block_granules(problem.matmul)
    reason = why_no_parts(problem.matmul, clipped.blocks, int(tile.prologue_parts), granules)
    if reason is not None:
        raise ValueError(f"{tile}: {reason}, and k is {problem.k}.")
    return clipped


def report(problem: TileProblem, tiles: Sequence[tuple[int, ...]], *, candidates: int) -> Report:
    """Compiles tiles, and XLA's dot beside them.

    **Arguments:**

    - `problem`: for one TPU.
    - `tiles`: the numbers of each; none are the most promising candidates.
    - `candidates`: how many of those.
    """
    assert problem.device is not None
    if tiles:
        named = [_named_tile(problem, TileConfig(*numbers)) for numbers in tiles]
    else:
        named = list(tile_candidates(problem, most=candidates))
    named = list(dict.fromkeys(named))
    asked = [tile for tile in named if why_not_compiled(problem, tile) is None]
    with CompilePool() as pool:
        judged = judge([compile_job(problem, tile) for tile in asked], pool)
        (xla,) = pool.ask([CompileJob(problem.matmul, problem.device)])
    by_tile = dict(zip(asked, judged, strict=True))
    rows = _with_estimates(
        problem, {tile: _row(problem, tile, by_tile.get(tile)) for tile in named}
    )

    def place(row: Row) -> tuple[bool, float]:
        times = (row.seconds, row.estimated_seconds, row.analytic_seconds, float("inf"))
        is_out = row.seconds is None and row.estimated_seconds is None
        return is_out, next(seconds for seconds in times if seconds is not None)

    on = chip(problem.device)
    verdicts = [*(judgement.verdict for judgement in judged if judgement), *([xla] if xla else [])]
    unavailable = [verdict.error for verdict in verdicts if verdict.unavailable]
    return Report(
        problem=problem,
        rows=tuple(sorted(rows, key=place)),
        calibrated=on.calibrated,
        roofline_seconds=roofline_seconds(problem.matmul, on),
        xla_estimate_seconds=None if xla is None else xla_estimate_seconds(xla, on),
        xla=None if xla is None else xla_time(problem.matmul, xla, on),
        libtpu=libtpu_name(),
        xla_error=None if xla is None else xla.error,
        xla_unread=None if xla is None else xla.schedule_error,
        no_compiler=unavailable[0] if unavailable else None,
    )
