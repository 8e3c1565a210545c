"""The tables of tiles that come with the package."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

from .._hardware import find_generation
from ..compiler import CompilePool, Judgement
from ..tiles import candidates, Entry, StaticResolver, TileProblem
from ..tiles._compiler import compiler_entry
from ..tiles._ranking import rank
from ._products import kernel_problem, PRODUCTS
from ._shapes import PROJECTIONS, ROWS, SQUARES
from ._tuning import one_for_each_entry


# An entry is worth its place where it is faster than the default tile by more than what one
# compiler differs from the next.
_WORTH = 0.98

# For a generation with published timings, and for others: there the model's word is worth less.
_CANDIDATES = {True: 4, False: 3}
_BUDGET_SECONDS = 7200.0


def shipped_problems(device: str, dtypes: Iterable[str] = ("bfloat16", "float32")):
    """Every problem that a table of one generation was made for, of a layer's three products."""
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
    """Where the compiler knows a better tile than the default, as entries of a table.

    What the tile is does not depend on the machine: the budget is many times what two cores need.

    **Arguments:**

    - `problems`: for known TPUs.
    - `most_candidates`: how many tiles are compiled for each.
    - `told`: called with each judgement as it comes.

    **Returns:**

    The entries, and of which problems the compiler gave no answer, and why.
    """
    tiles = [
        candidates(problem, most=most_candidates or _CANDIDATES[is_calibrated(problem)])
        for problem in problems
    ]
    # By itself: as a candidate it would not be compiled where another is sure to be faster.
    defaults = [[StaticResolver().resolve(problem).tile] for problem in problems]
    with CompilePool() as pool:
        ranked = functools.partial(
            rank, problems, pool=pool, budget_seconds=_BUDGET_SECONDS, told=told, exact=False
        )
        of_defaults, rankings = ranked(defaults), ranked(tiles)
    entries, missing = [], {}
    for problem, default, ranking in zip(problems, of_defaults, rankings, strict=True):
        if not ranking.may_be_stored:
            missing[problem] = ranking.why_not_stored()
        elif default.unanswered:
            missing[problem] = default.why_not_stored()
        elif not default.judgements or ranking.seconds < _WORTH * default.seconds:
            entries.append(dataclasses.replace(compiler_entry(problem, ranking), failures={}))
    return entries, missing


def is_calibrated(problem: TileProblem) -> bool:
    generation = find_generation(problem.device)
    return generation is not None and generation.is_calibrated
