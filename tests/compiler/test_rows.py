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


@pytest.mark.slow
def test_rows_add_up():
    with CompilePool() as pool:
        verdicts = pool.ask(JOBS)
    wrong = {}
    for asked, verdict in zip(JOBS, verdicts, strict=True):
        assert verdict.schedule_error is None, asked
        block_m, block_k, block_n = BLOCKS
        columns = (block_k // chip(asked.device).mxu_size) * (
            block_n // chip(asked.device).mxu_size
        )
        needed = block_m * columns * mxu_passes(asked.problem)
        if verdict.schedule.middle.rows != needed:
            wrong[asked.device, asked.problem.layout, asked.problem.lhs_dtype.name] = (
                verdict.schedule.middle.rows / needed
            )
    assert not wrong


def test_a_transposed_float32_on_a_v5e():
    """Half of its rows are multiplied half a register at a time."""
    asked = job(512, 1024, 1024, BLOCKS, layout="TN", dtype="float32")
    with CompilePool() as pool:
        (verdict,) = pool.ask([asked])
    assert verdict.schedule.middle.rows == 256 * 4 * 4
    assert verdict.schedule.middle.mxu_cycles == 256 * 4
