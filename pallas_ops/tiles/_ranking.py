"""Candidates in the order that the TPU compiler's schedules predict."""

import dataclasses
import time
from collections.abc import Sequence

from ..compiler import CompileJob, CompilePool, judge, Judgement, Verdict
from ._config import TileConfig
from ._legal import vmem_limit_bytes
from ._problem import TileProblem


_verdicts: dict[CompileJob, Verdict] = {}
"""What the compiler has said in this process, of stand-ins."""


def compile_job(problem: TileProblem, tile: TileConfig) -> CompileJob:
    """The kernel with this tile as it would be compiled for the problem's device."""
    if problem.device is None:
        raise ValueError("The TPU compiler compiles for one TPU, and none is named.")
    limit = vmem_limit_bytes(problem, tile)
    return CompileJob(problem.matmul, problem.device, tile.blocks, limit)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What came of asking the compiler for several tiles.

    **Arguments:**

    - `judgements`: those that compile and are predicted, fastest first.
    - `failures`: why each of the others is out.
    - `left_out`: how many the budget had no time for.
    - `transient`: whether the failures say nothing of the tiles: there is no compiler, say.
    """

    judgements: tuple[tuple[TileConfig, Judgement], ...]
    failures: dict[TileConfig, str]
    left_out: int
    transient: bool


def rank(
    problem: TileProblem,
    tiles: Sequence[TileConfig],
    pool: CompilePool,
    *,
    budget_seconds: float | int,
) -> Ranking:
    """Compiles tiles in parallel and orders them by their predicted time.

    A tile that cannot be faster than the best so far is not compiled. Of problems that differ in
    their batch, one compilation serves all. The fastest is compiled as it is, at last.

    **Arguments:**

    - `problem`: for a known TPU.
    - `tiles`: the most promising first.
    - `pool`: where they are compiled.
    - `budget_seconds`: what is not compiled by then is left out.
    """
    end = time.monotonic() + budget_seconds
    jobs = [compile_job(problem, tile) for tile in tiles]
    judged = judge(jobs, pool, end=end, only_better=True, shared=_verdicts)
    late = time.monotonic() > end
    predicted, failures, left_out, transient = [], {}, 0, False
    for tile, judgement in zip(tiles, judged, strict=True):
        if judgement is None:
            left_out += late
        elif judgement.prediction is None:
            failures[tile] = judgement.error or "no prediction"
            transient = transient or judgement.verdict.transient
        else:
            predicted.append((tile, judgement))
    # Of two that take as long, the one that was more promising: the sort keeps their order.
    predicted.sort(key=lambda pair: _seconds(pair[1]))
    # What a smaller product's compilation said is made sure of, whatever the budget says.
    while predicted:
        tile, judgement = predicted[0]
        (exact,) = judge([judgement.job], pool)
        assert exact is not None
        if exact.prediction is not None:
            predicted[0] = (tile, exact)
            break
        failures[tile] = exact.error or "no prediction"
        del predicted[0]
    return Ranking(tuple(predicted), failures, left_out, transient and not predicted)


def _seconds(judgement: Judgement) -> float:
    assert judgement.prediction is not None
    return judgement.prediction.seconds
