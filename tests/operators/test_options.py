import threading

import jax
import jax.numpy as jnp
import pytest

import pallas_ops as po
from pallas_ops.operators._options import ambient_options, CallOptions

from ..program import described


X = jnp.ones((4, 4))


def bound_options(function, *args):
    """The options of every operator call in a function's program, inner programs included."""
    return [call.options for call in described(function, *args)]


def test_defaults_hold_inside_the_block_alone():
    with po.options(implementation="interpret"):
        (inside,) = bound_options(lambda x: po.matmul(x, x), X)
    (outside,) = bound_options(lambda x: po.matmul(x, x), X)
    assert inside.implementation == "interpret"
    assert outside.implementation is None


def test_what_a_call_says_wins():
    with po.options(implementation="interpret"):
        (params,) = bound_options(lambda x: po.matmul(x, x, implementation="xla"), X)
    assert params.implementation == "xla"


def test_blocks_nest():
    tile = po.TileConfig(8, 128, 128)
    with po.options(implementation="interpret", device="v5e"):
        with po.options(tiles=tile, device="v6e"):
            options = ambient_options()
            assert options.implementation == "interpret"
            assert options.tiles.forward == tile
            assert options.device == "v6e"
        assert ambient_options() == CallOptions("interpret", device="v5e")
    assert ambient_options() == CallOptions()


def test_an_exception_closes_the_block():
    with pytest.raises(RuntimeError), po.options(implementation="interpret"):
        raise RuntimeError
    assert ambient_options() == CallOptions()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(implementation="numpy"), ValueError, "no implementation 'numpy'.*'tpu_interpret'"),
        (dict(device="v99"), ValueError, "Unknown TPU 'v99'.*'v5e'"),
        (dict(tiles=3), TypeError, "TileConfig"),
    ],
)
def test_bad_options_change_nothing(options, error, message):
    with pytest.raises(error, match=message), po.options(**options):
        pytest.fail("the block was entered")
    assert ambient_options() == CallOptions()


def test_a_jitted_function_is_compiled_again_for_other_options_and_found_again():
    traced = []

    @jax.jit
    def f(x):
        traced.append(ambient_options().implementation)
        return po.matmul(x, x)

    f(X)
    with po.options(implementation="interpret"):
        f(X)
        f(X)
    f(X)
    with po.options(implementation="interpret"):
        f(X)
    assert traced == [None, "interpret"]
    with po.options(implementation="interpret", tiles=po.TileConfig(8, 128, 128)):
        f(X)
    assert len(traced) == 3


def test_two_calls_in_one_program_keep_their_own_options():
    def f(x):
        with po.options(implementation="interpret"):
            x = po.matmul(x, x)
        with po.options(implementation="xla"):
            return po.matmul(x, x)

    names = [params.implementation for params in bound_options(f, X)]
    assert names == ["interpret", "xla"]
    text = jax.jit(f).lower(X).as_text()
    assert text.count("stablehlo.while") == 1  # the interpreter's grid, once


def test_the_gradient_keeps_the_options_of_its_call():
    with po.options(implementation="interpret", device="v5e"):
        _, pullback = jax.vjp(lambda x, y: po.matmul(x, y), X, X)
    for params in bound_options(pullback, X):
        assert params.implementation == "interpret"
        assert params.device == "v5e"
    assert len(bound_options(pullback, X)) == 2


def test_other_threads_are_not_affected():
    seen = []
    with po.options(implementation="interpret"):
        thread = threading.Thread(target=lambda: seen.append(ambient_options()))
        thread.start()
        thread.join()
    assert seen == [CallOptions()]
