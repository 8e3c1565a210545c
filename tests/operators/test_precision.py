import base64
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_ops as po
from pallas_ops.kernels import kernel_precision, pallas_matmul
from pallas_ops.operators._precision import resolve_precision

from ..program import equations, operator_calls


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
        (call,) = operator_calls(lambda x: po.matmul(x, x, **keywords), x)
        return call.params["precision"]

    assert bound() == DEFAULT
    with jax.default_matmul_precision("float32"):
        assert bound() == HIGHEST
        assert bound(precision="high") == HIGH


def test_gradients_keep_it():
    x = jnp.ones((4, 4))
    calls = operator_calls(jax.grad(lambda x: po.matmul(x, x, precision="highest").sum()), x)
    assert [call.params["precision"] for call in calls] == [HIGHEST] * len(calls)
    assert len(calls) >= 2


def _problem(lhs, rhs, precision):
    lhs, rhs = np.dtype(lhs), np.dtype(rhs)
    return po.MatmulProblem((64, 256), (256, 128), lhs, rhs, lhs, precision=precision)


@pytest.mark.parametrize(
    ("lhs", "rhs", "asked", "used"),
    [
        ("float32", "float32", DEFAULT, {DEFAULT}),
        # jax 0.10.2's Mosaic has no HIGH: never less than was asked for.
        ("float32", "float32", HIGH, {HIGH, HIGHEST}),
        ("float32", "float32", HIGHEST, {HIGHEST}),
        (jnp.bfloat16, "float32", HIGHEST, {HIGHEST}),
        # Exact in one pass, and Mosaic refuses any other.
        (jnp.bfloat16, jnp.bfloat16, HIGHEST, {DEFAULT}),
    ],
)
def test_what_the_kernel_uses(lhs, rhs, asked, used):
    problem = _problem(lhs, rhs, asked)
    assert kernel_precision(problem) in used
    operands = (jnp.ones(problem.lhs_shape, lhs), jnp.ones(problem.rhs_shape, rhs))
    kernel = pallas_matmul(problem, 64, 128, 128)
    dots = [e for e in equations(kernel, *operands) if e.primitive.name == "dot_general"]
    assert dots
    for dot in dots:
        precision = dot.params["precision"]
        assert set(precision if isinstance(precision, tuple) else (precision,)) <= used


def test_high_is_kept_where_this_jax_has_it():
    """Names the versions: 0.10.2 refuses `HIGH` in Mosaic, 0.12 takes it."""
    used = kernel_precision(_problem("float32", "float32", HIGH))
    assert used == (HIGH if jax.__version_info__ >= (0, 12) else HIGHEST)


@pytest.mark.parametrize(
    ("lhs", "rhs", "asked", "used"),
    [
        ("float32", "float32", DEFAULT, None),
        ("float32", "float32", HIGH, "bf16x3" if jax.__version_info__ >= (0, 12) else "fp32"),
        ("float32", "float32", HIGHEST, "fp32"),
        ("bfloat16", "float32", HIGHEST, "fp32"),
        ("bfloat16", "bfloat16", HIGHEST, None),
    ],
)
def test_what_mosaic_is_asked_for(lhs, rhs, asked, used):
    """In the program for a TPU, of a product and of both its gradients."""

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
        found = re.findall(rb"contract_precision<(\w+)>", kernel)
        assert found == ([] if used is None else [used.encode()])


def test_an_algorithm_as_the_default_is_the_highest_precision():
    x = jnp.ones((4, 4))
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        (call,) = operator_calls(lambda x: po.matmul(x, x), x)
    assert call.params["precision"] == HIGHEST
