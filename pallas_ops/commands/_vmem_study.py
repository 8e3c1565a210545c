"""The VMEM estimate against the compiler's verdict, for `pallas-ops bench vmem`."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..compiler import chip, CompilePool, CompilerUnavailableError, judge
from ..tiles import candidates, estimate_vmem_bytes, TileConfig, TileProblem, why_illegal
from ..tiles._candidates import candidate_budget_bytes
from ..tiles._ranking import compile_job
from ..tiles._vmem import scoped_vmem_limit_bytes
from ._products import kernel_problem, PRODUCTS


SHAPES = ((4096, 4096, 4096), (2048, 1536, 8960))
_TARGETS = (256, 512, 768, 1024, 1536, 2048, 4096)
_NEAR = (0.6, 1.15)
"""Near the limit: tiles whose estimate is between these parts of it."""

_USUAL = 3
"""How many of the usual candidates of each product are compared with."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One tile, and what the compiler says of it.

    **Arguments:**

    - `problem`, `tile`: what was compiled.
    - `is_near`: whether it was chosen for being near the limit; others are there to compare with.
    - `kept`: whether the estimate does not prune it.
    - `compiles`: what the compiler says.
    - `seconds`: the predicted time, if it compiles.
    """

    problem: TileProblem
    tile: TileConfig
    is_near: bool
    kept: bool
    compiles: bool
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Study:
    """What came of all cases.

    **Arguments:**

    - `device`, `limit_bytes`: the TPU, and the limit that the tiles are near.
    - `cases`: the tiles that the compiler gave a verdict on.
    - `unanswered`: how many there were without one: a worker was lost, say.
    """

    device: str
    limit_bytes: int
    cases: tuple[Case, ...]
    unanswered: int = 0

    @property
    def calibrated(self) -> bool:
        """Whether the model that predicts times was compared with timings of this TPU."""
        return chip(self.device).calibrated

    @functools.cached_property
    def best_seconds(self) -> dict[TileProblem, float]:
        """For each problem the shortest predicted time of any tile, the usual candidates too."""
        best: dict[TileProblem, float] = {}
        for case in self.cases:
            if case.seconds is not None:
                best[case.problem] = min(best.get(case.problem, math.inf), case.seconds)
        return best

    @property
    def near(self) -> list[Case]:
        """The tiles near the limit, without those that are there to be compared with."""
        return [case for case in self.cases if case.is_near]

    def count(self, *, kept: bool, compiles: bool) -> int:
        return sum((case.kept, case.compiles) == (kept, compiles) for case in self.near)

    @property
    def losses(self) -> list[Case]:
        """Tiles near the limit that are pruned and within 2 % of the best."""
        return [
            case
            for case in self.near
            if not case.kept
            and case.seconds is not None
            and case.seconds <= 1.02 * self.best_seconds[case.problem]
        ]

    @property
    def kept_regret(self) -> float | None:
        """How much slower than the best of all tiles the best of those is that are kept.

        The worst of all problems; `None` where one of them has no tile that is kept and has a time.
        """
        kept: dict[TileProblem, float] = {}
        for case in self.cases:
            if case.kept and case.seconds is not None:
                kept[case.problem] = min(kept.get(case.problem, math.inf), case.seconds)
        if not kept or kept.keys() != self.best_seconds.keys():
            return None
        return max(kept[problem] / best - 1 for problem, best in self.best_seconds.items())

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "calibrated": self.calibrated,
            "limit_bytes": self.limit_bytes,
            "tiles": len(self.near),
            "unanswered": self.unanswered,
            "kept_and_compile": self.count(kept=True, compiles=True),
            "false_accepts": self.count(kept=True, compiles=False),
            "pruned_and_compile": self.count(kept=False, compiles=True),
            "pruned_and_refused": self.count(kept=False, compiles=False),
            "pruned_within_2_percent": len(self.losses),
            "kept_regret": self.kept_regret,
        }


def tiles_near_the_limit(problem: TileProblem) -> list[TileConfig]:
    """Every tile of some sizes whose estimate is near the default limit, in order of that."""
    limit = scoped_vmem_limit_bytes(problem.device)
    near = []
    for blocks in itertools.product(_TARGETS, repeat=3):
        tile = TileConfig(*blocks).clipped_to(problem.matmul)
        estimate = estimate_vmem_bytes(problem.matmul, tile)
        inside = _NEAR[0] * limit <= estimate <= _NEAR[1] * limit
        if inside and why_illegal(problem.matmul, tile) is None and tile not in near:
            near.append(tile)
    return sorted(near, key=lambda tile: (estimate_vmem_bytes(problem.matmul, tile), tile.blocks))


def share_out(wanted: int, available: Sequence[int]) -> list[int]:
    """How many to take of each: as even as can be, and `wanted` in all if there are as many."""
    shares = [0] * len(available)
    for _ in range(min(wanted, sum(available))):
        short = [index for index, count in enumerate(available) if shares[index] < count]
        shares[min(short, key=lambda index: shares[index])] += 1
    return shares


def spread(tiles: Sequence[TileConfig], count: int) -> list[TileConfig]:
    """So many of the tiles, spread evenly over them."""
    return [tiles[index * len(tiles) // count] for index in range(count)]


def study(device: str, *, tiles: int) -> Study:
    """Compiles tiles near the default limit of a TPU, within that limit, and counts.

    **Arguments:**

    - `device`: the TPU; of most use is one whose limit cannot be raised, a v4.
    - `tiles`: how many, over all problems, or as many as there are.

    **Raises:**

    [`pallas_ops.compiler.CompilerUnavailableError`][] where there is no compiler that answers.
    """
    problems = [
        kernel_problem(product, shape, dtype="bfloat16", device=device)
        for shape in SHAPES
        for product in PRODUCTS
    ]
    every = [tiles_near_the_limit(problem) for problem in problems]
    shares = share_out(tiles, list(map(len, every)))
    asked = 0
    cases: list[Case] = []
    with CompilePool() as pool:
        for problem, near, count in zip(problems, every, shares, strict=True):
            chosen = spread(near, count)
            usual = [tile for tile in candidates(problem, most=_USUAL) if tile not in chosen]
            asked += len(chosen) + len(usual)
            is_near = dict.fromkeys(chosen, True) | dict.fromkeys(usual, False)
            cases += _cases(problem, is_near, pool)
    limit = scoped_vmem_limit_bytes(device)
    return Study(device, limit, tuple(cases), asked - len(cases))


def _cases(problem: TileProblem, is_near: dict[TileConfig, bool], pool: CompilePool) -> list[Case]:
    """The tiles that the compiler gives a verdict on, within its default limit."""
    limit = scoped_vmem_limit_bytes(problem.device)
    jobs = [
        dataclasses.replace(compile_job(problem, tile), vmem_limit_bytes=None) for tile in is_near
    ]
    cases = []
    for tile, judgement in zip(is_near, judge(jobs, pool, shared={}), strict=True):
        assert judgement is not None
        verdict, prediction = judgement.verdict, judgement.prediction
        if verdict.unavailable:
            raise CompilerUnavailableError(verdict.error)
        if verdict.unheard:
            continue
        estimate = estimate_vmem_bytes(problem.matmul, tile)
        cases.append(
            Case(
                problem=problem,
                tile=tile,
                is_near=is_near[tile],
                kept=estimate <= candidate_budget_bytes(limit),
                compiles=verdict.compiles,
                seconds=None if prediction is None else prediction.seconds,
            )
        )
    return cases
