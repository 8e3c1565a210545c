"""`QuantizedPallasLinear`: conversion, the contract of its input, and Equinox's transformations."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops import PallasLinear, QuantizedPallasLinear, TileConfig

from ..program import described, operator_calls


def _pair(*args, seed=0, implementation=None, **kwargs):
    linear = eqx.nn.Linear(*args, **kwargs, key=jax.random.key(seed))
    return QuantizedPallasLinear.from_linear(linear, implementation=implementation), linear


def _dequantized(layer):
    """The same as an `eqx.nn.Linear` in float32."""
    scale = jnp.broadcast_to(layer.scale[..., None], layer.weight.shape)
    weight = layer.weight.astype(jnp.float32) * scale
    new = eqx.nn.Linear(
        layer.in_features, layer.out_features, layer.use_bias, key=jax.random.key(9)
    )
    return eqx.tree_at(
        lambda x: (x.weight, x.bias), new, (weight, layer.bias), is_leaf=lambda x: x is None
    )


def test_fields():
    layer, linear = _pair(30, 40)
    fields = dataclasses.fields(QuantizedPallasLinear)
    assert [field.name for field in fields] == [
        "weight",
        "scale",
        "bias",
        "in_features",
        "out_features",
        "use_bias",
        "tiles",
        "implementation",
    ]
    assert [bool(field.metadata.get("static")) for field in fields] == [False] * 3 + [True] * 5
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(layer)] == [
        ((40, 30), jnp.int8),
        ((40,), jnp.float32),
        ((40,), jnp.float32),
    ]
    assert layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.use_bias) == (30, 40, True)
    without, _ = _pair(3, 4, use_bias=False)
    assert (without.bias, without.use_bias, len(jax.tree.leaves(without))) == (None, False, 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("make", [eqx.nn.Linear, PallasLinear])
def test_no_weight_is_off_by_more_than_half_a_scale(make, dtype):
    linear = make(30, 40, dtype=dtype, key=jax.random.key(0))
    layer = QuantizedPallasLinear.from_linear(linear)
    back = np.asarray(layer.weight, np.float64) * np.asarray(layer.scale, np.float64)[:, None]
    error = np.abs(back - np.asarray(linear.weight.astype(jnp.float32), np.float64))
    assert (error <= np.asarray(layer.scale)[:, None] * (0.5 + 1e-4)).all()
    x = jnp.ones((2, 30), dtype)
    assert (layer(x).shape, layer(x).dtype) == ((2, 40), dtype)


@pytest.mark.parametrize(
    "implementation", ["interpret", pytest.param("tpu_interpret", marks=pytest.mark.slow), "xla"]
)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("sizes", [(30, 40), ("scalar", 4), (3, "scalar"), ("scalar", "scalar")])
def test_it_returns_what_its_weights_return(sizes, use_bias, implementation):
    layer, _ = _pair(*sizes, use_bias=use_bias, implementation=implementation)
    expected = _dequantized(layer)
    features = () if sizes[0] == "scalar" else (sizes[0],)
    for batch in ((), (5,), (2, 3), (0,)):
        x = jax.random.normal(jax.random.key(1), (*batch, *features))
        own, theirs = layer(x), expected
        for _ in batch:
            theirs = jax.vmap(theirs)
        assert own.shape == (*batch, *(() if sizes[1] == "scalar" else (sizes[1],)))
        np.testing.assert_allclose(own, theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (jnp.ones(4), ValueError, r"expected an input of shape \(\.\.\., 3\).*float32\[4\]"),
        (jnp.ones((3, 4)), ValueError, r"QuantizedPallasLinear\(in_features=3, out_features=4\)"),
        (jnp.float32(1), ValueError, "expected an input of shape"),
        (jnp.ones(3, jnp.int32), TypeError, "lhs. floating-point or int8"),
        (jnp.ones(3, bool), TypeError, "lhs. floating-point or int8"),
    ],
)
def test_wrong_inputs(x, error, message):
    layer, _ = _pair(3, 4)
    with pytest.raises(error, match=message):
        layer(x)


def test_from_linear_refuses_what_it_cannot_round():
    with pytest.raises(TypeError, match=r"Linear(.|\n)*Conv1d"):
        QuantizedPallasLinear.from_linear(eqx.nn.Conv1d(3, 4, 2, key=jax.random.key(0)))
    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        QuantizedPallasLinear.from_linear(linear, implementation="cuda")
    for weight, error, message in (
        (jnp.ones((4, 3), jnp.complex64), TypeError, "floating-point numbers, got complex64"),
        (linear.weight.at[0, 0].set(jnp.nan), ValueError, "entries that are NaN"),
        (None, TypeError, "`array` must be an array, got None|array"),
    ):
        bad = eqx.tree_at(lambda x: x.weight, linear, weight, is_leaf=lambda x: x is None)
        with pytest.raises(error, match=message):
            QuantizedPallasLinear.from_linear(bad)


def test_a_batch_is_one_kernel_however_it_is_given():
    layer, _ = _pair(30, 40)
    direct = operator_calls(layer, jnp.ones((3, 8, 30)))
    mapped = operator_calls(jax.vmap(jax.vmap(layer)), jnp.ones((3, 8, 30)))
    for (call,) in (direct, mapped):
        shapes = [(v.aval.shape, v.aval.dtype) for v in call.invars]
        assert shapes == [
            ((24, 30), jnp.float32),
            ((40, 30), jnp.int8),
            ((1, 40), jnp.float32),
            ((1, 40), jnp.float32),
        ]


def test_filter_grad_of_itself_and_of_its_input():
    layer, _ = _pair(30, 40, implementation="interpret")
    x = jax.random.normal(jax.random.key(1), (5, 30))

    def loss(both):
        layer, x = both
        return jnp.sum(jnp.sin(jax.vmap(layer)(x)))

    of_layer, of_x = eqx.filter_jit(eqx.filter_grad(loss))((layer, x))
    assert of_layer.weight is None
    theirs, theirs_x = eqx.filter_grad(loss)((_dequantized(layer), x))
    np.testing.assert_allclose(of_x, theirs_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_layer.bias, theirs.bias, rtol=1e-4, atol=1e-5)
    of_scale = (theirs.weight * layer.weight.astype(jnp.float32)).sum(axis=1)
    np.testing.assert_allclose(of_layer.scale, of_scale, rtol=1e-4, atol=1e-3)
    updated = eqx.apply_updates(layer, jax.tree.map(lambda g: -1e-6 * g, of_layer))
    assert updated.weight is layer.weight
    assert loss((updated, x)) < loss((layer, x))


def test_an_ensemble():
    keys = jax.random.split(jax.random.key(0), 3)
    linears = eqx.filter_vmap(lambda key: eqx.nn.Linear(30, 40, key=key))(keys)
    mapped = eqx.filter_vmap(QuantizedPallasLinear.from_linear)(linears)
    stacked = QuantizedPallasLinear.from_linear(linears)
    for one, other in zip(jax.tree.leaves(mapped), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (stacked.weight.shape, stacked.scale.shape) == ((3, 40, 30), (3, 40))
    x = jax.random.normal(jax.random.key(1), (5, 30))

    def run(layers):
        return eqx.filter_vmap(lambda layer: jax.vmap(layer)(x))(layers)

    layers = [jax.tree.map(lambda leaf: leaf[i], stacked) for i in range(3)]
    expected = jnp.stack([jax.vmap(_dequantized(layer))(x) for layer in layers])
    np.testing.assert_allclose(run(stacked), expected, rtol=1e-4, atol=1e-5)
    leaves, static = eqx.partition(stacked, eqx.is_array)
    (call,) = operator_calls(lambda leaves: run(eqx.combine(leaves, static)), leaves)
    assert [v.aval.shape for v in call.invars][:2] == [(1, 5, 30), (3, 40, 30)]
    with pytest.raises(ValueError, match="called under equinox"):
        stacked(x)


def test_files(tmp_path):
    layer, _ = _pair(30, 40)
    path = tmp_path / "layer.eqx"
    eqx.tree_serialise_leaves(path, layer)
    loaded = eqx.tree_deserialise_leaves(path, jax.tree.map(jnp.zeros_like, layer))
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(layer), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert path.stat().st_size < 4 * 30 * 40


def test_a_whole_model():
    model = eqx.nn.MLP(30, 10, 64, 2, key=jax.random.key(0))
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)  # noqa: E731
    quantized = jax.tree.map(
        lambda node: QuantizedPallasLinear.from_linear(node) if is_linear(node) else node,
        model,
        is_leaf=is_linear,
    )
    x = jax.random.normal(jax.random.key(1), (5, 30))
    run = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    own, theirs = run(quantized, x), run(model, x)
    assert len(operator_calls(jax.vmap(quantized), x)) == 3
    assert float(jnp.abs(own - theirs).max()) < 0.02 * float(jnp.abs(theirs).max())


def test_filters_shapes_and_structure():
    layer, _ = _pair(3, 4)
    shapes = eqx.filter_eval_shape(
        lambda key: QuantizedPallasLinear.from_linear(eqx.nn.Linear(3, 4, key=key)),
        jax.random.key(0),
    )
    assert (shapes.weight.dtype, shapes.scale.shape) == (jnp.int8, (4,))
    abstract = eqx.filter_eval_shape(lambda layer, x: layer(x), shapes, jnp.ones((2, 3)))
    assert (abstract.shape, abstract.dtype) == ((2, 4), jnp.float32)
    arrays, static = eqx.partition(layer, eqx.is_array)
    np.testing.assert_array_equal(eqx.combine(arrays, static)(jnp.ones(3)), layer(jnp.ones(3)))
    tile = TileConfig(8, 128, 128)
    structures = {
        jax.tree.structure(
            QuantizedPallasLinear.from_linear(
                eqx.nn.Linear(3, 4, key=jax.random.key(0)),
                tiles=tiles,
                implementation=implementation,
            )
        )
        for tiles in (None, tile, {"forward": tile, "lhs_cotangent": tile})
        for implementation in (None, "interpret")
    }
    assert len(structures) == 6


def test_options_reach_a_layer_that_says_nothing():
    layer, _ = _pair(3, 4)

    def named():
        (call,) = described(layer, jnp.ones((2, 3)))
        return call.options.implementation

    with po.options(implementation="interpret"):
        assert named() == "interpret"
    assert named() is None
