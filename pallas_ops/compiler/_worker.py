"""The compile worker: a process that compiles, and reads what the compiler leaves behind.

`python -m pallas_ops.compiler._worker FOLDER`, with `LIBTPU_INIT_ARGS` set so that libtpu writes
its schedules to FOLDER. Jobs come pickled on standard input, verdicts go to standard output.
"""

import errno
import functools
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import jax
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import make_single_device_sharding

from ..kernels import kernel_name, pallas_matmul, xla_matmul
from ._bundles import read_program, READABLE_LIBTPU, UnreadableScheduleError
from ._chip import chip
from ._jobs import CompileJob, Verdict
from ._schedule import KernelSchedule, read_schedule
from ._topology import (
    compile_only_device,
    CompilerUnavailableError,
    libtpu_mismatch,
    libtpu_version,
    why_not_understood,
)
from ._xla import estimated_cycles, read_xla


Schedule = TypeVar("Schedule")


def main() -> None:
    """Answers jobs until there are no more."""
    folder = pathlib.Path(sys.argv[1])
    threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True).start()
    # Whatever libtpu prints to standard output must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        while True:
            job = pickle.load(sys.stdin.buffer)
            pickle.dump(answer(job, folder), answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        # Who asked is gone, and cannot. Of any other fault they read what it says, and clear up.
        shutil.rmtree(folder, ignore_errors=True)


def _end_with(parent: int, folder: pathlib.Path) -> None:
    """Ends this process when the one who asked is gone, in the middle of a compilation too."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def answer(job: CompileJob, folder: pathlib.Path) -> Verdict:
    """Compiles one program and reads its schedule."""
    clear(folder)
    problem = job.problem
    product: Callable
    if job.blocks is None:
        product = functools.partial(xla_matmul, problem)
    else:
        kernel = pallas_matmul(
            problem,
            *job.blocks,
            vmem_limit_bytes=job.vmem_limit_bytes,
            textbook=job.textbook,
            prologue_parts=job.prologue_parts,
        )

        def from_hbm(lhs, rhs, *columns):
            # Small operands, which a longer program would not keep there, XLA would put into VMEM.
            return kernel(
                pltpu.with_memory_space_constraint(lhs, pltpu.HBM),
                pltpu.with_memory_space_constraint(rhs, pltpu.HBM),
                *columns,
            )

        product = from_hbm

    operands = (
        (problem.lhs_shape, problem.lhs_dtype),
        (problem.rhs_shape, problem.rhs_dtype),
        *((columns.shape, columns.dtype) for columns in problem.columns),
    )
    try:
        stored = by_rows(len(problem.lhs_shape), job.device)  # both, and the result, have one rank
        lowered = jax.jit(product, in_shardings=stored, out_shardings=stored).lower(
            *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands)
        )
        compiled = lowered.compile()
    except CompilerUnavailableError as error:
        return Verdict(False, str(error), transient=True, unavailable=True)
    except Exception as error:
        reason = why_not_understood(error)
        if reason is not None:
            return Verdict(False, reason, transient=True, unavailable=True)
        return Verdict(False, refusal(error), vmem_bytes=vmem_of_error(str(error)))
    finally:
        jax.clear_caches()
    if job.blocks is None:
        text = compiled.as_text() or ""
        xla, schedule_error, transient = _read(
            lambda: read_xla(text, folder, job.problem, chip(job.device)), folder
        )
        clear(folder)
        return Verdict(
            True,
            schedule_error=schedule_error,
            xla_cycles=estimated_cycles(text),
            xla_schedule=xla,
            transient=transient,
        )
    schedule, schedule_error, transient = _read(lambda: find_schedule(folder, job), folder)
    verdict = Verdict(
        True,
        vmem_bytes=vmem_of_report(folder),
        schedule=schedule,
        schedule_error=schedule_error,
        transient=transient,
    )
    clear(folder)
    return verdict


def _read(
    read: Callable[[], Schedule], folder: pathlib.Path
) -> tuple[Schedule | None, str | None, bool]:
    """A schedule; or why it cannot be read, and whether that says nothing about the program."""
    made_for = f"libtpu {', '.join(READABLE_LIBTPU[:-1])} and {READABLE_LIBTPU[-1]}"
    wrote = f"libtpu {libtpu_version()} wrote, by a reader made for {made_for}"
    try:
        return read(), None, False
    except UnreadableScheduleError as error:
        reason, transient = f"no time is read from the schedule that {wrote}: {error}", False
    except OSError as error:
        reason, transient = f"no schedule could be read: {error.strerror}", True
    except Exception as error:  # a fault of the reader's must not end the process
        fault = f"{type(error).__name__}: {error}"
        reason, transient = f"no time is read from the schedule that {wrote}: {fault}", False
    if _is_full(folder):
        reason, transient = f"no schedule was written: {folder.parent} is full", True
    return None, reason, transient


def by_rows(rank: int, device: str) -> Format:
    """How an array lies in HBM: by rows, as between the operations of a longer program.

    At the border of a program XLA may choose to store a matrix of ragged sizes by columns, and then
    copies it for the kernel.
    """
    sharding = make_single_device_sharding(compile_only_device(device))
    return Format(Layout(tuple(range(rank))), sharding)


def clear(folder: pathlib.Path) -> None:
    """Removes what libtpu has written so far."""
    for path in folder.iterdir():
        if path.name != "stderr":
            path.unlink(missing_ok=True)


def _is_full(folder: pathlib.Path) -> bool:
    """Whether nothing more can be written there."""
    probe = folder / "probe"
    try:
        probe.write_bytes(b"\0" * (1 << 16))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        probe.unlink(missing_ok=True)
    return False


def find_schedule(folder: pathlib.Path, job: CompileJob) -> KernelSchedule:
    """The schedule of the kernel.

    **Raises:**

    `UnreadableScheduleError` where there is none.
    """
    assert job.blocks is not None
    problem, block_k = job.problem, job.blocks[1]
    kernel = kernel_name(problem)
    names = sorted(path.name for path in folder.glob("*-final_bundles.txt"))
    found = [name for name in names if kernel in name and "schedule-analysis" not in name]
    if len(found) != 1:
        raise UnreadableScheduleError(
            f"expected one schedule of {kernel}, and found {len(found)} among {len(names)} files"
        )
    leading = zip(problem.leading_shape, problem.sum_leading, strict=True)
    summed = [size for size, is_summed in leading if is_summed]
    sum_steps = math.prod([*summed, -(-problem.k // block_k)])
    program = read_program((folder / found[0]).read_text(errors="replace"))
    schedule = read_schedule(program, chip(job.device).rates, sum_steps, job.prologue_parts)
    # A product with one vector is summed without an MXU.
    if not schedule.middle.matmuls and 1 not in (problem.m, problem.n):
        raise UnreadableScheduleError("it holds no matrix multiplication that was recognised")
    return schedule


def refusal(error: BaseException) -> str:
    """What the compiler refuses; of an error of its own, the versions too where they do not fit."""
    mismatch = libtpu_mismatch() if "INTERNAL" in str(error) else None
    return one_line(error) + (f" (note that {mismatch})" if mismatch else "")


def one_line(error: BaseException) -> str:
    """What the compiler refuses, without the pages of context that follow."""
    text = " ".join(str(error).split())
    code = re.search(r"E\d{4}: \w+", text)
    memory = re.search(r"Scoped allocation with size \S+ and limit \S+", text)
    if code and memory:
        return f"{code.group()}: {memory.group()}"
    memory = re.search(r"Ran out of memory in memory space vmem\. Used \S+ of \S+ vmem", text)
    if memory:
        return memory.group()
    if len(text) > 300:
        text = text[:300].rsplit(" ", 1)[0] + " ..."
    return f"{type(error).__name__}: {text}"


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def vmem_of_error(text: str) -> int | None:
    """The VMEM that a refused program would have taken, in bytes, as the compiler says it.

    It says so in one of two ways: of the limit of one kernel, or of all VMEM that it may use.
    """
    size = r"([\d.]+)([KMG]?)"
    found = re.search(rf"[Ss]coped allocation with size {size}|Used {size} of \S+ vmem", text)
    if found is None:
        return None
    number, unit = [group for group in found.groups() if group is not None]
    return round(float(number) * _UNITS[unit])


def vmem_of_report(folder: pathlib.Path) -> int | None:
    """The VMEM that the program takes, in bytes, of the report beside the schedule."""
    most = None
    for path in folder.glob("*vmem_report.html"):
        _, _, data = path.read_text(errors="replace").partition("const DATA =")
        try:
            report, _ = json.JSONDecoder().raw_decode(data.lstrip())
            for part in report["hlo_breakdowns"].values():
                most = max(most or 0, int(part["total_size"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    return most


if __name__ == "__main__":
    main()
