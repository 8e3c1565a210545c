"""A smaller product whose kernel has the same schedule."""

import dataclasses

from ._jobs import CompileJob


def stand_in(job: CompileJob) -> CompileJob:
    """The same kernel for as few blocks as have every kind of step.

    The compiler schedules one step of the grid, whose blocks, layout and dtypes are the same; how
    many steps there are is a constant in it. So one compilation serves all batch sizes, to a few
    cycles in a step (`test_a_stand_in_has_the_same_schedule`). An axis keeps its ragged edge, and k
    its first, middle and last step.
    """
    if job.blocks is None:
        return job
    problem = job.problem
    block_m, block_k, block_n = job.blocks
    m, n = _few(problem.m, block_m, 2), _few(problem.n, block_n, 2)
    k = _few(problem.k, block_k, 3)
    lhs = (k, m) if problem.transpose_lhs else (m, k)
    rhs = (n, k) if problem.transpose_rhs else (k, n)
    smaller = dataclasses.replace(
        problem,
        lhs_shape=(*problem.lhs_shape[:-2], *lhs),
        rhs_shape=(*problem.rhs_shape[:-2], *rhs),
        epilogue=None if problem.epilogue is None else problem.epilogue.of_columns(n),
    )
    return dataclasses.replace(job, problem=smaller)


def _few(size: int, block: int, steps: int) -> int:
    """At most so many whole blocks, and the ragged one."""
    whole, ragged = divmod(size, block)
    return min(whole, steps) * block + ragged
