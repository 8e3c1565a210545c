"""The tables of tiles that come with the package."""

import dataclasses
from collections.abc import Callable, Iterable

from ..compiler import CompilePool
from ..tiles import candidates, Entry, problem_key, TileProblem
from ..tiles._compiler import compiler_entry
from ..tiles._ranking import rank
from ._entries import canonical_key
from ._products import make_problem, PRODUCTS
from ._shapes import PROJECTIONS, ROWS, SQUARES
from ._tuning import one_for_each_entry


CANDIDATES = 8
BUDGET_SECONDS = 120.0


def shipped_problems(device: str, dtypes: Iterable[str] = ("bfloat16", "float32")):
    """Every problem that a table of one generation answers, of a layer's three products."""
    shapes = [(rows, one.k, one.n) for one in PROJECTIONS for rows in ROWS]
    problems = [
        make_problem(
            product,
            *shape,
            dtype=dtype,
            out_dtype=None,
            layout="NT",
            precision="default",
            device=device,
            implementation="mosaic",
        )
        for dtype in dtypes
        for shape in (*shapes, *((size, size, size) for size in SQUARES))
        for product in PRODUCTS
    ]
    return one_for_each_entry(problems)


def generate(
    problems: list[TileProblem],
    *,
    most_candidates: int = CANDIDATES,
    told: Callable[[TileProblem, Entry | None], None] | None = None,
) -> list[Entry]:
    """The tile of each problem by the compiler, as entries of a table.

    What the tile is does not depend on the machine, if it is left its time: the budget is four
    times what two cores need.

    **Arguments:**

    - `problems`: for known TPUs.
    - `most_candidates`: how many tiles are compiled for each.
    - `told`: called with each problem and its entry, or `None` where no tile compiles.
    """
    entries: dict[tuple, Entry] = {}
    with CompilePool() as pool:
        for problem in problems:
            tiles = candidates(problem, most=most_candidates)
            ranking = rank(problem, tiles, pool, budget_seconds=BUDGET_SECONDS)
            entry = None
            if ranking.judgements:
                entry = dataclasses.replace(compiler_entry(problem, ranking), failures={})
                entries[canonical_key(problem_key(problem))] = entry
            if told is not None:
                told(problem, entry)
    return list(entries.values())
