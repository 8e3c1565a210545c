"""Activations as programs: which functions are, and that they compute the same."""

import functools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.compiler import compile_for_tpu
from pallas_ops.kernels import Activation
from pallas_ops.kernels._elementwise import _OPERATIONS


F32 = np.dtype(np.float32)
gelu_erf = functools.partial(jax.nn.gelu, approximate=False)


def inverse_tangent(x):
    return jnp.arctan2(x, jnp.ones_like(x))


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": jax.nn.gelu,
    "gelu, exact": gelu_erf,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "leaky_relu": jax.nn.leaky_relu,
    "mish": jax.nn.mish,
    "hard_silu": jax.nn.hard_silu,
    "log_sigmoid": jax.nn.log_sigmoid,
    "soft_sign": jax.nn.soft_sign,
    "squareplus": jax.nn.squareplus,
    "square": lambda x: x * x,
    "cube": lambda x: x**3,
    "sine": jnp.sin,
    "erf": lax.erf,
    "exp": jnp.exp,
    "constant": lambda x: x * 0.0 + 3.0,
    "rounded": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "branches": lambda x: jnp.where((x > 0) & (x < 1), x, jnp.where(x < 0, -x, 0.5)),
    "clipped": lambda x: jnp.clip(x, -1, 1),
    "sign": lambda x: jnp.sign(x) * jnp.sqrt(jnp.abs(x) + 1),
    "atan2": inverse_tangent,
    "not itself": lambda x: jnp.where(x != x, -1.0, x),
    "NaN": lambda x: jnp.where(jnp.isnan(x), 2.0, x * x),
    "not zero": lambda x: jnp.where(x != 0, jnp.sin(x) / x, 1.0),
    "zero or NaN": lambda x: jnp.where(~(x == x) | ~(x != 0), 0.5, x),
    "infinite": lambda x: jnp.where(jnp.isinf(x), jnp.sign(x), x),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "largest and least": lambda x: jnp.maximum(x, 1.0) + jnp.minimum(x, -1.0),
    "logaddexp": lambda x: jnp.logaddexp(x, 0.0),
}
POINTS = np.concatenate(
    [np.linspace(-8, 8, 1001), [0.0, -0.0, 1e-6, -1e-6, np.inf, -np.inf, np.nan]]
).astype(np.float32)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_program_computes_the_function_and_its_derivatives(name):
    activation = Activation.of(ACTIVATIONS[name], F32)
    assert activation is not None
    expected, function = [], ACTIVATIONS[name]
    for _ in range(4):
        expected.append(function)
        function = (lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1])(function)
    programs = [activation.program(order, F32) for order in range(4)]
    rows = [activation.derivative(order) for order in range(3)]

    @jax.jit
    def run(x):
        matrix = x.reshape(-1, 4)
        return (
            [function(x) for function in expected],
            [program(x) for program in programs],
            [function(matrix).reshape(-1) for function in rows],
        )

    wanted, found, whole = run(jnp.asarray(POINTS))
    for order, values in enumerate(wanted):
        # Of the size of the values: a derivative that vanishes has no digits.
        scale = max(1.0, float(np.max(np.abs(np.nan_to_num(values, posinf=0, neginf=0)))))
        close = dict(rtol=2e-5, atol=2e-6 * scale)
        assert found[order].dtype == values.dtype
        np.testing.assert_allclose(found[order], values, **close)
        if order == 0:  # the zeros that have no digits to be rounded
            is_zero = np.asarray(values == 0) & (np.abs(POINTS) != 1e-6)
            signs = [np.signbit(np.asarray(one)[is_zero]) for one in (found[order], values)]
            np.testing.assert_array_equal(*signs)
        if order < len(whole):
            np.testing.assert_allclose(whole[order], values, **close)


def test_the_complementary_error_function_is_exact_in_its_tail():
    x = np.linspace(-6, 9, 3001).astype(np.float32)
    expected = np.array([math.erfc(value) for value in x])
    found = np.asarray(_OPERATIONS["erfc"](jnp.asarray(x)), np.float64)
    # The square of x, rounded, is an exponent: that alone costs 81 * 2^-24 at 9.
    assert np.max(np.abs(found / expected - 1)) < 1e-5
    assert np.max(np.abs(found - expected)) < 5e-7


def test_exp_minus_one_is_exact_where_it_is_small():
    x = np.concatenate([np.linspace(-10, 10, 2001), np.logspace(-30, 0, 200)]).astype(np.float32)
    found = np.asarray(_OPERATIONS["expm1"](jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(found, np.expm1(x.astype(np.float64)), rtol=5e-7)


def test_the_inverse_error_function():
    x = np.concatenate(
        [np.linspace(-1, 1, 2001), [1e-20, -0.0, 0.9999999, 2.0, np.nan, np.inf]]
    ).astype(np.float32)
    found = np.asarray(_OPERATIONS["erf_inv"](jnp.asarray(x)))
    np.testing.assert_allclose(found, lax.erf_inv(jnp.asarray(x)), rtol=1e-6)
    assert np.signbit(found[-5])


SCALE = jnp.arange(5.0)


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.softmax,
        lambda x: x - x.mean(),
        lambda x: x - jnp.max(x, axis=0, keepdims=True),
        lambda x: x[::-1],
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: jnp.sort(x, axis=-1),
        lambda x: x.at[0].set(0.0),
        lambda x: x * SCALE,
        lambda x: x.T @ x,
        lambda x: (x, x),
        lambda x: x * x.shape[0],
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        lambda x: jax.pure_callback(np.sin, x, x),
    ],
    ids=range(13),
)
def test_what_looks_at_more_than_one_entry_is_none(function):
    assert Activation.of(function, F32) is None


def test_a_function_with_a_traced_parameter_is_none():
    found = []

    @jax.jit
    def run(slope):
        found.append(Activation.of(lambda x: jnp.where(x > 0, x, slope * x), F32))
        return slope

    run(0.1)
    assert found == [None]
    known = jnp.float32(0.1)
    assert Activation.of(lambda x: jnp.where(x > 0, x, known * x), F32) is not None


def test_equal_functions_are_equal_and_others_are_not():
    def times(factor):
        return Activation.of(lambda x: x * factor, F32)

    assert times(2.0) == times(2.0)
    assert hash(times(2.0)) == hash(times(2.0))
    assert times(2.0) != times(3.0)
    # Of two with the same values, a rule of its own is told by its derivative.
    own_rule = jax.custom_jvp(lambda x: x * 2.0)
    own_rule.defjvp(lambda primals, tangents: (own_rule(*primals), tangents[0] * 7.0))
    custom = Activation.of(own_rule, F32)
    assert custom != times(2.0)
    np.testing.assert_array_equal(custom.program(1, F32)(jnp.ones(3)), [7.0, 7.0, 7.0])


def test_what_a_function_closes_over_is_taken_as_it_was():
    factor = 2.0
    activation = Activation.of(lambda x: x * factor, F32)
    factor = 5.0
    np.testing.assert_array_equal(activation.derivative(0)(jnp.ones((2, 2))), np.full((2, 2), 2.0))


def test_programs_can_be_sent_to_another_process():
    for function in ACTIVATIONS.values():
        programs = Activation.of(function, F32).programs
        assert pickle.loads(pickle.dumps(programs)) == programs


@pytest.mark.parametrize("device", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_the_compiler_takes_every_operation(device):
    """Every activation and its derivatives, in one kernel."""
    activations = [Activation.of(function, F32) for function in ACTIVATIONS.values()]
    programs = [a.program(order, F32) for a in activations for order in (0, 1, 2)]
    used = {operation.name for program in programs for operation in program.operations}
    # Those that are left are in no activation above, and are tried alone.
    x = jnp.ones((8, 128), jnp.float32)
    alone = {
        "exp2": jnp.exp2, "erf_inv": lax.erf_inv, "floor": jnp.floor, "ceil": jnp.ceil,
        "round": jnp.round, "tan": jnp.tan, "cos": jnp.cos, "rem": lambda x: lax.rem(x, x + 2),
        "clamp": lambda x: lax.clamp(0.0, x, 1.0), "rsqrt": lax.rsqrt, "log": jnp.log,
        "pow": lambda x: x**1.5, "is_finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
        "not": lambda x: jnp.where(~(x > 0), x, 0.0),
        "or": lambda x: jnp.where((x > 0) | (x < -1), x, 0.0),
        "xor": lambda x: jnp.where((x > 0) ^ (x < 1), x, 0.0),
        "erfc": lax.erfc, "stop_gradient": lax.stop_gradient, "log1p": jnp.log1p,
        "ge": lambda x: jnp.where(x >= 0, x, 0.0), "le": lambda x: jnp.where(x <= 0, x, 0.0),
        "eq": lambda x: jnp.where(x == 0, x, 1.0), "ne": lambda x: jnp.where(x != 0, x, 1.0),
    }  # fmt: skip
    for name, function in alone.items():
        program = Activation.of(function, F32).programs[0]
        assert name in {operation.name for operation in program.operations}
        programs.append(program)
        used |= {operation.name for operation in program.operations}
    # What only some versions of JAX write.
    versions = {"add_any", "copy", "copy_p", "polynomial", "one_minus_square"}
    versions |= {"bitcast_convert_type", "and", "custom"}
    assert set(_OPERATIONS) - used <= versions

    def kernel(x_ref, out_ref):
        for number, program in enumerate(programs):
            out_ref[number] = program(x_ref[...])

    out = jax.ShapeDtypeStruct((len(programs), *x.shape), jnp.float32)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    call = pl.pallas_call(kernel, out_shape=out, in_specs=[vmem], out_specs=vmem)
    assert "tpu_custom_call" in compile_for_tpu(call, x, device=device).as_text()


GIVEN = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)


def _loop(x):
    return lax.fori_loop(0, 3, lambda _, y: y * 2, x)


@pytest.mark.parametrize(
    "function",
    [
        _loop,
        lambda x: lax.scan(lambda y, _: (y * 2, None), x, length=3)[0],
        lambda x: lax.while_loop(lambda y: False, lambda y: y * 2, x),
        lambda x: x.astype(jnp.float16).astype(x.dtype),  # Mosaic refuses it
    ],
)
def test_what_no_list_of_operations_is(function):
    assert Activation.of(function, F32) is None


def test_calls_are_written_out():
    wrapped = jax.checkpoint(jax.jit(lambda x: jax.nn.relu(x) * 2))
    assert Activation.of(wrapped, F32) is not None


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_function_is_the_same_of_bfloat16(name):
    # `jnp.hypot`, which squareplus is made of from jax 0.12.1 on, asks for the eps of its dtype.
    asks = "hypot" in str(jax.make_jaxpr(ACTIVATIONS[name])(jnp.ones(2)))
    assert (Activation.of(ACTIVATIONS[name], F32, GIVEN) is None) == asks


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.where(x > 0, x, jnp.finfo(x.dtype).min),
        lambda x: x + jnp.finfo(x.dtype).eps,
        lambda x: x * 2 if x.size > 100 else x,
        lambda x: x * 2 if x.shape == (64, 32) else x,
        lambda x: x * 2 if x.dtype == jnp.bfloat16 else x,
        jnp.nan_to_num,
    ],
)
def test_what_asks_for_its_dtype_or_shape_is_applied_to_what_it_would_be_given(function):
    assert Activation.of(function, F32) is not None
    assert Activation.of(function, F32, GIVEN) is None


def test_a_number_that_a_function_closes_over_is_read_each_time():
    factor = 1.0

    def scaled(x):
        return x * factor

    one = Activation.of(scaled, F32)
    factor = 10.0
    assert Activation.of(scaled, F32) != one


def test_float64_has_its_own_digits():
    with jax.enable_x64(True):
        x = jnp.linspace(-3, 3, 101)
        for function in (gelu_erf, jnp.expm1):
            program = Activation.of(function, np.dtype(np.float64)).programs[0]
            np.testing.assert_allclose(program(x), function(x), rtol=1e-12, atol=1e-14)
