"""What each precision of the kernel costs and gives, for `pallas-ops bench precision`.

No CPU multiplies as an MXU does: its errors are emulated, and called so everywhere.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compiler import (
    chip,
    CompileJob,
    CompilePool,
    CompilerUnavailableError,
    judge,
    Judgement,
    Verdict,
    xla_time,
    XlaTime,
)
from ..compiler._schedule import KernelSchedule
from ..kernels import MatmulProblem, mxu_passes, product_of_pieces, promoted_dtype
from ..tiles import StaticResolver, TileProblem
from ..tiles._ranking import compile_job
from ._console import microseconds


ASKED = (
    ("float32", "float32", lax.Precision.DEFAULT),
    ("float32", "float32", lax.Precision.HIGH),
    ("float32", "float32", lax.Precision.HIGHEST),
    ("bfloat16", "float32", lax.Precision.DEFAULT),
    ("bfloat16", "float32", lax.Precision.HIGH),
    ("bfloat16", "float32", lax.Precision.HIGHEST),
    ("bfloat16", "bfloat16", lax.Precision.DEFAULT),
)
"""The dtypes of both operands, and what is asked for them; bfloat16 alone needs no more passes."""

_MOST_EMULATED = 256
"""Rows and columns of the product whose error is emulated: more of them say the same."""


def emulated_product(
    lhs: np.ndarray,
    rhs: np.ndarray,
    problem: MatmulProblem,
    *,
    mxu_size: int = 128,
    block_k: int = 512,
) -> np.ndarray:
    """What the kernel computes on a TPU, emulated on the CPU.

    The pieces are the kernel's own. Of float32 in one pass an MXU makes bfloat16 itself, and how is
    in no dump: it is taken to round to the nearest. For each part of k that fills an MXU, its
    product is added to the sum of the pass in float32. In which order an MXU sums within itself is
    not known; here NumPy does that in float32.

    **Arguments:**

    - `lhs`, `rhs`: (m, k) and (k, n), of the problem's dtypes.
    - `problem`: of which the dtypes, the layout and the precision are looked at.
    - `mxu_size`: the rows of weights that an MXU holds.
    - `block_k`: the block of k.

    **Returns:**

    The product in float32.
    """
    total = np.zeros((lhs.shape[0], rhs.shape[1]), np.float32)
    for start in range(0, lhs.shape[1], block_k):
        left = jnp.asarray(lhs[:, start : start + block_k])
        right = jnp.asarray(rhs[start : start + block_k])
        dot = functools.partial(_dot_of_an_mxu, mxu_size=mxu_size)
        total += product_of_pieces(left, right, problem, dot)
    return total


def _dot_of_an_mxu(lhs: jax.Array, rhs: jax.Array, *, mxu_size: int) -> jax.Array:
    left, right = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    with np.errstate(invalid="ignore"):  # an infinity times zero
        for start in range(0, left.shape[1], mxu_size):
            total += left[:, start : start + mxu_size] @ right[start : start + mxu_size]
    return jnp.asarray(total)


def relative_error(product: np.ndarray, lhs: np.ndarray, rhs: np.ndarray) -> float:
    """The largest error against float64, relative to the sum of the products' magnitudes.

    Relative to that sum, |lhs| @ |rhs|, it does not depend on how much cancels.
    """
    wide_lhs, wide_rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    error = np.abs(np.asarray(product, np.float64) - wide_lhs @ wide_rhs)
    return float((error / (np.abs(wide_lhs) @ np.abs(wide_rhs))).max())


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair of dtypes at one precision.

    **Arguments:**

    - `problem`: the product, with the precision that was asked for.
    - `tile`: the blocks of m, k and n.
    - `scheduled_passes`: the rows that the compiler's schedule gives to the MXUs, in multiples of
        those of one pass; `None` without a schedule.
    - `emulated_error`: the largest relative error of the emulated passes.
    - `cpu_error`: that of `jax.numpy.dot` here, with sums in float32.
    - `seconds`: the predicted time; `None` without one.
    - `xla`: the predicted time of XLA's own dot; `None` without one.
    - `error`: why there is no time.
    """

    problem: MatmulProblem
    tile: tuple[int, int, int]
    scheduled_passes: float | None
    emulated_error: float
    cpu_error: float
    seconds: float | None
    xla: XlaTime | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "lhs_dtype": self.problem.lhs_dtype.name,
            "rhs_dtype": self.problem.rhs_dtype.name,
            "asked": self.problem.precision.name,
            "passes": mxu_passes(self.problem),
            "scheduled_passes": self.scheduled_passes,
            "emulated_error": self.emulated_error,
            "cpu_error": self.cpu_error,
            "tile": list(self.tile),
            "predicted_us": microseconds(self.seconds),
            "xla_us": None if self.xla is None else microseconds(self.xla.seconds),
            "xla_source": None if self.xla is None else self.xla.source,
            "error": self.error,
        }


def study(device: str, shape: tuple[int, int, int], *, offset: float = 0.0) -> list[Row]:
    """Compiles one shape in each pair of dtypes at each precision, and emulates its errors.

    The tile is the one that is taken where none was named, stored or compiled.

    **Arguments:**

    - `device`: the TPU.
    - `shape`: m, k and n; the layout is that of a linear layer, NT.
    - `offset`: what is added to the normal random numbers that are multiplied.

    **Raises:**

    [`pallas_ops.compiler.CompilerUnavailableError`][] where there is no compiler that answers.
    """
    jobs = []
    for asked in ASKED:
        problem = TileProblem(_problem(shape, *asked), device=device)
        jobs.append(compile_job(problem, StaticResolver().resolve(problem).tile))
    with CompilePool() as pool:
        judged = judge(jobs, pool)
        of_xla = pool.ask([CompileJob(job.problem, device) for job in jobs])
    return [_row(judgement, xla, offset) for judgement, xla in zip(judged, of_xla, strict=True)]


def _problem(
    shape: tuple[int, int, int], lhs: str, rhs: str, precision: lax.Precision
) -> MatmulProblem:
    m, k, n = shape
    return MatmulProblem(
        (m, k),
        (n, k),
        np.dtype(jnp.dtype(lhs)),
        np.dtype(jnp.dtype(rhs)),
        np.dtype(np.float32),  # so that no rounding of the result hides what was lost before
        transpose_rhs=True,
        precision=precision,
    )


def _rows(schedule: KernelSchedule, job: CompileJob) -> int:
    """What the MXUs get for one tile, whose operands may come in parts."""
    if schedule.start is None or schedule.part is None:
        return schedule.middle.rows
    return schedule.start.rows + (job.prologue_parts - 1) * schedule.part.rows


def _row(judgement: Judgement | None, xla: Verdict | None, offset: float) -> Row:
    assert judgement is not None
    assert xla is not None
    if judgement.verdict.unavailable:
        raise CompilerUnavailableError(judgement.verdict.error)
    problem, blocks = judgement.job.problem, judgement.job.blocks
    assert blocks is not None
    on = chip(judgement.job.device)
    schedule, prediction = judgement.verdict.schedule, judgement.prediction
    block_m, block_k, block_n = blocks
    one_pass = block_m * -(-block_k // on.mxu_size) * -(-block_n // on.mxu_size)

    random = np.random.default_rng(0)
    m, n = min(problem.m, _MOST_EMULATED), min(problem.n, _MOST_EMULATED)
    lhs = (random.standard_normal((m, problem.k)) + offset).astype(problem.lhs_dtype)
    rhs = (random.standard_normal((problem.k, n)) + offset).astype(problem.rhs_dtype)
    emulated = emulated_product(lhs, rhs, problem, mxu_size=on.mxu_size, block_k=block_k)
    both = promoted_dtype(problem.lhs_dtype, problem.rhs_dtype)
    on_cpu = jnp.dot(
        jnp.asarray(lhs, both), jnp.asarray(rhs, both), preferred_element_type=jnp.float32
    )
    return Row(
        problem,
        blocks,
        scheduled_passes=None if schedule is None else _rows(schedule, judgement.job) / one_pass,
        emulated_error=relative_error(emulated, lhs, rhs),
        cpu_error=relative_error(np.asarray(on_cpu), lhs, rhs),
        seconds=None if prediction is None else prediction.seconds,
        xla=xla_time(problem, xla, on),
        error=judgement.error,
    )
