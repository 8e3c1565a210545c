"""The tiled matmul kernel, shared by every implementation that runs it."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._pieces import mxu_passes, product_of_pieces
from ._problem import MatmulProblem, promoted_dtype
from ._prologue import Prologue
from ._sums import column_sums_type, with_column_sums


KERNEL_VERSION = 3
"""Part of the key of stored tiles: raise it whenever another tile may have become the best."""

# Of these a product is exact in float32: an MXU needs no more than one pass.
_NARROW_DTYPES = frozenset({jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8)})


def step_size(problem: MatmulProblem, blocks: tuple[int, int, int]) -> int:
    """How long the program of one step is, in multiplications of bfloat16.

    One of float32 is as long as two of bfloat16, for each pass.
    """
    wide = np.dtype(np.float32) in (problem.lhs_dtype, problem.rhs_dtype)
    return math.prod(blocks) * mxu_passes(problem) * (2 if wide else 1)


# Up to this size of a step the last one has a program of its own, as it has wherever the edge of k
# must be masked: it saves 260 of 8,762 cycles for blocks of 512 x 1024 x 1024, 516 of 33,585 for
# four times as much work, and costs as much time to compile again (v5e, libtpu 0.0.50).
_MOST_FOR_TWO_BODIES = 2**30


def is_matrix_vector(problem: MatmulProblem) -> bool:
    """Whether Pallas would lower the product with a vector wrongly.

    It multiplies such operands element by element, which fails for all but float32 (jax 0.10.2 and
    0.12): bfloat16 has to be raised, and int8 multiplied by us.
    """
    narrow = {problem.lhs_dtype, problem.rhs_dtype} <= _NARROW_DTYPES
    return problem.has_vector_rhs and narrow


def multiplied_dtype(problem: MatmulProblem) -> np.dtype:
    """What the blocks become in VMEM before they are multiplied: the dtype that holds both.

    So int8 beside bfloat16 is multiplied in one pass, and is exact. float32 in several passes is
    cut to pieces of bfloat16.
    """
    if mxu_passes(problem) > 1:
        return np.dtype(jnp.bfloat16)
    dtype = promoted_dtype(problem.lhs_dtype, problem.rhs_dtype)
    if is_matrix_vector(problem):
        return np.dtype(np.int32 if dtype == np.int8 else np.float32)
    return dtype


def kernel_name(problem: MatmulProblem) -> str:
    """What the kernel is called in a program, in profiles and in the compiler's dumps."""
    return f"pallas_ops_matmul_{problem.layout.lower()}"


def _masked(block: jax.Array, axis: int, left: jax.Array) -> jax.Array:
    """Zeros in place of all but the first `left` entries along `axis`."""
    inside = lax.broadcasted_iota(jnp.int32, block.shape, axis) < left
    if block.shape[0] >= 8 or block.dtype == jnp.float32:
        return jnp.where(inside, block, jnp.zeros_like(block))
    # Mosaic cannot spread a mask over the few packed rows of a narrow dtype ("Sublane broadcast").
    wide = block.astype(jnp.int32 if block.dtype == jnp.int8 else jnp.float32)
    return jnp.where(inside, wide, jnp.zeros_like(wide)).astype(block.dtype)


def _block_product(
    lhs, rhs, problem: MatmulProblem, k_left: jax.Array | None, interpreted: bool
) -> jax.Array:
    """The product of two blocks, where only the first `k_left` steps of k are real.

    Past the edge of an operand a block holds whatever was in memory. Both sides are masked: a
    zero on one side alone would still leave 0 * NaN.
    """
    lhs_k, rhs_k = (0 if problem.transpose_lhs else 1), (1 if problem.transpose_rhs else 0)
    if k_left is not None:
        lhs, rhs = _masked(lhs, lhs_k, k_left), _masked(rhs, rhs_k, k_left)
    dtype = multiplied_dtype(problem)
    if interpreted and dtype == jnp.bfloat16:
        # Products of bfloat16 are exact in float32 too. A CPU that multiplies bfloat16 itself sums
        # them less exactly than those: seven times, for 1000 numbers around 10 (AVX512_BF16).
        dtype = np.dtype(np.float32)
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(((lhs_k,), (rhs_k,)), ((), ())),
        # An interpreter may run on a TPU too, whose own passes these are then.
        precision=problem.precision if interpreted else lax.Precision.DEFAULT,
        preferred_element_type=problem.accumulator_dtype,
    )
    if mxu_passes(problem) > 1 and not interpreted:
        return product_of_pieces(lhs, rhs, problem, dot)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    if is_matrix_vector(problem) and dtype == np.int32:
        return jnp.sum(lhs * rhs, axis=1, keepdims=True)
    return dot(lhs, rhs)


def _matmul_kernel(
    lhs_ref,
    rhs_ref,
    *refs,
    problem: MatmulProblem,
    block_shape: tuple[int, int, int],
    textbook: bool,
    reduction_axes: tuple[int, ...],
    grid: tuple[int, ...],
    interpreted: bool,
    steps: Sequence[jax.Array] | None = None,
    parts: int = 1,
    part: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None,
):
    """One step of the grid: one block of the output, one block of k.

    `steps` is where in the grid it is, for a caller who calls inside of a condition.

    Where `part` is given, it is the very first step, whose blocks come in `parts` along k, each
    when `part` returns it; the references to blocks are to be read after the last one.
    """
    block_k, k_axis = block_shape[1], reduction_axes[-1]
    steps = [pl.program_id(axis) for axis in range(len(grid))] if steps is None else steps
    k_step, k_steps = steps[k_axis], grid[k_axis]
    ragged = problem.k % block_k != 0
    read = len(problem.columns)
    column_refs, out_refs = refs[:read], refs[read : read + problem.outputs]
    scratch = refs[read + problem.outputs :]

    def product(masked: bool):
        k_left = problem.k - k_step * block_k if masked else None
        return _block_product(lhs_ref[...], rhs_ref[...], problem, k_left, interpreted)

    def store(value):
        outputs: tuple[jax.Array, ...] = (value,)
        if problem.epilogue is not None:
            outputs = problem.epilogue.apply(value, *(ref[...] for ref in column_refs))
        for out_ref, output in zip(out_refs, outputs, strict=True):
            out_ref[...] = output.astype(out_ref.dtype)

    long_axes = [axis for axis in reduction_axes if grid[axis] > 1]
    if part is not None:
        (accumulator_ref,) = scratch

        @pl.loop(0, parts)
        def _(index):
            # What is read before the part is there would be kept in registers until then.
            lhs, rhs = part(index)
            nothing = jnp.zeros((), accumulator_ref.dtype)
            before = jnp.where(index == 0, nothing, accumulator_ref[...])
            accumulator_ref[...] = before + _block_product(lhs, rhs, problem, None, interpreted)

        if not long_axes:
            store(accumulator_ref[...])
        return

    if not long_axes:
        # A single step: no accumulator to fill and to read again.
        store(product(masked=ragged))
        return

    (accumulator_ref,) = scratch
    first = functools.reduce(jnp.logical_and, [steps[a] == 0 for a in long_axes])
    last = functools.reduce(jnp.logical_and, [steps[a] == grid[a] - 1 for a in long_axes])

    if textbook:

        @pl.when(first)
        def _():
            accumulator_ref[...] = jnp.zeros_like(accumulator_ref)

        accumulator_ref[...] += product(masked=ragged)

        @pl.when(last)
        def _():
            store(accumulator_ref[...])

        return

    def total(masked: bool):
        # Before the first step the accumulator holds whatever was in memory. To choose costs
        # nothing beside the MXUs; to fill it with zeros is a store for each of its registers.
        nothing = jnp.zeros((), accumulator_ref.dtype)
        return jnp.where(first, nothing, accumulator_ref[...]) + product(masked)

    only_k = long_axes == [k_axis]
    if only_k and (ragged or step_size(problem, block_shape) <= _MOST_FOR_TWO_BODIES):
        # The last step does not store what it would read again, and it alone meets the edge of k.
        @pl.when(jnp.logical_not(last))
        def _():
            accumulator_ref[...] = total(masked=False)

        @pl.when(last)
        def _():
            store(total(masked=ragged))

        return

    if ragged and k_steps > 1:
        # Only the last step of k meets the edge: the others need not pay for the mask.
        @pl.when(k_step != k_steps - 1)
        def _():
            accumulator_ref[...] = total(masked=False)

        @pl.when(k_step == k_steps - 1)
        def _():
            accumulator_ref[...] = total(masked=True)
    else:
        accumulator_ref[...] = total(masked=ragged)

    @pl.when(last)
    def _():
        store(accumulator_ref[...])


def pallas_matmul(
    problem: MatmulProblem,
    block_m: int,
    block_k: int,
    block_n: int,
    *,
    interpret: Any = False,
    vmem_limit_bytes: int | None = None,
    textbook: bool = False,
    prologue_parts: int = 1,
    column_sums: bool = False,
) -> Callable[..., jax.Array | tuple[jax.Array, ...]]:
    """The Pallas call that computes `problem` with one choice of blocks.

    The grid runs over the leading axes of the output, then m, then n, then everything that is
    summed: the leading axes that are contracted and, innermost, k. An operand that is shared along
    a leading axis is read where it lies (its index map ignores the axis), never copied.

    **Arguments:**

    - `problem`: what to compute; none of its axes may be empty.
    - `block_m`, `block_k`, `block_n`: the block sizes. They need not divide the axes.
    - `interpret`: as in `jax.experimental.pallas.pallas_call`.
    - `vmem_limit_bytes`: the scoped VMEM limit in bytes; `None` is the compiler's default.
    - `textbook`: as tutorials have it, to predict what they measured: the first step fills the
        accumulator with zeros, and the last one stores it after adding.
    - `prologue_parts`: in how many parts of k the first blocks are fetched, see `Prologue`. With
        more than one, the steps run in order, on one TensorCore.
    - `column_sums`: whether the sums of lhs over k are returned too, as of `column_sums_type`.
        For a transposed lhs that no leading axis shares, and no epilogue.

    **Returns:**

    A function from `lhs`, `rhs` and the arrays that the epilogue reads to the product; with an
    epilogue, to a tuple of its outputs; with `column_sums`, to the product and these.
    """
    kept = [axis for axis, summed in enumerate(problem.sum_leading) if not summed]
    summed = [axis for axis, summed in enumerate(problem.sum_leading) if summed]
    sizes = problem.leading_shape
    grid = (
        *(sizes[axis] for axis in kept),
        pl.cdiv(problem.m, block_m),
        pl.cdiv(problem.n, block_n),
        *(sizes[axis] for axis in summed),
        pl.cdiv(problem.k, block_k),
    )
    m_axis, n_axis, k_axis = len(kept), len(kept) + 1, len(grid) - 1
    grid_axis_of = {axis: position for position, axis in enumerate(kept)}
    grid_axis_of |= {axis: n_axis + 1 + position for position, axis in enumerate(summed)}
    reduction_axes = tuple(range(n_axis + 1, len(grid)))

    def block_spec(shape, rows: tuple[int, int | None], columns: tuple[int, int]):
        """The blocks of one array; `rows` and `columns` are a block size and a grid axis.

        An array of a single row has no grid axis of rows.
        """
        moving = [grid_axis_of[axis] if size > 1 else None for axis, size in enumerate(shape[:-2])]

        def index_map(*steps):
            leading = (0 if axis is None else steps[axis] for axis in moving)
            row = 0 if rows[1] is None else steps[rows[1]]
            return (*leading, row, steps[columns[1]])

        # `None` drops an axis from the block, so that the kernel always sees matrices.
        return pl.BlockSpec((*(None for _ in moving), rows[0], columns[0]), index_map)

    m, k, n = (block_m, m_axis), (block_k, k_axis), (block_n, n_axis)
    lhs_spec = block_spec(problem.lhs_shape, *((k, m) if problem.transpose_lhs else (m, k)))
    rhs_spec = block_spec(problem.rhs_shape, *((n, k) if problem.transpose_rhs else (k, n)))
    column_specs = [block_spec(array.shape, (1, None), n) for array in problem.columns]
    out_specs = [block_spec(problem.out_shape, m, n) for _ in range(problem.outputs)]
    sums_shape, sums_dtype = column_sums_type(problem)
    if column_sums:
        out_specs.append(block_spec(sums_shape, (1, None), m))

    prologue = None
    if prologue_parts > 1:
        prologue = Prologue(problem, (block_m, block_k, block_n), prologue_parts)
    accumulates = prologue is not None or any(grid[axis] > 1 for axis in reduction_axes)
    scratch = [pltpu.VMEM((block_m, block_n), problem.accumulator_dtype)] if accumulates else []
    kernel: Callable[..., None] = functools.partial(
        _matmul_kernel,
        problem=problem,
        block_shape=(block_m, block_k, block_n),
        textbook=textbook,
        reduction_axes=reduction_axes,
        grid=grid,
        interpreted=bool(interpret),
        parts=prologue_parts,
    )
    sequential_axes = reduction_axes
    if column_sums:
        kernel = with_column_sums(
            kernel, problem=problem, block_k=block_k, grid=grid, n_axis=n_axis
        )
        # Only the first block of n adds to the sums.
        sequential_axes = (n_axis, *sequential_axes)
    if prologue is not None:
        kernel = functools.partial(prologue.kernel, step=kernel)
        lhs_spec = rhs_spec = pl.BlockSpec(memory_space=pl.ANY)
        scratch += prologue.scratch
        # A step fetches for the one after it.
        sequential_axes = tuple(range(len(grid)))
    call = functools.partial(
        pl.pallas_call,
        kernel,
        grid=grid,
        in_specs=[lhs_spec, rhs_spec, *column_specs],
        out_specs=out_specs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(
                "arbitrary" if axis in sequential_axes else "parallel" for axis in range(len(grid))
            ),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=problem.flops, bytes_accessed=problem.bytes_accessed, transcendentals=0
        ),
        interpret=interpret,
        name=kernel_name(problem),
    )

    def run(*operands: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        # Inside a `shard_map`, the result varies over the mesh axes that the operands vary over.
        varying = jax.typeof(operands[0]).manual_axis_type
        out_shape = jax.ShapeDtypeStruct(
            problem.out_shape, problem.out_dtype, manual_axis_type=varying
        )
        out_shapes = [out_shape] * problem.outputs
        if column_sums:
            sums = jax.ShapeDtypeStruct(sums_shape, sums_dtype, manual_axis_type=varying)
            out_shapes.append(sums)
        outputs = call(out_shape=out_shapes)(*operands)
        return outputs[0] if problem.epilogue is None and not column_sums else tuple(outputs)

    return run
