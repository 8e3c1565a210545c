"""Compile workers, and what may happen to them."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import pytest

from pallas_ops.compiler import (
    _pool as pool_module,
    _worker as worker,
    chip,
    CompilePool,
    judge,
    lower_bound_seconds,
    Verdict,
)
from pallas_ops.compiler._bundles import READABLE_LIBTPU
from pallas_ops.compiler._stand_in import stand_in
from pallas_ops.compiler._topology import libtpu_version

from .tools import job


pytestmark = pytest.mark.own_workers

ROOT = pathlib.Path(__file__).parents[2]
SMALL = job(1024, 1024, 1024, (256, 512, 256))


@pytest.fixture(scope="module")
def pool():
    with CompilePool(2) as pool:
        yield pool


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where temporary files go during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# What is said.


@pytest.mark.parametrize(
    ("device", "mxus", "size"),
    [("v4", 4, 128), ("v5e", 4, 128), ("v5p", 4, 128), ("v6e", 2, 256), ("tpu7x", 2, 256)],
)
def test_every_generation_is_read(pool, device, mxus, size):
    (verdict,) = pool.ask([job(2048, 2048, 2048, (512, 512, 256), device)])
    assert verdict.compiles
    schedule = verdict.schedule
    assert verdict.schedule_error is None
    # Sixteen rows of bfloat16 in a register, against each block of weights that an MXU holds.
    matmuls = (512 // 16) * (512 // size) * (256 // size)
    assert schedule.middle.matmuls == schedule.first.matmuls == schedule.last.matmuls == matmuls
    rate = chip(device).rates[16]
    assert schedule.middle.mxu_cycles == matmuls * 16 / rate / mxus
    # The last step stores the result and no sum: neither it nor the first one costs more.
    for step in (schedule.first, schedule.last):
        assert 0.9 < step.cycles / schedule.middle.cycles < 1.1
    assert 0.3 < schedule.middle.mxu_use < 1
    least = 2 * (512 * 512 + 512 * 256 + 512 * 256) * 2 + 4 * 512 * 256
    assert least <= verdict.vmem_bytes <= 2 * least


@pytest.mark.parametrize("device", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_awkward_kernels_are_read(pool, device):
    jobs = [
        job(300, 1000, 700, (128, 256, 256), device),
        job(300, 1000, 700, (128, 256, 256), device, layout="TN"),
        job(300, 1000, 700, (128, 256, 256), device, layout="NT", dtype="float32"),
        job(1, 4096, 1024, (1, 4096, 512), device, layout="NT"),
        job(1, 300, 200, (1, 300, 200), device),
        job(7, 300, 1, (7, 300, 1), device, layout="NT", dtype="float32"),
        job(64, 96, 64, (32, 96, 64), device, leading=(5,), summed=(True,)),
        job(64, 96, 64, (32, 96, 64), device, leading=(5,), summed=(False,)),
    ]
    if device != "v4":
        jobs.append(job(512, 512, 512, (128, 256, 256), device, dtype="int8", out="int32"))
    for one, found in zip(jobs, judge(jobs, pool), strict=True):
        assert found.error is None, one
        assert found.prediction.seconds > 0


def test_transposes_are_seen(pool):
    layouts = ("NN", "NT", "TN")
    jobs = [job(1024, 1024, 1024, (256, 256, 256), layout=layout) for layout in layouts]
    plain, rhs, lhs = (verdict.schedule.middle for verdict in pool.ask(jobs))
    assert plain.transposes == 0
    assert rhs.transposes > 0
    assert lhs.transposes > 0


def test_what_is_refused(pool):
    large = dataclasses.replace(
        job(4096, 4096, 4096, (2048, 1024, 1024)), vmem_limit_bytes=16 << 20
    )
    eight = job(512, 512, 512, (128, 256, 256), "v4", dtype="int8", out="int32")
    memory, dtype = pool.ask([large, eight])
    assert not memory.compiles
    assert not memory.transient
    assert memory.vmem_bytes == 28 << 20
    assert memory.error == (
        "E1001: CompileTimeScopedVmemOom: Scoped allocation with size 28.00M and limit 16.00M"
    )
    assert not dtype.compiles
    assert "\n" not in dtype.error


def test_no_schedule_beats_the_lower_bound(pool):
    """A vector's product uses no MXU: its width does not fill one."""
    jobs = [
        job(1024, 1024, 1, (512, 1024, 1), layout="NT"),
        job(1024, 1024, 1, (512, 1024, 1), layout="NT", dtype="float32"),
        job(1, 1024, 1024, (1, 1024, 512)),
        job(1024, 1024, 8, (512, 1024, 8)),
    ]
    for asked, found in zip(jobs, judge(jobs, pool), strict=True):
        bound = lower_bound_seconds(asked.problem, asked.blocks, chip(asked.device))
        assert 0 < bound <= found.prediction.seconds


def test_xla_says_its_own_estimate(pool):
    (verdict,) = pool.ask([job(4096, 4096, 4096)])
    assert verdict.compiles
    ideal = 4096**3 / (4 * 128 * 128)
    assert ideal < verdict.xla_cycles < 1.1 * ideal


def test_three_runs_say_the_same_byte_for_byte():
    jobs = [
        SMALL,
        job(1024, 512, 2048, (512, 512, 512), layout="TN"),
        job(512, 512, 512, (128, 128, 128), "v6e", dtype="float32"),
        job(512, 512, 512),
    ]
    runs = []
    for workers in (1, 2, 2):
        with CompilePool(workers) as pool:
            runs.append(repr(judge(jobs[:-1], pool)) + repr(pool.ask(jobs)))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    "one",
    [
        job(8192, 2048, 8192, (512, 1024, 512), layout="NT"),
        job(8, 4096, 32128, (8, 1024, 2048), layout="NT"),
        job(2048, 1536, 8960, (512, 512, 512), dtype="float32"),
        job(5000, 3000, 7000, (512, 1024, 512)),
        job(1536, 8192, 4096, (512, 1024, 512), layout="TN"),
    ],
    ids=str,
)
def test_a_stand_in_has_the_same_schedule(pool, one):
    smaller = stand_in(one)
    assert smaller.problem.flops < one.problem.flops
    whole, few = pool.ask([one, smaller])
    assert few.vmem_bytes == pytest.approx(whole.vmem_bytes, rel=0.01)
    for kind in ("first", "middle", "last"):
        cycles = getattr(whole.schedule, kind).cycles
        assert getattr(few.schedule, kind).cycles == pytest.approx(cycles, rel=0.005, abs=5)


def test_leaving_out_what_cannot_be_better_changes_no_winner(pool):
    jobs = [
        job(1024, 1024, 1024, blocks)
        for blocks in ((512, 1024, 512), (256, 512, 256), (128, 128, 128), (8, 128, 128))
    ]
    every = judge(jobs, pool)
    some = judge(jobs, pool, rivals=[0] * len(jobs), shared={})
    assert None not in every
    assert some[-1] is None

    def best(judged):
        times = [(one.prediction.seconds, one.job) for one in judged if one is not None]
        return min(times, key=lambda pair: pair[0])[1]

    assert best(every) == best(some)


# What may happen.


def test_a_worker_that_is_killed_is_replaced(scratch):
    with CompilePool(1) as pool:
        (before,) = pool.ask([SMALL])
        (one,) = pool._idle
        # In the middle of a compilation that takes seconds.
        slow = job(4096, 4096, 4096, (512, 2048, 512))
        threading.Timer(0.5, one.process.kill).start()
        killed, after = pool.ask([slow, SMALL])
        assert one.process.returncode == -signal.SIGKILL
        assert killed.compiles
        assert after == before
    assert list(scratch.iterdir()) == []


def test_workers_that_ended_while_they_rested(scratch):
    with CompilePool(2) as pool:
        pool.ask([SMALL, SMALL])
        for one in pool._idle:
            one.process.kill()
            one.process.wait()
        (verdict,) = pool.ask([SMALL])
    assert verdict.schedule is not None
    assert list(scratch.iterdir()) == []


def test_a_fault_of_the_worker_is_told(scratch):
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([dataclasses.replace(SMALL, blocks=(0, 128, 128))])
    assert verdict.transient
    assert "the compiler's process ended (exit code 1): " in verdict.error
    assert "ZeroDivisionError" in verdict.error
    assert list(scratch.iterdir()) == []


def test_a_worker_that_is_lost_twice_is_told(monkeypatch, scratch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag_of_libtpu=1")
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([SMALL])
    assert not verdict.compiles
    assert verdict.transient
    assert "the compiler's process ended (" in verdict.error
    assert verdict.blames_program
    assert list(scratch.iterdir()) == []


def test_a_time_limit(scratch):
    with CompilePool(1, compile_seconds=0.3) as pool:
        # The first one cannot even start in that time.
        (verdict,) = pool.ask([SMALL])
        assert verdict.error == "it took longer than 0.3 s"
        assert verdict.transient
        assert verdict.blames_program
        # Of the time for all of them there is less left than for one: that says nothing of the one.
        pool.compile_seconds = 60.0
        assert pool.ask([SMALL], end=time.monotonic() + 0.3) == [None]
        pool.compile_seconds = 60.0
        (verdict,) = pool.ask([SMALL])
        assert verdict.compiles
        assert pool.ask([SMALL, SMALL], end=time.monotonic() - 1) == [None, None]
    assert list(scratch.iterdir()) == []


def test_no_room_for_a_worker(monkeypatch, tmp_path):
    missing = str(tmp_path / "missing")
    monkeypatch.setattr(pool_module, "_folder_with_room", lambda: missing)
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([SMALL])
    assert verdict.transient
    assert "no compile worker could be started" in verdict.error


def test_a_temporary_folder_that_is_full(monkeypatch, scratch):
    usage = shutil.disk_usage

    def full(folder):
        found = usage(folder)
        return found._replace(free=0) if str(folder).startswith(str(scratch)) else found

    monkeypatch.setattr(shutil, "disk_usage", full)
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([SMALL])
        (one,) = pool._idle
        assert one.folder.parent in (pathlib.Path("/dev/shm"), pathlib.Path("/var/tmp"))
    assert verdict.schedule is not None
    assert not one.folder.exists()
    assert list(scratch.iterdir()) == []
    # Nowhere any room: the usual place, and what happens there is told.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(folder)._replace(free=0))
    assert pool_module._folder_with_room() == str(scratch)


def test_a_temporary_folder_with_a_space(monkeypatch, tmp_path):
    spaced = tmp_path / "of two"
    spaced.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spaced))
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([SMALL])
    assert verdict.schedule is not None
    assert list(tmp_path.iterdir()) == [spaced]
    assert list(spaced.iterdir()) == []
    # Where there is no other.
    monkeypatch.setattr(os, "access", lambda folder, mode: str(folder) == str(spaced))
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([SMALL])
    assert verdict.transient
    assert (
        f"without a space in its name; TMPDIR names one, and now it is '{spaced}'" in verdict.error
    )


def test_more_open_files_than_select_can_name(scratch):
    """`select` fails for descriptors from 1024 on."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with contextlib.ExitStack() as files, CompilePool(1) as pool:
            for _ in range(1100):
                files.enter_context(open(os.devnull))
            (verdict,) = pool.ask([SMALL])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert verdict.schedule is not None


SLOW = job(8192, 8192, 4096, (1024, 1024, 1024), dtype="float32")
SLOW = dataclasses.replace(
    SLOW, problem=dataclasses.replace(SLOW.problem, precision=jax.lax.Precision.HIGHEST)
)


def test_ctrl_c_does_not_wait_for_the_compiler(scratch):
    begun = []

    def interrupted(job, verdict):
        begun.append(time.monotonic())
        raise KeyboardInterrupt

    with CompilePool(2) as pool, pytest.raises(KeyboardInterrupt):
        pool.ask([SLOW, SMALL], told=interrupted)
    # It would take 20 s and more.
    assert time.monotonic() - begun[0] < 10
    assert list(scratch.iterdir()) == []


ASKING = """
import sys
from pallas_ops.compiler import CompilePool
from tests.compiler.test_pool import SLOW
with CompilePool(1) as pool:
    print("asking", flush=True)
    pool.ask([SLOW])
"""


def test_a_worker_ends_with_the_one_who_asked(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKING], env=environment, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert asking.stdout.readline() == b"asking\n"
    until = time.monotonic() + 60
    while not list(tmp_path.glob("*/*hlo*")) and time.monotonic() < until:
        time.sleep(0.2)  # until its compilation is under way
    asking.kill()
    asking.wait()
    asking.stdout.close()
    gone = time.monotonic()
    while list(tmp_path.iterdir()) and time.monotonic() < gone + 60:
        time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() < gone + 10  # the compilation would take 20 s and more


def test_a_folder_that_is_full(monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "_is_full", lambda folder: True)
    # In this process libtpu was not told to write its schedules.
    verdict = worker.answer(SMALL, tmp_path)
    assert verdict.compiles
    assert verdict.schedule is None
    assert verdict.transient
    assert verdict.schedule_error == f"no schedule was written: {tmp_path.parent} is full"


def test_a_libtpu_whose_schedules_cannot_be_read(tmp_path):
    verdict = worker.answer(SMALL, tmp_path)
    assert verdict.compiles
    assert verdict.schedule is None
    assert not verdict.transient
    assert f"that libtpu {libtpu_version()} wrote" in verdict.schedule_error
    assert f"made for libtpu {READABLE_LIBTPU[0]}" in verdict.schedule_error
    assert "expected one schedule of pallas_ops_matmul_nn" in verdict.schedule_error


def test_no_compiler(monkeypatch, tmp_path):
    def unavailable(device):
        raise worker.CompilerUnavailableError("there is none")

    monkeypatch.setattr(worker, "compile_only_device", unavailable)
    verdict = worker.answer(SMALL, tmp_path)
    assert verdict == Verdict(False, "there is none", transient=True, unavailable=True)


def test_no_libtpu(monkeypatch, scratch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    heard = []
    with CompilePool(1) as pool:
        (verdict,) = pool.ask([SMALL], told=lambda job, said: heard.append(said))
        (found,) = judge([SMALL], pool)
    assert heard == [verdict] == [found.verdict]
    assert verdict.unavailable
    assert "comes with `pip install 'jax[tpu]'` on Linux on x86-64" in verdict.error
    assert found.prediction is None
    assert list(scratch.iterdir()) == []  # no process was started


def test_nothing_is_left_behind_by_one_who_is_killed(tmp_path):
    code = """
import sys
from pallas_ops.compiler import CompilePool
from tests.compiler.tools import job
pool = CompilePool(1)
pool.ask([job(512, 512, 512, (128, 128, 128))])
print(pool._idle[0].process.pid, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker_pid = int(process.stdout.readline())
    assert len(list(tmp_path.iterdir())) == 1
    process.kill()
    process.communicate()
    for _ in range(100):
        if not list(tmp_path.iterdir()) and not pathlib.Path(f"/proc/{worker_pid}").exists():
            break
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_rests(scratch):
    pool = CompilePool(1, rest_seconds=0.5)
    with pool:
        pool.ask([SMALL])
    (one,) = pool._idle
    with pool:  # in time: the same process
        pool.ask([SMALL])
        assert pool._idle == [one]
    for _ in range(100):
        if not pool._idle and one.process.poll() is not None:
            break
        time.sleep(0.1)
    assert pool._idle == []
    assert list(scratch.iterdir()) == []


def test_an_environment_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    environment = pool_module.worker_environment(tmp_path)
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    # The last of two that contradict each other is libtpu's.
    assert environment["LIBTPU_INIT_ARGS"].startswith("--mine=1 --xla_jf_dump_to=")
