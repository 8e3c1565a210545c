"""What was settled for a call is not settled again, and nothing that may change is remembered."""

import contextlib
import functools
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.operators._known import known


X, W = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(-1, 2, 20).reshape(4, 5)
B = jnp.arange(5.0)
_watching: list[list[str]] = []


@jax.monitoring.register_event_duration_secs_listener
def _note(event, *_, **__):
    for seen in _watching:
        seen.append(event)


@contextlib.contextmanager
def events():
    """What JAX traces, lowers and compiles meanwhile."""
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


slope = 2.0


def scaled(z):
    return z * slope


CALLS = {
    "a product": lambda: po.matmul(X, W),
    "with a bias": lambda: po.matmul(X, W, bias=B),
    "an activation of JAX": lambda: po.matmul(X, W, activation=jax.nn.gelu),
    "part of one": lambda: po.matmul(
        X, W, activation=functools.partial(jax.nn.gelu, approximate=False)
    ),
    "a new function each time": lambda: po.matmul(X, W, activation=lambda z: z**3 + 1),
    "one that reads a number": lambda: po.matmul(X, W, activation=scaled),
    "of more than one entry": lambda: po.matmul(X, W, activation=jax.nn.softmax),
    "of int8": lambda: po.quantized_matmul(X, jnp.int8(W), B, activation=jax.nn.silu),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_seen_is_not_traced_again(name):
    CALLS[name]()
    with events() as seen:
        CALLS[name]()
    assert not seen


@pytest.mark.parametrize("name", ["layer", "vmap", "grad"])
def test_nor_is_a_layer(name):
    layer = po.PallasLinear(4, 5, key=jax.random.key(0))
    run = {
        "layer": lambda: layer(X[0]),
        "vmap": lambda: jax.vmap(layer)(X),
        "grad": lambda: eqx.filter_grad(lambda layer: jnp.sum(jax.vmap(layer)(X)))(layer),
    }[name]
    run()
    with events() as seen:
        run()
    assert "/jax/core/compile/backend_compile_duration" not in seen


class Scale:
    """A model that trains in place, such as those of other libraries."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, z):
        return z * self.factor

    def method(self, z):
        return z * self.factor


def test_the_checks_above_see_what_they_look_for():
    activation = Scale(2.0)
    po.matmul(X, W, activation=activation)
    with events() as seen:
        po.matmul(X, W, activation=activation)
    assert "/jax/core/compile/jaxpr_trace_duration" in seen


def test_what_an_activation_reads_may_change():
    global slope
    factor, model = 2.0, Scale(2.0)

    def enclosing(z):
        return z * factor

    def helped(z):
        return scaled(z) + 0

    activations = (
        scaled,
        enclosing,
        helped,
        jax.jit(enclosing),
        functools.partial(lambda f, z: f(z), enclosing),
        model,
        model.method,
    )
    product = np.asarray(po.matmul(X, W))
    try:
        for value in (2.0, 3.0, jnp.float32(4.0), 2.0):
            slope = factor = model.factor = value
            for activation in activations:
                if isinstance(activation, type(jax.jit(enclosing))):
                    activation.clear_cache()  # which is JAX's own
                found = po.matmul(X, W, activation=activation)
                np.testing.assert_allclose(found, product * float(value), rtol=1e-5, atol=1e-6)
    finally:
        slope = 2.0


def test_no_model_is_kept_alive():
    class Model:
        pass

    def of(kind):
        model = Model()
        model.weight = jnp.ones(())
        weight = model.weight
        activation = {
            "method": model.__dict__.setdefault("f", lambda z: z * model.weight),
            "closure": lambda z: z * (weight if model else 0),
            "number": lambda z: z * 2.0 + (0 if model is None else 1),
        }[kind]
        po.matmul(X, W, activation=activation)
        jax.jit(lambda x: po.matmul(x, W, activation=activation))(X)
        return weakref.ref(model)

    for kind in ("method", "closure", "number"):
        reference = of(kind)
        gc.collect()
        assert reference() is None, kind


def test_a_call_that_was_seen_reads_the_environment_again(monkeypatch):
    call = dict(implementation="interpret")
    po.matmul(X, W, **call)
    monkeypatch.setenv("PALLAS_OPS_TILES", "nothing")
    with pytest.raises(ValueError, match="names no tile resolver"):
        po.matmul(X, W, **call)


def test_a_call_that_was_seen_reads_the_rules_of_promotion_again():
    wide = W.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert po.matmul(X, wide, bias=B).dtype == jnp.float32
        assert po.matmul(X, W, bias=B.astype(jnp.bfloat16)).dtype == jnp.float32
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(Exception, match="promotion"):
            po.matmul(X, wide, bias=B)
        with pytest.raises(Exception, match="promotion"):
            po.matmul(X, W, bias=B.astype(jnp.bfloat16))


def test_without_jit():
    with jax.disable_jit():
        found = po.matmul(X, W, bias=B, activation=jax.nn.gelu)
    np.testing.assert_allclose(found, jax.nn.gelu(X @ W + B[None]), rtol=1e-5, atol=1e-6)


def test_products_that_are_alike_are_one_function_of_the_program():
    keys = jax.random.split(jax.random.key(0), 6)
    layers = [po.PallasLinear(128, 128, key=key) for key in keys]

    def loss(weights, x):
        for weight, bias in weights:
            x = po.matmul(x, weight, transpose_rhs=True, bias=bias)
        return jnp.sum(jnp.sin(x))

    weights = [(layer.weight, layer.bias) for layer in layers]
    traced = jax.jit(jax.grad(loss)).trace(weights, jnp.ones((256, 128)))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # Forward; backward of x; of weight and bias, and of the last one's weight, which XLA sums.
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 4
    assert text.count("call @pallas_ops_matmul") >= 6 + 5 + 6


KNOWN = (
    jax.nn.relu,
    jnp.tanh,
    jax.lax.rsqrt,
    functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
    scaled,
    jax.jit(scaled),
    lambda z: jnp.where(z > 0, z, 0.1 * z),
    lambda z, power=3: z**power,
)


def _draws(z):
    return z + np.random.normal()


def _imports(z):
    import math

    return z * math.pi


def _recursive(z):
    return _recursive(z)


def _counts(z):
    global slope
    slope = slope + 0
    return z


UNKNOWN = (
    Scale(1.0),
    Scale(1.0).method,
    _draws,
    _imports,
    _recursive,
    _counts,
    lambda z: z * B[0],
    lambda z: z * pytest.anything,
    lambda z: print(z) or z,
    functools.partial(jnp.add, B),
    functools.lru_cache(scaled),
    eqx.nn.PReLU(0.1),
)


@pytest.mark.parametrize("function", KNOWN)
def test_known(function):
    assert known(function) is not None
    assert known(function) == known(function)
    assert hash(known(function)) == hash(known(function))


@pytest.mark.parametrize("function", UNKNOWN)
def test_unknown(function):
    assert known(function) is None


def test_known_functions_are_equal_by_what_they_compute():
    def times(factor):
        return lambda z: z * factor

    assert known(times(2.0)) == known(times(2.0))
    for one, other in ((2, 2.0), (0.0, -0.0), (1, True), (2.0, 3.0)):
        assert known(times(one)) != known(times(other))
    assert known(jax.nn.relu) != known(jax.nn.relu6)
    assert known(lambda z: z + 1) != known(lambda z: z + 2)
