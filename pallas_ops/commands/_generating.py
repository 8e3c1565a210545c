"""The tables of tiles that come with the package."""

import dataclasses
from collections.abc import Callable, Iterable

from .._hardware import find_generation
from ..compiler import CompilePool, Judgement
from ..tiles import candidates, Entry, TileProblem
from ..tiles._compiler import compiler_entry
from ..tiles._ranking import rank
from ._products import kernel_problem, PRODUCTS
from ._shapes import PROJECTIONS, ROWS, SQUARES
from ._tuning import one_for_each_entry


# For a generation with published timings, and for others: there the model's word is worth less.
_CANDIDATES = {True: 4, False: 3}
_BUDGET_SECONDS = 7200.0


def shipped_problems(device: str, dtypes: Iterable[str] = ("bfloat16", "float32")):
    """Every problem that a table of one generation answers, of a layer's three products."""
    shapes = [(rows, one.k, one.n) for one in PROJECTIONS for rows in ROWS]
    problems = [
        kernel_problem(product, shape, dtype=dtype, device=device)
        for dtype in dtypes
        for shape in (*shapes, *((size, size, size) for size in SQUARES))
        for product in PRODUCTS
    ]
    return one_for_each_entry(problems)


def generate(
    problems: list[TileProblem],
    *,
    most_candidates: int | None = None,
    told: Callable[[Judgement], None] | None = None,
) -> tuple[list[Entry], dict[TileProblem, str]]:
    """The tile of each problem by the compiler, as entries of a table.

    What the tile is does not depend on the machine: the budget is many times what two cores need.

    **Arguments:**

    - `problems`: for known TPUs.
    - `most_candidates`: how many tiles are compiled for each.
    - `told`: called with each judgement as it comes.

    **Returns:**

    The entries, and why there is none of each of the other problems.
    """
    tiles = [
        candidates(problem, most=most_candidates or _CANDIDATES[is_calibrated(problem)])
        for problem in problems
    ]
    with CompilePool() as pool:
        rankings = rank(
            problems, tiles, pool, budget_seconds=_BUDGET_SECONDS, told=told, exact=False
        )
    entries, missing = [], {}
    for problem, ranking in zip(problems, rankings, strict=True):
        if ranking.may_be_stored:
            entries.append(dataclasses.replace(compiler_entry(problem, ranking), failures={}))
        else:
            missing[problem] = ranking.why_not_stored()
    return entries, missing


def is_calibrated(problem: TileProblem) -> bool:
    generation = find_generation(problem.device)
    return generation is not None and generation.is_calibrated
