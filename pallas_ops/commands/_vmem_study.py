"""The VMEM estimate against the compiler's verdict, for `pallas-ops bench vmem`."""

import dataclasses
import itertools
from typing import Any

from ..compiler import CompilePool, judge
from ..tiles import candidates, estimate_vmem_bytes, TileConfig, TileProblem, why_illegal
from ..tiles._candidates import candidate_budget_bytes
from ..tiles._ranking import compile_job
from ..tiles._vmem import scoped_vmem_limit_bytes
from ._products import kernel_problem, PRODUCTS


SHAPES = ((4096, 4096, 4096), (2048, 1536, 8960))
_TARGETS = (256, 512, 768, 1024, 1536, 2048, 4096)
_NEAR = (0.6, 1.15)
"""Near the limit: tiles whose estimate is between these parts of it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One tile near the limit.

    **Arguments:**

    - `problem`, `tile`: what was compiled.
    - `estimate_bytes`: by which a candidate is pruned.
    - `kept`: whether it is not pruned.
    - `compiles`: what the compiler says.
    - `vmem_bytes`: what it takes, or would take.
    - `seconds`: the predicted time, if it compiles.
    """

    problem: TileProblem
    tile: TileConfig
    estimate_bytes: int
    kept: bool
    compiles: bool
    vmem_bytes: int | None
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Study:
    """What came of all cases.

    **Arguments:**

    - `device`, `limit_bytes`: the TPU, and the limit that the tiles are near.
    - `cases`: the tiles.
    - `best_seconds`: for each problem the shortest predicted time of any tile that compiles, the
        usual candidates among them.
    """

    device: str
    limit_bytes: int
    cases: tuple[Case, ...]
    best_seconds: dict[TileProblem, float]

    @property
    def near(self) -> list[Case]:
        """The tiles near the limit, without those that are there to be compared with."""
        least, most = (part * self.limit_bytes for part in _NEAR)
        return [case for case in self.cases if least <= case.estimate_bytes <= most]

    def count(self, *, kept: bool, compiles: bool) -> int:
        return sum((case.kept, case.compiles) == (kept, compiles) for case in self.near)

    @property
    def losses(self) -> list[Case]:
        """Tiles that are pruned and within 2 % of the best."""
        return [
            case
            for case in self.cases
            if not case.kept
            and case.seconds is not None
            and case.seconds <= 1.02 * self.best_seconds[case.problem]
        ]

    @property
    def kept_regret(self) -> float:
        """How much slower than the best of all tiles the best of those is that are kept."""
        worst = 0.0
        for problem, best in self.best_seconds.items():
            kept = [
                case.seconds
                for case in self.cases
                if case.kept and case.problem == problem and case.seconds is not None
            ]
            worst = max(worst, min(kept) / best - 1)
        return worst

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "limit_bytes": self.limit_bytes,
            "tiles": len(self.near),
            "kept_and_compile": self.count(kept=True, compiles=True),
            "false_accepts": self.count(kept=True, compiles=False),
            "pruned_and_compile": self.count(kept=False, compiles=True),
            "pruned_and_refused": self.count(kept=False, compiles=False),
            "pruned_within_2_percent": len(self.losses),
            "kept_regret": self.kept_regret,
        }


def tiles_near_the_limit(problem: TileProblem, most: int) -> list[TileConfig]:
    """Tiles whose estimate is near the default limit, spread evenly over what there is."""
    limit = scoped_vmem_limit_bytes(problem.device)
    near = []
    for blocks in itertools.product(_TARGETS, repeat=3):
        tile = TileConfig(*blocks).clipped_to(problem.matmul)
        estimate = estimate_vmem_bytes(problem.matmul, tile)
        inside = _NEAR[0] * limit <= estimate <= _NEAR[1] * limit
        if inside and why_illegal(problem.matmul, tile) is None and tile not in near:
            near.append(tile)
    near.sort(key=lambda tile: (estimate_vmem_bytes(problem.matmul, tile), tile.blocks))
    return [near[index * len(near) // most] for index in range(min(most, len(near)))]


def study(device: str, *, tiles: int = 72) -> Study:
    """Compiles tiles near the default limit of a TPU, within that limit, and counts.

    **Arguments:**

    - `device`: the TPU; of most use is one whose limit cannot be raised, a v4.
    - `tiles`: how many, over all problems.
    """
    problems = [
        kernel_problem(product, shape, dtype="bfloat16", device=device)
        for shape in SHAPES
        for product in PRODUCTS
    ]
    limit = scoped_vmem_limit_bytes(device)
    cases, best = [], {}
    with CompilePool() as pool:
        for problem in problems:
            near = tiles_near_the_limit(problem, -(-tiles // len(problems)))
            usual = [tile for tile in candidates(problem, most=6) if tile not in near]
            jobs = [
                dataclasses.replace(compile_job(problem, tile), vmem_limit_bytes=None)
                for tile in (*near, *usual)
            ]
            judged = judge(jobs, pool, shared={})
            times = []
            for tile, judgement in zip((*near, *usual), judged, strict=True):
                assert judgement is not None
                verdict, prediction = judgement.verdict, judgement.prediction
                estimate = estimate_vmem_bytes(problem.matmul, tile)
                case = Case(
                    problem=problem,
                    tile=tile,
                    estimate_bytes=estimate,
                    kept=estimate <= candidate_budget_bytes(limit),
                    compiles=verdict.compiles,
                    vmem_bytes=verdict.vmem_bytes,
                    seconds=None if prediction is None else prediction.seconds,
                )
                if case.seconds is not None:
                    times.append(case.seconds)
                cases.append(case)
            best[problem] = min(times)
    return Study(device, limit, tuple(cases), best)
