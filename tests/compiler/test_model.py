"""The time model, on schedules that are made up."""

import dataclasses
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_ops._hardware import GENERATIONS
from pallas_ops.compiler import (
    _model as model,
    chip,
    lower_bound_seconds,
    predict,
    roofline_seconds,
)

from .tools import problem, schedule, step


V5E = chip("v5e")
sizes = st.integers(1, 40)
blocks = st.integers(1, 12)


def brute_force_bytes(problem, blocks):
    """Every block that the pipeline moves, by walking the grid in its order."""
    shape = (problem.m, problem.k, problem.n)
    m_steps, k_steps, n_steps = (-(-s // b) for s, b in zip(shape, blocks, strict=True))
    kept = [s for s, d in zip(problem.leading_shape, problem.sum_leading, strict=True) if not d]
    summed = [s for s, d in zip(problem.leading_shape, problem.sum_leading, strict=True) if d]

    def padded(rows, columns, dtype):
        return -(-rows // 8) * 8 * -(-columns // 128) * 128 * dtype.itemsize

    def clip(axis, index):
        return min(blocks[axis], shape[axis] - index * blocks[axis])

    moved, lhs_at, rhs_at, out_at = 0, None, None, None
    grid = itertools.product(
        range(math.prod(kept)),
        range(m_steps),
        range(n_steps),
        range(math.prod(summed)),
        range(k_steps),
    )
    for batch, m, n, total, k in grid:
        if lhs_at != (batch, total, m, k):
            lhs_at = (batch, total, m, k)
            rows = (clip(0, m), clip(1, k))
            moved += padded(*(rows[::-1] if problem.transpose_lhs else rows), problem.lhs_dtype)
        if rhs_at != (batch, total, k, n):
            rhs_at = (batch, total, k, n)
            rows = (clip(1, k), clip(2, n))
            moved += padded(*(rows[::-1] if problem.transpose_rhs else rows), problem.rhs_dtype)
        if out_at != (batch, m, n):
            out_at = (batch, m, n)
            moved += padded(clip(0, m), clip(2, n), problem.out_dtype)
    return moved


leading_axes = st.sampled_from(
    [((), ()), ((3,), (False,)), ((3,), (True,)), ((2, 3), (False, True))]
)


@hypothesis.given(
    shape=st.tuples(sizes, sizes, sizes),
    blocks=st.tuples(blocks, blocks, blocks),
    layout=st.sampled_from(["NN", "NT", "TN", "TT"]),
    leading=leading_axes,
    cycles=st.tuples(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000)),
)
@hypothesis.settings(deadline=None, max_examples=25)
def test_the_simulation(shape, blocks, layout, leading, cycles):
    # Long sums and many blocks of one axis, but no more steps than are simulated in no time.
    blocks = tuple(max(min(b, s), -(-s // 12)) for b, s in zip(blocks, shape, strict=True))
    given = problem(*shape, layout=layout, leading=leading[0], summed=leading[1])
    found = predict(given, blocks, schedule(*cycles, mxu_cycles=1), V5E)
    assert found.hbm_bytes == brute_force_bytes(given, blocks)
    grid = [-(-s // b) for s, b in zip(shape, blocks, strict=True)]
    assert found.steps == math.prod(grid) * math.prod(leading[0])
    # Nothing is faster than all of its work, on the core and in memory.
    assert found.seconds >= found.compute_seconds
    assert found.seconds >= found.transfer_seconds
    assert found.mxu_seconds * V5E.clock_hertz == pytest.approx(found.steps)

    # Skipping rows that are alike changes nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_same", lambda *_: False)
        slowly = predict(given, blocks, schedule(*cycles, mxu_cycles=1), V5E)
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(slowly), rel=1e-4)


def test_a_step_by_hand():
    # One step: both blocks arrive after a latency, it is computed, and its block is stored.
    found = predict(problem(128, 128, 128), (128, 128, 128), schedule(1500, 1500, 1500), V5E)
    block = 128 * 128 * 2
    expected = 3 * block / V5E.bytes_per_second + 2 * V5E.dma_latency_seconds
    assert found.seconds == pytest.approx(expected + 1500 / V5E.clock_hertz)


def test_a_step_in_parts_by_hand():
    """Each part is multiplied when it is there, and the one before it is done."""
    given, blocks, size = problem(128, 512, 128), (128, 512, 128), 2 * 128 * 512 * 2
    part_seconds = size / 4 / V5E.bytes_per_second

    def found(cycles):
        start, part = step(cycles + 200), step(cycles)
        in_parts = dataclasses.replace(schedule(1, 1, 1), start=start, part=part)
        return predict(given, blocks, in_parts, V5E, prologue_parts=4)

    output = 128 * 128 * 2 / V5E.bytes_per_second + V5E.dma_latency_seconds
    # Slow parts: only the first one is waited for. Fast ones: the last one ends it.
    slow, fast = found(3000), found(10)
    arrives = V5E.dma_latency_seconds + part_seconds
    assert slow.seconds == pytest.approx(arrives + 4 * 3000 / V5E.clock_hertz + output)
    assert fast.seconds == pytest.approx(arrives + 3 * part_seconds + 10 / V5E.clock_hertz + output)
    assert slow.compute_seconds == pytest.approx((4 * 3000 + 200) / V5E.clock_hertz)
    assert slow.hbm_bytes == size + 128 * 128 * 2


def test_bound():
    given = problem(4096, 4096, 4096)
    blocks = (1024, 1024, 1024)
    busy, idle = schedule(20000, 20000, 20000, 19000), schedule(1, 1, 1, 1)
    assert predict(given, blocks, busy, V5E).bound == "mxu"
    assert predict(given, blocks, idle, V5E).bound == "hbm"
    assert predict(problem(256, 256, 256), (8, 128, 128), idle, V5E).bound == "latency"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_chips_by_jax_own_table(generation):
    on, info = chip(generation), GENERATIONS[generation].info
    peak = 2 * on.num_mxus * on.mxu_size**2 * on.rows_per_cycle * on.clock_hertz
    assert peak == pytest.approx(info.bf16_ops_per_second)
    assert 0.9e9 < on.clock_hertz < 2.5e9
    assert on.calibrated == (generation == "v5e")


def test_roofline():
    square = roofline_seconds(problem(4096, 4096, 4096), V5E)
    assert square == pytest.approx(2 * 4096**3 / 197e12)
    few = problem(1, 4096, 4096)
    assert roofline_seconds(few, V5E) == pytest.approx(few.bytes_accessed / 820e9)
    eight = problem(4096, 4096, 4096, dtype="int8", out="int32")
    assert roofline_seconds(eight, V5E) == pytest.approx(square / 2)


@pytest.mark.parametrize("blocks", [(128, 128, 128), (512, 1024, 1024), (1024, 4096, 512)])
def test_the_lower_bound_is_one(blocks):
    given = problem(4096, 4096, 4096)
    bound = lower_bound_seconds(given, blocks, V5E)
    cycles = math.prod(blocks) // (4 * 128 * 128)
    whole = predict(given, blocks, schedule(cycles, cycles, cycles), V5E).seconds
    assert roofline_seconds(given, V5E) * 0.999 <= bound <= whole
    in_parts = lower_bound_seconds(given, blocks, V5E, prologue_parts=2)
    assert roofline_seconds(given, V5E) * 0.999 <= in_parts <= whole
