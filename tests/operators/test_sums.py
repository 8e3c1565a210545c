"""The gradients of a weight and of a bias in one kernel: values, and the form of programs."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_ops as po
from pallas_ops import TileConfig
from pallas_ops.compiler import compile_for_tpu

from ..program import equations, forms


# Of the weight's gradient: all axes in several blocks, the last one ragged.
TILES = {"forward": TileConfig(32, 128, 128), "rhs_cotangent": TileConfig(128, 16, 128)}
ROWS, INPUTS, OUTPUTS = 43, 140, 200


def _draw(seed, *shape, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32).astype(dtype)


def _operands(rows=ROWS, inputs=INPUTS, outputs=OUTPUTS, dtype=jnp.float32, leading=()):
    return (
        _draw(0, *leading, rows, inputs, dtype=dtype),
        _draw(1, *leading, outputs, inputs, dtype=dtype, scale=max(inputs, 1) ** -0.5),
        _draw(2, *leading, outputs, dtype=dtype),
    )


def _ours(implementation="interpret", tiles=None):
    def run(x, w, b):
        call = dict(implementation=implementation, tiles=tiles)
        return po.matmul(x, w, transpose_rhs=True, bias=b, **call)

    return run


def _theirs(x, w, b):
    z = jnp.matmul(x, jnp.swapaxes(w, -1, -2), precision="highest")
    return z + jnp.broadcast_to(b, z.shape)


FORMS = [("interpret", TILES), ("tpu_interpret", TILES), ("xla", None), (None, None)]


@pytest.mark.parametrize(("implementation", "tiles"), FORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_gradients_are_those_of_float64(implementation, tiles, dtype):
    x, w, _ = operands = _operands(dtype=dtype)
    cotangent = _draw(3, ROWS, OUTPUTS, dtype=dtype)
    _, vjp = jax.vjp(_ours(implementation, tiles), *operands)
    found = jax.jit(vjp)(cotangent)
    g, x64, w64 = (np.asarray(array, np.float64) for array in (cotangent, x, w))
    eps = float(jnp.finfo(dtype).eps)
    for one, exact, primal in zip(found, (g @ w64, g.T @ x64, g.sum(0)), operands, strict=True):
        assert (one.shape, one.dtype) == (primal.shape, primal.dtype)
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=eps, atol=1e-5)


@pytest.mark.parametrize(("implementation", "tiles"), [("interpret", TILES), (None, None)])
def test_derivatives_of_second_order_in_both_modes(implementation, tiles):
    operands = _operands(5, 3, 4)
    check_grads(jax.jit(_ours(implementation)), operands, 2, rtol=0.05, atol=0.05)
    ours, theirs = _ours(implementation, tiles), _theirs
    tangents = tuple(jnp.cos(array) for array in _operands())
    for one, other in zip(
        *(jax.jit(lambda *a, f=f: jax.jvp(f, a, tangents))(*_operands()) for f in (ours, theirs)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)

    def second(f):
        """The gradient of what reads both results of the gradient."""

        def norm(*operands):
            found = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (1, 2))(*operands)
            return sum(jnp.sum(jnp.cos(one)) for one in found)

        return jax.jit(jax.grad(norm, (0, 1, 2)))(*_operands())

    for one, other in zip(second(ours), second(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-3)
    small = _operands(2, 3, 2)
    hessians = [
        jax.hessian(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (1, 2))(*small)
        for f in (_ours(implementation), theirs)
    ]
    for one, other in zip(*map(jax.tree.leaves, hessians), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _both(loss):
    """Gradients, of a function of the operands, by ours and by theirs."""
    return [jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2))) for f in (_ours(), _theirs)]


MAPPED = {
    "a batch": (0, None, None),
    "an ensemble": (0, 0, 0),
    "an ensemble of one input": (None, 0, 0),
    "one bias for all": (0, 0, None),
    "weights of one bias and input": (None, 0, None),
    "a bias each": (0, None, 0),
    "biases alone": (None, None, 0),
}


@pytest.mark.parametrize("order", ["vmap, then grad", "grad, then vmap"])
@pytest.mark.parametrize("name", MAPPED)
def test_mapped(name, order):
    axes = MAPPED[name]
    operands = tuple(
        one if axis is not None else one[0]
        for one, axis in zip(_operands(7, 20, 30, leading=(3,)), axes, strict=True)
    )

    def loss(f, *operands):
        return jnp.sum(jnp.tanh(f(*operands)))

    def mapped(f, *operands):
        return jnp.sum(jax.vmap(functools.partial(loss, f), axes)(*operands))

    if order == "vmap, then grad":
        gradients = _both(mapped)
    else:
        gradients = [jax.jit(jax.vmap(gradient, axes)) for gradient in _both(loss)]
    for one, other in zip(*(gradient(*operands) for gradient in gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_the_transpose_is_mapped(axes):
    """By each of its two operands alone, too: the sums have the axis where the cotangent has."""
    cotangents, inputs = _draw(0, 3, 7, 30), _draw(1, 3, 7, 20)
    w, b = _draw(2, 30, 20), _draw(3, 30)
    operands = [
        one if axis is not None else one[0]
        for one, axis in zip((cotangents, inputs), axes, strict=True)
    ]

    def gradients(f, cotangent, x):
        return jax.vjp(functools.partial(f, x), w, b)[1](cotangent)

    mapped = jax.vmap(functools.partial(gradients, _ours()), axes)
    assert forms(mapped, *operands)[-1] == "TN + sums"
    for one, other in zip(
        *(jax.vmap(functools.partial(gradients, f), axes)(*operands) for f in (_ours(), _theirs)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (5, 0, 4), (5, 3, 0), (1, 3, 4), (5, 3, 1), (5, 1, 4)]
)
def test_axes_that_are_empty_or_of_one(implementation, shape):
    operands = _operands(*shape)
    found, expected = (
        jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))(*operands)
        for f in (_ours(implementation), _theirs)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_float64():
    with jax.enable_x64(True):
        operands = [array.astype(jnp.float64) for array in _operands()]
        gradient = jax.grad(lambda b: jnp.sum(jnp.sin(_ours(None)(*operands[:2], b))))
        both = jax.grad(lambda *a: jnp.sum(jnp.sin(_ours(None)(*a))), (1, 2))(*operands)
        exact = np.cos(np.asarray(_theirs(*operands))).sum(0)
        for one in (gradient(operands[2]), both[1]):
            assert one.dtype == jnp.float64
            np.testing.assert_allclose(one, exact, rtol=1e-12)


def test_a_cotangent_that_is_not_a_number_stays_in_its_column():
    x, w, b = _operands()
    cotangent = jnp.ones((ROWS, OUTPUTS)).at[7, 3].set(jnp.nan)
    _, vjp = jax.vjp(_ours(tiles=TILES), x, w, b)
    _, _, of_bias = vjp(cotangent)
    assert np.isnan(of_bias[3])
    np.testing.assert_array_equal(np.delete(np.asarray(of_bias), 3), float(ROWS))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((1, 2), ["NT + bias", "TN + sums"]),
        ((0, 1, 2), ["NT + bias", "TN + sums", "NN"]),
        ((1,), ["NT + bias", "TN"]),
        ((2,), ["NT + bias"]),
    ],
)
def test_the_sums_are_taken_where_both_gradients_are_wanted(wanted, expected):
    def loss(x, w, b):
        return jnp.sum(jnp.sin(jax.vmap(lambda row: _ours(None)(row[None], w, b)[0])(x)))

    operands = _operands()
    assert sorted(forms(jax.grad(loss, wanted), *operands)) == sorted(expected)


def test_what_is_not_linear_or_not_by_rows_of_k_is_as_before():
    x, w, b = _operands(dtype=jnp.bfloat16)
    wide = b.astype(jnp.float32)

    def gradients(function, *operands):
        loss = lambda *a: jnp.sum(jnp.sin(function(*a).astype(jnp.float32)))  # noqa: E731
        return forms(jax.grad(loss, (1, 2)), *operands)

    def plain(x, w, b):
        return po.matmul(x, w.T, bias=b)

    def activated(x, w, b):
        return po.matmul(x, w, transpose_rhs=True, bias=b, activation=jax.nn.gelu)

    for function, bias in ((plain, b), (activated, b), (_ours(None), wide)):
        with jax.numpy_dtype_promotion("standard"):
            assert not [form for form in gradients(function, x, w, bias) if "sums" in form]
    assert "TN + sums" in gradients(_ours(None), x, w, b)


def test_a_tile_for_the_weights_gradient_is_that_of_both():
    def loss(x, w, b, tiles=None):
        return jnp.sum(_ours("interpret", tiles)(x, w, b))

    operands = _operands()
    _, backward = po.tiles.collect(jax.grad(loss, (1, 2)), *operands, device="v5e")
    _, alone = po.tiles.collect(jax.grad(loss, 1), *operands, device="v5e")
    assert (backward, backward.layout) == (alone, "TN")
    tiles = {"rhs_cotangent": TileConfig(100, 16, 128)}
    with pytest.raises(ValueError, match="block_m=100"):
        jax.grad(functools.partial(loss, tiles=tiles), (1, 2))(*operands)


def _stacked(layers, x):
    for layer in layers:
        x = jax.vmap(layer)(x)
    return x


def _layers(count, size, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), count)
    return [po.PallasLinear(size, size, key=key, dtype=dtype) for key in keys]


def _compiled_gradient(function, layers, x, device="v5e"):
    parameters, rest = eqx.partition(layers, eqx.is_inexact_array)

    def loss(parameters, x):
        out = function(eqx.combine(parameters, rest), x)
        return jnp.mean((out.astype(jnp.float32) - 1) ** 2)

    return compile_for_tpu(jax.grad(loss), parameters, x, device=device).as_text()


def _kernels_with_sums(text):
    return sum(
        "custom_call_target" in line and "matmul_tn" in line and " = (" in line
        for line in text.splitlines()
    )


@pytest.mark.parametrize("device", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_a_cotangent_that_a_kernel_made_is_read_once(device):
    """The loss' own gradient XLA sums where it computes it; those of the other layers it cannot."""
    layers, x = _layers(3, 1280), jnp.zeros((256, 1280), jnp.bfloat16)
    text = _compiled_gradient(_stacked, layers, x, device)
    assert text.count('custom_call_target="tpu_custom_call"') == 3 + 3 + 2
    assert _kernels_with_sums(text) == 2
    assert " reduce(%pallas_ops" not in text
    assert not [line for line in text[text.index("ENTRY") :].splitlines() if " reduce(" in line]


def test_what_xla_sums_where_it_computes_it_the_kernel_does_not():
    def network(layers, x):
        for layer in layers:
            x = x + jax.vmap(layer)(jax.nn.relu(x))
        return x

    text = _compiled_gradient(network, _layers(3, 1280), jnp.zeros((256, 1280), jnp.bfloat16))
    assert _kernels_with_sums(text) == 0
    assert not [line for line in text[text.index("ENTRY") :].splitlines() if " reduce(" in line]


def test_a_kernel_behind_other_programs_is_found():
    """Heads that are split and swapped, and a kernel inside of a function that is jitted."""

    @jax.jit
    def heads(q):
        swapped = jnp.swapaxes(q.reshape(256, 10, 128), 0, 1)
        return jnp.swapaxes(po.matmul(swapped, jnp.ones((128, 128), q.dtype)), 0, 1)

    def network(layers, x):
        return heads(jax.vmap(layers[0])(x)).reshape(x.shape)

    text = _compiled_gradient(network, _layers(1, 1280), jnp.zeros((256, 1280), jnp.bfloat16))
    assert _kernels_with_sums(text) == 1


@pytest.mark.parametrize(("used", "kernels", "with_sums"), [("weight", 5, 0), ("bias", 3, 0)])
def test_what_is_not_used_is_not_computed(used, kernels, with_sums):
    def loss(layers, x):
        return jnp.mean((_stacked(layers, x).astype(jnp.float32) - 1) ** 2)

    def gradients(layers, x):
        return [getattr(of, used) for of in eqx.filter_grad(loss)(layers, x)]

    layers, x = _layers(2, 1280), jnp.zeros((256, 1280), jnp.bfloat16)
    text = compile_for_tpu(gradients, layers, x).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == kernels
    assert _kernels_with_sums(text) == with_sums
    small = [po.PallasLinear(9, 9, key=jax.random.key(key)) for key in range(2)]
    of_all = eqx.filter_grad(loss)(small, jnp.ones((5, 9)))
    for one, other in zip(jax.jit(gradients)(small, jnp.ones((5, 9))), of_all, strict=True):
        np.testing.assert_allclose(one, getattr(other, used), rtol=1e-5, atol=1e-6)


def test_eager_calls_and_unwanted_results():
    """Outside of `jit`, and where one of the two results is used."""
    x, w, b = _operands()
    _, vjp = jax.vjp(_ours(tiles=TILES), x, w, b)
    cotangent = _draw(3, ROWS, OUTPUTS)
    eager = vjp(cotangent)
    for index, one in enumerate(eager):
        alone = jax.jit(lambda c, i=index: vjp(c)[i])(cotangent)
        np.testing.assert_allclose(alone, one, rtol=1e-5, atol=1e-4)


def test_no_value_is_larger_than_operands_and_results():
    layer = po.PallasLinear(64, 10, key=jax.random.key(0))

    def loss(layer, x):
        return jnp.sum(jnp.sin(jax.vmap(layer)(x)))

    x = jnp.ones((32, 64))
    sizes = [v.aval.size for e in equations(eqx.filter_grad(loss), layer, x) for v in e.outvars]
    assert max(sizes) == 32 * 64
