import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import pallas_ops as po


def _scale_signature(
    x: Float[Array, "rows n"], weights: Float[Array, " n"], *, power: int = 1
) -> Float[Array, "rows n"]:
    raise NotImplementedError


def _scale(x, weights, *, power=1):
    return x * jnp.broadcast_to(weights, x.shape) ** power


def _no_bfloat16(x, weights, *, power=1):
    return "no bfloat16" if x.dtype == jnp.bfloat16 else None


def _operator(**changes):
    arguments = dict(
        name="scale",
        signature=_scale_signature,
        implementations=[
            po.Implementation("tpu", _scale, platforms=("tpu",)),
            po.Implementation("fast", _scale, _no_bfloat16),
            po.Implementation("wide", _scale, lambda x, weights, *, power=1: "never"),
        ],
    )
    return po.Operator(**{**arguments, **changes})


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry, so that a test leaves nothing behind."""
    from pallas_ops.operators import _registry

    monkeypatch.setattr(_registry, "_operators", dict(_registry._operators))


X, WEIGHTS = jnp.ones((3, 4)), jnp.arange(4.0)


def test_matmul_is_there():
    assert "matmul" in po.list_operators()
    operator = po.get_operator("matmul")
    assert list(operator.implementations) == ["mosaic", "xla", "interpret", "tpu_interpret"]
    np.testing.assert_array_equal(operator(X, X.T), po.matmul(X, X.T))


@pytest.mark.usefixtures("registry")
def test_register_get_list():
    operator = _operator()
    assert po.register_operator(operator) is operator
    assert po.get_operator("scale") is operator
    assert po.list_operators() == sorted(po.list_operators())
    assert "scale" in po.list_operators()


@pytest.mark.usefixtures("registry")
def test_a_taken_name_is_an_error_and_changes_nothing():
    first = po.register_operator(_operator())
    with pytest.raises(ValueError, match=r"'scale' is registered already.*replace=True"):
        po.register_operator(_operator())
    assert po.get_operator("scale") is first
    second = po.register_operator(_operator(), replace=True)
    assert po.get_operator("scale") is second


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"No operator 'matmull'.*matmul"):
        po.get_operator("matmull")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(implementations=[]), ValueError, "at least one implementation"),
        (dict(implementations=[po.Implementation("a", _scale)] * 2), ValueError, "of one name"),
        (dict(vjp=(_scale,)), TypeError, "vjp"),
        (dict(vjp=(_scale, 1)), TypeError, "vjp"),
    ],
)
def test_malformed_operators(changes, error, message):
    with pytest.raises(error, match=message):
        _operator(**changes)


def test_platforms_are_a_tuple():
    with pytest.raises(TypeError, match="platforms"):
        po.Implementation("a", _scale, platforms="tpu")


@pytest.mark.parametrize("jit", [False, True])
def test_a_call_takes_the_first_implementation_that_supports_it(jit):
    operator = _operator()
    call = jax.jit(operator, static_argnames="power") if jit else operator
    np.testing.assert_array_equal(call(X, WEIGHTS, power=2), X * WEIGHTS[None] ** 2)


@pytest.mark.parametrize("jit", [False, True])
def test_when_none_supports_a_call_each_reason_is_told(jit):
    operator = _operator(implementations=list(_operator().implementations.values())[1:])
    call = jax.jit(operator) if jit else operator
    with pytest.raises(po.UnsupportedCallError) as error:
        call(X.astype(jnp.bfloat16), WEIGHTS.astype(jnp.bfloat16))
    message = str(error.value)
    assert message.startswith("scale: no implementation supports (bfloat16[3, 4], bfloat16[4])")
    assert "- fast: no bfloat16" in message
    assert "- wide: never" in message


def test_an_implementation_by_name():
    with pytest.raises(po.UnsupportedCallError, match="- wide: never"):
        _operator()(X, WEIGHTS, implementation="wide")
    with pytest.raises(ValueError, match=r"scale has no implementation 'slow'.*'fast'"):
        _operator()(X, WEIGHTS, implementation="slow")


def test_platform_decides_when_the_program_is_lowered():
    def tpu_only(x, weights, *, power=1):
        return _scale(x, weights, power=power) + 1

    operator = _operator(
        implementations=[
            po.Implementation("tpu", tpu_only, platforms=("tpu",)),
            po.Implementation("anywhere", _scale),
        ]
    )
    np.testing.assert_array_equal(operator(X, WEIGHTS), X * WEIGHTS[None])
    modules = {
        platform: jax.export.export(jax.jit(operator), platforms=[platform])(
            X, WEIGHTS
        ).mlir_module()
        for platform in ("cpu", "tpu")
    }
    assert "stablehlo.add" in modules["tpu"]
    assert "stablehlo.add" not in modules["cpu"]


@pytest.mark.parametrize("rules", [None, "own"])
def test_a_platform_that_nothing_runs_on_is_our_error_when_compiled(rules):
    vjp = None if rules is None else (_forward, _backward)
    operator = _operator(
        implementations=[
            po.Implementation("tpu", _scale, platforms=("tpu",)),
            po.Implementation("gpu", _scale, platforms=("gpu",)),
        ],
        vjp=vjp,
    )
    gradient = jax.grad(lambda x, w: operator(x, w).sum(), (0, 1))
    row = jax.vmap(lambda x: operator(x[None], WEIGHTS)[0])
    tangent = jax.jit(lambda x: jax.linearize(lambda w: operator(x, w).sum(), WEIGHTS)[0])
    calls = [operator, gradient, lambda x, _: row(x), lambda x, _: tangent(x)]
    for call in calls[: 3 if vjp else 4]:
        for form in (call, jax.jit(call)):
            with pytest.raises(po.UnsupportedCallError) as error:
                form(X, WEIGHTS)
            assert "- tpu: runs on tpu, not on another platform" in str(error.value)
            assert "- gpu: runs on cuda, rocm, not on another platform" in str(error.value)
        # From the same machine, for the platform that there is an implementation for.
        jax.export.export(jax.jit(call), platforms=["tpu", "cuda"])(X, WEIGHTS)
    with jax.disable_jit(), pytest.raises(po.UnsupportedCallError):
        operator(X, WEIGHTS)


def test_numpy_arrays_are_arrays():
    np.testing.assert_array_equal(
        _operator()(np.asarray(X), weights=np.asarray(WEIGHTS)), X * WEIGHTS[None]
    )
    product = po.get_operator("matmul")(np.ones((2, 3), "float32"), np.ones((3, 4), "float32"))
    np.testing.assert_array_equal(product, np.full((2, 4), 3.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, jnp.ones(5)), r"scale: argument `weights` is float32\[5\], expected .*n"),
        ((X[0], WEIGHTS), r"scale: argument `x` is float32\[4\], expected .*rows n"),
        ((X.astype(int), WEIGHTS), r"scale: argument `x` is int32\[3, 4\]"),
        ((X,), r"scale.*missing a required argument: 'weights'"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_the_signature_is_checked(arguments, message, jit):
    call = _operator()
    with pytest.raises(TypeError, match=message):
        (jax.jit(call) if jit else call)(*arguments)


def test_a_list_is_no_array():
    with pytest.raises(TypeError, match=r"scale: argument `x` is \[1\.0\]"):
        _operator()([1.0], WEIGHTS)


def test_static_arguments_are_checked_too():
    with pytest.raises(TypeError, match="argument `power` is 'two', expected int"):
        _operator()(X, WEIGHTS, power="two")


def test_the_result_is_checked():
    broken = _operator(implementations=[po.Implementation("a", lambda x, weights: x[:, :2])])
    with pytest.raises(TypeError, match=r"scale: the result is float32\[3, 2\], expected"):
        broken(X, WEIGHTS)


def _forward(x, weights, *, power=1, implementation):
    return implementation.function(x, weights, power=power), (x, weights)


def _backward(residuals, cotangent, *, power=1):
    _, weights = residuals
    # Twice the true derivative of x: what a test can tell from JAX's own.
    return 2 * cotangent * weights[None] ** power, jnp.zeros_like(weights)


def test_derivative_rules_are_used_by_the_operator_and_by_each_implementation():
    operator = _operator(vjp=(_forward, _backward))
    for call in (operator, operator.implementations["fast"]):
        gradient = jax.grad(lambda x: call(x, WEIGHTS, power=2).sum())(X)
        np.testing.assert_array_equal(gradient, 2 * jnp.broadcast_to(WEIGHTS**2, X.shape))
    plain = jax.grad(lambda x: _operator()(x, WEIGHTS, power=2).sum())(X)
    np.testing.assert_array_equal(plain, jnp.broadcast_to(WEIGHTS**2, X.shape))


def test_bare_kernels_are_not_differentiable_and_registered_ones_are():
    from pallas_ops.operators._implementations import IMPLEMENTATIONS

    bare = {i.name: i.function for i in IMPLEMENTATIONS}["interpret"]
    wrapped = po.get_operator("matmul").implementations["interpret"]
    x, w = jnp.ones((4, 300)), jnp.ones((5, 300))
    tiles = po.TileConfig(8, 128, 128)

    def loss(call):
        return lambda x, w: (call(x, w, transpose_rhs=True, tiles=tiles) ** 2).sum()

    gradients = jax.grad(loss(wrapped), (0, 1))(x, w)
    expected = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), (0, 1))(x, w)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    with pytest.raises((NotImplementedError, ValueError, AssertionError)):
        jax.grad(loss(bare), (0, 1))(x, w)


def test_static_arguments_reach_an_implementation_that_is_named():
    named = _operator()(X, WEIGHTS, power=2, implementation="fast")
    np.testing.assert_array_equal(named, X * WEIGHTS[None] ** 2)


def test_a_positional_argument_given_by_name_is_differentiated():
    gradient = jax.grad(lambda w: _operator(vjp=None)(X, weights=w).sum())(WEIGHTS)
    np.testing.assert_array_equal(gradient, X.sum(0))


def test_what_is_no_implementation():
    # By our own checks, or by those of jaxtyping's import hook where it is on, as here.
    with pytest.raises(TypeError, match=r"implementations"):
        _operator(implementations=[_scale])
    with pytest.raises(TypeError, match="name"):
        _operator(name=3)
