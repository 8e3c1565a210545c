"""What the reader takes for the first, the middle and the last step of a sum, in real schedules.

A kernel as tutorials have it tells them apart: its first step fills the accumulator besides, its
last one stores the result besides, and both are guarded by the place in the sum.
"""

import dataclasses

import pytest

from pallas_ops.compiler import chip, CompilePool
from pallas_ops.compiler._stand_in import stand_in

from .tools import job


DEVICES = ("v4", "v5e", "v5p", "v6e", "tpu7x")
LAYOUTS = ("NN", "NT", "TN")
BLOCKS = (256, 256, 256)
SUMS = (2, 3, 8)


def _jobs(device, dtypes):
    """Products of 2 x 2 blocks, by what they are, each with how many steps a sum takes."""
    found = {}
    for layout in LAYOUTS:
        for dtype in dtypes:
            given = dict(device=device, layout=layout, dtype=dtype)
            if dtype == "int8":
                given["out"] = "int32"
            for steps in SUMS:
                found[layout, dtype, steps, ""] = job(512, 256 * steps, 512, BLOCKS, **given)
            found[layout, dtype, 3, "ragged"] = job(512, 600, 512, BLOCKS, **given)
            batch = dict(leading=(3,), **given)
            found[layout, dtype, 2, "batch"] = job(512, 512, 512, BLOCKS, summed=(False,), **batch)
            found[layout, dtype, 3, "summed"] = job(512, 256, 512, BLOCKS, summed=(True,), **batch)
            both = dict(leading=(2, 2), summed=(False, True), **given)
            found[layout, dtype, 4, "both"] = job(512, 512, 512, BLOCKS, **both)
    return found


def _check(device, dtypes):
    own = _jobs(device, dtypes)
    textbook = {name: dataclasses.replace(one, textbook=True) for name, one in own.items()}
    with CompilePool() as pool:
        verdicts = pool.ask([*own.values(), *textbook.values()])
    schedules = []
    for asked, verdict in zip([*own.values(), *textbook.values()], verdicts, strict=True):
        assert verdict.error is None, asked
        assert verdict.schedule_error is None, asked
        schedules.append(verdict.schedule)
    size = chip(device).mxu_size
    rows = 256 * (256 // size) ** 2
    for name, schedule in zip([*own, *textbook], schedules, strict=True):
        steps = (schedule.first, schedule.middle, schedule.last)
        assert {step.rows for step in steps} == {rows}, name
    # The accumulator's registers, of which at most three are stored in a bundle.
    registers = 256 * 256 // 1024
    for (_, _, _, what), schedule in zip(own, schedules, strict=False):
        for step in (schedule.first, schedule.last):
            most = 1.6 if what else 1.15  # the last one may mask the edge of k besides
            assert 1 / most < step.bundles / schedule.middle.bundles < most
    for name, schedule in zip(textbook, schedules[len(own) :], strict=True):
        first, middle, last = schedule.first, schedule.middle, schedule.last
        if name[2] > 2:
            assert first.bundles - middle.bundles >= registers / 4, name
            # libtpu 0.0.52 has most of these stores in every step, each behind a predicate.
            assert last.bundles > middle.bundles, name
        else:
            assert middle == first, name  # there is none
    for layout in LAYOUTS:
        for dtype in dtypes:
            # However many there are, they cost the same, but for the scalars.
            two, three, eight = (
                schedules[len(own) + list(own).index((layout, dtype, steps, ""))] for steps in SUMS
            )
            for one, other in ((two, three), (three, eight)):
                assert abs(one.first.bundles - other.first.bundles) <= 16
                assert abs(one.last.bundles - other.last.bundles) <= 16
            assert abs(three.middle.bundles - eight.middle.bundles) <= 16


def test_the_places_in_a_sum():
    _check("v5e", ("bfloat16",))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_places_in_a_sum_on_every_generation(device):
    _check(device, ("bfloat16", "float32") if device == "v4" else ("bfloat16", "float32", "int8"))


@pytest.mark.slow
def test_a_large_kernel_with_a_transposed_lhs():
    """It keeps what it compares as numbers: for want of predicate registers."""
    asked = job(12000, 1280, 5120, (1280, 1200, 1280), layout="TN")
    asked = stand_in(dataclasses.replace(asked, vmem_limit_bytes=64 << 20))
    with CompilePool() as pool:
        (verdict,) = pool.ask([asked])
    assert verdict.schedule_error is None
    schedule = verdict.schedule
    rows = 1280 * -(-1200 // 128) * (1280 // 128)
    assert schedule.first.rows == schedule.middle.rows == schedule.last.rows == rows
