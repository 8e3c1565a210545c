"""The time model: how long a kernel takes, from its schedule and the transfers of its blocks."""

import dataclasses
import math
from collections.abc import Iterator

from ..kernels import MatmulProblem
from ._chip import Chip
from ._schedule import KernelSchedule
from ._xla import XlaSchedule


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted time, and what it is made of.

    **Arguments:**

    - `seconds`: of one call of the kernel, without dispatch.
    - `mxu_seconds`: the part of it in which the busiest MXU takes rows.
    - `compute_seconds`: the part of it in which the TensorCore issues bundles, or waits for an MXU.
    - `transfer_seconds`: the time that all transfers take, at the full bandwidth of HBM.
    - `hbm_bytes`: what they move.
    - `steps`: of the grid.
    """

    seconds: float
    mxu_seconds: float
    compute_seconds: float
    transfer_seconds: float
    hbm_bytes: int
    steps: int

    @property
    def bound(self) -> str:
        """What the time goes to, for more than half of it.

        `"mxu"` or `"hbm"`; `"latency"` where neither works half of the time: each waits for
        transfers to begin, for registers, or for what a step costs besides.
        """
        busiest = max(self.mxu_seconds, self.transfer_seconds)
        if busiest < self.seconds / 2:
            return "latency"
        return "mxu" if self.mxu_seconds >= self.transfer_seconds else "hbm"


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of the grid, as the pipeline sees it."""

    cycles: int
    mxu_cycles: int
    fetched_bytes: int
    """For the step that follows."""
    stored_bytes: int
    """Of the output block that is finished."""
    parts: tuple[float, ...] = ()
    """When each part of its blocks arrives, where they come in parts."""
    part_cycles: int = 0
    """What each part takes, beside `cycles`."""


def _padded_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a block in HBM, where an array fills whole tiles of 8 by 128."""
    return -(-rows // 8) * 8 * -(-columns // 128) * 128 * itemsize


class _Grid:
    """The steps of one kernel's grid, in order: batch, m, n, and innermost what is summed."""

    def __init__(
        self,
        problem: MatmulProblem,
        blocks: tuple[int, int, int],
        schedule: KernelSchedule,
        in_hbm: tuple[bool, bool],
        transposed_out: bool,
    ):
        self.problem, self.blocks, self.schedule = problem, blocks, schedule
        self.sizes = (problem.m, problem.k, problem.n)
        counts = (-(-size // block) for size, block in zip(self.sizes, blocks, strict=True))
        self.m_steps, self.k_steps, self.n_steps = counts
        roles = list(zip(problem.leading_shape, problem.sum_leading, strict=True))
        self.batches = math.prod(size for size, summed in roles if not summed)
        self.reductions = self.k_steps * math.prod(size for size, summed in roles if summed)
        # Out of HBM: an operand that was copied to VMEM beforehand is not fetched.
        self.in_hbm = in_hbm
        self.transposed_out = transposed_out
        # An operand that is shared by the whole batch stays where its place does.
        self.lhs_moves = any(size > 1 for size in problem.lhs_shape[:-2])
        self.rhs_moves = any(size > 1 for size in problem.rhs_shape[:-2])

    @property
    def steps(self) -> int:
        return self.batches * self.m_steps * self.n_steps * self.reductions

    def _size(self, axis: int, step: int) -> int:
        return min(self.blocks[axis], self.sizes[axis] - step * self.blocks[axis])

    def lhs_bytes(self, m: int, k: int) -> int:
        if not self.in_hbm[0]:
            return 0
        shape = (self._size(0, m), self._size(1, k))
        shape = shape[::-1] if self.problem.transpose_lhs else shape
        return _padded_bytes(*shape, self.problem.lhs_dtype.itemsize)

    def rhs_bytes(self, k: int, n: int) -> int:
        if not self.in_hbm[1]:
            return 0
        shape = (self._size(1, k), self._size(2, n))
        shape = shape[::-1] if self.problem.transpose_rhs else shape
        return _padded_bytes(*shape, self.problem.rhs_dtype.itemsize)

    def out_bytes(self, m: int, n: int) -> int:
        shape = (self._size(0, m), self._size(2, n))
        shape = shape[::-1] if self.transposed_out else shape
        return self.problem.outputs * _padded_bytes(*shape, self.problem.out_dtype.itemsize)

    def _fetched(self, place: tuple[int, ...], following: tuple[int, ...] | None) -> int:
        """Bytes of the blocks of the step that follows, where they lie elsewhere."""
        if following is None:
            return 0
        batch, m, n, step = place
        next_batch, next_m, next_n, next_step = following
        k, next_k = step % self.k_steps, next_step % self.k_steps
        # Which of the leading axes' sizes it is at, those that are kept and those that are summed.
        leading = (batch, step // self.k_steps) != (next_batch, next_step // self.k_steps)
        fetched = 0
        if (m, k) != (next_m, next_k) or (leading and self.lhs_moves):
            fetched += self.lhs_bytes(next_m, next_k)
        if (k, n) != (next_k, next_n) or (leading and self.rhs_moves):
            fetched += self.rhs_bytes(next_k, next_n)
        return fetched

    def row(self, batch: int, m: int) -> Iterator[_Step]:
        """The steps of one row of output blocks, and what each fetches for the one after it."""
        places = [
            (batch, m, n, step) for n in range(self.n_steps) for step in range(self.reductions)
        ]
        row = batch * self.m_steps + m + 1
        beyond = (row // self.m_steps, row % self.m_steps, 0, 0)
        followers = [*places[1:], beyond if row < self.batches * self.m_steps else None]
        for place, following in zip(places, followers, strict=True):
            step, is_last = place[3], place[3] == self.reductions - 1
            cost = self.schedule.middle
            if self.reductions > 1 and step == 0:
                cost = self.schedule.first
            elif self.reductions > 1 and is_last:
                cost = self.schedule.last
            yield _Step(
                cycles=cost.cycles,
                mxu_cycles=cost.mxu_cycles,
                fetched_bytes=self._fetched(place, following),
                stored_bytes=self.out_bytes(m, place[2]) if is_last else 0,
            )


@dataclasses.dataclass
class _Pipeline:
    """The state of the simulation; times in cycles.

    **Arguments:**

    - `now`: when the step begins.
    - `transfers_end`: when the transfers that were issued have passed.
    - `blocks_arrive`: when the blocks of the step are there.
    - `store_ends`: when the output block of the step before is stored, if it finished one.
    """

    bytes_per_cycle: float
    latency: float
    now: float
    transfers_end: float = 0.0
    blocks_arrive: float = 0.0
    store_ends: float | None = None
    computed: int = 0
    mxu: int = 0
    moved: int = 0

    def transfer(self, count: int) -> float:
        """Issues a transfer; returns when it will have arrived."""
        self.transfers_end = max(self.transfers_end, self.now) + count / self.bytes_per_cycle
        self.moved += count
        return self.transfers_end + self.latency

    def run(self, step: _Step) -> None:
        arrive = self.transfer(step.fetched_bytes) if step.fetched_bytes else self.now
        begins, cycles = max(self.now, self.blocks_arrive), step.cycles
        if step.parts:
            # What is left of it runs while the first part is fetched.
            cycles = step.part_cycles
            begins = max(self.now + step.cycles, step.parts[0])
            for part in step.parts[1:]:
                begins = max(begins + cycles, part)
        self.now = begins + cycles
        self.blocks_arrive = arrive
        self.computed += step.cycles + len(step.parts) * step.part_cycles
        self.mxu += step.mxu_cycles
        stored_before, self.store_ends = self.store_ends, None
        if step.stored_bytes:
            self.store_ends = self.transfer(step.stored_bytes)
        if stored_before is not None:
            self.now = max(self.now, stored_before)

    def backlog(self) -> tuple[float, ...]:
        """What is under way, from now on: all that the following steps depend on."""
        ends = (self.transfers_end, self.blocks_arrive, self.store_ends or 0.0)
        return tuple(max(0.0, end - self.now) for end in ends)

    def repeat(self, before: "_Pipeline", times: int) -> None:
        """Goes on as since `before`, so many times more."""
        duration = self.now - before.now
        self.now += times * duration
        self.transfers_end += times * duration
        self.blocks_arrive += times * duration
        if self.store_ends is not None:
            self.store_ends += times * duration
        self.computed += times * (self.computed - before.computed)
        self.mxu += times * (self.mxu - before.mxu)
        self.moved += times * (self.moved - before.moved)


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two times are the same, to a thousandth of a cycle."""
    return all(abs(left - right) < 1e-3 for left, right in zip(one, other, strict=True))


def predict(
    problem: MatmulProblem,
    blocks: tuple[int, int, int],
    schedule: KernelSchedule,
    chip: Chip,
    *,
    prologue_parts: int = 1,
    in_hbm: tuple[bool, bool] = (True, True),
    transposed_out: bool = False,
) -> Prediction:
    """Simulates the grid step by step, with two buffers for each block.

    While one step is computed, the blocks of the next one are fetched, if their place differs, and
    the output block that was finished last is stored. A step begins when its blocks are there. All
    transfers share the bandwidth of HBM, in the order of their issue, and each arrives a latency
    later.

    **Arguments:**

    - `problem`, `blocks`: the kernel.
    - `schedule`: what the compiler made of it.
    - `chip`: where it runs.
    - `prologue_parts`: in how many parts the first blocks are fetched; each is multiplied when it
        is there.
    - `in_hbm`: whether lhs, and rhs, is fetched from HBM, and not in VMEM already.
    - `transposed_out`: whether the result is stored as (n, m).
    """
    grid = _Grid(problem, blocks, schedule, in_hbm, transposed_out)
    pipeline = _Pipeline(
        bytes_per_cycle=chip.bytes_per_second / chip.clock_hertz,
        latency=chip.dma_latency_seconds * chip.clock_hertz,
        now=float(schedule.prologue_bundles),
    )
    first_bytes = grid.lhs_bytes(0, 0) + grid.rhs_bytes(0, 0)
    parts = [pipeline.transfer(first_bytes // prologue_parts) for _ in range(prologue_parts)]
    pipeline.blocks_arrive = parts[-1]

    def in_parts(step: _Step) -> _Step:
        """The very first step, whose blocks come in parts."""
        start, part = schedule.start, schedule.part
        assert start is not None
        assert part is not None
        return dataclasses.replace(
            step,
            cycles=start.cycles - part.cycles,
            parts=tuple(parts),
            part_cycles=part.cycles,
        )

    def run_row(batch: int, m: int) -> None:
        for number, step in enumerate(grid.row(batch, m)):
            is_start = prologue_parts > 1 and batch == m == number == 0
            pipeline.run(in_parts(step) if is_start else step)

    def run_alike(run, count: int) -> None:
        """Runs `count` units, of which all but the first and the last are alike, until one
        leaves behind what it found."""
        done = 0
        while done < count:
            before = dataclasses.replace(pipeline)
            run(done)
            done += 1
            # The first one begins with nothing under way; the last one may be ragged, and the one
            # before it fetches for that.
            left = count - done - 2
            if done > 1 and left > 0 and _same(before.backlog(), pipeline.backlog()):
                pipeline.repeat(before, left)
                done += left

    def run_batch(batch: int) -> None:
        run_alike(lambda m: run_row(batch, m), grid.m_steps)

    run_alike(run_batch, grid.batches)
    end = max(pipeline.now, pipeline.store_ends or 0.0) + schedule.epilogue_bundles
    return Prediction(
        seconds=end / chip.clock_hertz,
        mxu_seconds=pipeline.mxu / chip.clock_hertz,
        compute_seconds=pipeline.computed / chip.clock_hertz,
        transfer_seconds=pipeline.moved / chip.bytes_per_second,
        hbm_bytes=pipeline.moved,
        steps=grid.steps,
    )


def predict_xla(problem: MatmulProblem, xla: XlaSchedule, chip: Chip) -> float:
    """The seconds of XLA's own dot, by the same simulation.

    Its loop runs over n, then m, then k, and is simulated as that of the transposed product. What
    was copied to VMEM beforehand is there, and took no time: XLA does so before the program begins,
    where it can.
    """
    other = xla.other_cycles / chip.clock_hertz
    if xla.blocks is None or xla.loop is None:
        return other
    transposed = dataclasses.replace(
        problem,
        lhs_shape=problem.rhs_shape,
        rhs_shape=problem.lhs_shape,
        lhs_dtype=problem.rhs_dtype,
        rhs_dtype=problem.lhs_dtype,
        transpose_lhs=not problem.transpose_rhs,
        transpose_rhs=not problem.transpose_lhs,
        epilogue=None,  # what it reads hardly counts
    )
    in_hbm = (not xla.rhs_in_vmem, not xla.lhs_in_vmem)
    blocks = (xla.blocks[2], xla.blocks[1], xla.blocks[0])
    found = predict(transposed, blocks, xla.loop, chip, in_hbm=in_hbm, transposed_out=True)
    return other + found.seconds
