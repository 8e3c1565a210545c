"""One door to the kernel, for every implementation that runs it."""

import dataclasses
from typing import Any

import jax

from ._pallas import pallas_matmul
from ._problem import MatmulProblem
from ._sums import kernel_sums_columns, sum_columns
from ._tpu_interpret import tpu_interpret_matmul
from ._xla import xla_matmul


def run_kernel(
    problem: MatmulProblem,
    blocks: tuple[int, int, int],
    *operands: jax.Array,
    implementation: str,
    vmem_limit_bytes: int | None = None,
    prologue_parts: int = 1,
    column_sums: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """The product by the kernel; of a problem with an epilogue, all of its outputs.

    **Arguments:**

    - `problem`: what the operands are.
    - `blocks`: the block sizes of m, k and n.
    - `*operands`: lhs, rhs, and what the epilogue reads.
    - `implementation`: `"mosaic"`, `"interpret"` or `"tpu_interpret"`.
    - `vmem_limit_bytes`: the scoped VMEM limit in bytes; `None` is the compiler's default.
    - `prologue_parts`, `column_sums`: as in `pallas_matmul`. Sums that the kernel cannot return are
        taken beside it.
    """
    same: dict[str, Any] = dict(
        implementation=implementation,
        vmem_limit_bytes=vmem_limit_bytes,
        prologue_parts=prologue_parts,
    )
    if problem.epilogue is not None and problem.columns and problem.has_vector_rhs:
        # Mosaic cannot add a column to the product with a vector (jax 0.10.2: "Lane broadcast").
        alone = dataclasses.replace(problem, epilogue=None, out_dtype=problem.accumulator_dtype)
        sums = run_kernel(alone, blocks, *operands[:2], **same)
        assert isinstance(sums, jax.Array)
        outputs = problem.epilogue.apply(sums, *operands[2:])
        return tuple(output.astype(problem.out_dtype) for output in outputs)
    if column_sums and (
        problem.is_empty or not kernel_sums_columns(problem, blocks, prologue_parts)
    ):
        product = run_kernel(problem, blocks, *operands, **same)
        assert isinstance(product, jax.Array)
        return product, sum_columns(problem, operands[0])
    if problem.is_empty:
        # Nothing to multiply: what is left to do is no matter of blocks.
        return xla_matmul(problem, *operands)
    if implementation == "tpu_interpret":
        return tpu_interpret_matmul(
            problem, blocks, *operands, prologue_parts=prologue_parts, column_sums=column_sums
        )
    kernel = pallas_matmul(
        problem,
        *blocks,
        interpret=implementation == "interpret",
        vmem_limit_bytes=vmem_limit_bytes,
        prologue_parts=prologue_parts,
        column_sums=column_sums,
    )
    return kernel(*operands)
