"""The rows that a kernel gives to the MXUs are those of its product, on every generation."""

import pytest

from pallas_ops.compiler import chip, CompilePool
from pallas_ops.kernels import mxu_passes

from .tools import job


BLOCKS = (256, 512, 512)
JOBS = [
    job(512, 1024, 1024, BLOCKS, device, layout=layout, dtype=dtype)
    for device in ("v4", "v5e", "v5p", "v6e", "tpu7x")
    for layout in ("NN", "NT", "TN")
    for dtype in ("bfloat16", "float32", "int8")
    if (device, dtype) != ("v4", "int8")  # refused
]
PRECISE_JOBS = [
    job(
        512,
        1024,
        1024,
        BLOCKS,
        device,
        dtype=lhs,
        rhs_dtype=rhs,
        out="float32",
        precision=precision,
    )
    for device in ("v4", "v5e", "v5p", "v6e", "tpu7x")
    for precision in ("HIGH", "HIGHEST")
    for lhs, rhs in (("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"))
]


def _rows_of_one_pass(device):
    block_m, block_k, block_n = BLOCKS
    size = chip(device).mxu_size
    return block_m * (block_k // size) * (block_n // size)


@pytest.mark.slow
def test_rows_add_up():
    jobs = [*JOBS, *PRECISE_JOBS]
    with CompilePool() as pool:
        verdicts = pool.ask(jobs)
    wrong = {}
    for asked, verdict in zip(jobs, verdicts, strict=True):
        assert verdict.schedule_error is None, asked
        needed = _rows_of_one_pass(asked.device) * mxu_passes(asked.problem)
        if verdict.schedule.middle.rows != needed:
            wrong[asked] = verdict.schedule.middle.rows / needed
    assert not wrong


def test_the_passes_of_float32_on_a_v5e():
    """One, three and six."""
    asked = [
        job(512, 1024, 1024, BLOCKS, dtype="float32", precision=precision)
        for precision in ("DEFAULT", "HIGH", "HIGHEST")
    ]
    with CompilePool() as pool:
        steps = [verdict.schedule.middle for verdict in pool.ask(asked)]
    assert [step.rows / _rows_of_one_pass("v5e") for step in steps] == [1, 3, 6]
    # A register holds twice as many rows of their bfloat16.
    assert [step.matmuls / steps[0].matmuls for step in steps] == [1, 1.5, 3]


def test_a_transposed_float32_on_a_v5e():
    """Half of its rows are multiplied half a register at a time."""
    asked = job(512, 1024, 1024, BLOCKS, layout="TN", dtype="float32")
    with CompilePool() as pool:
        (verdict,) = pool.ask([asked])
    assert verdict.schedule.middle.rows == 256 * 4 * 4
    assert verdict.schedule.middle.mxu_cycles == 256 * 4
