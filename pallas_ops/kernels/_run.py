"""One door to the kernel, for every implementation that runs it."""

import jax
import jax.numpy as jnp

from ._pallas import pallas_matmul
from ._problem import MatmulProblem
from ._tpu_interpret import tpu_interpret_matmul


def run_kernel(
    problem: MatmulProblem,
    blocks: tuple[int, int, int],
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    implementation: str,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """The product of `lhs` and `rhs` by the kernel.

    **Arguments:**

    - `problem`: what the operands are.
    - `blocks`: the block sizes of m, k and n.
    - `implementation`: `"mosaic"`, `"interpret"` or `"tpu_interpret"`.
    - `vmem_limit_bytes`: the scoped VMEM limit in bytes; `None` is the compiler's default.
    """
    if problem.is_empty:
        return jnp.zeros(problem.out_shape, problem.out_dtype)
    if implementation == "tpu_interpret":
        return tpu_interpret_matmul(problem, blocks, lhs, rhs)
    kernel = pallas_matmul(
        problem,
        *blocks,
        interpret=implementation == "interpret",
        vmem_limit_bytes=vmem_limit_bytes,
    )
    return kernel(lhs, rhs)
