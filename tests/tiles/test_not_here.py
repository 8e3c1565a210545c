"""Programs for another machine: never timed, and answered from what is stored or by shape."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.compiler import compile_for_tpu, compile_only_device
from pallas_ops.tiles import Entry, problem_key, TileStore, versions

from .conftest import forget_what_this_process_knows
from .tools import matmul_problem


def never(problem, tile, run, hopeless_seconds):
    raise AssertionError(f"timed {problem.describe()}")


X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
PROBLEM = po.tiles.TileProblem(matmul_problem(64, 256, 64, layout="NT"), device="v5e")
STORED = po.TileConfig(8, 128, 64)


@pytest.fixture
def stored(store):
    """A tile for a v5e, and another for any TPU."""
    for device, tile in (("v5e", STORED), (None, po.TileConfig(16, 128, 64))):
        problem = po.tiles.TileProblem(PROBLEM.matmul, device=device)
        TileStore(store).put(Entry(problem_key(problem), versions(), tile))


class Keeping:
    """Passes on what another resolver says, and remembers it."""

    def __init__(self, resolver):
        self.resolver, self.said = resolver, []

    def resolve(self, problem):
        self.said.append((problem, self.resolver.resolve(problem)))
        return self.said[-1][1]


def product(tiles, implementation="mosaic"):
    return lambda x: po.matmul(x, x, transpose_rhs=True, tiles=tiles, implementation=implementation)


def export(function):
    return jax.export.export(jax.jit(function), platforms=["tpu"])(X)


def export_for_both(function):
    return jax.export.export(jax.jit(function), platforms=["tpu", "cpu"])(X)


def lower_for_tpu(function):
    return jax.jit(function).trace(X).lower(lowering_platforms=("tpu",))


def compile_only(function):
    return compile_for_tpu(function, X, device="v5e")


def aot_on_a_topology(function):
    """As `compile_for_tpu`, by hand, and not compiled."""
    sharding = jax.sharding.make_single_device_sharding(compile_only_device("v5e"))
    return jax.jit(function).lower(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding))


WAYS = [export, lower_for_tpu, compile_only, aot_on_a_topology]
KNOWN_DEVICE = (compile_only, aot_on_a_topology)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_for_another_machine_is_never_timed(way):
    tiles = Keeping(po.AutotuneResolver(timer=never))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        way(product(tiles))
    ((problem, resolution),) = tiles.said
    assert not problem.can_be_timed
    assert problem.device == ("v5e" if way in KNOWN_DEVICE else None)
    assert problem.implementation == "mosaic"
    assert resolution.source == "estimate"


def test_a_program_for_two_platforms_is_never_timed():
    tiles = Keeping(po.AutotuneResolver(timer=never))
    exported = export_for_both(product(tiles, None))
    assert [problem.implementation for problem, _ in tiles.said] == ["mosaic"]
    x = jnp.ones(X.shape)
    np.testing.assert_allclose(exported.call(x), x @ x.T)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tuned", [True, False])
def test_the_store_is_asked(way, tuned, stored):
    tiles = Keeping(po.AutotuneResolver(timer=never) if tuned else po.CachedResolver())
    way(product(tiles))
    ((_, resolution),) = tiles.said
    assert resolution.source == "store"
    assert resolution.tile == (STORED if way in KNOWN_DEVICE else po.TileConfig(16, 128, 64))


def test_options_say_the_device_of_an_export(stored):
    tiles = Keeping(po.CachedResolver())
    with po.options(device="TPU v5 lite"):
        export(product(tiles))
    ((problem, resolution),) = tiles.said
    assert (problem.device, resolution.tile) == ("v5e", STORED)


def test_the_default_asks_the_store_too(stored):
    """What is stored is seen in the program of a call that says nothing."""
    texts = [
        export(product(tiles)).mlir_module() for tiles in (None, po.CachedResolver(quiet=True))
    ]
    assert texts[0] == texts[1] != export(product(po.StaticResolver())).mlir_module()


@pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")
def test_a_program_that_is_lowered_for_here_is_timed():
    """The counterpart: else the tests above could pass for another reason."""
    tiles = Keeping(po.AutotuneResolver(timer=lambda *_: 1.0))
    jax.jit(product(tiles, "interpret")).lower(X)
    ((problem, resolution),) = tiles.said
    assert (problem.can_be_timed, resolution.source) == (True, "autotune")


def test_a_miss_is_told_once_where_somebody_asked_for_the_store():
    with pytest.warns(UserWarning, match="no tile is stored for lhs float32"):
        po.CachedResolver().resolve(PROBLEM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.CachedResolver().resolve(PROBLEM)
        forget_what_this_process_knows()
        po.CachedResolver(quiet=True).resolve(PROBLEM)


def test_a_miss_on_a_real_tpu_is_told_even_by_the_default():
    here = po.tiles.TileProblem(PROBLEM.matmul, device="v5e", can_be_timed=True)
    with pytest.warns(UserWarning, match="no tile is stored for"):
        po.CachedResolver(quiet=True).resolve(here)
