import base64
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_ops as po
from pallas_ops.kernels import mxu_passes, pallas_matmul, product_of_pieces
from pallas_ops.kernels._pieces import cut_to_pieces
from pallas_ops.operators._precision import resolve_precision

from ..program import described, equations
from ..tiles.tools import matmul_problem


DEFAULT, HIGH, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (None, DEFAULT),
        ("highest", HIGHEST),
        ("float32", HIGHEST),
        ("bfloat16_3x", HIGH),
        (HIGH, HIGH),
        ((HIGH, DEFAULT), HIGH),
        ((None, "highest"), HIGHEST),
    ],
)
def test_all_forms_of_dot_general(given, resolved):
    assert resolve_precision(given) == resolved


def test_the_default_is_read_when_the_call_is_bound():
    x = jnp.ones((4, 4))

    def bound(**keywords):
        (call,) = described(lambda x: po.matmul(x, x, **keywords), x)
        return call.problem.precision

    assert bound() == DEFAULT
    with jax.default_matmul_precision("float32"):
        assert bound() == HIGHEST
        assert bound(precision="high") == HIGH


def test_gradients_keep_it():
    x = jnp.ones((4, 4))
    calls = described(jax.grad(lambda x: po.matmul(x, x, precision="highest").sum()), x)
    assert [call.problem.precision for call in calls] == [HIGHEST] * len(calls)
    assert len(calls) >= 2


def _problem(lhs, rhs, precision, layout="NN"):
    out = "int32" if lhs == rhs == "int8" else "float32"
    return matmul_problem(64, 256, 128, lhs, rhs, out, layout, precision=precision)


PASSES = [
    ("float32", "float32", DEFAULT, 1),
    ("float32", "float32", HIGH, 3),
    ("float32", "float32", HIGHEST, 6),
    # What is exact in bfloat16 is not cut.
    ("bfloat16", "float32", DEFAULT, 1),
    ("bfloat16", "float32", HIGH, 2),
    ("float32", "bfloat16", HIGHEST, 3),
    ("float32", "int8", HIGHEST, 3),
    ("bfloat16", "bfloat16", HIGHEST, 1),
    ("bfloat16", "int8", HIGHEST, 1),
    ("int8", "int8", HIGHEST, 1),
]


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("lhs", "rhs", "asked", "passes"), PASSES)
def test_a_product_of_bfloat16_for_each_pass(lhs, rhs, asked, passes, layout):
    problem = _problem(lhs, rhs, asked, layout)
    assert mxu_passes(problem) == passes
    operands = (jnp.ones(problem.lhs_shape, lhs), jnp.ones(problem.rhs_shape, rhs))
    kernel = pallas_matmul(problem, 64, 256, 128)
    dots = [e for e in equations(kernel, *operands) if e.primitive.name == "dot_general"]
    assert len(dots) == passes
    for dot in dots:
        assert dot.params["precision"] in (None, (DEFAULT, DEFAULT))
        assert passes == 1 or {x.aval.dtype for x in dot.invars} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("asked", [HIGH, HIGHEST])
def test_interpreters_do_not_cut(asked):
    """They multiply float32 as it is."""
    problem = _problem("float32", "float32", asked)
    operands = (jnp.ones(problem.lhs_shape), jnp.ones(problem.rhs_shape))
    kernel = pallas_matmul(problem, 64, 256, 128, interpret=True)
    (dot,) = [e for e in equations(kernel, *operands) if e.primitive.name == "dot_general"]
    assert dot.params["precision"] == (asked, asked)


def test_a_vector_is_multiplied_in_float32():
    problem = po.MatmulProblem((64, 256), (1, 256), *[np.dtype("float32")] * 3, transpose_rhs=True)
    problem = dataclasses.replace(problem, precision=HIGHEST)
    assert mxu_passes(problem) == 1


def _values(*shape):
    random = np.random.default_rng(len(shape) + shape[0])
    return random.standard_normal(shape).astype(np.float32)


def test_the_pieces_are_all_of_a_number_and_bfloat16():
    x = np.concatenate([_values(10_000), np.float32([0, -0.0, 1, 3.4e38, -3.4e38, -1e-30])])
    pieces = cut_to_pieces(jnp.asarray(x), 3)
    assert {piece.dtype for piece in pieces} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(sum(np.asarray(piece, np.float32) for piece in pieces), x)


def _by_pieces(problem, lhs, rhs):
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    return product_of_pieces(lhs, rhs, problem, lambda x, y: dot(*_raised(x, y)))


def _raised(*arrays):
    return (array.astype(jnp.float32) for array in arrays)


@pytest.mark.parametrize("asked", [HIGH, HIGHEST])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_infinity_and_nan_by_pieces(dtypes, asked):
    """Where they are in the product of float32: not all over the row of an infinity."""
    lhs, rhs = _values(6, 256), _values(256, 8)
    lhs[0, 3], lhs[1, 5], lhs[2, 7] = np.inf, -np.inf, np.nan
    rhs[3, 1:4] = 1, 0, -0.5  # as many pieces as bfloat16 has, and none
    rhs[9, 0], rhs[10, 4] = np.inf, np.nan
    lhs[3, 9], lhs[4, 9], lhs[5, 9] = 2, 0, -np.inf
    lhs, rhs = jnp.asarray(lhs, dtypes[0]), jnp.asarray(rhs, dtypes[1])
    found = _by_pieces(_problem(*dtypes, asked), lhs, rhs)
    expected = jnp.dot(*_raised(lhs, rhs))
    assert jnp.isinf(expected).any()
    np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(expected))
    np.testing.assert_array_equal(jnp.isposinf(found), jnp.isposinf(expected))
    np.testing.assert_array_equal(jnp.isneginf(found), jnp.isneginf(expected))


@pytest.mark.parametrize("asked", [HIGH, HIGHEST])
def test_the_largest_numbers_do_not_overflow(asked):
    """3.4e38 is infinity where it is rounded to bfloat16."""
    lhs, rhs = jnp.full((8, 256), 3.4e38), jnp.full((256, 128), 1e-30)
    found = _by_pieces(_problem("float32", "float32", asked), lhs, rhs)
    np.testing.assert_allclose(found, 3.4e8 * 256, rtol=1e-4 if asked == HIGH else 1e-6)


@pytest.mark.parametrize(("lhs", "rhs", "asked", "passes"), PASSES[:6])
def test_what_mosaic_is_asked_for(lhs, rhs, asked, passes):
    """In the program for a TPU, of a product and of both its gradients: bfloat16, as it is."""

    def product(x, y):
        out = None if lhs == rhs else "float32"  # a mixture has to be asked for
        options = {"precision": asked, "preferred_element_type": out}
        return po.matmul(x, y, implementation="mosaic", **options).sum()

    operands = jax.ShapeDtypeStruct((64, 256), lhs), jax.ShapeDtypeStruct((256, 128), rhs)
    gradient = jax.jit(jax.value_and_grad(product, argnums=(0, 1))).trace(*operands)
    text = gradient.lower(lowering_platforms=("tpu",)).as_text()
    kernels = [base64.b64decode(body) for body in re.findall(r"body\\22: \\22([\w+/=]+)", text)]
    assert len(kernels) == 3
    for kernel in kernels:
        assert not re.findall(rb"contract_precision<(\w+)>", kernel)


def test_an_algorithm_as_the_default_is_the_highest_precision():
    x = jnp.ones((4, 4))
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        (call,) = described(lambda x: po.matmul(x, x), x)
    assert call.problem.precision == HIGHEST
