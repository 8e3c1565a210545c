"""The sums of lhs over k that the kernel returns beside a product."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.kernels import pallas_matmul, run_kernel, sum_columns, xla_matmul
from pallas_ops.kernels._sums import kernel_sums_columns


FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)


def _problem(m, k, n, dtype=FLOAT32, leading=((), ()), summed=(), transpose_rhs=False):
    rhs = (n, k) if transpose_rhs else (k, n)
    return po.MatmulProblem(
        (*leading[0], k, m),
        (*leading[1], *rhs),
        *(dtype, dtype, dtype),
        transpose_lhs=True,
        transpose_rhs=transpose_rhs,
        sum_leading=summed,
    )


def _operands(problem, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)
        for shape, dtype in (
            (problem.lhs_shape, problem.lhs_dtype),
            (problem.rhs_shape, problem.rhs_dtype),
        )
    ]


# The problem, its blocks, and in how many parts the first of them come.
CASES = {
    "one step": (_problem(256, 64, 128), (128, 64, 128), 1),
    "several of each axis": (_problem(256, 128, 256), (128, 32, 128), 1),
    "all edges ragged": (_problem(300, 100, 200), (128, 32, 128), 1),
    "fewer rows than a register": (_problem(130, 3, 7), (128, 3, 7), 1),
    "transposed rhs": (_problem(256, 256, 40, transpose_rhs=True), (128, 128, 40), 1),
    "long sums and a rest": (_problem(256, 1200, 40), (128, 1200, 40), 1),
    "long sums, ragged": (_problem(140, 2000, 40), (128, 1104, 40), 1),
    "bfloat16": (_problem(256, 1100, 140, BFLOAT16), (128, 560, 128), 1),
    "one block of m and of n": (_problem(100, 50, 70), (100, 16, 70), 1),
    "wide": (_problem(10_000, 40, 8), (9_088, 24, 8), 1),
    "an axis that stays": (
        _problem(200, 40, 150, leading=((3,), (3,)), summed=(False,)),
        (128, 16, 128),
        1,
    ),
    "shared rhs": (
        _problem(200, 40, 150, leading=((3,), (1,)), summed=(False,)),
        (128, 40, 128),
        1,
    ),
    "summed axes": (
        _problem(200, 40, 150, leading=((3, 2), (3, 2)), summed=(True, False)),
        (128, 24, 128),
        1,
    ),
    "parts": (_problem(256, 256, 256), (128, 128, 128), 4),
    "parts, one step of k": (_problem(256, 256, 256, BFLOAT16), (128, 256, 128), 4),
    "parts, one step": (_problem(128, 256, 128, BFLOAT16), (128, 256, 128), 2),
}


@pytest.mark.parametrize(
    "implementation", ["interpret", pytest.param("tpu_interpret", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_product_and_sums(name, implementation):
    problem, blocks, parts = CASES[name]
    assert kernel_sums_columns(problem, blocks)
    lhs, rhs = _operands(problem)
    call = dict(implementation=implementation, prologue_parts=parts)
    alone = run_kernel(problem, blocks, lhs, rhs, **call)
    product, sums = run_kernel(problem, blocks, lhs, rhs, **call, column_sums=True)
    np.testing.assert_array_equal(product, alone)
    expected = sum_columns(problem, lhs)
    assert (sums.shape, sums.dtype) == (expected.shape, jnp.float32)
    exact = np.asarray(lhs, np.float64).sum(
        axis=(*(axis for axis, summed in enumerate(problem.sum_leading) if summed), -2),
        keepdims=True,
    )
    np.testing.assert_allclose(sums, exact, rtol=1e-5, atol=2e-5 * problem.k**0.5)


@pytest.mark.parametrize(
    ("problem", "blocks"),
    [
        # A second TensorCore would have nothing to do but steps of n.
        (_problem(100, 50, 300), (100, 16, 128)),
        # Each step along the axis would sum the same.
        (_problem(200, 40, 150, leading=((1,), (3,)), summed=(False,)), (128, 40, 128)),
        (_problem(200, 0, 150), (128, 8, 128)),
    ],
)
def test_what_the_kernel_does_not_sum_is_summed_beside_it(problem, blocks):
    lhs, rhs = _operands(problem)
    product, sums = run_kernel(
        problem, blocks, lhs, rhs, implementation="interpret", column_sums=True
    )
    np.testing.assert_allclose(product, xla_matmul(problem, lhs, rhs), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(sums, sum_columns(problem, lhs))


def test_nothing_past_the_edge_is_summed():
    """Where memory past the edge of k and m is not a number, and where a column holds one."""
    problem = _problem(200, 100, 40)
    lhs, rhs = _operands(problem)
    lhs = lhs.at[70, 3].set(jnp.nan).at[99, 5].set(jnp.inf)
    _, sums = run_kernel(
        problem, (128, 64, 40), lhs, rhs, implementation="tpu_interpret", column_sums=True
    )
    np.testing.assert_allclose(sums, jnp.sum(lhs, 0, keepdims=True), rtol=1e-5, atol=1e-4)
    assert np.isnan(sums[0, 3])
    assert np.isfinite(np.delete(np.asarray(sums)[0], [3, 5])).all()


def test_many_rows_of_bfloat16_are_summed_in_float32():
    """A sum in bfloat16 would stay at 256, where 1 is half of its last place."""
    problem = _problem(256, 4096, 8, BFLOAT16)
    lhs = jnp.ones(problem.lhs_shape, jnp.bfloat16)
    kernel = pallas_matmul(problem, 128, 1024, 8, interpret=True, column_sums=True)
    _, sums = kernel(lhs, jnp.ones(problem.rhs_shape, jnp.bfloat16))
    np.testing.assert_array_equal(sums, np.full((1, 256), 4096.0))
