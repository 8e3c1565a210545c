"""What each precision of the kernel costs and gives, for `pallas-ops bench precision`.

No CPU multiplies as an MXU does: its errors are emulated, and called so everywhere.
"""

import dataclasses
from typing import Any

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
from ..kernels import kernel_precision, MatmulProblem, mxu_passes, promoted_dtype
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

MULTIPLIED = {
    1: (("rounded", "rounded"),),
    3: (("rest", "top"), ("top", "rest"), ("top", "top")),
    6: (
        ("last", "top"),
        ("top", "last"),
        ("rest", "rest"),
        ("middle", "top"),
        ("top", "middle"),
        ("top", "top"),
    ),
}
"""Which piece of lhs each pass multiplies with which of rhs, in their order.

As Mosaic's own dump has it, alike for v4, v5e, v5p, v6e and tpu7x: `matmul_mode` of lhs and
`gain_latch_mode` of rhs in `post-lower-to-llo` (`LIBTPU_INIT_ARGS=--xla_mosaic_dump_to=DIR`, libtpu
0.0.50.1), where the pieces are called `round`, `high`, `low`, `soft_middle_eight` and
`soft_low_eight`."""


def pieces(x: np.ndarray) -> dict[str, np.ndarray]:
    """The pieces of bfloat16 that the compiler makes of float32, each held in float32.

    `top` is cut off, not rounded (`vand.u32 0xffff0000` in the schedule of a v5e), `middle` is what
    is cut off of the rest, and `last` what is left then: the three are `x`. How an MXU makes
    bfloat16 of what it is given as float32 is in no dump: `rounded` and `rest` take it to round to
    the nearest, as the name of its mode says.

    **Arguments:**

    - `x`: an array of float32.

    **Returns:**

    The pieces by their names in `MULTIPLIED`.
    """
    top = _cut(x)
    with np.errstate(invalid="ignore"):  # an infinity less itself
        left = x - top
        middle = _cut(left)
        last = left - middle
    return {
        "rounded": _rounded(x),
        "top": top,
        "rest": _rounded(left),
        "middle": middle,
        "last": last,
    }


def _cut(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float32)


def emulated_product(
    lhs: np.ndarray, rhs: np.ndarray, passes: int, *, mxu_size: int = 128, block_k: int = 512
) -> np.ndarray:
    """What the kernel computes on a TPU, emulated on the CPU.

    For each part of k that fills an MXU, and for each pass, the MXU's product is added to one sum
    in float32, which begins anew in each block. In which order an MXU sums within itself is not
    known; here NumPy does that in float32.

    **Arguments:**

    - `lhs`, `rhs`: (m, k) and (k, n), of float32 or bfloat16.
    - `passes`: how many passes the MXUs make: 1, 3 or 6.
    - `mxu_size`: the rows of weights that an MXU holds.
    - `block_k`: the block of k.

    **Returns:**

    The product in float32.
    """
    lhs_pieces, rhs_pieces = (pieces(np.asarray(x, np.float32)) for x in (lhs, rhs))
    k = lhs.shape[1]
    total = np.zeros((lhs.shape[0], rhs.shape[1]), np.float32)
    for block in range(0, k, block_k):
        end = min(block + block_k, k)
        sums = np.zeros_like(total)
        for start in range(block, end, mxu_size):
            part = slice(start, min(start + mxu_size, end))
            for of_lhs, of_rhs in MULTIPLIED[passes]:
                with np.errstate(invalid="ignore"):
                    sums += lhs_pieces[of_lhs][:, part] @ rhs_pieces[of_rhs][part]
        total += sums
    return total


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
            "kernel": kernel_precision(self.problem).name,
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
    emulated = emulated_product(
        lhs, rhs, mxu_passes(problem), mxu_size=on.mxu_size, block_k=block_k
    )
    both = promoted_dtype(problem.lhs_dtype, problem.rhs_dtype)
    on_cpu = jnp.dot(
        jnp.asarray(lhs, both), jnp.asarray(rhs, both), preferred_element_type=jnp.float32
    )
    return Row(
        problem,
        blocks,
        scheduled_passes=None if schedule is None else schedule.middle.rows / one_pass,
        emulated_error=relative_error(emulated, lhs, rhs),
        cpu_error=relative_error(np.asarray(on_cpu), lhs, rhs),
        seconds=None if prediction is None else prediction.seconds,
        xla=xla_time(problem, xla, on),
        error=judgement.error,
    )
