"""Reading XLA's own dot, and the time that the model makes of it."""

import dataclasses
import json

import pytest

from pallas_ops.compiler import (
    chip,
    CompilePool,
    roofline_seconds,
    Verdict,
    xla_estimate_seconds,
    xla_time,
)
from pallas_ops.compiler._bundles import UnreadableScheduleError
from pallas_ops.compiler._model import predict_xla
from pallas_ops.compiler._xla import read_xla, XlaSchedule
from pallas_ops.kernels import mxu_passes

from .test_bundles import TEXT
from .tools import job, problem, schedule


MATRICES = {
    "cut along m": job(1024, 1024, 1024),
    "cut along k": job(16, 4096, 32128),
    "ragged": job(1000, 500, 1500),
    "transposed lhs": job(1024, 512, 2048, layout="TN"),
    "transposed rhs": job(512, 1536, 2048, layout="NT"),
    "float32": job(512, 1024, 1024, dtype="float32"),
    "int8": job(512, 1024, 1024, dtype="int8", out="int32"),
    "few rows": job(8, 1024, 2048),
    "short k": job(1024, 8, 1536, layout="NT"),
    "v4": job(512, 1024, 1024, device="v4", layout="TN"),
    "v5p": job(2048, 4096, 1024, device="v5p", layout="TN"),
    "v6e": job(512, 1024, 1024, device="v6e", layout="TN"),
    "tpu7x": job(512, 1024, 1024, device="tpu7x"),
}


@pytest.fixture(scope="module")
def verdicts():
    vectors = {"matrix by vector": job(1024, 2048, 1), "vector": job(1, 2048, 1024, layout="NT")}
    jobs = MATRICES | vectors
    with CompilePool() as pool:
        answers = pool.ask([*jobs.values()])
    return {name: (jobs[name], answer) for name, answer in zip(jobs, answers, strict=True)}


@pytest.mark.parametrize("name", MATRICES)
def test_rows_and_time_are_those_of_the_product(verdicts, name):
    asked, verdict = verdicts[name]
    assert verdict.schedule_error is None
    product, on = asked.problem, chip(asked.device)
    found = verdict.xla_schedule
    steps = 1
    for size, block in zip((product.m, product.k, product.n), found.blocks, strict=True):
        steps *= -(-size // block)
    needed = product.flops / (2 * on.mxu_size**2) * mxu_passes(product)
    assert steps * found.loop.middle.rows >= 0.99 * needed
    time = xla_time(product, verdict, on)
    assert time.source in ("schedule", "transfers")
    assert roofline_seconds(product, on) <= time.seconds
    if product.m > 16:
        # What XLA itself expects is more: it counts each step's transfers where they are hidden.
        cores = 2 if asked.device == "v5p" else 1  # its estimate is for both
        assert time.seconds < 1.1 * cores * xla_estimate_seconds(verdict, on)


@pytest.mark.parametrize("name", ["matrix by vector", "vector"])
def test_a_vector_is_summed_without_an_mxu(verdicts, name):
    asked, verdict = verdicts[name]
    found = verdict.xla_schedule
    assert (found.blocks, found.loop) == (None, None)
    on = chip(asked.device)
    # XLA's own estimate is several times what its transfers and its bundles take.
    assert found.other_cycles / on.clock_hertz < xla_estimate_seconds(verdict, on)
    time = xla_time(asked.problem, verdict, on)
    assert roofline_seconds(asked.problem, on) <= time.seconds < xla_estimate_seconds(verdict, on)


def _program(
    iterations=("1", "2", "1"), window=("5", "1"), operation="fusion.3", copied="", **config
):
    """A program as XLA prints it, of one loop; shortened."""
    window_config = {
        "estimated_cycles": "1000",
        "iteration_bounds": list(iterations),
        "output_window_bounds": list(window),
        **config,
    }
    return f"""HloModule jit_product

%fused (a: bf16[128,128]) -> bf16[128,128] {{
  %inner = bf16[128,128] parameter(0), backend_config={{"flag_configs":[]}}
}}

ENTRY %main.1 (lhs.1: bf16[128,128], rhs.1: bf16[128,128]) -> bf16[128,128] {{
  %lhs.1 = bf16[128,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  {copied}
  %rhs.1 = bf16[128,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %{
        operation
    } = bf16[128,128]{{1,0:T(8,128)(2,1)}} fusion(%lhs.1, %rhs.1), calls=%fused, backend_config={
        json.dumps({"window_config": window_config}, separators=(",", ":"))
    }
}}
"""


@pytest.fixture
def folder(tmp_path):
    # 16 + 16 + 8 rows in each step, of which there are two.
    (tmp_path / "17-fusion.3-01-final_bundles.txt").write_text(TEXT)
    (tmp_path / "17-fusion.3-00-schedule-analysis_final_bundles.txt").write_text("no schedule")
    (tmp_path / "17-other_fusion.3-01-final_bundles.txt").write_text("another's")
    return tmp_path


def test_what_is_read(folder):
    copied = (
        "%copy-start = (bf16[128,128]{1,0:T(8,128)(2,1)S(1)}, bf16[128,128], u32[]{:S(2)}) "
        "copy-start(%lhs.1), cross_program_prefetch_index=0"
    )
    found = read_xla(_program(copied=copied), folder, problem(80, 128, 128), chip("v5e"))
    assert found.blocks == (40, 128, 128)
    assert found.loop.middle.rows == 40
    assert (found.lhs_in_vmem, found.rhs_in_vmem) == (True, False)
    assert found.other_cycles == 0
    more = _program().replace(
        "  ROOT", '  %copy.1 = copy(%lhs.1), backend_config={"estimated_cycles":"300"}\n  ROOT'
    )
    with_copy = read_xla(more, folder, problem(80, 128, 128), chip("v5e"))
    assert with_copy.other_cycles == 300
    # To HBM; the flag of the copy itself is always in another memory.
    elsewhere = read_xla(
        _program(copied=copied.replace("S(1)", "")), folder, problem(80, 128, 128), chip("v5e")
    )
    assert elsewhere.lhs_in_vmem is False
    late = copied.replace(", cross_program_prefetch_index=0", "")
    with pytest.raises(UnreadableScheduleError, match="in the program itself"):
        read_xla(_program(copied=late), folder, problem(80, 128, 128), chip("v5e"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            _program().replace(
                "ROOT %fusion.3 = bf16[128,128]{1,0", "ROOT %fusion.3 = bf16[128,128]{0,1"
            ),
            "transposed product",
        ),
        (_program(iterations=("2", "2", "1")), r"runs \(2, 2, 1\) over n, m and k"),
        (_program(iterations=("1", "1", "1"), window=("10", "1")), "gives 40 rows to the MXUs"),
        (_program(operation="fusion.4"), "expected one schedule of fusion.4"),
        (_program(operation="other_fusion.3"), "is cut off, or no schedule"),
        (_program(window=("5",)), "other axes than m and n"),
        (_program(iterations=("1", "x")), "ValueError"),
        (_program(iterations=()), "0 of XLA's operations multiply"),
        (_program().replace("ENTRY", "ENTER"), "no entry computation"),
        (_program().replace('"window_config"', "window"), "is no JSON"),
        (_program().replace("parameter(1)", ""), "no parameter 1"),
    ],
)
def test_what_does_not_add_up_is_not_read(folder, text, reason):
    with pytest.raises(UnreadableScheduleError, match=reason):
        read_xla(text, folder, problem(80, 128, 128), chip("v5e"))


def test_leading_axes_are_not_read(folder):
    batch = problem(128, 128, 128, leading=(2,), summed=(False,))
    with pytest.raises(UnreadableScheduleError, match="leading axes"):
        read_xla(_program(), folder, batch, chip("v5e"))


def test_where_the_time_comes_from():
    product, on = problem(1024, 1024, 1024), chip("v5e")
    slow = XlaSchedule((512, 1024, 512), schedule(9000, 9000, 9000, 8192), False, False, 0)
    verdict = Verdict(True, xla_cycles=20_000, xla_schedule=slow)
    found = xla_time(product, verdict, on)
    assert (found.source, found.seconds) == ("schedule", predict_xla(product, slow, on))
    assert found.seconds > 4 * 9000 / on.clock_hertz
    unread = dataclasses.replace(verdict, xla_schedule=None)
    assert xla_time(product, unread, on).seconds == 20_000 / on.clock_hertz
    assert xla_time(product, unread, on).source == "estimate"
    hopeful = dataclasses.replace(unread, xla_cycles=1)
    least = product.bytes_accessed / on.bytes_per_second
    assert xla_time(product, hopeful, on).seconds == least
    assert xla_time(product, hopeful, on).source == "transfers"
    assert xla_time(product, Verdict(True), on) is None


def test_the_result_is_stored_as_it_lies():
    """Of few rows, padded to 8 and not to 128."""
    product, on = problem(8, 64, 16384), chip("v5e")
    loop = schedule(100, 100, 100)
    found = predict_xla(product, XlaSchedule((8, 128, 16384), loop, True, True, 0), on)
    stored = 8 * 16384 * 2 / on.bytes_per_second
    assert stored <= found <= stored + 100 / on.clock_hertz + 2.1 * on.dma_latency_seconds


def test_what_is_in_vmem_is_not_fetched():
    product, on = problem(1024, 4096, 1024), chip("v5e")
    loop = schedule(100, 100, 100)

    def seconds(lhs: bool, rhs: bool, other: int = 0) -> float:
        return predict_xla(product, XlaSchedule((512, 4096, 512), loop, lhs, rhs, other), on)

    # Its loop runs over n and then m: a block of rhs stays for all m.
    moved = {(lhs, rhs): seconds(lhs, rhs) for lhs in (False, True) for rhs in (False, True)}
    assert moved[True, True] < moved[True, False] < moved[False, True] < moved[False, False]
    more = seconds(True, True, other=1500) - seconds(True, True)
    assert more == pytest.approx(1500 / on.clock_hertz)
