"""Reading the program that XLA makes of a dot, so that one model can judge it and our kernel.

XLA says of each of its loops how often it runs and which window of the result one step computes;
the final schedule says what a step costs. Nothing about either is promised: whatever does not add
up to the product is an `UnreadableScheduleError`, and never a guess.
"""

import dataclasses
import json
import math
import pathlib
import re
from typing import Any

from ..kernels import MatmulProblem, mxu_passes
from ._bundles import read_program, UnreadableScheduleError
from ._chip import Chip
from ._schedule import KernelSchedule, read_schedule


@dataclasses.dataclass(frozen=True)
class XlaSchedule:
    """The schedule of XLA's own dot.

    **Arguments:**

    - `blocks`: the windows of m, k and n that one step of its loop multiplies; `None` for a product
        with a vector, which XLA sums without an MXU.
    - `loop`: the schedule of that loop.
    - `lhs_in_vmem`, `rhs_in_vmem`: whether the operand was copied to VMEM beforehand.
    - `other_cycles`: what its other operations take: by XLA's estimate, or, where there is no loop
        that multiplies, by their schedules.
    """

    blocks: tuple[int, int, int] | None
    loop: KernelSchedule | None
    lhs_in_vmem: bool
    rhs_in_vmem: bool
    other_cycles: int


@dataclasses.dataclass(frozen=True)
class _Operation:
    """One operation of XLA's program that has a loop."""

    name: str
    is_by_rows: bool
    estimated_cycles: int
    iterations: tuple[int, ...]
    window: tuple[int, ...]


# The units of a window: an array in memory is made of tiles of 8 rows by 128 columns.
_ROWS, _COLUMNS = 8, 128


def estimated_cycles(text: str) -> int | None:
    """XLA's own estimate of a program: the sum over the operations that it gives one for."""
    found = re.findall(r'"estimated_cycles":"(\d+)"', text)
    return sum(map(int, found)) if found else None


def read_xla(text: str, folder: pathlib.Path, problem: MatmulProblem, on: Chip) -> XlaSchedule:
    """The schedule of XLA's dot.

    **Arguments:**

    - `text`: the compiled program, as HLO.
    - `folder`: where libtpu wrote the schedules of its operations.
    - `problem`: the product; of matrices, without leading axes.
    - `on`: the chip.

    **Raises:**

    `UnreadableScheduleError` where the loops do not add up to the product.
    """
    if problem.leading_shape:
        raise UnreadableScheduleError(
            "leading axes: which of XLA's loops runs over them is not said"
        )
    operations = _operations(text)
    loops = {}
    for operation in operations:
        program = read_program(_schedule_text(folder, operation.name))
        loops[operation] = read_schedule(program, on.rates)
    multiplying = [operation for operation in operations if loops[operation].middle.matmuls]
    if not multiplying and 1 in (problem.m, problem.n):
        return XlaSchedule(None, None, False, False, _cycles_without_mxu(loops))
    if len(multiplying) != 1:
        raise UnreadableScheduleError(f"{len(multiplying)} of XLA's operations multiply")
    (operation,) = multiplying
    blocks = _blocks(operation, problem)
    _check_rows(loops[operation], operation, blocks, problem, on)
    lhs_in_vmem, rhs_in_vmem = _in_vmem(text)
    return XlaSchedule(
        blocks,
        loops[operation],
        lhs_in_vmem,
        rhs_in_vmem,
        (estimated_cycles(text) or 0) - operation.estimated_cycles,
    )


def _operations(text: str) -> list[_Operation]:
    """The operations of the program itself that XLA gives a loop."""
    found = []
    for line in _entry(text).splitlines():
        name = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = ", line)
        _, marker, config = line.partition("backend_config=")
        if name is None or not marker:
            continue
        window = _window_config(config)
        if window is None:
            continue
        try:
            found.append(
                _Operation(
                    name.group(1),
                    _is_by_rows(line),
                    int(window["estimated_cycles"]),
                    tuple(map(int, window["iteration_bounds"])),
                    tuple(map(int, window["output_window_bounds"])),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableScheduleError(f"XLA's loop {name.group(1)}: {error!r}") from error
    return found


def _is_by_rows(line: str) -> bool:
    """Whether the result of an operation is stored by rows, and not transposed."""
    return re.search(r" = \w+\[\d+,\d+\]\{1,0[:}]", line) is not None


def _entry(text: str) -> str:
    """The operations of the program itself, without those of its fusions."""
    _, marker, entry = text.partition("\nENTRY ")
    if not marker:
        raise UnreadableScheduleError("XLA's program has no entry computation")
    return entry


def _window_config(config: str) -> dict[str, Any] | None:
    try:
        decoded, _ = json.JSONDecoder().raw_decode(config)
    except ValueError as error:
        raise UnreadableScheduleError(f"XLA's backend_config is no JSON: {error}") from error
    window = decoded.get("window_config")
    return window if window and window.get("iteration_bounds") else None


def _schedule_text(folder: pathlib.Path, name: str) -> str:
    found = [
        path
        for path in folder.glob("*-final_bundles.txt")
        if re.search(rf"\d-{re.escape(name)}-\d+-final_bundles\.txt$", path.name)
    ]
    if len(found) != 1:
        raise UnreadableScheduleError(f"expected one schedule of {name}, found {len(found)}")
    return found[0].read_text(errors="replace")


def _cycles_without_mxu(loops: dict[_Operation, KernelSchedule]) -> int:
    """What operations without an MXU take, one after the other.

    All that a step may run is taken to run, so that it is at most this.
    """
    cycles = 0
    for operation, loop in loops.items():
        if loop.inner_loops:
            raise UnreadableScheduleError("a loop inside XLA's, how often it runs is not said")
        around = loop.prologue_bundles + loop.epilogue_bundles
        cycles += math.prod(operation.iterations) * loop.middle.cycles + around
    return cycles


def _blocks(operation: _Operation, problem: MatmulProblem) -> tuple[int, int, int]:
    """What one step multiplies: its window of the result, and how often XLA cuts k."""
    if not operation.is_by_rows:
        raise UnreadableScheduleError("XLA computes the transposed product")
    if len(operation.window) != 2 or len(operation.iterations) != 3:
        raise UnreadableScheduleError(
            f"a window of XLA's with other axes than m and n: {operation}"
        )
    block_m, block_n = operation.window[0] * _ROWS, operation.window[1] * _COLUMNS
    n_steps, m_steps, k_steps = operation.iterations
    wanted = -(-problem.m // block_m), -(-problem.n // block_n)
    if (m_steps, n_steps) != wanted:
        raise UnreadableScheduleError(
            f"XLA's loop runs {operation.iterations} over n, m and k, where windows of {block_m} "
            f"by {block_n} need {wanted[::-1]}"
        )
    return block_m, _up(-(-problem.k // k_steps), _COLUMNS), block_n


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _check_rows(
    loop: KernelSchedule,
    operation: _Operation,
    blocks: tuple[int, int, int],
    problem: MatmulProblem,
    on: Chip,
) -> None:
    """That the rows that the MXUs take are those of the product.

    Weights fill whole MXUs, and rows whole registers of operands.
    """
    block_m, block_k, block_n = blocks
    filled = math.prod(-(-size // on.mxu_size) for size in (block_k, block_n)) * mxu_passes(problem)
    least, most = block_m * filled, _up(block_m, max(on.rates)) * filled
    if not 0.98 * least <= loop.middle.rows <= 1.05 * most:
        raise UnreadableScheduleError(
            f"a step of XLA's loop {operation.name} gives {loop.middle.rows} rows to the MXUs, "
            f"where {block_m} x {block_k} x {block_n} takes {least}"
        )


def _in_vmem(text: str) -> tuple[bool, bool]:
    """Which operands were copied to VMEM before the program began: memory space 0 is HBM."""
    entry, found = _entry(text), []
    for position in (0, 1):
        name = re.search(rf"%([\w.\-]+) = [^\n]* parameter\({position}\)", entry)
        if name is None:
            raise UnreadableScheduleError(f"XLA's program has no parameter {position}")
        source = re.escape(name.group(1))
        copy = re.search(
            rf"= \(\w+\[[\d,]*\](\{{[^}}]*\}})[^\n]* copy-start\(%{source}\)([^\n]*)", entry
        )
        copied = copy is not None and re.search(r"S\([1-9]\d*\)", copy.group(1)) is not None
        if copied and copy is not None and "cross_program_prefetch_index" not in copy.group(2):
            raise UnreadableScheduleError("XLA copies an operand to VMEM in the program itself")
        found.append(copied)
    return found[0], found[1]
