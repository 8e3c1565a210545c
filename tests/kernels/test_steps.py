"""The ways in which the kernel sums over steps of k."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.compiler import CompileJob, CompilePool
from pallas_ops.kernels import _pallas, MatmulProblem, pallas_matmul, step_size


BFLOAT16, FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
BLOCKS = (16, 128, 128)


def _problem(k, leading=(), summed=(), dtype=FLOAT32):
    return MatmulProblem(
        (*leading, 32, k), (*leading, k, 256), dtype, dtype, FLOAT32, sum_leading=summed
    )


CASES = {
    "one step": _problem(128),
    "two steps": _problem(256),
    "three steps": _problem(384),
    "a ragged step": _problem(100),
    "a ragged end": _problem(300),
    "summed axes": _problem(256, (3,), (True,)),
    "summed axes, one step of k": _problem(128, (3,), (True,)),
    "summed axes, ragged": _problem(200, (2, 3), (False, True)),
    "summed axes, one ragged step": _problem(100, (3,), (True,)),
    "integers": _problem(300, dtype=np.dtype(np.int8)),
}
FORMS = {"as it is": {}, "one body": {"_MOST_FOR_TWO_BODIES": 0}, "textbook": {}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_every_form_is_the_product(monkeypatch, name, form):
    """What is in memory before is never part of it: the interpreter fills that with NaN."""
    for constant, value in FORMS[form].items():
        monkeypatch.setattr(_pallas, constant, value)
    problem = CASES[name]
    is_integer = problem.lhs_dtype == np.int8
    if is_integer:
        problem = MatmulProblem(
            *(problem.lhs_shape, problem.rhs_shape), *(problem.lhs_dtype,) * 2, np.dtype(np.int32)
        )
    random = np.random.default_rng(0)
    lhs, rhs = (
        jnp.asarray(random.integers(-8, 8, shape), problem.lhs_dtype)
        for shape in (problem.lhs_shape, problem.rhs_shape)
    )
    run = pallas_matmul(problem, *BLOCKS, interpret=True, textbook=form == "textbook")
    products = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    summed = tuple(axis for axis, is_summed in enumerate(problem.sum_leading) if is_summed)
    expected = products.sum(axis=summed, keepdims=True) if summed else products
    np.testing.assert_array_equal(jax.jit(run)(lhs, rhs), expected)


def _conditionals(problem, **form):
    run = pallas_matmul(problem, *BLOCKS, **form)
    operands = [
        jax.ShapeDtypeStruct(shape, problem.lhs_dtype)
        for shape in (problem.lhs_shape, problem.rhs_shape)
    ]
    text = str(jax.make_jaxpr(run)(*operands))
    return text.count("cond["), text.count("dot_general")


def test_the_bodies_of_a_step(monkeypatch):
    """How often the multiplication is in the program, which is what makes it long."""
    assert _conditionals(CASES["one step"]) == (0, 1)
    assert _conditionals(CASES["three steps"]) == (2, 2)
    assert _conditionals(CASES["a ragged end"]) == (2, 2)
    assert _conditionals(CASES["three steps"], textbook=True) == (2, 1)
    assert _conditionals(CASES["summed axes, ragged"]) == (3, 2)
    monkeypatch.setattr(
        _pallas, "_MOST_FOR_TWO_BODIES", step_size(CASES["three steps"], BLOCKS) - 1
    )
    assert _conditionals(CASES["three steps"]) == (1, 1)
    assert _conditionals(CASES["a ragged end"]) == (2, 2)


def test_the_size_of_a_step():
    highest = jax.lax.Precision.HIGHEST
    wide = MatmulProblem((8, 8), (8, 8), FLOAT32, FLOAT32, FLOAT32)
    narrow = MatmulProblem((8, 8), (8, 8), BFLOAT16, BFLOAT16, FLOAT32)
    long = MatmulProblem((8, 8), (8, 8), FLOAT32, FLOAT32, FLOAT32, precision=highest)
    assert [step_size(one, (2, 3, 5)) for one in (narrow, wide, long)] == [30, 60, 360]


@pytest.mark.parametrize("device", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_no_step_is_slower_than_the_textbooks(device):
    """The first and the last step of a sum cost what those between them cost, to 4 %."""
    problem = MatmulProblem((1024, 1024), (1024, 512), BFLOAT16, BFLOAT16, BFLOAT16)
    blocks = (512, 256, 256)
    jobs = [
        CompileJob(problem, device, blocks),
        CompileJob(problem, device, blocks, textbook=True),
    ]
    with CompilePool() as pool:
        own, textbook = (verdict.schedule for verdict in pool.ask(jobs))
    assert own.middle.mxu_cycles == textbook.middle.mxu_cycles
    # A store for each register of the accumulator, one or two in a bundle.
    assert textbook.first.bundles - textbook.middle.bundles >= 512 * 256 // 1024 // 2 - 8
    for step in (own.first, own.middle, own.last):
        assert step.cycles <= 1.04 * textbook.middle.cycles
