"""Candidates in the order that the TPU compiler's schedules predict."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from ..compiler import CompileJob, CompilePool, judge, Judgement, Verdict
from ._config import TileConfig
from ._failures import failures_told
from ._legal import vmem_limit_bytes
from ._problem import TileProblem


_verdicts: dict[CompileJob, Verdict] = {}
"""What the compiler has said in this process, of stand-ins."""


def compile_job(problem: TileProblem, tile: TileConfig) -> CompileJob:
    """The kernel with this tile as it would be compiled for the problem's device."""
    if problem.device is None:
        raise ValueError("The TPU compiler compiles for one TPU, and none is named.")
    limit = vmem_limit_bytes(problem, tile)
    return CompileJob(
        problem.matmul,
        problem.device,
        tile.blocks,
        limit,
        prologue_parts=int(tile.prologue_parts),
    )


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What came of asking the compiler for several tiles.

    **Arguments:**

    - `judgements`: those that compile and are predicted, fastest first.
    - `failures`: why others are out.
    - `unanswered`: those that the compiler said nothing about, and why: a worker was lost, the disk
        was full, there is no compiler. One of them may be the fastest.
    - `left_out`: how many the budget had no time for.
    """

    judgements: tuple[tuple[TileConfig, Judgement], ...]
    failures: dict[TileConfig, str]
    unanswered: dict[TileConfig, str]
    left_out: int

    @property
    def may_be_stored(self) -> bool:
        """Whether the compiler said all that it was asked; the budget may have left tiles out."""
        return bool(self.judgements) and not self.unanswered

    def why_not_stored(self) -> str:
        """What is said where it may not be."""
        unanswered = f"the compiler gave no answer:{failures_told(self.unanswered)}"
        if self.judgements:
            return f"a tile may be faster for which {unanswered}"
        if self.failures:
            return f"no tile has a predicted time:{failures_told(self.failures | self.unanswered)}"
        if self.unanswered:
            return unanswered
        return f"the budget left no time for any of {self.left_out} tiles"


def rank(
    problems: Sequence[TileProblem],
    tiles: Sequence[Sequence[TileConfig]],
    pool: CompilePool,
    *,
    budget_seconds: float | int,
    told: Callable[[Judgement], None] | None = None,
    exact: bool = True,
) -> list[Ranking]:
    """Compiles the tiles of problems in parallel and orders each problem's by predicted time.

    A tile that cannot be faster than the best so far is not compiled. Of problems that differ in
    their batch, one compilation serves all.

    **Arguments:**

    - `problems`: for known TPUs.
    - `tiles`: for each problem, the most promising first.
    - `pool`: where they are compiled.
    - `budget_seconds`: what is not compiled by then is left out.
    - `told`: called with each judgement as it comes.
    - `exact`: whether the fastest is compiled as it is, at last.
    """
    end = time.monotonic() + budget_seconds
    jobs = {
        (index, tile): compile_job(problem, tile)
        for index, problem in enumerate(problems)
        for tile in tiles[index]
    }
    rivals = [index for index, _ in jobs]
    given = list(jobs.values())
    judged = judge(given, pool, end=end, rivals=rivals, shared=_verdicts, told=told)
    late = time.monotonic() > end
    rankings = [_Open() for _ in problems]
    for (index, tile), judgement in zip(jobs, judged, strict=True):
        ranking = rankings[index]
        if judgement is None:
            ranking.left_out += late
        elif judgement.prediction is None:
            ranking.fail(tile, judgement)
        else:
            ranking.predicted.append((tile, judgement))
    for ranking in rankings:
        # Of two that take as long, the one that was more promising: the sort keeps their order.
        ranking.predicted.sort(key=lambda pair: _seconds(pair[1]))
    # What a smaller product's compilation said is made sure of, whatever the budget says.
    unsure = [ranking for ranking in rankings if ranking.predicted and exact]
    while unsure:
        sure = judge([ranking.predicted[0][1].job for ranking in unsure], pool)
        for ranking, judgement in zip(list(unsure), sure, strict=True):
            tile, _ = ranking.predicted.pop(0)
            assert judgement is not None
            if judgement.prediction is None:
                ranking.fail(tile, judgement)
            else:
                ranking.predicted.insert(0, (tile, judgement))
            if judgement.prediction is not None or not ranking.predicted:
                unsure.remove(ranking)
    return [ranking.close() for ranking in rankings]


@dataclasses.dataclass(eq=False)
class _Open:
    """A `Ranking` under way."""

    predicted: list[tuple[TileConfig, Judgement]] = dataclasses.field(default_factory=list)
    failures: dict[TileConfig, str] = dataclasses.field(default_factory=dict)
    unanswered: dict[TileConfig, str] = dataclasses.field(default_factory=dict)
    left_out: int = 0

    def fail(self, tile: TileConfig, judgement: Judgement) -> None:
        verdict = judgement.verdict
        # What takes too long to compile, or ends the compiler, is out, as what is refused.
        lost = verdict.transient and not verdict.blames_program
        (self.unanswered if lost else self.failures)[tile] = judgement.error or "no prediction"

    def close(self) -> Ranking:
        return Ranking(tuple(self.predicted), self.failures, self.unanswered, self.left_out)


def _seconds(judgement: Judgement) -> float:
    assert judgement.prediction is not None
    return judgement.prediction.seconds
