"""The tile of a person who tunes nothing, against the compiler's best, for `bench default`."""

import dataclasses
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ..compiler import chip, CompileJob, CompilePool, CompilerUnavailableError, xla_time
from ..operators import UnsupportedCallError
from ..tiles import candidates, StaticResolver, TileConfig, TileProblem
from ..tiles._ranking import rank, Ranking
from ._console import microseconds
from ._predicting import xla_is_faster
from ._products import kernel_problem, PRODUCTS


DTYPES = ("bfloat16", "float32", "int8")

_CANDIDATES = 10
_AT_ONCE = 6
_BUDGET_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One product with the default tile, with the best of ten candidates, and as XLA's dot.

    **Arguments:**

    - `problem`: the product.
    - `product`: one of `PRODUCTS`.
    - `default`, `best`: the tiles; `best` is `None` where no candidate has a predicted time.
    - `default_seconds`, `best_seconds`, `xla_seconds`: predicted, `None` where there is none.
    - `unread`: how many candidates compile with a schedule that cannot be read.
    - `error`: why the default tile has no time.
    """

    problem: TileProblem
    product: str
    default: TileConfig
    default_seconds: float | None
    best: TileConfig | None
    best_seconds: float | None
    xla_seconds: float | None
    unread: int = 0
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """The best time over the default's: 1 where nothing can be gained."""
        if self.default_seconds is None or self.best_seconds is None:
            return None
        return self.best_seconds / self.default_seconds

    def as_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "device": problem.device,
            "product": self.product,
            "m": problem.m,
            "k": problem.k,
            "n": problem.n,
            "layout": problem.layout,
            "dtype": problem.lhs_dtype.name,
            "default_tile": list(self.default.numbers),
            "default_us": microseconds(self.default_seconds),
            "best_tile": None if self.best is None else list(self.best.numbers),
            "best_us": microseconds(self.best_seconds),
            "best_over_default": self.ratio,
            "xla_us": microseconds(self.xla_seconds),
            "unread": self.unread,
            "error": self.error,
        }


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the rows say together.

    **Arguments:**

    - `rows`: how many products.
    - `median`, `worst`: of the best time over the default's.
    - `xla_is_faster`: of how many products XLA's dot is more than a tenth faster than the default.
    - `unread`: how many candidates compile with a schedule that cannot be read.
    - `without_time`: how many products have no time of the default, or of any candidate.
    """

    rows: int
    median: float | None
    worst: float | None
    xla_is_faster: int
    unread: int
    without_time: int

    @staticmethod
    def of(rows: Sequence[Row]) -> "Summary":
        ratios = [row.ratio for row in rows if row.ratio is not None]
        return Summary(
            rows=len(rows),
            median=statistics.median(ratios) if ratios else None,
            worst=min(ratios, default=None),
            xla_is_faster=sum(xla_is_faster(row.default_seconds, row.xla_seconds) for row in rows),
            unread=sum(row.unread for row in rows),
            without_time=len(rows) - len(ratios),
        )


def generated_problems(device: str, count: int, seed: int) -> list[tuple[str, TileProblem]]:
    """Products of shapes that nobody chose: a product and a dtype each, by a seed.

    m is 8 to 16,384, and k and n are 96 to 16,384, evenly on a scale of powers; every other shape
    is rounded to multiples of 64, as a model's are, and the rest are ragged.
    """
    draw = random.Random(seed)

    def size(least: int, rounded: bool) -> int:
        number = round(math.exp(draw.uniform(math.log(least), math.log(16_384))))
        return max(64, round(number / 64) * 64) if rounded and number >= 64 else number

    found = []
    for index in range(count):
        rounded = index % 2 == 0
        shape = (size(8, rounded), size(96, rounded), size(96, rounded))
        dtype = draw.choice(DTYPES)
        # A product of integers has no gradients.
        product = "forward" if dtype == "int8" else draw.choice(PRODUCTS)
        layout = draw.choice(("NN", "NT")) if product == "forward" else "NT"
        try:
            problem = kernel_problem(product, shape, dtype=dtype, device=device, layout=layout)
        except UnsupportedCallError:  # int8 by int8 on a v4
            problem = kernel_problem(product, shape, dtype=DTYPES[0], device=device, layout=layout)
        found.append((product, problem))
    return found


def named_problems(
    device: str, shapes: Sequence[tuple[int, int, int]]
) -> list[tuple[str, TileProblem]]:
    """All products of each shape, in bfloat16."""
    return [
        (product, kernel_problem(product, shape, dtype="bfloat16", device=device))
        for shape in shapes
        for product in PRODUCTS
    ]


def study(problems: Sequence[tuple[str, TileProblem]]) -> Iterator[list[Row]]:
    """Compiles the default tile, the first ten candidates and XLA's dot of each product.

    **Arguments:**

    - `problems`: each with the product that it is, for known TPUs.

    **Raises:**

    [`pallas_ops.compiler.CompilerUnavailableError`][] where there is no compiler that answers.
    """
    with CompilePool() as pool:
        for first in range(0, len(problems), _AT_ONCE):
            yield _rows(problems[first : first + _AT_ONCE], pool)


def _seconds(ranking: Ranking) -> float | None:
    """The time of the fastest."""
    return ranking.seconds if ranking.judgements else None


def _rows(problems: Sequence[tuple[str, TileProblem]], pool: CompilePool) -> list[Row]:
    dots = [CompileJob(problem.matmul, str(problem.device)) for _, problem in problems]
    verdicts = pool.ask(dots)
    for verdict in verdicts:
        if verdict is not None and verdict.unavailable:
            raise CompilerUnavailableError(verdict.error)
    defaults = [StaticResolver().resolve(problem).tile for _, problem in problems]
    ranked = [problem for _, problem in problems]
    given: dict[str, Any] = {"budget_seconds": _BUDGET_SECONDS, "exact": False}
    # By itself: as a candidate it would not be compiled where another is sure to be faster.
    own = rank(ranked, [[tile] for tile in defaults], pool, **given)
    tiles = [
        list(dict.fromkeys([default, *candidates(problem, most=_CANDIDATES)]))
        for problem, default in zip(ranked, defaults, strict=True)
    ]
    rows = []
    for (product, problem), default, verdict, alone, ranking in zip(
        problems, defaults, verdicts, own, rank(ranked, tiles, pool, **given), strict=True
    ):
        xla = None if verdict is None else xla_time(problem.matmul, verdict, chip(problem.device))
        errors = [*alone.failures.values(), *alone.unanswered.values()]
        rows.append(
            Row(
                problem=problem,
                product=product,
                default=default,
                default_seconds=_seconds(alone),
                best=ranking.judgements[0][0] if ranking.judgements else None,
                best_seconds=_seconds(ranking),
                xla_seconds=None if xla is None else xla.seconds,
                unread=ranking.unread,
                error=errors[0] if errors else None,
            )
        )
    return rows
