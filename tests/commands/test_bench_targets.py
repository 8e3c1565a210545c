"""What `pallas-ops bench` asks of its rows."""

import pytest

from pallas_ops.commands._benchmark import Row
from pallas_ops.commands._targets import targets


def _row(provider, m, k, n, seconds, product="forward", **fields):
    flops = 2 * m * k * n
    fields = {"roofline_seconds": flops / 197e12, "roofline_bound": "mxu", **fields}
    return Row(m, k, n, "bfloat16", product, provider, None, seconds, flops, "predicted",
               calibrated=True, **fields)  # fmt: skip


def _rows(*sizes, tuned, xla, estimate=None, product="forward", **fields):
    return [
        _row("tile128", *sizes, 1.0, product),
        _row("tuned", *sizes, tuned, product, **fields),
        _row("xla", *sizes, xla, product, xla_estimate_seconds=estimate),
    ]


def _found(rows):
    return {target.asked: target for target in targets(rows)}


def test_a_long_product():
    """4096 cubed takes 698 us at the peak of a v5e."""
    rows = _rows(4096, 4096, 4096, tuned=720e-6, xla=719e-6, estimate=730e-6, static_mxu_use=0.99)
    rows += _rows(4096, 4096, 4096, tuned=735e-6, xla=740e-6, product="rhs_grad")
    found = _found(rows)
    assert [(name, one.least, one.met, len(one.ratios)) for name, one in found.items()] == [
        ("XLA's time / tuned, m > 16", 1.0, 1, 2),
        ("XLA's own estimate, or the roofline / tuned, m > 16", 1.0, 1, 1),
        ("roofline / tuned, over 0.2 ms, forward and lhs_grad", 0.96, 1, 1),
        ("MXU use of a step, over 0.2 ms, forward and lhs_grad", 0.99, 1, 1),
        ("roofline / tuned, over 0.2 ms, rhs_grad", 0.945, 1, 1),
    ]
    worst, where = found["XLA's time / tuned, m > 16"].worst
    assert worst == pytest.approx(719 / 720)
    assert where == "4096 x 4096 x 4096 forward"


def test_a_step_is_three_products():
    rows = []
    for product, tuned in (("forward", 50e-6), ("lhs_grad", 50e-6), ("rhs_grad", 60e-6)):
        assert "XLA's time / tuned, of all three products" not in _found(rows)
        rows += _rows(1024, 1024, 1024, tuned=tuned, xla=52e-6, product=product)
    step = _found(rows)["XLA's time / tuned, of all three products"]
    assert step.ratios == ((pytest.approx(156 / 160), "1024 x 1024 x 1024 bfloat16"),)
    assert step.met == 0


def test_few_rows_are_compared_with_the_bandwidth():
    """8 MB at 820 GB/s are 10.2 us; of a smaller weight nothing is asked."""
    on_hbm = {"roofline_seconds": 10.2e-6, "roofline_bound": "hbm"}
    rows = _rows(16, 2048, 2048, tuned=11e-6, xla=9e-6, estimate=9e-6, **on_hbm)
    rows += _rows(16, 1024, 2048, tuned=11e-6, xla=9e-6, **on_hbm)
    (target,) = targets(rows)
    assert target.asked == "roofline / tuned, m <= 16, weights of 8 MB and more"
    assert (target.least, target.met, len(target.ratios)) == (0.93, 0, 1)


def test_an_estimate_below_the_roofline_is_the_roofline():
    rows = _rows(128, 4096, 4096, tuned=42e-6, xla=43e-6, estimate=20e-6, roofline_seconds=40e-6)
    (ratio, _) = _found(rows)["XLA's own estimate, or the roofline / tuned, m > 16"].worst
    assert ratio == pytest.approx(40 / 42)


def test_nothing_is_asked_of_what_has_no_time():
    assert targets(_rows(4096, 4096, 4096, tuned=None, xla=1e-3)) == []
    found = _found(_rows(4096, 4096, 4096, tuned=1e-3, xla=None))
    assert list(found) == ["roofline / tuned, over 0.2 ms, forward and lhs_grad"]
