"""The compiler's verdict on a kernel, with the time that the model makes of it."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence

from ..kernels import MatmulProblem, mxu_passes
from ._chip import Chip, chip
from ._jobs import CompileJob, Verdict
from ._model import predict, predict_xla, Prediction
from ._pool import CompilePool
from ._schedule import KernelSchedule, StepCost
from ._stand_in import stand_in


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the compiler says of one tile, and what the model makes of that.

    **Arguments:**

    - `job`: what was compiled.
    - `verdict`: what the compiler says.
    - `prediction`: the predicted time; `None` where it does not compile, or its schedule cannot be
        read.
    """

    job: CompileJob
    verdict: Verdict
    prediction: Prediction | None

    @property
    def error(self) -> str | None:
        """Why there is no prediction."""
        return self.verdict.error or self.verdict.schedule_error


def peak_operations_per_second(problem: MatmulProblem, chip: Chip) -> float:
    """What one TensorCore's MXUs do at most for these dtypes and this precision."""
    native = problem.multiplies_int8 and chip.multiplies_int8
    rate = chip.rates[32] if native else chip.rates[16] / mxu_passes(problem)
    return 2 * chip.num_mxus * chip.mxu_size**2 * rate * chip.clock_hertz


def mxu_seconds(problem: MatmulProblem, chip: Chip) -> float:
    """The least time that the MXUs of one TensorCore take."""
    return problem.flops / peak_operations_per_second(problem, chip)


def roofline_seconds(problem: MatmulProblem, chip: Chip) -> float:
    """The least time that the chip could take: the larger of its MXUs' and of HBM's.

    Each operand is read once and the result is written once, at the bandwidth of JAX's hardware
    table, and every MXU works in every cycle.
    """
    return max(mxu_seconds(problem, chip), problem.bytes_accessed / chip.bytes_per_second)


def lower_bound_seconds(
    problem: MatmulProblem, blocks: tuple[int, int, int], chip: Chip, *, prologue_parts: int = 1
) -> float:
    """A time that no schedule of these blocks can beat in the model: its MXUs never wait for it.

    A product with a vector may be summed without them: it is taken to cost its transfers alone.
    """
    m, k, n = blocks
    is_vector = 1 in (problem.m, problem.n)
    filled = 0 if is_vector else m * k * -(-n // chip.mxu_size) * chip.mxu_size
    rate = peak_operations_per_second(problem, chip) / (2 * chip.clock_hertz)
    cycles = math.floor(filled / rate)
    step = StepCost(cycles, cycles, cycles, 0, 0, 0, 0, 0)
    of_part = cycles // prologue_parts
    part = StepCost(of_part, of_part, of_part, 0, 0, 0, 0, 0)
    ideal = KernelSchedule(step, step, step, 0, 0, cycles, start=part, part=part)
    return predict(problem, blocks, ideal, chip, prologue_parts=prologue_parts).seconds


def judge(
    jobs: Sequence[CompileJob],
    pool: CompilePool,
    *,
    end: float | None = None,
    rivals: Sequence[Hashable] | None = None,
    shared: dict[CompileJob, Verdict] | None = None,
    told: Callable[[Judgement], None] | None = None,
) -> list[Judgement | None]:
    """Compiles kernels in parallel, and predicts the time of each.

    **Arguments:**

    - `jobs`: kernels, each with its blocks and each once.
    - `pool`: where they are compiled.
    - `end`: as in `CompilePool.ask`.
    - `rivals`: for each kernel, what it competes with others for. Where it is given, a kernel is
        left out that cannot be faster than the best of its rivals so far, by
        `lower_bound_seconds`. The best ones are the same.
    - `shared`: what the compiler said before. Where it is given, a smaller product with the same
        schedule is compiled in place of each kernel, and its verdict is kept there for others.
    - `told`: called with each judgement as it comes, by one thread at a time.

    **Returns:**

    The judgements in the order of the jobs; `None` for those that were left out.
    """
    rival_of = dict(zip(jobs, jobs if rivals is None else rivals, strict=True))
    best: dict[Hashable, float] = {}
    judged: dict[CompileJob, Judgement] = {}
    # Which kernels wait for which program.
    waiting: dict[CompileJob, list[CompileJob]] = {}

    def hear(program: CompileJob, verdict: Verdict) -> None:
        if shared is not None and not verdict.transient:
            shared[program] = verdict
        for job in waiting[program]:
            prediction = None
            if verdict.schedule is not None:
                assert job.blocks is not None
                on = chip(job.device)
                prediction = predict(
                    job.problem,
                    job.blocks,
                    verdict.schedule,
                    on,
                    prologue_parts=job.prologue_parts,
                )
                rival = rival_of[job]
                best[rival] = min(best.get(rival, math.inf), prediction.seconds)
            judged[job] = Judgement(job, verdict, prediction)
            if told is not None:
                told(judged[job])

    def may_be_better(job: CompileJob) -> bool:
        fastest = best.get(rival_of[job])
        if fastest is None:
            return True
        assert job.blocks is not None
        least = lower_bound_seconds(
            job.problem, job.blocks, chip(job.device), prologue_parts=job.prologue_parts
        )
        return least <= fastest

    for job in jobs:
        waiting.setdefault(job if shared is None else stand_in(job), []).append(job)
    known = {} if shared is None else {job: shared[job] for job in waiting if job in shared}
    for program, verdict in known.items():
        hear(program, verdict)
    pool.ask(
        [program for program in waiting if program not in known],
        end=end,
        told=hear,
        wanted=lambda program: any(map(may_be_better, waiting[program])),
    )
    return [judged.get(job) for job in jobs]


@dataclasses.dataclass(frozen=True)
class XlaTime:
    """The time of XLA's own dot, to compare a kernel's with.

    **Arguments:**

    - `seconds`: of one call, without dispatch.
    - `source`: `"schedule"`, where its schedule could be read: then the same model made both times;
        `"estimate"`, where it could not: XLA's own; `"transfers"`, where moving operands and result
        once takes longer than either says.
    """

    seconds: float
    source: str


def xla_time(problem: MatmulProblem, verdict: Verdict, chip: Chip) -> XlaTime | None:
    """The time of XLA's own dot; `None` where there is neither a schedule nor an estimate.

    Schedule and estimate leave out what XLA copied to VMEM beforehand, hence the third bound.
    """
    if verdict.xla_schedule is not None:
        found = XlaTime(predict_xla(problem, verdict.xla_schedule, chip), "schedule")
    else:
        estimate = xla_estimate_seconds(verdict, chip)
        if estimate is None:
            return None
        found = XlaTime(estimate, "estimate")
    transfers = XlaTime(problem.bytes_accessed / chip.bytes_per_second, "transfers")
    return max(found, transfers, key=lambda time: time.seconds)


def xla_estimate_seconds(verdict: Verdict, chip: Chip) -> float | None:
    """XLA's own estimate of the time of its dot; `None` where it gives none."""
    return None if verdict.xla_cycles is None else verdict.xla_cycles / chip.clock_hertz
