"""Candidates in the order that the TPU compiler's schedules predict."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..compiler import CompileJob, CompilePool, judge, Judgement, Verdict
from ._config import TileConfig
from ._estimate import estimate_seconds
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

    - `judgements`: those that compile, fastest first.
    - `estimated`: the seconds of those among them whose schedule could not be read, as of
        `scaled_estimates`.
    - `failures`: why others are out.
    - `unanswered`: those that the compiler said nothing about, and why: a worker was lost, the disk
        was full, there is no compiler. One of them may be the fastest.
    - `left_out`: how many the budget had no time for.
    - `unread`: how many compiled and could not be read.
    """

    judgements: tuple[tuple[TileConfig, Judgement], ...]
    estimated: dict[TileConfig, float]
    failures: dict[TileConfig, str]
    unanswered: dict[TileConfig, str]
    left_out: int
    unread: int = 0

    @property
    def seconds(self) -> float:
        """The time of the fastest: predicted, or estimated where that could not be read."""
        tile, judgement = self.judgements[0]
        prediction = judgement.prediction
        return self.estimated[tile] if prediction is None else prediction.seconds

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


def scaled_estimates(
    problem: TileProblem, read: Mapping[TileConfig, float], unread: Iterable[TileConfig]
) -> dict[TileConfig, float]:
    """The seconds of tiles whose schedule could not be read, to compare with predictions.

    The analytic estimate is another model than the one that reads schedules, and knows neither
    spills nor what a step costs beside its MXUs. For one problem both differ by about the same
    factor; it is taken to be the largest of those that were read, so that a tile goes before one
    that is known only where the estimate tells them apart clearly.

    **Arguments:**

    - `read`: the predicted seconds of others. Where there are none, the estimates are left as they
        are, and are not to be compared with predictions.
    """
    ratios = [seconds / estimate_seconds(problem, tile) for tile, seconds in read.items()]
    scale = max(ratios, default=1.0)
    return {tile: scale * estimate_seconds(problem, tile) for tile in unread}


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
    rankings = [_Open(problem) for problem in problems]
    for (index, tile), judgement in zip(jobs, judged, strict=True):
        if judgement is None:
            rankings[index].left_out += late
        else:
            rankings[index].hear(tile, judgement)
    for ranking in rankings:
        ranking.sort()
    # What a smaller product's compilation said is made sure of, whatever the budget says.
    unsure = [ranking for ranking in rankings if ranking.order and exact]
    while unsure:
        sure = judge([ranking.fastest.job for ranking in unsure], pool)
        for ranking, judgement in zip(unsure, sure, strict=True):
            assert judgement is not None
            ranking.make_sure(judgement)
        unsure = [ranking for ranking in unsure if not ranking.is_sure]
    return [ranking.close() for ranking in rankings]


@dataclasses.dataclass(eq=False)
class _Open:
    """A `Ranking` under way.

    **Arguments:**

    - `problem`: what it is of.
    - `compiled`: the tiles that compile, the most promising first.
    - `order`: those that may be the fastest, fastest first.
    - `sure`: those that were compiled as they are.
    """

    problem: TileProblem
    compiled: dict[TileConfig, Judgement] = dataclasses.field(default_factory=dict)
    estimated: dict[TileConfig, float] = dataclasses.field(default_factory=dict)
    order: list[TileConfig] = dataclasses.field(default_factory=list)
    sure: set[TileConfig] = dataclasses.field(default_factory=set)
    failures: dict[TileConfig, str] = dataclasses.field(default_factory=dict)
    unanswered: dict[TileConfig, str] = dataclasses.field(default_factory=dict)
    left_out: int = 0

    @property
    def fastest(self) -> Judgement:
        return self.compiled[self.order[0]]

    @property
    def is_sure(self) -> bool:
        return not self.order or self.order[0] in self.sure

    def hear(self, tile: TileConfig, judgement: Judgement) -> None:
        """Takes a judgement."""
        verdict = judgement.verdict
        if judgement.prediction is not None or (verdict.compiles and not verdict.transient):
            self.compiled[tile] = judgement
            return
        # What takes too long to compile, or ends the compiler, is out, as what is refused.
        lost = verdict.transient and not verdict.blames_program
        (self.unanswered if lost else self.failures)[tile] = judgement.error or "no prediction"

    def sort(self) -> None:
        read = {
            tile: one.prediction.seconds
            for tile, one in self.compiled.items()
            if one.prediction is not None
        }
        unread = [tile for tile in self.compiled if tile not in read]
        self.estimated = scaled_estimates(self.problem, read, unread)
        if not read:  # then the compiler knows no better than the estimate alone
            self.order = []
            return
        seconds = read | self.estimated
        # Of two that take as long, the one that was more promising: the sort keeps their order.
        self.order = sorted(self.compiled, key=lambda tile: (seconds[tile], tile not in read))

    def make_sure(self, judgement: Judgement) -> None:
        """Takes the judgement of the fastest, compiled as it is."""
        tile = self.order[0]
        self.sure.add(tile)
        before = self.compiled[tile]
        if before.prediction is not None and judgement.prediction is not None:
            self.compiled[tile] = judgement  # a few cycles apart: it stays the first
            return
        del self.compiled[tile]
        self.hear(tile, judgement)
        self.sort()

    def close(self) -> Ranking:
        ranked = tuple((tile, self.compiled[tile]) for tile in self.order)
        out = {tile: one.error or "" for tile, one in self.compiled.items() if not self.order}
        return Ranking(
            ranked,
            self.estimated if ranked else {},
            self.failures | out,
            self.unanswered,
            self.left_out,
            len(self.estimated),
        )
