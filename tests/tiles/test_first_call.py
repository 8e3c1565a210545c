"""The first call, wherever it is: one sweep, for the folded shape, and the same program after."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pallas_ops as po
from pallas_ops.tiles import candidates, TileStore

from .tools import RecordingTimer, tile_problem


# Eight rows of 256 into eight columns: two legal blocks of k, so two candidates. A row alone would
# be another problem. `small_blocks_first` makes the other one of the two the winner.
FOLDED = tile_problem(8, 256, 8, layout="NT")
WINNER = po.TileConfig(8, 128, 8)
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 256)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((8, 256)), jnp.float32)


def product(tiles):
    def rows(x, w):
        return po.matmul(x, w, transpose_rhs=True, tiles=tiles, implementation="interpret")

    return rows


def one_row(tiles):
    return lambda x, w: product(tiles)(x[None], w)[0]


def eager(tiles):
    return product(tiles)


def jit(tiles):
    return jax.jit(product(tiles))


def vmap(tiles):
    """Rows one by one: only the fold makes eight of them."""
    return jax.vmap(one_row(tiles), in_axes=(0, None))


def jit_of_vmap(tiles):
    return jax.jit(vmap(tiles))


def vmap_of_jit(tiles):
    return jax.vmap(jax.jit(one_row(tiles)), in_axes=(0, None))


def scan(tiles):
    """Two rounds of the same product."""

    def run(x, w):
        return lax.scan(lambda carry, x: (carry, product(tiles)(x, w)), 0, jnp.stack([x, x]))[1][1]

    return run


def jvp(tiles):
    return lambda x, w: jax.jvp(lambda x: product(tiles)(x, w), (x,), (x,))[1]


def shard_map(tiles):
    """Each of two devices has eight rows."""

    def run(x, w):
        mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = jax.shard_map(product(tiles), mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
        return jax.jit(mapped)(jnp.concatenate([x, x]), w)[8:]

    return run


FIRST_CALLS = [eager, jit, vmap, jit_of_vmap, vmap_of_jit, scan, jvp, shard_map]


def autotune(timer, **arguments):
    # What the interpreter's timings are worth is a warning of its own, tested below.
    return po.AutotuneResolver(timer=timer, **arguments)


pytestmark = pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")


def test_there_is_a_choice():
    assert {tile.block_k for tile in candidates(FOLDED)} == {128, 256}
    assert po.StaticResolver().resolve(FOLDED).tile != WINNER


@pytest.mark.parametrize("first", FIRST_CALLS)
def test_the_first_call_sweeps_once_for_the_folded_shape(first, store):
    timer = RecordingTimer()
    run = first(autotune(timer))
    out = run(X, W)
    assert timer.sweeps == [FOLDED]
    assert len(timer.calls) == len(candidates(FOLDED))
    np.testing.assert_allclose(out, X @ W.T, rtol=1e-5, atol=1e-4)
    run(X, W)
    run(X + 1, W)
    assert timer.sweeps == [FOLDED]
    (_, entry), *others = TileStore(store).entries()
    assert (entry.tile, entry.key["m"], others) == (WINNER, 8, [])


@pytest.mark.parametrize("first", [jit, jit_of_vmap])
def test_the_program_is_that_of_the_same_tile_said_by_hand(first):
    texts = [
        jax.jit(first(tiles)).lower(X, W).as_text()
        for tiles in (autotune(RecordingTimer()), po.StaticResolver(WINNER), WINNER)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != jax.jit(first(po.StaticResolver())).lower(X, W).as_text()


def test_all_first_calls_take_what_one_of_them_found():
    timer = RecordingTimer()
    for first in (scan, jit_of_vmap, shard_map):
        first(autotune(timer))(X, W)
    assert timer.sweeps == [FOLDED]


def loss(tiles, apply=vmap):
    return lambda x, w: (apply(tiles)(x, w) ** 2).sum()


@pytest.mark.parametrize(("outer", "apply"), [(lambda f: f, jit_of_vmap), (jax.jit, vmap)])
def test_a_gradient_sweeps_each_of_its_three_products_once(apply, outer):
    timer = RecordingTimer()
    gradient = outer(jax.grad(loss(autotune(timer), apply), (0, 1)))
    with jax.checking_leaks():
        got = gradient(X, W)
    wanted = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), (0, 1))(X, W)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    gradient(X, W)
    asked = [(p.layout, p.m, p.k, p.n) for p, _ in timer.calls]
    assert set(asked) == {("NT", 8, 256, 8), ("NN", 8, 8, 256), ("TN", 8, 8, 256)}
    problems = {problem for problem, _ in timer.calls}
    # Each candidate of each problem once.
    assert len(asked) == len(set(timer.calls)) == sum(len(candidates(p)) for p in problems)


def test_a_layer_under_vmap_is_never_resolved_for_one_row():
    timer = RecordingTimer()
    layer = po.PallasLinear(
        256, 8, key=jax.random.key(0), tiles=autotune(timer), implementation="interpret"
    )
    mlp = eqx.nn.Sequential([layer, eqx.nn.Lambda(jax.nn.relu)])

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(mlp, x):
        return jax.vmap(mlp)(x).sum()

    gradient(mlp, X)
    assert {p.layout: (p.m, p.k, p.n) for p, _ in timer.calls} == {
        "NT": (8, 256, 8),
        "TN": (8, 8, 256),
    }


def test_axes_that_no_fold_removes_are_part_of_the_problem():
    """A stack of products is timed as a stack, and so is the sum over one in its gradient."""
    timer = RecordingTimer()
    tiles = autotune(timer)
    x, w = jnp.ones((3, 8, 16)), jnp.ones((3, 16, 8))

    def loss(x, w):
        return po.matmul(x, w, tiles=tiles, implementation="interpret").sum()

    jax.jit(jax.value_and_grad(loss))(x[:1], w)
    found = [(p.layout, p.batch, p.matmul.sum_leading) for p in timer.sweeps]
    assert found == [("NN", (3,), (False,)), ("NT", (3,), (True,))]


def test_threads_that_compile_at_once_do_not_wait_for_each_other_for_ever():
    timer, done = RecordingTimer(), []

    def run(k):
        f = jit_of_vmap(autotune(timer))
        done.append(float(f(jnp.ones((8, k)), jnp.ones((8, k)))[0, 0]))

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in (16, 24, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [16.0, 16.0, 24.0]
    assert sorted(problem.k for problem in timer.sweeps) == [16, 24]


CONTEXTS = {
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "debug_nans": lambda: jax.debug_nans(True),
    "default_matmul_precision": lambda: jax.default_matmul_precision("float32"),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_call_inside_a_context(context):
    timer = RecordingTimer()
    with CONTEXTS[context]():
        out = jit_of_vmap(autotune(timer))(X, W)
    np.testing.assert_allclose(out, X @ W.T, rtol=1e-5, atol=1e-4)
    (problem,) = timer.sweeps
    assert problem.precision == ("HIGHEST" if context == "default_matmul_precision" else "DEFAULT")
    assert (problem.m, problem.k, problem.n) == (8, 256, 8)


@pytest.mark.parametrize(
    "flag", ["jax_disable_jit", "jax_check_tracer_leaks", "jax_debug_nans", "jax_enable_x64"]
)
def test_the_first_call_under_a_global_flag(flag):
    """Global flags hold in the thread that measures too, as environment variables do."""
    timer = RecordingTimer(lambda problem, tile: float(tile.block_k))
    try:
        jax.config.update(flag, True)
        out = jit_of_vmap(autotune(timer))(X, W)
    finally:
        jax.config.update(flag, False)
    np.testing.assert_allclose(out, X @ W.T, rtol=1e-5, atol=1e-4)
    assert timer.sweeps == [FOLDED]


def test_no_tracer_reaches_the_timer_and_no_trace_is_left_behind():
    """`run` can be called in the timer, and what it runs is no part of what is being traced."""
    seen = []

    def timer(problem, tile, run, hopeless_seconds):
        seen.append(isinstance(jnp.ones(3) + 1, jax.core.Tracer))
        assert run(2) is None
        return 1.0

    jax.jit(jax.grad(loss(autotune(timer))))(X, W)
    assert seen
    assert not any(seen)
