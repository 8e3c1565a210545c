"""The programs that come out: how many kernel calls, of which shapes, and nothing transposed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.compiler import compile_for_tpu

from ..program import equations, forms, operator_calls


BATCH, IN, OUT = 24, 40, 56


def _layer(implementation=None, in_features=IN, out_features=OUT):
    return po.PallasLinear(
        in_features, out_features, key=jax.random.key(0), implementation=implementation
    )


def _loss(layer, x):
    return jnp.sum(jnp.tanh(jax.vmap(layer)(x)) ** 2)


def _parameters_and_rest(layer):
    return eqx.partition(layer, eqx.is_inexact_array)


def _gradient(layer, with_input):
    """The gradient of the loss, as a function of arrays alone."""
    parameters, rest = _parameters_and_rest(layer)

    def loss(parameters, x):
        return _loss(eqx.combine(parameters, rest), x)

    return jax.grad(loss, argnums=(0, 1) if with_input else 0), parameters


def _shapes(function, *args):
    return {
        variable.aval.shape
        for equation in equations(function, *args)
        for variable in (*equation.invars, *equation.outvars)
        if hasattr(variable.aval, "shape")
    }


@pytest.mark.parametrize(
    ("with_input", "products"),
    [(True, ["NN", "NT + bias", "TN + sums"]), (False, ["NT + bias", "TN + sums"])],
)
def test_the_gradient_of_a_vmapped_layer(with_input, products):
    gradient, parameters = _gradient(_layer(), with_input)
    x = jnp.ones((BATCH, IN))
    calls = operator_calls(gradient, parameters, x)
    assert sorted(forms(gradient, parameters, x)) == products
    for call in calls:
        shapes = {v.aval.shape for v in call.invars}
        assert shapes <= {(BATCH, IN), (BATCH, OUT), (OUT, IN), (1, OUT)}
        assert all(v.aval.ndim == 2 for v in (*call.invars, *call.outvars))
    shapes = _shapes(gradient, parameters, x)
    assert (BATCH, OUT, IN) not in shapes
    assert (BATCH, IN, OUT) not in shapes
    assert not [e for e in equations(gradient, parameters, x) if e.primitive.name == "transpose"]


def test_the_checks_above_see_what_they_look_for():
    """The same questions to a layer whose gradients are taken for each example."""
    layer = _layer()

    def loss(layer, x):
        gradients = jax.vmap(lambda x: jax.grad(lambda w: jnp.sum(jnp.tanh(w @ x)))(layer.weight))(
            x
        )
        return gradients.sum(axis=0).T

    x = jnp.ones((BATCH, IN))
    assert (BATCH, OUT, IN) in _shapes(loss, layer, x)
    assert [e for e in equations(loss, layer, x) if e.primitive.name == "transpose"]
    assert not operator_calls(loss, layer, x)


def test_batch_axes_given_directly_cost_the_same_as_vmap():
    layer = _layer()
    direct = operator_calls(layer, jnp.ones((3, 8, IN)))
    mapped = operator_calls(jax.vmap(jax.vmap(layer)), jnp.ones((3, 8, IN)))
    operands = [(24, IN), (OUT, IN), (1, OUT)]
    assert [[v.aval.shape for v in e.invars] for e in direct] == [operands]
    assert [[v.aval.shape for v in e.invars] for e in mapped] == [operands]


@pytest.mark.parametrize(
    ("lhs", "rhs", "operands"),
    [
        ((2, 3, 4, 5), (5, 6), [(24, 5), (5, 6)]),
        ((2, 3, 4, 5), (1, 1, 5, 6), [(24, 5), (5, 6)]),
        ((2, 3, 4, 5), (2, 3, 5, 6), [(6, 4, 5), (6, 5, 6)]),
        ((2, 3, 4, 5), (3, 5, 6), [(2, 3, 4, 5), (1, 3, 5, 6)]),
        ((2, 3, 4, 5), (2, 1, 5, 6), [(2, 12, 5), (2, 5, 6)]),
        ((4, 5), (7, 5, 6), [(1, 4, 5), (7, 5, 6)]),
    ],
)
def test_leading_axes_fold_into_one_call_without_copies(lhs, rhs, operands):
    function = jax.grad(lambda x, y: (po.matmul(x, y) ** 2).sum(), (0, 1))
    x, y = jnp.ones(lhs), jnp.ones(rhs)
    forward, *backward = operator_calls(function, x, y)
    assert [v.aval.shape for v in forward.invars] == operands
    assert len(backward) == 2
    # A gradient is summed in the kernel: no value is larger than the operands or the result.
    largest = max(x.size, y.size, po.matmul(x, y).size)
    assert max(np.prod(shape, dtype=int) for shape in _shapes(function, x, y)) <= largest
    names = {e.primitive.name for e in equations(function, x, y)}
    assert not names & {"transpose", "concatenate", "gather", "pad"}


def test_an_ensemble_is_one_call_for_each_product():
    keys = jax.random.split(jax.random.key(0), 5)
    layers = eqx.filter_vmap(lambda key: po.PallasLinear(IN, OUT, key=key))(keys)
    parameters, rest = eqx.partition(layers, eqx.is_inexact_array)

    def loss(parameters, x):
        run = eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x), in_axes=(eqx.if_array(0), None))
        return jnp.sum(jnp.tanh(run(eqx.combine(parameters, rest), x)) ** 2)

    gradient, x = jax.grad(loss, (0, 1)), jnp.ones((BATCH, IN))
    calls = operator_calls(gradient, parameters, x)
    assert len(calls) == 3
    assert not [e for e in equations(gradient, parameters, x) if e.primitive.name == "transpose"]
    assert (5, BATCH, IN) not in _shapes(gradient, parameters, x)  # dx is summed in the kernel
    assert compile_for_tpu(gradient, parameters, x).as_text().count("tpu_custom_call") == 3


def test_memory_of_a_compiled_step_does_not_grow_with_per_example_weights():
    def temporary_bytes(batch, gradient):
        x = jax.ShapeDtypeStruct((batch, 512), jnp.float32)
        return compile_for_tpu(gradient, parameters, x).memory_analysis().temp_size_in_bytes

    gradient, parameters = _gradient(_layer(None, 512, 512), with_input=True)
    small, large = temporary_bytes(128, gradient), temporary_bytes(512, gradient)
    one_weight_gradient = 512 * 512 * 4
    # Activations may grow (batch x features); gradients for each example would add 384 of these.
    assert large - small < 8 * (512 - 128) * 512 * 4 < 384 * one_weight_gradient


def test_per_example_gradients_would_be_seen_in_the_memory_of_a_compiled_step():
    layer = _layer(None, 512, 512)

    def per_example(weight, x):
        one = jax.grad(lambda w, x: jnp.sum(jnp.tanh(po.matmul(x[None], w, transpose_rhs=True))))
        return jnp.tanh(jax.vmap(one, (None, 0))(weight, x)).sum(0)

    sizes = [
        compile_for_tpu(per_example, layer.weight, jax.ShapeDtypeStruct((batch, 512), jnp.float32))
        .memory_analysis()
        .temp_size_in_bytes
        for batch in (128, 512)
    ]
    assert sizes[1] - sizes[0] >= 384 * 512 * 512 * 4


# A column-major layout, and what a copy from one to the other is in a compiled program.
_MOVES = ("{0,1:", " transpose(", " pad(")


def _compiled_step(in_features, out_features):
    gradient, parameters = _gradient(_layer(None, in_features, out_features), with_input=True)
    text = compile_for_tpu(gradient, parameters, jnp.ones((200, in_features))).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    return text


def test_no_operand_is_transposed_or_padded_in_hbm():
    """In the compiled step of ragged sizes, operands go to the kernel as they are stored."""
    text = _compiled_step(500, 300)
    assert not [move for move in _MOVES if move in text]


def test_xla_itself_may_store_a_ragged_weight_by_columns():
    """What the test above would see: at the border of a program, XLA takes the layout that pads
    less, and then has to copy the weight to rows for the kernel. Documented as a limit."""
    assert "{0,1:" in _compiled_step(300, 500)
