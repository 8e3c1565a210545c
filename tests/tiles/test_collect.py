"""`collect`: the problems of a program, each once, from its trace alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pallas_ops as po
from pallas_ops.tiles import collect


X = jax.ShapeDtypeStruct((32, 24), jnp.float32)
W = jax.ShapeDtypeStruct((24, 16), jnp.float32)


def found(problems):
    return [(p.layout, p.m, p.k, p.n) for p in problems]


def model_and_step():
    model = eqx.nn.MLP(24, 10, 40, 2, key=jax.random.key(0))

    def step(model, x, y):
        def loss(model):
            return ((jax.vmap(model)(x) - y) ** 2).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -g, gradients))
        # A function and `None` among what is returned, as in a real step.
        return value, model, None

    return po.swap_linear(model), step


STEP = {
    *[("NT", 32, 24, 40), ("NT", 32, 40, 40), ("NT", 32, 40, 10)],
    *[("NN", 32, 10, 40), ("NN", 32, 40, 40)],
    *[("TN", 40, 32, 24), ("TN", 40, 32, 40), ("TN", 10, 32, 40)],
}


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["", "filter_jit"])
def test_a_training_step_of_a_swapped_model(wrap):
    model, step = model_and_step()
    problems = collect(wrap(step), model, X, jax.ShapeDtypeStruct((32, 10), jnp.float32))
    assert set(found(problems)) == STEP
    assert len(problems) == len(STEP)
    assert {(p.device, p.implementation, p.can_be_timed) for p in problems} == {
        (None, "mosaic", False)
    }


def test_the_collected_problems_are_those_that_a_run_resolves():
    asked = []

    class Asking:
        def resolve(self, problem):
            asked.append(problem)
            return po.StaticResolver().resolve(problem)

    model, step = model_and_step()
    x, y = jnp.ones(X.shape), jnp.ones((32, 10))
    with po.options(tiles=Asking(), implementation="interpret"):
        eqx.filter_jit(step)(model, x, y)
    assert set(asked) == set(collect(step, model, x, y, implementation="interpret"))


@jax.custom_jvp
def with_own_gradient(x, w):
    return po.matmul(x, w)


with_own_gradient.defjvp(lambda primals, tangents: (po.matmul(*primals), jnp.zeros((32, 16))))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: lax.scan(lambda c, _: (po.matmul(x, w), None), jnp.zeros((32, 16)), None, 3),
        lambda x, w: lax.cond(x[0, 0] > 0, po.matmul, lambda x, w: jnp.zeros((32, 16)), x, w),
        lambda x, w: lax.while_loop(
            lambda c: c.sum() < 0, lambda c: po.matmul(x, w), jnp.zeros((32, 16))
        ),
        lambda x, w: jax.jit(jax.jit(po.matmul))(x, w),
        lambda x, w: jax.checkpoint(po.matmul)(x, w),
        lambda x, w: jax.vmap(lambda x: po.matmul(x[None], w))(x),
        lambda x, w: with_own_gradient(x, w),
        lambda x, w: [po.matmul(x, w), po.matmul(x, w), jnp.dot(x, w)],
        lambda x, w: (po.matmul(x, w), None)[1],
    ],
    ids=["scan", "cond", "while", "jit", "checkpoint", "vmap", "custom_jvp", "twice", "unused"],
)
def test_products_inside_other_programs(function):
    assert found(collect(function, X, W)) == [("NN", 32, 24, 16)]


def test_inside_a_shard_map_it_is_the_shards_product():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(po.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    assert found(collect(f, X, W)) == [("NN", 8, 24, 16)]


def test_the_order_is_that_of_the_program():
    def function(x, w):
        return po.matmul(po.matmul(x, w), w.T)

    assert found(collect(function, X, W)) == [("NN", 32, 24, 16), ("NN", 32, 16, 24)]


def test_the_order_is_that_of_the_program_inside_other_programs_too():
    def inner(x):
        return jax.jit(lambda x: po.matmul(x, jnp.ones((2, 3))))(x)

    def function(x):
        x = inner(jax.lax.cond(x[0, 0] > 0, lambda x: po.matmul(x, jnp.ones((24, 2))), _two, x))
        return po.matmul(jax.jit(lambda x: po.matmul(x, jnp.ones((3, 4))))(x), jnp.ones((4, 5)))

    assert [p.n for p in collect(function, X)] == [2, 3, 4, 5]


def _two(x):
    return po.matmul(x, jnp.ones((24, 2)))


def test_arguments_may_hold_anything():
    def function(x, *, weights, activation, rate, nothing, name):
        assert (nothing, name, rate) == (None, "a name", 0.5)
        return activation(po.matmul(x, weights["w"])) * rate

    keywords = dict(activation=jax.nn.relu, rate=0.5, nothing=None, name="a name")
    problems = collect(function, X, weights={"w": W}, **keywords)
    assert found(problems) == [("NN", 32, 24, 16)]
    assert collect(lambda: None) == ()


def test_what_the_kernel_does_not_have_is_left_out():
    def function(x, half, empty, complex_x):
        return [po.matmul(a, a.T) for a in (x, half, empty, complex_x)]

    problems = collect(
        function,
        X,
        jax.ShapeDtypeStruct((4, 4), jnp.float16),
        jax.ShapeDtypeStruct((0, 4), jnp.float32),
        jax.ShapeDtypeStruct((4, 4), jnp.complex64),
    )
    assert found(problems) == [("NN", 32, 24, 32)]


def test_device_and_implementation():
    def function(x, w):
        return [
            po.matmul(x, w, implementation=name) for name in (None, "xla", "interpret", "mosaic")
        ]

    assert [p.implementation for p in collect(function, X, W)] == ["mosaic", "interpret"]
    # XLA has no tiles.
    with po.options(implementation="xla"):
        assert collect(po.matmul, X, W) == ()
    assert collect(lambda x, w: po.matmul(x, w, implementation="xla"), X, W) == ()
    tuned = collect(function, X, W, implementation="tpu_interpret", device="TPU v6 lite")
    assert [p.implementation for p in tuned] == ["tpu_interpret", "interpret", "mosaic"]
    assert {p.device for p in tuned} == {"v6e"}
    with po.options(device="v4"):
        assert {p.device for p in collect(function, X, W)} == {"v4"}
        assert {p.device for p in collect(function, X, W, device="v5p")} == {"v5p"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(device="v9"), "Unknown TPU 'v9'. Known are"),
        (dict(device="cpu"), "Unknown TPU 'cpu'. Known are"),
        (dict(implementation="xla"), "`implementation` is one that runs the kernel.*got 'xla'"),
        (dict(implementation="mosiac"), "'tpu_interpret'; got 'mosiac'"),
    ],
)
def test_names_that_are_none(wrong, message):
    with pytest.raises(ValueError, match=message):
        collect(po.matmul, X, W, **wrong)


def test_nothing_is_run_resolved_or_left_behind(store):
    def resolve(problem):
        raise AssertionError("resolved")

    calls = []

    def function(x, w):
        calls.append(1)
        jax.debug.callback(lambda: calls.append("ran"))
        return po.matmul(x, w, tiles=po.StaticResolver(resolve))

    with jax.checking_leaks():
        collect(jax.jit(function), X, W)
    assert calls == [1]
    assert not store.exists()


def test_an_error_of_the_function_is_the_functions():
    with pytest.raises(ValueError, match="contracting size k differs"):
        collect(lambda x: po.matmul(x, x), X)


def test_an_epilogue_is_part_of_the_problem():
    def loss(x, w, b):
        return po.matmul(x, w, transpose_rhs=True, bias=b, activation=jax.nn.gelu).sum()

    x, w, b = jnp.ones((16, 128)), jnp.ones((256, 128)), jnp.ones(256)
    (alone,) = collect(loss, x, w, b, device="v5e")
    fused, *gradients = collect(jax.grad(loss, (0, 1, 2)), x, w, b, device="v5e")
    assert alone.epilogue.startswith("bias:float32 ")
    assert fused.epilogue.startswith(alone.epilogue + " ")  # one more output
    assert (alone.matmul.outputs, fused.matmul.outputs) == (1, 2)
    assert [problem.epilogue for problem in gradients] == ["", ""]

    # Another function of the same name is another epilogue, the same one written again is not.
    def only(activation):
        call = functools.partial(po.matmul, transpose_rhs=True, activation=activation)
        (problem,) = collect(lambda x, w, b: call(x, w, bias=b), x, w, b, device="v5e")
        return problem

    other, same = only(jnp.tanh), only(lambda z: jax.nn.gelu(z))
    assert other.epilogue != alone.epilogue
    assert same == alone
