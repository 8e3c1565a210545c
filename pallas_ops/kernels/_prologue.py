"""Operands that the kernel fetches itself, to multiply before whole blocks are there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._problem import MatmulProblem


def grid_steps(problem: MatmulProblem, blocks: tuple[int, int, int]) -> tuple[int, int, int]:
    """How many blocks of m, k and n there are."""
    m, k, n = (
        pl.cdiv(size, block)
        for size, block in zip((problem.m, problem.k, problem.n), blocks, strict=True)
    )
    return m, k, n


def operand_buffers(problem: MatmulProblem, blocks: tuple[int, int, int]) -> tuple[int, int]:
    """How many buffers lhs and rhs need: one for a block that never moves."""
    m, k, n = grid_steps(problem, blocks)
    return (2 if m * k > 1 else 1), (2 if k * n > 1 else 1)


def why_no_parts(
    problem: MatmulProblem,
    blocks: tuple[int, int, int],
    parts: int,
    granules: tuple[int, int, int],
) -> str | None:
    """Why the first blocks cannot be fetched in so many parts of k, or `None` where they can.

    **Arguments:**

    - `granules`: what a TPU packs along each axis. A kernel can copy nothing but whole multiples
        ("Offsets along tiled dimensions must be aligned to tiles", jax 0.12).
    """
    if parts == 1:
        return None
    sizes = (problem.m, problem.k, problem.n)
    if problem.leading_shape:
        return f"prologue_parts={parts} is for a product without leading axes"
    if any(size % block for size, block in zip(sizes, blocks, strict=True)):
        return f"prologue_parts={parts} is for blocks that divide m, k and n evenly"
    cut = (blocks[0], blocks[1] / parts, blocks[2])
    if any(size % granule for size, granule in zip(cut, granules, strict=True)):
        wanted = "x".join(map(str, granules))
        return f"prologue_parts={parts} is for parts of whole multiples of {wanted}"
    return None


@dataclasses.dataclass(frozen=True)
class Prologue:
    """Two buffers for each operand, as Pallas' own pipeline has them, filled by the kernel.

    Pallas begins a step when all of its blocks are there. For the very first one, nothing is
    multiplied meanwhile. Here the first blocks come in parts along k, and one part is multiplied
    while the next is fetched.

    **Arguments:**

    - `problem`: without leading axes.
    - `blocks`: which divide its axes evenly.
    - `parts`: of k, into which the first blocks are cut.
    """

    problem: MatmulProblem
    blocks: tuple[int, int, int]
    parts: int

    @property
    def scratch(self) -> list[Any]:
        """What `kernel` needs behind all other references."""
        m, k, n = self.blocks
        lhs_buffers, rhs_buffers = operand_buffers(self.problem, self.blocks)
        return [
            pltpu.VMEM((lhs_buffers, *self._lhs(m, k)), self.problem.lhs_dtype),
            pltpu.VMEM((rhs_buffers, *self._rhs(k, n)), self.problem.rhs_dtype),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((self.parts,)),
        ]

    def _lhs(self, m: Any, k: Any) -> tuple[Any, Any]:
        return (k, m) if self.problem.transpose_lhs else (m, k)

    def _rhs(self, k: Any, n: Any) -> tuple[Any, Any]:
        return (n, k) if self.problem.transpose_rhs else (k, n)

    def kernel(
        self,
        lhs_hbm,
        rhs_hbm,
        *refs,
        step: Callable[..., None],
    ):
        """One step of a grid over m, n and k, with both operands where they lie.

        **Arguments:**

        - `step(lhs_ref, rhs_ref, *refs, steps)`: what a step does with its blocks, where `steps`
            is its place in the grid. The very first one is called before they are there, and with
            `part`: `part(index)` waits for a part of both, and returns it.
        """
        *others, lhs_buffers, rhs_buffers, arrived, part_arrived = refs
        block_m, block_k, block_n = self.blocks
        m_steps, k_steps, n_steps = grid_steps(self.problem, self.blocks)
        m, n, k = (pl.program_id(axis) for axis in range(3))
        number = (m * n_steps + n) * k_steps + k
        # A block is fetched when its place is another than in the step before.
        lhs_is_kept = k_steps == 1 and n_steps > 1
        rhs_is_kept = k_steps == 1 and n_steps == 1
        lhs_slot = lax.rem(m if lhs_is_kept else number, 2)
        rhs_slot = jnp.int32(0) if rhs_is_kept else lax.rem(number, 2)

        def cut(step: jax.Array | int, size: int):
            return pl.ds(
                step * size if isinstance(step, int) else pl.multiple_of(step * size, size), size
            )

        def lhs_copy(m, k, slot):
            source = lhs_hbm.at[self._lhs(cut(m, block_m), cut(k, block_k))]
            return pltpu.make_async_copy(source, lhs_buffers.at[slot], arrived.at[0, slot])

        def rhs_copy(k, n, slot):
            source = rhs_hbm.at[self._rhs(cut(k, block_k), cut(n, block_n))]
            return pltpu.make_async_copy(source, rhs_buffers.at[slot], arrived.at[1, slot])

        def fetch_following():
            ends_k = k == k_steps - 1
            ends_n = jnp.logical_and(ends_k, n == n_steps - 1)
            next_k = jnp.where(ends_k, 0, k + 1)
            next_n = jnp.where(ends_n, 0, jnp.where(ends_k, n + 1, n))
            next_m = jnp.where(ends_n, m + 1, m)

            @pl.when(next_m < m_steps)
            def _():
                if lhs_is_kept:
                    pl.when(ends_n)(lhs_copy(next_m, next_k, 1 - lhs_slot).start)
                else:
                    lhs_copy(next_m, next_k, 1 - lhs_slot).start()
                if not rhs_is_kept:
                    rhs_copy(next_k, next_n, 1 - rhs_slot).start()

        def part_places(index):
            """The part of k in the first blocks of both operands: in HBM, and in their buffers."""
            of_k = cut(index, block_k // self.parts)
            lhs, rhs = self._lhs(pl.ds(0, block_m), of_k), self._rhs(of_k, pl.ds(0, block_n))
            sources = lhs_hbm.at[lhs], rhs_hbm.at[rhs]
            return sources, (lhs_buffers.at[0, *lhs], rhs_buffers.at[0, *rhs])

        def part_copies(index):
            return [
                pltpu.make_async_copy(source, target, part_arrived.at[index])
                for source, target in zip(*part_places(index), strict=True)
            ]

        def part(index):
            for copy in part_copies(index):
                copy.wait()
            _, (lhs_ref, rhs_ref) = part_places(index)
            return lhs_ref[...], rhs_ref[...]

        @pl.when(number == 0)
        def _():
            for index in range(self.parts):
                for copy in part_copies(index):
                    copy.start()
            fetch_following()
            first = lhs_buffers.at[0], rhs_buffers.at[0]
            step(*first, *others, steps=(m, n, k), part=part)

        @pl.when(number != 0)
        def _():
            fetch_following()
            if lhs_is_kept:
                pl.when(n == 0)(lhs_copy(m, k, lhs_slot).wait)
            else:
                lhs_copy(m, k, lhs_slot).wait()
            if not rhs_is_kept:
                rhs_copy(k, n, rhs_slot).wait()
            step(lhs_buffers.at[lhs_slot], rhs_buffers.at[rhs_slot], *others, steps=(m, n, k))
