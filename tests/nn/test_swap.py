"""`swap_linear` and `restore_linear`, in every kind of Equinox model."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pallas_ops
from pallas_ops import PallasLinear, restore_linear, swap_linear, TileConfig

from ..program import described, operator_calls


KEY = jax.random.key(0)


def _layers(model: Any, cls: type) -> list[Any]:
    """The nodes whose type is exactly `cls`, in the order of the tree."""
    is_one = lambda x: type(x) is cls  # noqa: E731
    return [x for x in jax.tree.leaves(model, is_leaf=is_one) if is_one(x)]


def _leaves_are_shared(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a is b for a, b in pairs)


def _check(model: Any, call: Any, count: int, tolerance: float = 2e-5) -> Any:
    """Swaps, compares values and gradients of `call(model)`, and restores; returns the swapped.

    Values are compared to a few units in float32's last place for sums of at most some tens of
    products: the two may sum in another order.
    """
    swapped = swap_linear(model)
    assert len(_layers(model, eqx.nn.Linear)) == count, "the model was changed"
    assert len(_layers(swapped, PallasLinear)) == count
    assert _layers(swapped, eqx.nn.Linear) == []
    assert _leaves_are_shared(model, swapped)

    @eqx.filter_jit
    def value_and_gradient(model):
        gradient = eqx.filter_grad(lambda model: jnp.sum(jnp.sin(call(model))))
        return call(model), gradient(model)

    (our_value, ours), (their_value, theirs) = map(value_and_gradient, (swapped, model))
    np.testing.assert_allclose(our_value, their_value, rtol=tolerance, atol=tolerance)
    compared = 0
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        compared += bool(np.any(other))
    assert compared >= count, "gradients of zeros show nothing"

    again = swap_linear(swapped)
    assert jax.tree.structure(again) == jax.tree.structure(swapped)
    assert _leaves_are_shared(again, swapped)
    restored = restore_linear(swapped)
    assert jax.tree.structure(restored) == jax.tree.structure(model)
    assert _leaves_are_shared(restored, model)
    return swapped


def _count_calls(function: Any, *args: Any) -> int:
    return len(operator_calls(function, *args))


# What is reached.


def test_mlp():
    x = jax.random.normal(KEY, (6, 5))
    swapped = _check(eqx.nn.MLP(5, 3, 8, 2, key=KEY), lambda m: jax.vmap(m)(x), 3)
    assert _count_calls(jax.vmap(swapped), x) == 3


@pytest.mark.parametrize("scalar", [("scalar", 2), (2, "scalar"), ("scalar", "scalar")], ids=str)
def test_mlp_with_scalars(scalar):
    shape = () if scalar[0] == "scalar" else (2,)
    x = jax.random.normal(KEY, (6, *shape))
    _check(eqx.nn.MLP(*scalar, 8, 1, key=KEY), lambda m: jax.vmap(m)(x), 2)


def test_mlp_with_scan():
    """The hidden layers are one layer of stacked weights, run by `jax.lax.scan`."""
    x = jax.random.normal(KEY, (6, 5))
    model = eqx.nn.MLP(5, 3, 8, 4, scan=True, key=KEY)
    swapped = _check(model, lambda m: jax.vmap(m)(x), 3)
    stacked = [layer for layer in _layers(swapped, PallasLinear) if layer.weight.ndim == 3]
    assert len(stacked) == 1
    assert stacked[0].weight.shape[1:] == (8, 8)


def test_layers_are_made_under_vmap_as_mlp_with_scan_makes_them():
    """Which refuses extra fields that are not static, even of `None`."""
    make = lambda key: PallasLinear(  # noqa: E731
        4, 4, key=key, tiles=TileConfig(8, 128, 128), implementation="xla"
    )
    stacked = jax.vmap(make)(jax.random.split(KEY, 3))
    assert stacked.weight.shape == (3, 4, 4)
    last, _ = jax.lax.scan(lambda x, layer: (layer(x), None), jnp.ones(4), stacked)
    expected = jnp.ones(4)
    for weight, bias in zip(stacked.weight, stacked.bias, strict=True):
        expected = weight @ expected + bias
    np.testing.assert_allclose(last, expected, rtol=1e-5, atol=1e-6)


def test_multihead_attention():
    x = jax.random.normal(KEY, (6, 8))
    model = eqx.nn.MultiheadAttention(2, 8, key=KEY, use_query_bias=True)
    swapped = _check(model, lambda m: m(x, x, x), 4)
    assert isinstance(swapped.query_proj, PallasLinear)
    batch = jax.random.normal(KEY, (3, 6, 8))
    np.testing.assert_allclose(
        *(jax.vmap(lambda x, m=m: m(x, x, x))(batch) for m in (swapped, model)),
        rtol=2e-5,
        atol=2e-5,
    )


def test_sequential_with_lambda_and_dropout():
    x = jax.random.normal(KEY, (5,))
    keys = jax.random.split(KEY, 2)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(5, 7, key=keys[0]),
            eqx.nn.LayerNorm(7),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.Dropout(0.5, inference=True),
            eqx.nn.Linear(7, 2, use_bias=False, key=keys[1]),
        ]
    )
    _check(model, lambda m: m(x), 2)


def test_weight_norm():
    x = jax.random.normal(KEY, (5,))
    _check(eqx.nn.WeightNorm(eqx.nn.Linear(5, 7, key=KEY)), lambda m: m(x), 1)


def test_spectral_norm():
    """Stateful, and swapped together with its state or without."""
    x = jax.random.normal(KEY, (6, 5))
    make = lambda: eqx.nn.SpectralNorm(  # noqa: E731
        eqx.nn.Linear(5, 7, key=KEY), "weight", key=jax.random.key(1)
    )
    model, state = eqx.nn.make_with_state(make)()

    def call(model):
        run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        out, new_state = run(x, state)
        return out + 0 * sum(map(jnp.sum, jax.tree.leaves(new_state)))

    _check(model, call, 1)


def test_shared():
    """One weight in two places: `Shared` puts a placeholder into one of the layers."""

    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            one, two = (eqx.nn.Linear(4, 4, key=k) for k in jax.random.split(key))
            where, get = lambda pair: pair[1].weight, lambda pair: pair[0].weight
            self.shared = eqx.nn.Shared((one, two), where, get)

        def __call__(self, x):
            one, two = self.shared()
            assert one.weight is two.weight
            return two(jnp.tanh(one(x)))

    x = jax.random.normal(KEY, (4,))
    swapped = _check(Tied(KEY), lambda m: m(x), 2)
    assert all(type(layer) is PallasLinear for layer in swapped.shared())
    assert len(jax.tree.leaves(eqx.filter(swapped, eqx.is_array))) == 3


def test_ensemble():
    x = jax.random.normal(KEY, (6, 5))
    model = eqx.filter_vmap(lambda key: eqx.nn.MLP(5, 3, 8, 1, key=key))(jax.random.split(KEY, 4))
    run = lambda m: eqx.filter_vmap(lambda m: jax.vmap(m)(x))(m)  # noqa: E731
    _check(model, run, 2)


def test_filter_placeholders():
    """A partition of the model, both halves swapped, is a partition of the swapped model."""
    model = eqx.nn.MLP(5, 3, 8, 1, key=KEY)
    halves = [swap_linear(half) for half in eqx.partition(model, eqx.is_array)]
    assert all(len(_layers(half, PallasLinear)) == 2 for half in halves)
    x = jnp.ones(5)
    joined = eqx.combine(*halves)
    assert jax.tree.structure(joined) == jax.tree.structure(swap_linear(model))
    np.testing.assert_allclose(joined(x), model(x), rtol=1e-5, atol=1e-6)
    mask = swap_linear(jax.tree.map(lambda _: True, model))
    assert jax.tree.structure(mask) == jax.tree.structure(
        jax.tree.map(lambda _: True, swap_linear(model))
    )


@pytest.mark.parametrize(
    "wrap",
    [eqx.filter_vmap, eqx.filter_checkpoint, eqx.Partial],
    ids=lambda wrap: wrap.__name__,
)
def test_equinox_wrappers(wrap):
    x = jax.random.normal(KEY, (6, 5) if wrap is eqx.filter_vmap else (5,))
    model = wrap(eqx.nn.Linear(5, 3, key=KEY))
    _check(model, lambda m: m(x), 1)


def test_partial_of_jax():
    """Its arguments are part of the tree; its function is not, to JAX itself."""
    x = jax.random.normal(KEY, (5,))
    layer = eqx.nn.Linear(5, 3, key=KEY)
    model = jax.tree_util.Partial(lambda layer, x: layer(x), layer)
    _check(model, lambda m: m(x), 1)
    with pytest.warns(UserWarning, match="found no equinox"):
        swap_linear(jax.tree_util.Partial(layer))


def test_plain_containers_and_a_single_layer():
    x = jnp.ones(5)
    layer = eqx.nn.Linear(5, 3, key=KEY)
    _check(layer, lambda m: m(x), 1)
    model = {"a": [layer, None], "b": (eqx.nn.Linear(5, 3, key=jax.random.key(1)), 1.5)}
    _check(model, lambda m: m["a"][0](x) + m["b"][0](x), 2)


def test_one_layer_in_two_places_is_swapped_in_both():
    layer = eqx.nn.Linear(5, 5, key=KEY)
    model = eqx.nn.Sequential([layer, layer])
    swapped = swap_linear(model)
    assert len(_layers(swapped, PallasLinear)) == 2
    assert swapped.layers[0].weight is swapped.layers[1].weight is layer.weight


# What is not.


def test_nothing_to_swap_warns():
    model = eqx.nn.GRUCell(3, 4, key=KEY)
    with pytest.warns(UserWarning, match="swap_linear found no equinox.*Linear in the model") as w:
        swapped = swap_linear(model)
    assert len(w) == 1
    assert jax.tree.structure(swapped) == jax.tree.structure(model)
    assert _leaves_are_shared(swapped, model)
    with pytest.warns(UserWarning, match="restore_linear found no .*PallasLinear in the model"):
        restore_linear(model)
    mlp = eqx.nn.MLP(3, 3, 3, 1, key=KEY)
    swapped = swap_linear(mlp, where=lambda m: m.layers[0])
    with pytest.warns(UserWarning, match="in what `where` picked"):
        swap_linear(eqx.nn.Sequential([mlp, model]), where=lambda m: m.layers[1])


def test_already_swapped_or_restored_does_not_warn():
    model = eqx.nn.MLP(3, 3, 3, 1, key=KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_linear(swap_linear(model))
        swap_linear(swap_linear(model), where=lambda m: m.layers[0])
        restore_linear(model)
        restore_linear(restore_linear(swap_linear(model)))


def test_asking_something_of_layers_that_are_swapped_already_warns_and_changes_nothing():
    model = swap_linear(eqx.nn.MLP(3, 3, 3, 1, key=KEY), implementation="xla")
    with pytest.warns(UserWarning, match="are PallasLinear already.*restore_linear first"):
        again = swap_linear(model, implementation="interpret")
    assert eqx.tree_equal(model, again)
    assert [layer.implementation for layer in again.layers] == ["xla", "xla"]


def test_a_closure_is_out_of_reach_and_said_to_be():
    class Model(eqx.Module):
        run: Any

    layer = eqx.nn.Linear(3, 4, key=KEY)
    model = Model(lambda x: jax.vmap(layer)(x))
    with pytest.warns(UserWarning, match="inside closures"):
        swapped = swap_linear(model)
    assert swapped.run is model.run


def test_subclasses_of_linear_are_left_alone():
    class Doubled(eqx.nn.Linear):
        def __call__(self, x, *, key=None):
            return 2 * super().__call__(x)

    model = eqx.nn.Sequential([Doubled(3, 3, key=KEY), eqx.nn.Linear(3, 3, key=KEY)])
    swapped = swap_linear(model)
    assert type(swapped.layers[0]) is Doubled
    assert type(swapped.layers[1]) is PallasLinear
    with pytest.warns(UserWarning, match="subclasses"):
        swap_linear(model.layers[0])


# `where`.


@pytest.fixture
def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(5, 3, 8, 3, key=KEY)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (lambda m: m.layers[1], [1]),
        (lambda m: m.layers, [0, 1, 2, 3]),
        (lambda m: m.layers[1:3], [1, 2]),
        (lambda m: [m.layers[0], m.layers[3]], [0, 3]),
        (lambda m: (m.layers[2],), [2]),
        (lambda m: m, [0, 1, 2, 3]),
    ],
    ids=["a layer", "a part", "a slice", "a list", "a tuple of one", "all of it"],
)
def test_where(mlp, where, expected):
    swapped = swap_linear(mlp, where=where, implementation="xla")
    kinds = [type(layer) is PallasLinear for layer in swapped.layers]
    assert [number for number, kind in enumerate(kinds) if kind] == expected
    assert all(swapped.layers[number].implementation == "xla" for number in expected)
    assert _leaves_are_shared(swapped, mlp)
    np.testing.assert_allclose(swapped(jnp.ones(5)), mlp(jnp.ones(5)), rtol=1e-5, atol=1e-6)
    restored = restore_linear(swapped, where=where)
    assert jax.tree.structure(restored) == jax.tree.structure(mlp)


def test_where_in_steps(mlp):
    """Other choices for other parts; what is swapped already keeps what it was given."""
    tile = TileConfig(8, 128, 128)
    model = swap_linear(mlp, where=lambda m: m.layers[0], tiles=tile, implementation="interpret")
    model = swap_linear(model)
    assert [layer.implementation for layer in model.layers] == ["interpret", None, None, None]
    assert [layer.tiles is None for layer in model.layers] == [False, True, True, True]
    np.testing.assert_allclose(model(jnp.ones(5)), mlp(jnp.ones(5)), rtol=1e-5, atol=1e-6)
    part = restore_linear(model, where=lambda m: m.layers[1:])
    assert [type(layer) is PallasLinear for layer in part.layers] == [True, False, False, False]


def test_where_reaches_into_a_part():
    model = {"one": eqx.nn.MLP(2, 2, 2, 1, key=KEY), "two": eqx.nn.MLP(2, 2, 2, 1, key=KEY)}
    swapped = swap_linear(model, where=lambda m: m["two"])
    assert len(_layers(swapped["one"], PallasLinear)) == 0
    assert len(_layers(swapped["two"], PallasLinear)) == 2


# What is said for every layer.


def test_tiles_and_implementation_reach_every_layer(mlp):
    tile = TileConfig(8, 128, 128)
    swapped = swap_linear(mlp, tiles=tile, implementation="interpret")
    assert all(layer.implementation == "interpret" for layer in swapped.layers)
    expected = PallasLinear(1, 1, key=KEY, tiles=tile).tiles
    assert [layer.tiles for layer in swapped.layers] == [expected] * 4
    calls = described(swapped, jnp.ones(5))
    assert [call.options.implementation for call in calls] == ["interpret"] * 4


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"implementation": "cuda"}, ValueError, "no implementation 'cuda'"),
        ({"tiles": {"backward": TileConfig(8, 128, 128)}}, ValueError, "backward"),
        ({"tiles": 128}, Exception, "tiles"),
        ({"tiles": (8, 128, 128)}, Exception, "tiles"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_changed(mlp, bad, error, message):
    structure, leaves = jax.tree.structure(mlp), jax.tree.leaves(mlp)
    for where in (None, lambda m: m.layers[0]):
        with pytest.raises(error, match=message):
            swap_linear(mlp, where=where, **bad)
    with pytest.raises(error, match=message):  # even where there is nothing to swap
        swap_linear(eqx.nn.GRUCell(3, 4, key=KEY), **bad)
    assert jax.tree.structure(mlp) == structure
    assert all(a is b for a, b in zip(jax.tree.leaves(mlp), leaves, strict=True))


# Files.


def test_files_of_a_model_load_into_the_swapped_one_and_back(tmp_path):
    model = eqx.nn.MLP(5, 3, 8, 3, scan=True, key=KEY)
    swapped = swap_linear(model)
    other = eqx.nn.MLP(5, 3, 8, 3, scan=True, key=jax.random.key(1))
    x = jnp.ones(5)
    for saved, like in ((model, swap_linear(other)), (swapped, other)):
        path = tmp_path / f"{type(saved.layers[0]).__name__}.eqx"
        eqx.tree_serialise_leaves(path, saved)
        loaded = eqx.tree_deserialise_leaves(path, like)
        assert jax.tree.structure(loaded) == jax.tree.structure(like)
        np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5, atol=1e-6)


# Training.


def _data() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (32, 5))
    return x, jnp.stack([jnp.sin(x.sum(1)), x[:, 0] * x[:, 1], jnp.ones(32)], axis=1)


def _make_step(optimiser: optax.GradientTransformation) -> Any:
    x, y = _data()

    @eqx.filter_jit
    def step(model, state):
        @eqx.filter_value_and_grad
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradients = loss(model)
        updates, state = optimiser.update(gradients, state, eqx.filter(model, eqx.is_array))
        return value, eqx.apply_updates(model, updates), state

    return step


def _train(model: Any, state: Any, step: Any, steps: int) -> tuple[list[float], Any, Any]:
    losses = []
    for _ in range(steps):
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            loss, model, state = step(model, state)
        losses.append(float(loss))
    return losses, model, state


@pytest.mark.parametrize(
    ("implementation", "scan"), [(None, False), ("interpret", False), ("interpret", True)]
)
def test_training_swapped_gives_the_same_losses(implementation, scan):
    model = eqx.nn.MLP(5, 3, 16, 3, scan=scan, key=KEY)
    optimiser = optax.adamw(1e-2)
    step = _make_step(optimiser)
    runs = [
        _train(start, optimiser.init(eqx.filter(start, eqx.is_array)), step, 8)
        for start in (model, swap_linear(model, implementation=implementation))
    ]
    (plain, _, _), (swapped, trained, _) = runs
    # The same arithmetic in another order: a few units in the last place, grown over 8 steps.
    np.testing.assert_allclose(swapped, plain, rtol=1e-4)
    assert plain[-1] < 0.8 * plain[0]
    assert len(_layers(trained, PallasLinear)) == len(_layers(model, eqx.nn.Linear)) == 4 - scan


def test_optimiser_state_is_swapped_too_and_training_goes_on():
    """Four steps, then a swap of model and state, then four more: as without the swap."""
    model = eqx.nn.MLP(5, 3, 16, 2, key=KEY)
    optimiser = optax.adam(1e-2)
    step = _make_step(optimiser)
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    expected, _, _ = _train(model, state, step, 8)
    losses, model, state = _train(model, state, step, 4)

    swapped, swapped_state = swap_linear(model), swap_linear(state)
    fresh = optimiser.init(eqx.filter(swapped, eqx.is_array))
    assert jax.tree.structure(swapped_state) == jax.tree.structure(fresh)
    assert _leaves_are_shared(swapped_state, state)
    more, swapped, swapped_state = _train(swapped, swapped_state, step, 4)
    np.testing.assert_allclose(losses + more, expected, rtol=1e-4)

    # Without the state it does not fit, as the design says, and does not pass unnoticed.
    with pytest.raises(Exception, match=r"PyTree|pytree|Linear"):
        _train(swap_linear(model), state, step, 1)

    back, state_back = restore_linear(swapped), restore_linear(swapped_state)
    assert jax.tree.structure(state_back) == jax.tree.structure(state)
    _train(back, state_back, step, 1)


def test_swap_inside_a_jitted_function():
    model = eqx.nn.MLP(5, 3, 8, 2, key=KEY)
    x = jnp.ones(5)

    @eqx.filter_jit
    def call(model):
        swapped = swap_linear(model, implementation="xla")
        return swapped(x), restore_linear(swapped)

    out, back = call(model)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    np.testing.assert_allclose(out, model(x), rtol=1e-5, atol=1e-6)


def test_the_names_are_public():
    assert pallas_ops.swap_linear is swap_linear
    assert {"PallasLinear", "swap_linear", "restore_linear"} <= set(dir(pallas_ops))
