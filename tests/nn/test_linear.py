"""`PallasLinear` as `eqx.nn.Linear`: the Equinox contract, line by line, for the layer itself."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import PallasLinear, TileConfig

from ..program import described


@pytest.fixture
def getkey():
    keys = iter(jax.random.split(jax.random.key(5678), 64))
    return lambda: next(keys)


def _pair(*args, seed=0, **kwargs) -> tuple[PallasLinear, eqx.nn.Linear]:
    key = jax.random.key(seed)
    return PallasLinear(*args, **kwargs, key=key), eqx.nn.Linear(*args, **kwargs, key=key)


def _same_bits(one, other):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# Fields.


def test_it_is_a_linear():
    layer, _ = _pair(3, 4)
    assert isinstance(layer, eqx.nn.Linear)
    assert type(layer) is not eqx.nn.Linear


def test_the_fields_are_linears_and_then_two_static_ones():
    own, theirs = dataclasses.fields(PallasLinear), dataclasses.fields(eqx.nn.Linear)
    names = ["weight", "bias", "in_features", "out_features", "use_bias"]
    assert [field.name for field in theirs] == names
    assert [field.name for field in own] == [*names, "tiles", "implementation"]
    static = [bool(field.metadata.get("static")) for field in own]
    assert static == [False, False, True, True, True, True, True]


def test_only_weight_and_bias_are_leaves_in_that_order():
    layer, linear = _pair(3, 4, seed=1)
    leaves = jax.tree.leaves(layer)
    assert len(leaves) == 2
    assert leaves[0] is layer.weight
    assert leaves[1] is layer.bias
    paths = [
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (layer, linear)
    ]
    assert paths[0] == paths[1] == [".weight", ".bias"]


def test_without_bias():
    layer, _ = _pair(3, 4, use_bias=False)
    assert layer.bias is None
    assert layer.use_bias is False
    assert len(jax.tree.leaves(layer)) == 1
    np.testing.assert_array_equal(layer(jnp.zeros(3)), jnp.zeros(4))


def test_what_is_said_of_tiles_and_implementation_is_in_the_structure():
    """Part of `jit`'s key, and hashable."""
    tile = TileConfig(8, 128, 128)
    layers = [
        PallasLinear(3, 4, key=jax.random.key(0), tiles=tiles, implementation=implementation)
        for tiles in (None, tile, {"forward": tile, "rhs_cotangent": tile})
        for implementation in (None, "interpret")
    ]
    assert len({jax.tree.structure(layer) for layer in layers}) == 6
    assert layers[1].implementation == "interpret"


# Initial values.


@pytest.mark.parametrize(
    "args",
    [
        (3, 4),
        (1, 1),
        (784, 10),
        (0, 4),
        (4, 0),
        (0, 0),
        ("scalar", 5),
        (5, "scalar"),
        ("scalar", "scalar"),
    ],
    ids=str,
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_initial_values_are_bit_for_bit_those_of_linear(args, use_bias):
    layer, linear = _pair(*args, use_bias=use_bias)
    _same_bits(layer.weight, linear.weight)
    if use_bias:
        _same_bits(layer.bias, linear.bias)
    else:
        assert layer.bias is linear.bias is None
    for name in ("in_features", "out_features", "use_bias"):
        assert getattr(layer, name) == getattr(linear, name)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_initial_values_of_each_dtype(dtype):
    layer, linear = _pair(7, 3, dtype=dtype)
    assert layer.weight.dtype == layer.bias.dtype == dtype
    _same_bits(layer.weight, linear.weight)
    _same_bits(layer.bias, linear.bias)


@pytest.mark.parametrize("dtype", [None, jnp.float64, jnp.complex128, jnp.float32])
def test_initial_values_in_64_bit_mode(dtype):
    with jax.enable_x64(True):
        layer, linear = _pair(7, 3, dtype=dtype)
        assert layer.weight.dtype == (dtype or jnp.float64)
        _same_bits(layer.weight, linear.weight)
        _same_bits(layer.bias, linear.bias)
        x = jnp.arange(7, dtype=layer.weight.dtype)
        assert layer(x).dtype == linear(x).dtype == layer.weight.dtype
        eps = jnp.finfo(layer.weight.dtype).eps
        np.testing.assert_allclose(layer(x), linear(x), rtol=50 * eps, atol=50 * eps)


def test_initial_values_follow_the_contract():
    """The recipe itself, so that a change in Equinox is noticed: it would break stored seeds."""
    layer, _ = _pair(9, 4, seed=3)
    weight_key, bias_key = jax.random.split(jax.random.key(3), 2)
    uniform = functools.partial(jax.random.uniform, minval=-1 / 3, maxval=1 / 3)
    _same_bits(layer.weight, uniform(weight_key, (4, 9)))
    _same_bits(layer.bias, uniform(bias_key, (4,)))
    legacy = jax.random.PRNGKey(3)
    _same_bits(PallasLinear(9, 4, key=legacy).weight, eqx.nn.Linear(9, 4, key=legacy).weight)


# Equinox's own tests for Linear (tests/test_nn.py: test_custom_init, test_linear).


def test_constructor_errors():
    for cls in (eqx.nn.Linear, PallasLinear):
        with pytest.raises(TypeError):
            cls(1, 1, 1)  # no key
        with pytest.raises(TypeError):
            cls(3, 4)
        with pytest.raises(TypeError):
            cls(3)
        with pytest.raises(TypeError):
            cls(out_features=4)
        with pytest.raises(TypeError):
            cls(3, 4, True, None, jax.random.key(0))
        with pytest.raises(TypeError):
            cls(3, 4, key=jax.random.key(0), features=5)


@pytest.mark.parametrize("features", [(3.5, 4), (3, "vector"), (None, 4)])
def test_features_that_are_none(features):
    for cls in (eqx.nn.Linear, PallasLinear):
        with pytest.raises((TypeError, ValueError)):
            cls(*features, key=jax.random.key(0))


def test_wrong_tiles_and_implementation_in_the_constructor():
    make = functools.partial(PallasLinear, 3, 4, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"no implementation 'cuda'.*'mosaic'"):
        make(implementation="cuda")
    with pytest.raises(ValueError, match="block_m must be"):
        make(tiles=TileConfig(0, 1, 1))
    with pytest.raises(ValueError, match="forward, lhs_cotangent, rhs_cotangent"):
        make(tiles={"backward": TileConfig(8, 128, 128)})
    with pytest.raises(TypeError):
        make(tiles=(8, 128, 128))
    with pytest.raises(TypeError):
        PallasLinear(3, 4, True, None, None, key=jax.random.key(0))  # tiles is keyword-only


def test_linear_of_equinox(getkey):
    def linear(*args, **kwargs):
        """The layer, shown to be the one that Equinox makes of the same arguments."""
        key = getkey()
        layer, reference = (
            PallasLinear(*args, **kwargs, key=key),
            eqx.nn.Linear(*args, **kwargs, key=key),
        )
        _same_bits(layer.weight, reference.weight)
        return layer

    # Zero input shape
    layer = linear(0, 4)
    assert layer(jax.random.normal(getkey(), (0,))).shape == (4,)
    # Zero output shape
    assert linear(4, 0)(jax.random.normal(getkey(), (4,))).shape == (0,)
    x = jax.random.normal(getkey(), (3,))
    # Positional arguments
    assert linear(3, 4)(x).shape == (4,)
    # Some keyword arguments
    assert linear(3, out_features=4)(x).shape == (4,)
    # All keyword arguments
    assert linear(in_features=3, out_features=4)(x).shape == (4,)
    assert linear(use_bias=False, dtype=jnp.float32, out_features=4, in_features=3)(x).shape == (4,)
    # All positional arguments
    assert linear(3, 4, False, jnp.float32)(x).shape == (4,)
    # "scalar" shapes
    assert linear("scalar", 2)(jax.random.normal(getkey(), ())).shape == (2,)
    x = jax.random.normal(getkey(), (2,))
    assert linear(2, "scalar")(x).shape == ()
    assert linear("scalar", "scalar")(jnp.array(1.0)).shape == ()
    # float16 and complex64
    x = jax.random.normal(getkey(), (2,), dtype=jnp.float16)
    assert linear(2, "scalar", dtype=jnp.float16)(x).dtype == jnp.float16
    x = jax.random.normal(getkey(), (2,), dtype=jnp.complex64)
    assert linear(2, "scalar", dtype=jnp.complex64)(x).dtype == jnp.complex64


# Calls.


@pytest.mark.parametrize("implementation", [None, "interpret"])
@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(3, 4), (1, 1), (4, 4), (0, 4), (4, 0), ("scalar", 3), (3, "scalar"), ("scalar", "scalar")],
)
def test_values_are_those_of_linear(implementation, in_features, out_features):
    layer, linear = _pair(in_features, out_features)
    layer = PallasLinear.from_linear(layer, implementation=implementation)
    shape = () if in_features == "scalar" else (in_features,)
    x = jax.random.normal(jax.random.key(1), (6, *shape))
    one = layer(x[0])
    assert (one.shape, one.dtype) == (linear(x[0]).shape, linear(x[0]).dtype)
    np.testing.assert_allclose(one, linear(x[0]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(layer)(x), jax.vmap(linear)(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer(x[0], key=jax.random.key(0)), one)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_values_of_other_dtypes(dtype):
    layer, linear = _pair(30, 4, dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (30,), dtype=dtype)
    # Both round sums of 30 products, ours to the dtype once; a few units in the last place.
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    assert layer(x).dtype == linear(x).dtype == dtype
    np.testing.assert_allclose(
        *(np.asarray(f(x)).astype(np.complex128) for f in (layer, linear)),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("leading", [(5,), (3, 5), (2, 1, 3), (0,), (3, 0), (1,)], ids=str)
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(3, 4), ("scalar", 4), (3, "scalar"), ("scalar", "scalar")]
)
def test_leading_axes_are_vmap_is_equinox(leading, in_features, out_features):
    layer, linear = _pair(in_features, out_features)
    shape = () if in_features == "scalar" else (in_features,)
    x = jax.random.normal(jax.random.key(1), (*leading, *shape))
    mapped, reference = layer, linear
    for _ in leading:
        mapped, reference = jax.vmap(mapped), jax.vmap(reference)
    out = layer(x)
    expected = reference(x)
    assert out.shape == mapped(x).shape == expected.shape
    assert out.dtype == expected.dtype
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-5, atol=1e-6)


_WRONG = [
    # eqx.nn.Linear(3, 4) broadcasts this one, silently.
    (3, 4, (3, 4)),
    (3, 4, (4,)),
    (3, 4, ()),
    (3, 4, (1,)),
    (3, 4, (3, 1)),
    (3, 4, (2, 3, 4)),
    (0, 4, (1,)),
    (1, 4, (2,)),
]


@pytest.mark.parametrize(("in_features", "out_features", "shape"), _WRONG, ids=str)
def test_wrong_shapes_are_an_error_that_names_the_layer(in_features, out_features, shape):
    layer, _ = _pair(in_features, out_features)
    x = jnp.ones(shape)
    jitted = jax.jit(lambda x: layer(x))
    for call in (layer, jitted, eqx.filter_jit(layer), lambda x: jax.vmap(layer)(x[None])):
        with pytest.raises(ValueError, match="PallasLinear") as caught:
            call(x)
        message = str(caught.value)
        assert f"PallasLinear(in_features={in_features}, out_features={out_features})" in message
        assert f"shape (..., {in_features})" in message
        assert f"float32[{', '.join(map(str, shape))}]" in message
        own = message.split("--------------------")[0].strip()  # JAX adds a note below
        assert len(own) < 400
        assert "\n" not in own


def test_a_square_batch_that_linear_broadcasts():
    """The reason for the error above, shown: without it a transposed result would come back."""
    layer, linear = _pair(3, 4)
    # `x` is meant as 4 examples of 3 features, and is given transposed.
    with jax.numpy_rank_promotion("allow"):
        assert linear(jnp.ones((3, 4))).shape == (4, 4)
    with pytest.raises(ValueError, match="in_features=3"):
        layer(jnp.ones((3, 4)))
    # And the right way round, ours is a batch where Equinox refuses.
    assert layer(jnp.ones((4, 3))).shape == (4, 4)


@pytest.mark.parametrize("x", [[1.0, 2.0, 3.0], "x", None], ids=str)
def test_inputs_that_are_no_arrays(x):
    layer, _ = _pair(3, 4)
    with pytest.raises(Exception, match=r"array|Array"):
        layer(x)


def test_a_python_number_is_a_scalar():
    layer, linear = _pair("scalar", 4)
    assert (layer(2.0) == linear(2.0)).all()
    with pytest.raises(ValueError, match=r"in_features=3.*got float32\[\]"):
        _pair(3, 4)[0](1.0)


def test_a_stacked_layer_is_not_called_without_vmap():
    keys = jax.random.split(jax.random.key(0), 5)
    stacked = eqx.filter_vmap(lambda key: PallasLinear(3, 4, key=key))(keys)
    with pytest.raises(ValueError, match=r"got float32\[5, 4, 3\].*filter_vmap"):
        stacked(jnp.ones(3))


# Result dtypes.

_ALL = ("float16", "bfloat16", "float32", "complex64", "int8", "int32")


def test_result_dtypes_follow_jnp():
    with jax.numpy_dtype_promotion("standard"):
        for weight in ("float16", "bfloat16", "float32", "complex64"):
            layer, linear = _pair(3, 4, dtype=jnp.dtype(weight))
            for x in _ALL:
                example = jax.ShapeDtypeStruct((3,), jnp.dtype(x))
                out, expected = jax.eval_shape(layer, example), jax.eval_shape(linear, example)
                assert out.dtype == expected.dtype, (weight, x)
                assert out.shape == expected.shape


def test_mixtures_are_refused_under_strict_promotion():
    refused = 0
    for weight in ("float16", "bfloat16", "float32", "complex64"):
        layer, linear = _pair(3, 4, dtype=jnp.dtype(weight))
        for x in _ALL:
            example = jax.ShapeDtypeStruct((3,), jnp.dtype(x))
            if x == weight:
                assert jax.eval_shape(layer, example).dtype == weight
                continue
            for call in (layer, linear):
                with pytest.raises(Exception, match="no available implicit dtype promotion"):
                    jax.eval_shape(call, example)
            refused += 1
    assert refused == 20


def test_a_weakly_typed_input_takes_the_weights_dtype():
    layer, linear = _pair(3, 4, dtype=jnp.bfloat16)
    x = jnp.broadcast_to(1.0, (3,))
    assert x.weak_type
    assert layer(x).dtype == linear(x).dtype == jnp.bfloat16


def test_a_mixed_layer_computes_in_float32():
    """A bfloat16 activation, float32 weights: the kernel mixes them, and rounds nothing."""
    layer, _ = _pair(300, 4)
    x = jax.random.normal(jax.random.key(1), (6, 300)).astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        for implementation in ("interpret", "xla"):
            out = PallasLinear.from_linear(layer, implementation=implementation)(x)
            assert out.dtype == jnp.float32
            exact = np.asarray(x, np.float64) @ np.asarray(layer.weight, np.float64).T
            np.testing.assert_allclose(out, exact + np.asarray(layer.bias), rtol=1e-4, atol=1e-5)


# Conversions.


@pytest.mark.parametrize("use_bias", [True, False])
def test_conversions_share_the_arrays(use_bias):
    _, linear = _pair(3, 4, use_bias=use_bias)
    layer = PallasLinear.from_linear(linear, implementation="xla")
    back = layer.to_linear()
    assert type(layer) is PallasLinear
    assert type(back) is eqx.nn.Linear
    for converted in (layer, back):
        assert converted.weight is linear.weight
        assert converted.bias is linear.bias
        assert (converted.in_features, converted.out_features) == (3, 4)
        assert converted.use_bias is use_bias
    assert layer.implementation == "xla"
    assert jax.tree.structure(back) == jax.tree.structure(linear)


def test_from_linear_of_a_pallas_linear_says_anew():
    layer = PallasLinear(3, 4, key=jax.random.key(0), implementation="interpret")
    again = PallasLinear.from_linear(layer, tiles=TileConfig(8, 128, 128))
    assert again.implementation is None
    assert again.tiles is not None
    assert again.weight is layer.weight


def test_from_linear_refuses_what_is_no_linear():
    with pytest.raises(TypeError, match=r"Linear(.|\n)*Conv1d"):
        PallasLinear.from_linear(eqx.nn.Conv1d(3, 4, 2, key=jax.random.key(0)))
    _, linear = _pair(3, 4)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        PallasLinear.from_linear(linear, implementation="cuda")


def test_from_linear_takes_whatever_stands_in_the_fields():
    """No check may run on them: filters, partitions and `Shared` put other things there."""
    _, linear = _pair(3, 4)
    arrays, rest = eqx.partition(linear, eqx.is_array)
    placeholder = eqx.tree_at(lambda x: (x.weight, x.bias), linear, (object(), "b"))
    for odd in (rest, placeholder, jax.tree.map(lambda x: x[None], linear)):
        layer = PallasLinear.from_linear(odd)
        assert layer.weight is odd.weight
        assert layer.bias is odd.bias
        assert layer.to_linear().weight is odd.weight
    joined = eqx.combine(PallasLinear.from_linear(arrays), PallasLinear.from_linear(rest))
    _same_bits(joined(jnp.ones(3)), PallasLinear.from_linear(linear)(jnp.ones(3)))


def test_from_linear_is_differentiable():
    """Converted inside a loss: the gradient is that of the layer outside."""
    _, linear = _pair(3, 4)
    x = jax.random.normal(jax.random.key(1), (5, 3))

    def loss(linear, convert):
        return jnp.sum(jnp.sin(jax.vmap(convert(linear))(x)))

    ours = eqx.filter_jit(eqx.filter_grad(loss))(linear, PallasLinear.from_linear)
    theirs = eqx.filter_grad(loss)(linear, lambda layer: layer)
    assert type(ours) is eqx.nn.Linear
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_files_of_either_class_load_into_the_other(tmp_path, dtype):
    ours, theirs = _pair(3, 4, dtype=dtype)
    empty = jax.tree.map(jnp.zeros_like, (ours, theirs))
    for number, (saved, like) in enumerate([(ours, empty[1]), (theirs, empty[0])]):
        path = tmp_path / f"{number}.eqx"
        eqx.tree_serialise_leaves(path, saved)
        loaded = eqx.tree_deserialise_leaves(path, like)
        assert type(loaded) is type(like)
        _same_bits(loaded.weight, saved.weight)
        _same_bits(loaded.bias, saved.bias)


# Idioms around a layer.


def test_lora():
    """The usual LoRA: a subclass-free wrapper put in by `isinstance`, trained on its own."""

    class LoRA(eqx.Module):
        linear: eqx.nn.Linear
        a: jax.Array
        b: jax.Array

        def __init__(self, linear, rank, key):
            self.linear = linear
            out_features, in_features = linear.weight.shape
            self.a = jax.random.normal(key, (rank, in_features))
            self.b = jnp.zeros((out_features, rank))

        def __call__(self, x, *, key=None):
            return self.linear(x) + self.b @ (self.a @ x)

    is_linear = lambda x: isinstance(x, eqx.nn.Linear)  # noqa: E731
    model = eqx.nn.Sequential([PallasLinear(3, 4, key=jax.random.key(0))])
    adapted = jax.tree.map(
        lambda x: LoRA(x, 2, jax.random.key(9)) if is_linear(x) else x, model, is_leaf=is_linear
    )
    x = jnp.ones(3)
    np.testing.assert_array_equal(adapted(x), model(x))
    frozen = jax.tree.map(lambda _: False, adapted)
    spec = eqx.tree_at(lambda m: (m.layers[0].a, m.layers[0].b), frozen, (True, True))
    trained, fixed = eqx.partition(adapted, spec)
    gradient = jax.grad(lambda trained: jnp.sum(eqx.combine(trained, fixed)(x) ** 2))(trained)
    assert gradient.layers[0].linear.weight is None
    assert np.any(gradient.layers[0].b)


def test_weight_decay_mask_by_isinstance():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    swapped = pallas_ops.swap_linear(model)
    is_linear = lambda x: isinstance(x, eqx.nn.Linear)  # noqa: E731

    def weights(model):
        return [x.weight for x in jax.tree.leaves(model, is_leaf=is_linear) if is_linear(x)]

    assert len(weights(swapped)) == 2
    assert all(a is b for a, b in zip(weights(model), weights(swapped), strict=True))
    replaced = eqx.tree_at(weights, swapped, [jnp.zeros_like(w) for w in weights(model)])
    np.testing.assert_array_equal(replaced(jnp.ones(3)), replaced.layers[-1].bias)


def test_a_subclass_of_the_layer_keeps_its_own_class():
    class Scaled(PallasLinear):
        def __call__(self, x, *, key=None):
            return 2 * super().__call__(x, key=key)

    layer, _ = _pair(3, 4)
    scaled = Scaled.from_linear(layer)
    assert type(scaled) is Scaled
    np.testing.assert_array_equal(scaled(jnp.ones(3)), 2 * layer(jnp.ones(3)))


def test_filter_and_partition():
    layer, _ = _pair(3, 4)
    arrays, static = eqx.partition(layer, eqx.is_array)
    assert static.weight is None
    assert static.in_features == 3
    _same_bits(eqx.combine(arrays, static)(jnp.ones(3)), layer(jnp.ones(3)))
    shapes = eqx.filter_eval_shape(PallasLinear, 3, 4, key=jax.random.key(0))
    assert isinstance(shapes.weight, jax.ShapeDtypeStruct)
    abstract = eqx.filter_eval_shape(lambda layer, x: layer(x), shapes, jnp.ones((2, 3)))
    assert (abstract.shape, abstract.dtype) == ((2, 4), jnp.float32)


def test_as_a_jit_argument_and_through_partial():
    layer, _ = _pair(3, 4)
    x = jnp.ones((2, 3))
    traces = 0

    @jax.jit
    def call(layer, x):
        nonlocal traces
        traces += 1
        return layer(x)

    np.testing.assert_array_equal(call(layer, x), layer(x))
    call(jax.tree.map(lambda leaf: leaf + 1, layer), x)
    assert traces == 1
    partial = jax.tree_util.Partial(lambda layer, x: layer(x), layer)
    _same_bits(jax.jit(lambda f, x: f(x))(partial, x), layer(x))
    assert len(jax.tree.leaves(partial)) == 2


def test_a_layer_says_what_it_is():
    text = repr(PallasLinear(3, 4, key=jax.random.key(0), implementation="interpret"))
    assert text.startswith("PallasLinear(")
    assert "weight=f32[4,3]" in text
    assert "implementation='interpret'" in text


def test_an_ensemble_of_layers():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.filter_vmap(lambda key: PallasLinear(3, 4, key=key))(keys)
    linears = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 4, key=key))(keys)
    _same_bits(layers.weight, linears.weight)
    x = jax.random.normal(jax.random.key(1), (5, 3))

    def run(layers):
        return eqx.filter_vmap(lambda layer: jax.vmap(layer)(x))(layers)

    np.testing.assert_allclose(run(layers), run(linears), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        run(PallasLinear.from_linear(linears)), run(linears), rtol=1e-5, atol=1e-6
    )


def test_options_reach_a_layer_that_says_nothing():
    layer, _ = _pair(3, 4)
    x = jnp.ones((2, 3))

    def names():
        return [call.options.implementation for call in described(lambda x: layer(x), x)]

    assert names() == [None]
    with pallas_ops.options(implementation="interpret"):
        assert names() == ["interpret"]
    assert names() == [None]


def test_a_layer_that_the_kernel_cannot_compute_says_why():
    layer = PallasLinear(3, 4, dtype=jnp.float16, key=jax.random.key(0), implementation="interpret")
    for call in (layer, jax.jit(lambda x: layer(x))):
        with pytest.raises(pallas_ops.UnsupportedCallError, match=r"interpret.*float16"):
            call(jnp.ones(3, jnp.float16))
