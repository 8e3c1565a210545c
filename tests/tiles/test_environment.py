"""`PALLAS_OPS_TILES`, and who goes before whom."""

import jax
import jax.numpy as jnp
import pytest

import pallas_ops as po
from pallas_ops.tiles import environment_resolver

from ..program import described


X = jnp.ones((8, 256))


def choice(**call):
    """What a call says of its tiles, in the end."""
    (found,) = described(lambda x: po.matmul(x, x.T, **call), X)
    return found.options.tiles


@pytest.mark.parametrize(
    ("value", "resolver"),
    [
        (None, None),
        ("", None),
        ("static", po.StaticResolver()),
        ("cached", po.CachedResolver(quiet=True)),
        ("autotune", po.AutotuneResolver()),
        ("compiler", po.CompilerResolver()),
    ],
)
def test_each_value(monkeypatch, value, resolver):
    if value is None:
        monkeypatch.delenv("PALLAS_OPS_TILES", raising=False)
    else:
        monkeypatch.setenv("PALLAS_OPS_TILES", value)
    assert environment_resolver() == resolver
    assert getattr(choice(), "resolver", None) == resolver


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Autotune", "PALLAS_OPS_TILES='Autotune' names no tile resolver"),
        ("128,128,128", "names no tile resolver"),
    ],
)
def test_other_values_are_readable_errors(monkeypatch, value, message):
    monkeypatch.setenv("PALLAS_OPS_TILES", value)
    with pytest.raises(ValueError, match=message) as error:
        po.matmul(X, X.T)
    assert "There are: static, cached, autotune, compiler." in str(error.value)


def test_call_then_options_then_environment(monkeypatch):
    one, two = po.StaticResolver(po.TileConfig(8, 128, 8)), po.StaticResolver()
    monkeypatch.setenv("PALLAS_OPS_TILES", "autotune")
    assert choice().resolver == po.AutotuneResolver()
    with po.options(tiles=one):
        assert choice().resolver == one
        assert choice(tiles=two).resolver == two
        assert choice(tiles=po.TileConfig(8, 256, 8)).forward == po.TileConfig(8, 256, 8)
    with po.options(implementation="xla"):
        assert choice().resolver == po.AutotuneResolver()
    layer = po.PallasLinear(256, 8, key=jax.random.key(0))
    (call,) = described(layer, X)
    assert call.options.tiles.resolver == po.AutotuneResolver()


@pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")
def test_the_gradients_keep_the_environment_of_their_call(monkeypatch):
    monkeypatch.setenv("PALLAS_OPS_TILES", "static")

    def loss(x):
        return po.matmul(x, jnp.ones((8, 256)), transpose_rhs=True).sum()

    _, pull = jax.vjp(loss, X)
    monkeypatch.setenv("PALLAS_OPS_TILES", "autotune")
    (call,) = described(pull, jnp.float32(1))
    assert call.options.tiles.resolver == po.StaticResolver()


def test_a_tile_that_a_call_names_leaves_the_gradients_to_the_options(monkeypatch):
    asked = []

    def record(problem):
        asked.append(problem.layout)
        return None

    tile = po.TileConfig(8, 128, 128)
    x, w = jnp.ones((8, 256)), jnp.ones((256, 128))

    def gradients(tiles):
        asked.clear()
        call = lambda x, w: po.matmul(x, w, tiles=tiles, implementation="interpret").sum()  # noqa: E731
        jax.jit(jax.value_and_grad(call, (0, 1))).lower(x, w)
        return sorted(asked)

    resolver = po.StaticResolver(record)
    with po.options(tiles=resolver):
        assert gradients(tile) == ["NT", "TN"]
        assert gradients({"lhs_cotangent": po.TileConfig(8, 128, 256)}) == ["NN", "TN"]
        assert gradients(po.StaticResolver()) == []
        assert gradients(None) == ["NN", "NT", "TN"]
    assert gradients(tile) == []
