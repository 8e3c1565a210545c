"""The TPU interpreter has global state: many calls at once, and many in one program."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import pallas_ops as po


TILES = po.TileConfig(16, 128, 128)


def _product(x, y):
    return po.matmul(x, y, implementation="tpu_interpret", tiles=TILES)


def _operands(seed):
    x, y = jax.random.split(jax.random.key(seed))
    return jax.random.normal(x, (9, 130)), jax.random.normal(y, (130, 17))


def test_two_threads_at_once():
    operands = [_operands(seed) for seed in range(6)]
    jitted = jax.jit(_product)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda pair: jitted(*pair), operands))
    for (x, y), result in zip(operands, results, strict=True):
        np.testing.assert_allclose(result, x @ y, rtol=1e-5, atol=1e-5)


def test_independent_calls_in_one_program():
    operands = [_operands(seed) for seed in range(4)]
    results = jax.jit(lambda pairs: [_product(x, y) for x, y in pairs])(operands)
    for (x, y), result in zip(operands, results, strict=True):
        np.testing.assert_allclose(result, x @ y, rtol=1e-5, atol=1e-5)


def test_in_a_scan():
    x = jax.random.normal(jax.random.key(0), (4, 4))
    final, _ = jax.jit(lambda x: jax.lax.scan(lambda c, _: (_product(c, x), None), x, length=3))(x)
    np.testing.assert_allclose(final, x @ x @ x @ x, rtol=1e-4, atol=1e-4)


def test_uninitialised_memory_past_the_edge_never_reaches_the_result():
    """This interpreter fills what was never written with NaN, so a mask left out shows."""
    for m, k, n in ((1, 129, 1), (17, 200, 130), (7, 257, 129)):
        for dtype in (jnp.float32, jnp.bfloat16):
            out = _product(jnp.ones((m, k), dtype), jnp.ones((k, n), dtype))
            expected = np.full((m, n), jnp.asarray(k, dtype))
            np.testing.assert_array_equal(np.asarray(out), expected)


def test_the_implementation_alone_under_vmap():
    alone = po.get_operator("matmul").implementations["tpu_interpret"]
    xs = jax.random.normal(jax.random.key(0), (3, 9, 130))
    y = jax.random.normal(jax.random.key(1), (130, 17))
    np.testing.assert_allclose(
        jax.vmap(lambda x: alone(x, y, tiles=TILES))(xs), xs @ y, rtol=1e-5, atol=1e-5
    )
