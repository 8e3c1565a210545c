"""Bias and activation in the kernel: values, derivatives, batches, and the form of programs."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_ops as po
from pallas_ops import TileConfig
from pallas_ops.compiler import compile_for_tpu

from ..program import equations, forms, operator_calls


gelu_erf = functools.partial(jax.nn.gelu, approximate=False)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu, exact": gelu_erf,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "cube": lambda x: x**3,
}
# Both axes and k in several blocks, all of them ragged.
TILE = TileConfig(16, 128, 128)
M, K, N = 19, 300, 140


def _draw(seed, *shape, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32).astype(dtype)


def _operands(dtype=jnp.float32, m=M, k=K, n=N):
    return (
        _draw(0, m, k, dtype=dtype),
        _draw(1, n, k, dtype=dtype, scale=k**-0.5),
        _draw(2, n, dtype=dtype),
    )


def _ours(activation, implementation="interpret", tiles=TILE, **keywords):
    return lambda x, w, b: po.matmul(
        x,
        w,
        transpose_rhs=True,
        bias=b,
        activation=activation,
        implementation=implementation,
        tiles=tiles,
        **keywords,
    )


def _theirs(activation):
    def run(x, w, b):
        z = jnp.matmul(x, jnp.swapaxes(w, -1, -2), precision="highest")
        z = z + jnp.broadcast_to(b, z.shape)
        return z if activation is None else activation(z)

    return run


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(name, implementation):
    activation, operands = ACTIVATIONS[name], _operands()
    ours = _ours(activation, implementation)
    theirs = _theirs(activation)
    np.testing.assert_allclose(ours(*operands), theirs(*operands), rtol=1e-4, atol=1e-5)
    cotangent = _draw(3, M, N)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.vdot(f(*a), cotangent), (0, 1, 2)))(*operands)
        for f in (ours, theirs)
    ]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_result_is_rounded_once(name, dtype):
    """Every entry is what float64 gives, to half a unit in the last place and what sums cost."""
    activation, (x, w, b) = ACTIVATIONS[name], _operands(dtype)
    found = _ours(activation)(x, w, b)
    assert found.dtype == dtype
    with jax.enable_x64(True):
        wide = [np.asarray(array.astype(jnp.float32), np.float64) for array in (x, w, b)]
        exact = np.asarray(_theirs(activation)(*map(jnp.asarray, wide)))
    unit = float(jnp.finfo(dtype).eps) / 2
    error = np.abs(np.asarray(found, np.float64) - exact)
    # Sums in float32 of 300 terms, and the slope of the activation (3 z^2 at most 60 here).
    slope = 60 if name == "cube" else 2
    assert (error <= unit * np.abs(exact) + slope * 2e-5).all()


def test_results_under_differentiation_are_the_same():
    for name, activation in ACTIVATIONS.items():
        operands = _operands(jnp.bfloat16)
        ours = _ours(activation)
        plain = jax.jit(ours)(*operands)
        value, _ = jax.vjp(ours, *operands)
        np.testing.assert_array_equal(value, plain, err_msg=name)


@pytest.mark.parametrize("name", ["gelu", "tanh", "none"])
def test_derivatives_of_higher_order_in_both_modes(name):
    operands = _operands(m=3, k=5, n=4)
    check_grads(jax.jit(_ours(ACTIVATIONS[name])), operands, 2, rtol=0.05, atol=0.05)


def test_higher_derivatives_have_the_functions_own_rules():
    @jax.custom_jvp
    def odd(x):
        return x * x

    @odd.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        return odd(x), jnp.sin(x) * dx

    x, w, b = _operands(m=2, k=3, n=4)

    def nth(f, order):
        def scalar(t):
            return jnp.sum(f(t * x, w, b))

        for _ in range(order):
            scalar = jax.grad(scalar)
        return scalar(0.7)

    for order in range(5):
        ours = nth(_ours(odd), order)
        np.testing.assert_allclose(ours, nth(_theirs(odd), order), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, None), (None, None, 0),
                                     (0, 0, None), (0, None, 0), (None, 0, 0), (0, 0, 0),
                                     (1, None, 1), (None, 1, None)], ids=str)  # fmt: skip
@pytest.mark.parametrize("differentiate", [False, True], ids=["value", "gradient"])
def test_vmap(in_axes, differentiate):
    x, w, b = (
        array if axis is None else jnp.moveaxis(jnp.stack([array, array * 2, -array]), 0, axis)
        for array, axis in zip(_operands(m=6, k=40, n=20), in_axes, strict=True)
    )

    def batched(f):
        g = f
        if differentiate:
            g = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))
        return jax.vmap(g, in_axes)(x, w, b)

    ours = batched(_ours(jax.nn.silu, tiles=None))
    for one, other in zip(
        jax.tree.leaves(ours), jax.tree.leaves(batched(_theirs(jax.nn.silu))), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_vmap_in_both_orders_and_the_gradient_of_vmap():
    x, w, b = _operands(m=6, k=40, n=20)
    xs, ws, bs = (jnp.stack([a, 2 * a]) for a in (x, w, b))
    ours, theirs = (f(jax.nn.gelu) for f in (functools.partial(_ours, tiles=None), _theirs))

    def per_example(f):
        def loss(xs, ws, bs):
            ensemble = jax.vmap(jax.vmap(lambda r, w, b: f(r[None], w, b)[0], (0, None, None)))
            other = jax.vmap(
                jax.vmap(lambda r, w, b: f(r[None], w, b)[0], (None, 0, 0)), (0, None, None)
            )
            value = jnp.sum(jnp.sin(ensemble(xs, ws, bs)))
            return value + jnp.sum(jnp.cos(other(xs[0], ws, bs)))

        return jax.value_and_grad(loss, (0, 1, 2))(xs, ws, bs)

    for one, other in zip(
        jax.tree.leaves(per_example(ours)), jax.tree.leaves(per_example(theirs)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 200, 1)])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_empty_and_smallest_products(m, k, n, implementation):
    operands = _draw(0, m, k), _draw(1, n, k), _draw(2, n)
    ours = _ours(jnp.exp, implementation, tiles=None)
    np.testing.assert_allclose(ours(*operands), _theirs(jnp.exp)(*operands), rtol=1e-5)
    of_bias = jax.grad(lambda b: ours(*operands[:2], b).sum())(operands[2])
    expected = jax.grad(lambda b: _theirs(jnp.exp)(*operands[:2], b).sum())(operands[2])
    np.testing.assert_allclose(of_bias, expected, rtol=1e-5)


def test_infinities_and_nan_go_where_they_do_unfused():
    x, w, b = _operands(m=4, k=8, n=6)
    x = x.at[0, 0].set(jnp.inf).at[1, 1].set(jnp.nan).at[2].set(-3e38)
    for activation in ACTIVATIONS.values():
        ours, theirs = (
            np.asarray(f(x, w, b.at[0].set(-jnp.inf)))
            for f in (_ours(activation, tiles=None), _theirs(activation))
        )
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(np.isposinf(ours), np.isposinf(theirs))
        np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_linear_transpose(layout, wanted):
    """In each operand with which the result is linear, as JAX has it for `x @ w + b`."""
    x, w, b, g = _draw(0, 2, 4, 3), _draw(1, 2, 3, 5), _draw(2, 5), _draw(3, 2, 4, 5)
    flags = [letter == "T" for letter in layout]
    stored = [jnp.swapaxes(a, 1, 2) if t else a for a, t in zip((x, w), flags, strict=True)]
    operands = [*stored, b]

    def transposed(function):
        def of_wanted(*values):
            given = dict(zip(wanted, values, strict=True))
            return function(*(given.get(index, one) for index, one in enumerate(operands)))

        return jax.linear_transpose(of_wanted, *(operands[index] for index in wanted))(g)

    def ours(x, w, b):
        return po.matmul(x, w, bias=b, transpose_lhs=flags[0], transpose_rhs=flags[1])

    def theirs(x, w, b):
        x, w = (jnp.swapaxes(a, 1, 2) if t else a for a, t in zip((x, w), flags, strict=True))
        return x @ w + jnp.broadcast_to(b, g.shape)

    for one, other in zip(transposed(ours), transposed(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_linear_transpose_of_a_pullback():
    """What a gradient of weight and bias is linear in is the cotangent: both results read it."""
    x, w, b = _operands(m=4, k=3, n=5)
    _, pullback = jax.vjp(functools.partial(_ours(None, None, None), x), w, b)
    of_w, of_b = _draw(4, 5, 3), _draw(5, 5)
    (found,) = jax.linear_transpose(pullback, _draw(3, 4, 5))((of_w, of_b))
    np.testing.assert_allclose(found, x @ of_w.T + of_b[None], rtol=1e-5, atol=1e-5)


def test_what_is_not_linear_is_not_transposed():
    x, w, b = _operands(m=4, k=3, n=5)
    for function in (_ours(jnp.tanh, None, None), _theirs(jnp.tanh)):
        with pytest.raises(NotImplementedError):
            jax.linear_transpose(lambda x: function(x, w, b), x)(_draw(3, 4, 5))
    with pytest.raises(NotImplementedError, match="not linear"):
        jax.linear_transpose(lambda x, w: _ours(None, None, None)(x, w, b), x, w)(_draw(3, 4, 5))


# The form of programs.


def _names(function, *args):
    return [equation.primitive.name for equation in equations(function, *args)]


def test_one_kernel_forward_and_three_for_a_gradient():
    x, w, b = _operands(jnp.bfloat16)
    layer = functools.partial(po.matmul, transpose_rhs=True, activation=jax.nn.gelu)

    def loss(x, w, b):
        return jnp.sum(jax.vmap(lambda row: layer(row[None], w, bias=b)[0])(x).astype(jnp.float32))

    assert forms(loss, x, w, b) == ["NT + bias + activation"]
    forward, *_ = operator_calls(jax.grad(loss, (0, 1, 2)), x, w, b)
    assert len(forward.outvars) == 2  # the value, and what the backward pass needs
    assert [v.aval.shape for v in forward.invars] == [(M, K), (N, K), (1, N)]
    assert sorted(forms(jax.grad(loss, (0, 1, 2)), x, w, b)[1:]) == ["NN", "TN"]
    # The kernel, and not JAX after it, computes the activation and its derivative.
    assert "tanh" not in _names(jax.grad(loss, (0, 1, 2)), x, w, b)
    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    assert compile_for_tpu(step, x, w, b).as_text().count("tpu_custom_call") == 3


def test_the_gradient_of_a_bias_is_no_second_pass_over_the_cotangent():
    """XLA sums it where it multiplies the cotangent by the derivative: one fusion returns both."""
    x, w, b = _operands(jnp.bfloat16, m=2048, k=1024, n=1024)

    def loss(parameters, x):
        for weight, bias in parameters:
            x = po.matmul(x, weight, transpose_rhs=True, bias=bias, activation=jax.nn.gelu)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    text = compile_for_tpu(jax.grad(loss), [(w, b), (w, b)], x).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2 + 2 + 1
    both = re.findall(r"= \(bf16\[1024\]\S*, bf16\[2048,1024\]\S*\) fusion\(", text)
    assert len(both) == 2


def test_what_is_not_elementwise_is_applied_to_the_whole_result():
    x, w, b = _operands()
    slope = jnp.float32(0.25)

    def learned(x, w, b, slope):
        return po.matmul(x, w, transpose_rhs=True, bias=b, activation=lambda z: slope * z)

    for function, args in (
        (_ours(jax.nn.softmax), (x, w, b)),
        (_ours(lambda z: z - z.mean()), (x, w, b)),
    ):
        assert forms(function, *args) == ["NT"]
    np.testing.assert_allclose(
        _ours(jax.nn.softmax)(x, w, b), _theirs(jax.nn.softmax)(x, w, b), rtol=1e-4
    )
    of_slope = jax.grad(lambda s: learned(x, w, b, s).sum())(slope)
    np.testing.assert_allclose(of_slope, _theirs(None)(x, w, b).sum(), rtol=1e-4)


def test_activations_that_change_the_dtype():
    x, w, b = _operands(jnp.bfloat16)
    widened = _ours(lambda z: z.astype(jnp.float32) * 2)(x, w, b)
    assert widened.dtype == jnp.float32
    assert _ours(lambda z: z > 0)(x, w, b).dtype == jnp.bool_


def test_an_activation_that_fails_tells_its_own_error():
    x, w, b = _operands()

    def bad(z):
        raise RuntimeError("of the activation")

    with pytest.raises(RuntimeError, match="of the activation"):
        _ours(bad)(x, w, b)


def test_bias_of_another_dtype_follows_the_promotion_rules():
    x, w, b = _operands(jnp.bfloat16)
    wide = b.astype(jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert _ours(None)(x, w, wide).dtype == jnp.float32
        gradients = jax.grad(lambda *a: _ours(jax.nn.silu)(*a).sum(), (0, 1, 2))(x, w, wide)
        assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        _ours(None)(x, w, wide)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """8192 rows of ones: bfloat16 alone stops counting at 256."""
    x, w, b = (
        _draw(0, 8192, 4, dtype=jnp.bfloat16),
        _draw(1, 3, 4, dtype=jnp.bfloat16),
        jnp.zeros(3),
    )
    b = b.astype(jnp.bfloat16)
    of_bias = jax.grad(lambda b: _ours(None, tiles=None)(x, w, b).astype(jnp.float32).sum())(b)
    np.testing.assert_array_equal(of_bias.astype(jnp.float32), [8192.0] * 3)


def test_layers_use_it():
    model = po.swap_linear(eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0)))
    x = _draw(0, 5, 8)
    assert forms(lambda x: jax.vmap(model)(x), x) == ["NT + bias"] * 3


def test_transformations_compose():
    x, w, b = _operands(m=4, k=16, n=16)
    ours, theirs = _ours(jnp.tanh, tiles=None), _theirs(jnp.tanh)

    def run(f):
        body = jax.checkpoint(lambda x, _: (f(x, w, b), None))
        return lambda x: jnp.sum(jax.lax.scan(body, x, None, length=3)[0] ** 2)

    np.testing.assert_allclose(
        jax.jit(jax.grad(run(ours)))(x), jax.grad(run(theirs))(x), rtol=1e-4, atol=1e-5
    )
    hessians = [jax.hessian(lambda b, f=f: jnp.sum(f(x, w, b) ** 2))(b) for f in (ours, theirs)]
    np.testing.assert_allclose(*hessians, rtol=1e-4, atol=1e-4)


def test_tpu_interpret():
    operands = _operands(jnp.bfloat16)
    ours = [_ours(jax.nn.silu, name) for name in ("tpu_interpret", "interpret")]
    np.testing.assert_array_equal(*(jax.jit(f)(*operands) for f in ours))
    gradients = [jax.grad(lambda x, f=f: f(x, *operands[1:]).sum())(operands[0]) for f in ours]
    np.testing.assert_array_equal(*gradients)
