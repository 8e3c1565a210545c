"""What is asked of the tuned products, and how many rows of `pallas-ops bench` have it."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ._benchmark import by_product, Row


_LONG_SECONDS = 200e-6
_FEW_ROWS = 16
_LARGE_WEIGHT_BYTES = 8_000_000


@dataclasses.dataclass(frozen=True)
class Target:
    """A ratio that is asked to be large enough.

    **Arguments:**

    - `asked`: of what, in words.
    - `least`: what is asked.
    - `ratios`: what there is, and of which product.
    """

    asked: str
    least: float
    ratios: tuple[tuple[float, str], ...]

    @property
    def met(self) -> int:
        return sum(ratio >= self.least for ratio, _ in self.ratios)

    @property
    def worst(self) -> tuple[float, str]:
        return min(self.ratios)


def targets(rows: Iterable[Row]) -> list[Target]:
    """What is asked of these rows. A product without a time is left out."""
    found: dict[tuple[str, float], list[tuple[float, str]]] = defaultdict(list)
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for by_provider in by_product(rows).values():
        tuned, xla = by_provider["tuned"], by_provider["xla"]
        shape = f"{tuned.m} x {tuned.k} x {tuned.n}"
        for asked, least, ratio in _asked(tuned, xla):
            found[asked, least].append((ratio, f"{shape} {tuned.product}"))
        if tuned.m > _FEW_ROWS and tuned.seconds and xla.seconds:
            steps[f"{shape} {tuned.dtype}"].append((xla.seconds, tuned.seconds))
    for step, pairs in steps.items():
        if len(pairs) == 3:
            of_xla, of_tuned = map(sum, zip(*pairs, strict=True))
            asked = "XLA's time / tuned, of all three products"
            found[asked, 1.0].append((of_xla / of_tuned, step))
    return [Target(asked, least, tuple(ratios)) for (asked, least), ratios in found.items()]


def _asked(tuned: Row, xla: Row) -> Iterator[tuple[str, float, float]]:
    """What is asked of one product, how much of it, and how much there is."""
    if tuned.seconds is None:
        return
    of_roofline = tuned.roofline_seconds / tuned.seconds
    if tuned.m > _FEW_ROWS:
        if xla.seconds is not None:
            yield f"XLA's time / tuned, m > {_FEW_ROWS}", 1.0, xla.seconds / tuned.seconds
        if xla.xla_estimate_seconds is not None:
            # XLA's estimate of few rows is far below what its operands take to be read.
            estimate = max(xla.xla_estimate_seconds, tuned.roofline_seconds)
            asked = f"XLA's own estimate, or the roofline / tuned, m > {_FEW_ROWS}"
            yield asked, 1.0, estimate / tuned.seconds
        if tuned.seconds > _LONG_SECONDS:
            transposed = tuned.product == "rhs_grad"
            products = "rhs_grad" if transposed else "forward and lhs_grad"
            least = 0.945 if transposed else 0.96
            yield f"roofline / tuned, over 0.2 ms, {products}", least, of_roofline
            if tuned.roofline_bound == "mxu" and tuned.static_mxu_use is not None:
                yield f"MXU use of a step, over 0.2 ms, {products}", 0.99, tuned.static_mxu_use
    elif tuned.k * tuned.n * tuned.itemsize >= _LARGE_WEIGHT_BYTES:
        yield f"roofline / tuned, m <= {_FEW_ROWS}, weights of 8 MB and more", 0.93, of_roofline
