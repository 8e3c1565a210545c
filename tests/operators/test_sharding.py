"""Several devices: local inside `shard_map`, our error under automatic partitioning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import pallas_ops as po
from pallas_ops.compiler import quiet_libtpu


X = jax.random.normal(jax.random.key(0), (8, 12))
W = jax.random.normal(jax.random.key(1), (12, 16))

# Specs of x, w and the product; the contracted axis is summed over the mesh where it is split.
CASES = {
    "data": (P("i", None), P(None, None), P("i", None)),
    "column": (P(None, None), P(None, "i"), P(None, "i")),
    "row": (P(None, "i"), P("i", None), P(None, None)),
}


def _sharded(case, mesh, implementation):
    x_spec, w_spec, out_spec = CASES[case]

    def local(x, w):
        out = po.matmul(x, w, implementation=implementation)
        return jax.lax.psum(out, "i") if case == "row" else out

    return jax.shard_map(local, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=out_spec)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((4,), ("i",), axis_types=(request.param,))


@pytest.mark.parametrize("implementation", [None, "xla", "interpret", "tpu_interpret"])
@pytest.mark.parametrize("case", CASES)
def test_inside_shard_map_with_its_default_checks(case, mesh, implementation):
    product = _sharded(case, mesh, implementation)
    x, w = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((X, W), CASES[case], strict=False)
    )
    np.testing.assert_allclose(jax.jit(product)(x, w), X @ W, rtol=1e-5, atol=1e-5)

    gradients = jax.jit(jax.grad(lambda x, w: (product(x, w) ** 2).sum(), (0, 1)))(x, w)
    expected = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(X, W)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "interpret", "tpu_interpret"])
def test_a_bias_inside_shard_map(mesh, implementation):
    """What is shared between the shards gets the gradient of all of them, the sums of each."""

    def local(x, w, b):
        out = po.matmul(x, w, transpose_rhs=True, bias=b, implementation=implementation)
        return po.matmul(out, w, bias=X[0], implementation=implementation)

    specs = (P("i", None), P(None, None), P(None))
    product = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
    operands = (X, W.T, jnp.arange(16.0))
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(operands, specs, strict=True)
    ]
    gradients = jax.jit(jax.grad(lambda *a: (product(*a) ** 2).sum(), (0, 1, 2)))(*placed)
    expected = jax.grad(lambda x, w, b: (((x @ w.T + b[None]) @ w + X[:1]) ** 2).sum(), (0, 1, 2))(
        *operands
    )
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("implementation", ["interpret", "tpu_interpret"])
@pytest.mark.parametrize("jit", [False, True])
def test_automatic_partitioning_is_our_error(mesh, implementation, jit):
    def product(x, w):
        return po.matmul(x, w, implementation=implementation)

    x = jax.device_put(X, NamedSharding(mesh, P("i", None)))
    w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
    with pytest.raises(
        ValueError, match=r"(runs on 4 devices|explicit mesh axes 'i').*jax\.shard_map"
    ) as error:
        (jax.jit(product) if jit else product)(x, w)
    assert "lhs float32[8, 12]" in str(error.value)


def test_xla_is_partitioned_automatically():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("i", None)))
    w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
    np.testing.assert_allclose(jax.jit(po.matmul)(x, w), X @ W, rtol=1e-5, atol=1e-5)


def _tpu_mesh(axis_type):
    quiet_libtpu()
    devices = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu").devices
    return jax.sharding.Mesh(np.array(devices), ("i",), axis_types=(axis_type,))


def _compile(function, mesh, case):
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((512, 512), (512, 1024)), CASES[case], strict=False)
    )
    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("case", "all_reduces"), [("data", 0), ("column", 0), ("row", 1)])
def test_compiled_for_four_v5e(case, all_reduces, axis_type):
    mesh = _tpu_mesh(axis_type)
    text = _compile(_sharded(case, mesh, "mosaic"), mesh, case)
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert text.count(" all-reduce(") == all_reduces
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in text]


@pytest.mark.parametrize("other", [jnp.tanh, lambda y: po.matmul(y, jnp.eye(512))])
def test_gradients_with_a_bias_are_compiled_for_four_v5e(other):
    """Whether XLA sums the cotangent or the kernel, as behind another kernel."""
    mesh = _tpu_mesh(AxisType.Auto)
    specs = (P("i", None), P(None, None), P(None))

    def local(x, w, b):
        return other(po.matmul(x, w, transpose_rhs=True, bias=b))

    product = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((1024, 512), (512, 512), (512,)), specs, strict=True)
    )
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(product(*a) ** 2), (1, 2)))
    text = gradient.lower(*arguments).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == (2 if other is jnp.tanh else 4)
    assert 1 <= text.count(" all-reduce(") <= 2


def test_automatic_partitioning_for_four_v5e_is_our_error_before_mosaics():
    mesh = _tpu_mesh(AxisType.Auto)
    with pytest.raises(ValueError, match=r"'mosaic'.*cannot be partitioned automatically"):
        _compile(po.matmul, mesh, "data")
