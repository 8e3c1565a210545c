"""The derivatives and batches of `matmul`, against those of `jax.numpy.matmul`.

Nearly all operands here are small integers in float32, and nearly all losses polynomials. Then
every number on the way is an integer below 2^24, which float32 holds and adds exactly, in any
order: two correct programs agree to the last bit, and no tolerance can hide a wrong one.
"""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_ops
from pallas_ops import TileConfig

from ..program import described


LAYOUTS = ("NN", "NT", "TN", "TT")
IMPLEMENTATIONS = ("interpret", "xla")
# Cuts 19 x 150 x 140 below in several ragged blocks, forward and in both gradients.
SMALL_TILES = {
    "forward": TileConfig(128, 128, 128),
    "lhs_cotangent": TileConfig(128, 128, 128),
    "rhs_cotangent": TileConfig(128, 128, 128),
}

# At -O0 LLVM compiles these programs faster; they hardly run.
FAST = {"xla_backend_optimization_level": 0}


def _integers(seed: int, *shape: int) -> jax.Array:
    """-2, -1, 1 or 2, as float32."""
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.choice([-2, -1, 1, 2], shape).astype(np.float32))


def _swap(x: jax.Array, letter: str) -> jax.Array:
    return jnp.swapaxes(x, -1, -2) if letter == "T" else x


def _ours(layout: str, **keywords: Any) -> Callable:
    return functools.partial(
        pallas_ops.matmul,
        transpose_lhs=layout[0] == "T",
        transpose_rhs=layout[1] == "T",
        **keywords,
    )


def _theirs(layout: str) -> Callable:
    return lambda lhs, rhs: jnp.matmul(_swap(lhs, layout[0]), _swap(rhs, layout[1]))


def _operands(layout: str, m=3, k=5, n=4, leading=((), ()), seed=0) -> tuple[jax.Array, jax.Array]:
    lhs = (k, m) if layout[0] == "T" else (m, k)
    rhs = (n, k) if layout[1] == "T" else (k, n)
    return _integers(seed, *leading[0], *lhs), _integers(seed + 1, *leading[1], *rhs)


def _equal(ours: Any, theirs: Any, hint: Any = "") -> None:
    """The same tree, shapes, dtypes and values, exactly; and not all of them zero."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), hint
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=str(hint))
        assert float(np.abs(other).max(initial=0)) < 2**24, (
            "no longer exact: choose smaller numbers"
        )
    assert any(np.any(x) for x in jax.tree.leaves(theirs)), "zeros show nothing"


def _compiled(function: Callable, *args: Any) -> Any:
    # A function of its own: some of Equinox' wrappers cannot be hashed.
    return jax.jit(lambda *args: function(*args), compiler_options=FAST)(*args)


def _loss(product: Callable) -> Callable:
    """Quadratic, and with a different weight for each entry, so that none can be mistaken."""

    def loss(lhs, rhs):
        out = product(lhs, rhs)
        weights = (1 + jnp.arange(out.size) % 3).reshape(out.shape)
        return jnp.sum(out * out * weights.astype(out.dtype))

    return loss


def _both_gradients(product: Callable) -> Callable:
    return jax.grad(_loss(product), argnums=(0, 1))


# Gradients of a single product.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grad(implementation, layout):
    sizes = [(1, 1, 1), (1, 7, 1), (3, 1, 4), (7, 9, 129)]
    cases = [_operands(layout, *size) for size in sizes]

    def gradients(product):
        return lambda cases: [_both_gradients(product)(*operands) for operands in cases]

    ours = _compiled(gradients(_ours(layout, implementation=implementation)), cases)
    theirs = _compiled(gradients(_theirs(layout)), cases)
    for size, one, other in zip(sizes, ours, theirs, strict=True):
        _equal(one, other, size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grad_with_small_tiles_that_do_not_divide(layout):
    operands = _operands(layout, 140, 150, 130)
    product = _ours(layout, implementation="interpret", tiles=SMALL_TILES)
    ours = _compiled(_both_gradients(product), *operands)
    _equal(ours, _compiled(_both_gradients(_theirs(layout)), *operands))


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [("NN", "interpret"), ("NT", "interpret"), ("TN", "interpret"), ("NT", "xla")],
)
def test_leading_axes_are_summed_to_the_operands_shape(layout, implementation):
    pairs = [
        ((3,), ()),
        ((), (3,)),
        ((3,), (3,)),
        ((2, 3), ()),
        ((2, 1), (1, 3)),
        ((2, 1, 3), (2, 1)),
        ((1, 2), (2, 2)),
    ]
    cases = [_operands(layout, leading=pair) for pair in pairs]

    def gradients(product):
        return lambda cases: [_both_gradients(product)(*operands) for operands in cases]

    ours = _compiled(gradients(_ours(layout, implementation=implementation)), cases)
    theirs = _compiled(gradients(_theirs(layout)), cases)
    for pair, operands, one, other in zip(pairs, cases, ours, theirs, strict=True):
        assert [x.shape for x in one] == [x.shape for x in operands]
        _equal(one, other, pair)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("leading", "sizes"),
    [
        (((), ()), (0, 3, 4)),
        (((), ()), (2, 0, 4)),
        (((), ()), (2, 3, 0)),
        (((0,), ()), (2, 3, 4)),
        (((), (0,)), (2, 3, 4)),
        (((0,), (1,)), (2, 3, 4)),
        (((2, 0), (2, 1)), (2, 3, 4)),
    ],
    ids=str,
)
def test_gradients_of_empty_products_are_zeros(implementation, leading, sizes):
    operands = _operands("NT", *sizes, leading=leading)
    gradients = _both_gradients(_ours("NT", implementation=implementation))(*operands)
    for gradient, operand in zip(gradients, operands, strict=True):
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
        np.testing.assert_array_equal(gradient, 0)


# The transformations, one by one, and with jit inside and outside.


def _transformed(layout: str, product: Callable, jit: Callable) -> dict[str, Callable]:
    """Functions of `lhs` and `rhs` (plain matrices, all three sizes equal), by name.

    `jit` wraps the product itself (inside) or nothing.
    """
    inner = jit(product)
    loss, square = _loss(inner), lambda lhs, rhs: inner(lhs, rhs) ** 2
    tangents = lambda lhs, rhs: (lhs[::-1] + 1, rhs[:, ::-1] - 1)  # noqa: E731

    def hvp(lhs, rhs):
        return jax.grad(
            lambda x, y: sum(map(jnp.vdot, jax.grad(loss, (0, 1))(x, y), tangents(lhs, rhs))),
            (0, 1),
        )(lhs, rhs)

    def forward_over_reverse(lhs, rhs):
        return jax.jvp(jax.grad(loss, (0, 1)), (lhs, rhs), tangents(lhs, rhs))

    def reverse_over_forward(lhs, rhs):
        return jax.grad(lambda x, y: jax.jvp(loss, (x, y), tangents(lhs, rhs))[1])(lhs, rhs)

    def linearize(lhs, rhs):
        out, linear = jax.linearize(square, lhs, rhs)
        return out, linear(*tangents(lhs, rhs)), linear(rhs, lhs)

    def linear_transpose(lhs, rhs):
        transpose = jax.linear_transpose(lambda x: inner(x, rhs), lhs)
        other = jax.linear_transpose(lambda y: inner(lhs, y), rhs)
        return transpose(inner(lhs, rhs)), other(inner(lhs, rhs))

    def scan(lhs, rhs):
        def step(carry, x):
            return jnp.clip(inner(carry, x), -2, 2), carry

        def scanned(lhs, rhs):
            last, steps = jax.lax.scan(step, lhs, jnp.stack([rhs, rhs.T, rhs]))
            return jnp.sum(last * last) + jnp.sum(steps * jnp.arange(3.0)[:, None, None])

        return jax.value_and_grad(scanned, (0, 1))(lhs, rhs)

    def checkpoint(lhs, rhs):
        @jax.checkpoint
        def layer(x):
            return jnp.abs(inner(x, rhs))

        return jax.value_and_grad(lambda x: jnp.sum(layer(jnp.clip(layer(x), 0, 2) - 1) ** 2))(lhs)

    def checkpointed_names(lhs, rhs):
        policy = jax.checkpoint_policies.dots_saveable
        return jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))(lhs, rhs)

    def while_loop(lhs, rhs):
        def forward(x, y):
            def body(state):
                step, value = state
                return step + 1, inner(value, y)

            return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

        return forward(lhs, rhs), jax.jvp(forward, (lhs, rhs), tangents(lhs, rhs))

    def cond(lhs, rhs):
        def either(x, y):
            return jax.lax.cond(x[0, 0] > 9, lambda: jnp.zeros_like(x), lambda: inner(x, y))

        return _both_gradients(either)(lhs, rhs)

    def custom_vjp_around(lhs, rhs):
        @jax.custom_vjp
        def wrapped(x, y):
            return inner(x, y)

        wrapped.defvjp(lambda x, y: jax.vjp(inner, x, y), lambda pullback, ct: pullback(2 * ct))
        return _both_gradients(wrapped)(lhs, rhs)

    def one_operand_used_twice(lhs, rhs):
        return jax.grad(lambda x: _loss(inner)(x, _swap(x, layout[0]) + rhs))(lhs)

    def chain(lhs, rhs):
        return jax.grad(lambda x, y: jnp.sum(inner(inner(x, y), y) ** 2), (0, 1))(lhs, rhs)

    return {
        "value": inner,
        "grad": jax.grad(loss, (0, 1)),
        "grad of lhs alone": jax.grad(loss, 0),
        "grad of rhs alone": jax.grad(loss, 1),
        "value_and_grad": jax.value_and_grad(loss, (0, 1)),
        "jvp": lambda lhs, rhs: jax.jvp(square, (lhs, rhs), tangents(lhs, rhs)),
        "jvp of lhs alone": lambda lhs, rhs: jax.jvp(lambda x: inner(x, rhs), (lhs,), (lhs.T,)),
        "linearize": linearize,
        "linear_transpose": linear_transpose,
        "jacrev": jax.jacrev(square, (0, 1)),
        "jacfwd": jax.jacfwd(square, (0, 1)),
        "hessian": jax.hessian(loss, (0, 1)),
        "jacrev of jacrev": jax.jacrev(jax.jacrev(loss, 1), 0),
        "grad of grad": hvp,
        "forward over reverse": forward_over_reverse,
        "reverse over forward": reverse_over_forward,
        "third derivative": jax.grad(lambda x, y: jnp.sum(hvp(x, y)[0] ** 2)),
        "scan": scan,
        "checkpoint": checkpoint,
        "checkpoint with a policy": checkpointed_names,
        "while_loop": while_loop,
        "cond": cond,
        "custom_vjp around it": custom_vjp_around,
        "one operand used twice": one_operand_used_twice,
        "chain": chain,
    }


_NAMES = tuple(_transformed("NN", jnp.matmul, lambda f: f))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("part", range(3))
def test_transformations_under_jit(layout, part):
    """The kernel, jitted outside of each transformation; every other one is jitted inside too."""
    operands = _operands(layout, 2, 2, 2, seed=part)
    names = _NAMES[part::3]

    def all_of(product):
        tables = [_transformed(layout, product, wrap) for wrap in (lambda f: f, jax.jit)]
        return lambda *operands: {
            name: tables[number % 2][name](*operands) for number, name in enumerate(names)
        }

    ours = _compiled(all_of(_ours(layout, implementation="interpret")), *operands)
    theirs = _compiled(all_of(_theirs(layout)), *operands)
    for name in names:
        _equal(ours[name], theirs[name], name)


@pytest.mark.parametrize("number", range(len(_NAMES)), ids=_NAMES)
def test_transformations_in_eager_code(number):
    """Not jitted outside; those that are not jitted inside above are so here."""
    operands = _operands("NT", 2, 2, 2)
    name = _NAMES[number]
    jit = jax.jit if (number // 3) % 2 == 0 else (lambda f: f)
    product = _ours("NT", implementation="xla")
    ours = _transformed("NT", product, jit)[name](*operands)
    _equal(ours, _compiled(_transformed("NT", _theirs("NT"), jit)[name], *operands))


# vmap.

_AXES = [pair for pair in itertools.product((None, 0, 1, 2), repeat=2) if pair != (None, None)]


def _batched(x: jax.Array, axis: int | None, size: int, seed: int) -> jax.Array:
    return x if axis is None else _integers(seed, *np.insert(x.shape, axis, size))


def _vmap_orders(product: Callable, in_axes: Any) -> dict[str, Callable]:
    mapped = jax.vmap(product, in_axes)
    return {
        "vmap": mapped,
        "grad of vmap": _both_gradients(mapped),
        "vmap of grad": jax.vmap(_both_gradients(product), in_axes),
        "jvp of vmap": lambda x, y: jax.jvp(mapped, (x, y), (2 * x - 1, y + 1)),
        "vmap of jvp": jax.vmap(lambda x, y: jax.jvp(product, (x, y), (2 * x - 1, y + 1)), in_axes),
    }


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for layout, name in itertools.product(("NN", "NT", "TN"), _vmap_orders(jnp.matmul, 0))
        # A tangent is one more product of the same layout: the layer's stands for all.
        if layout == "NT" or "jvp" not in name
    ],
)
def test_vmap_over_every_pair_of_axes(layout, name):
    """Values, gradients and tangents, in both orders, whichever operand is mapped along which."""
    # All for the main road; of the others each layout and transformation takes another third.
    which = LAYOUTS.index(layout) + list(_vmap_orders(jnp.matmul, 0)).index(name)
    xla = _AXES if name == "grad of vmap" and layout in ("NT", "TN") else _AXES[which % 3 :: 3]
    pairs = {"interpret": [(0, None), [(None, 1), (2, 0), (1, 1)][which % 3]], "xla": xla}
    for implementation, axes in pairs.items():
        cases = [
            tuple(
                _batched(x, axis, 3, seed)
                for seed, (x, axis) in enumerate(zip(_operands(layout, 2, 3, 4), pair, strict=True))
            )
            for pair in axes
        ]

        def all_of(product, axes=axes):
            return lambda cases: [
                _vmap_orders(product, pair)[name](*operands)
                for pair, operands in zip(axes, cases, strict=True)
            ]

        ours = _compiled(all_of(_ours(layout, implementation=implementation)), cases)
        theirs = _compiled(all_of(_theirs(layout)), cases)
        for pair, one, other in zip(axes, ours, theirs, strict=True):
            _equal(one, other, (implementation, pair))


_NESTED = [
    # One operand from outside and one from inside, both ways, and both batched twice.
    ((0, None), (None, 0)),
    ((None, 0), (0, None)),
    ((0, 0), (0, 0)),
    ((0, None), (0, None)),
    ((None, 0), (None, 0)),
]


def _nested_sample(seed: int, count: int) -> list[tuple[Any, Any]]:
    rng = random.Random(seed)
    return list(zip(rng.sample(_AXES, count), rng.sample(_AXES, count), strict=True))


_KINDS = ("value", "outer grad", "middle grad", "inner grad")


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_of_vmap(layout, kind, implementation):
    """Two mapped axes, with the gradient taken outside, between and inside of them."""
    number = LAYOUTS.index(layout) + 4 * _KINDS.index(kind)
    if implementation == "xla":
        axes = _NESTED[-3:] + _nested_sample(number, 2)
    else:
        axes = [_NESTED[number % 5], _NESTED[(number + 2) % 5]]
    cases = []
    for outer, inner in axes:
        operands = _operands(layout, 2, 3, 2)
        operands = [_batched(x, a, 2, 0) for x, a in zip(operands, inner, strict=True)]
        operands = [
            # The outer axis is taken away first: it may be last, after the inner one.
            x if a is None else _batched(x, a, 3, 1)
            for x, a in zip(operands, outer, strict=True)
        ]
        cases.append(tuple(operands))

    def nested(product, outer, inner):
        if kind == "value":
            return jax.vmap(jax.vmap(product, inner), outer)
        if kind == "outer grad":
            return _both_gradients(jax.vmap(jax.vmap(product, inner), outer))
        if kind == "inner grad":
            return jax.vmap(jax.vmap(_both_gradients(product), inner), outer)
        return jax.vmap(_both_gradients(jax.vmap(product, inner)), outer)

    def all_of(product):
        return lambda cases: [
            nested(product, *pair)(*operands) for pair, operands in zip(axes, cases, strict=True)
        ]

    ours = _compiled(all_of(_ours(layout, implementation=implementation)), cases)
    theirs = _compiled(all_of(_theirs(layout)), cases)
    for pair, one, other in zip(axes, ours, theirs, strict=True):
        _equal(one, other, pair)


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
def test_vmap_out_axes_and_negative_in_axes(out_axes):
    lhs, rhs = _integers(0, 3, 5, 2), _integers(1, 5, 2, 4)
    ours, theirs = (
        jax.vmap(product, in_axes=(-1, -2), out_axes=out_axes)
        for product in (_ours("NN", implementation="interpret"), jnp.matmul)
    )
    _equal(ours(lhs, rhs), theirs(lhs, rhs))


def test_vmap_with_leading_axes_on_both_sides():
    """The mapped axis comes before leading axes that broadcast."""
    cases = [
        ((2, 3), (3,), (0, None)),
        ((3,), (2, 3), (None, 0)),
        ((2, 3, 1), (2, 4), (0, 0)),
        ((2, 1, 3), (1, 3), (0, None)),
    ]
    operands = [
        _operands(layout, 2, 3, 2, (lhs_axes, rhs_axes))
        for layout, (lhs_axes, rhs_axes, _) in itertools.product(("NT", "TN"), cases)
    ]

    def gradients(make):
        return lambda operands: [
            (
                _both_gradients(jax.vmap(product, in_axes))(*pair),
                jax.vmap(_both_gradients(product), in_axes)(*pair),
            )
            for pair, (product, (_, _, in_axes)) in zip(
                operands, itertools.product(map(make, ("NT", "TN")), cases), strict=True
            )
        ]

    theirs = _compiled(gradients(_theirs), operands)
    for implementation in IMPLEMENTATIONS:
        ours = functools.partial(_ours, implementation=implementation)
        _equal(_compiled(gradients(ours), operands), theirs, implementation)


@pytest.mark.parametrize(
    ("implementation", "layout"), [("interpret", "NT"), ("interpret", "TN"), ("xla", "NT")]
)
@pytest.mark.parametrize("size", [0, 1])
def test_vmap_over_an_axis_of_size_1_or_0(implementation, layout, size):
    all_axes = [(0, None), (None, 0), (1, 2)]
    cases = [
        tuple(_batched(x, a, size, 3) for x, a in zip(_operands(layout), in_axes, strict=True))
        for in_axes in all_axes
    ]

    def all_of(product):
        return lambda cases: [
            (
                _both_gradients(jax.vmap(product, axes))(*operands),
                jax.vmap(_both_gradients(product), axes)(*operands),
            )
            for operands, axes in zip(cases, all_axes, strict=True)
        ]

    ours = _compiled(all_of(_ours(layout, implementation=implementation)), cases)
    theirs = _compiled(all_of(_theirs(layout)), cases)
    if size == 1:
        _equal(ours, theirs)
        return
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


def test_per_example_gradients_with_small_tiles():
    """`vmap` of `grad`: one weight gradient for each example, summed over nothing."""
    x, w = _integers(0, 3, 20, 150), _integers(1, 140, 150)
    ours = _compiled(
        jax.vmap(
            _both_gradients(_ours("NT", implementation="interpret", tiles=SMALL_TILES)),
            in_axes=(0, None),
        ),
        x,
        w,
    )
    assert ours[1].shape == (3, 140, 150)
    _equal(ours, jax.vmap(_both_gradients(_theirs("NT")), in_axes=(0, None))(x, w))


# Layers: ensembles, and one real non-polynomial model.


def _ensemble() -> pallas_ops.PallasLinear:
    def make(key):
        return pallas_ops.PallasLinear(5, 4, key=key, implementation="interpret")

    return eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))


def _to_integers(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.round(4 * x), tree)


@pytest.mark.parametrize("order", ["batch inside", "batch outside"])
@pytest.mark.parametrize("shared_input", [True, False])
def test_ensembles(order, shared_input):
    """Three stacked layers, each on a batch of 6, with the gradient of every one of them."""
    ours = _to_integers(_ensemble())
    theirs = pallas_ops.restore_linear(ours)
    x = _integers(2, 6, 5) if shared_input else _integers(2, 3, 6, 5)
    x_axis = None if shared_input else 0

    def outputs(layers, x):
        if order == "batch inside":
            run = lambda layer, x: jax.vmap(layer)(x)  # noqa: E731
            return eqx.filter_vmap(run, in_axes=(eqx.if_array(0), x_axis))(layers, x)
        run = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), x_axis))
        batched = jax.vmap(lambda x: run(layers, x), in_axes=0 if shared_input else 1, out_axes=1)
        return batched(x)

    def loss(both):
        out = outputs(*both)
        assert out.shape == (3, 6, 4)
        return jnp.sum(out * out * (1 + jnp.arange(4.0)).reshape(1, 1, 4))

    value, gradients = _compiled(eqx.filter_value_and_grad(loss), (ours, x))
    expected_value, expected = _compiled(eqx.filter_value_and_grad(loss), (theirs, x))
    _equal(value, expected_value)
    _equal(jax.tree.leaves(gradients), jax.tree.leaves(expected))
    per_member = eqx.filter_vmap(
        eqx.filter_grad(lambda layer, x: jnp.sum(jax.vmap(layer)(x) ** 2)),
        in_axes=(eqx.if_array(0), x_axis),
    )
    _equal(*(jax.tree.leaves(_compiled(per_member, layers, x)) for layers in (ours, theirs)))


def test_check_grads_to_second_order():
    """Against finite differences: nothing of `jax.numpy` in between."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 5)) / 4
    w = jax.random.normal(jax.random.key(1), (4, 5)) / 4
    product = _ours("NT", implementation="interpret", tiles=TileConfig(8, 128, 128))
    function = jax.jit(lambda x, w: jnp.tanh(product(x, w)))
    check_grads(function, (x, w), order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)


# Implementations on their own.


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in IMPLEMENTATIONS for layout in LAYOUTS] + [("tpu_interpret", "NT")],
)
def test_an_implementation_taken_alone_has_gradients(name, layout):
    implementation = pallas_ops.get_operator("matmul").implementations[name]
    flags = dict(transpose_lhs=layout[0] == "T", transpose_rhs=layout[1] == "T")
    product = functools.partial(implementation, **flags)
    operands = _operands(layout, 9, 5, 7)
    _equal(product(*operands), _theirs(layout)(*operands))
    ours, theirs = (_compiled(_both_gradients(f), *operands) for f in (product, _theirs(layout)))
    _equal(ours, theirs)


def test_an_implementation_taken_alone_with_leading_axes_and_tiles():
    implementation = pallas_ops.get_operator("matmul").implementations["interpret"]
    product = functools.partial(implementation, transpose_rhs=True, tiles=SMALL_TILES)
    operands = _operands("NT", 9, 150, 140, ((2, 1), (1, 3)))
    ours, theirs = (_compiled(_both_gradients(f), *operands) for f in (product, _theirs("NT")))
    _equal(ours, theirs)


@pytest.mark.parametrize("name", ["interpret", "xla"])
def test_an_implementation_taken_alone_under_vmap_and_twice_differentiated(name):
    implementation = pallas_ops.get_operator("matmul").implementations[name]
    product = functools.partial(implementation, transpose_rhs=True)
    operands = _operands("NT", leading=((2,), (2,)))
    for transform in (
        lambda f: jax.vmap(_both_gradients(f)),
        lambda f: _both_gradients(jax.vmap(f)),
        lambda f: jax.grad(lambda x, y: sum(map(jnp.sum, _both_gradients(f)(x, y))), (0, 1)),
    ):
        _equal(
            _compiled(transform(product), *operands), _compiled(transform(_theirs("NT")), *operands)
        )


def test_an_implementation_taken_alone_refuses_operands_that_do_not_fit():
    """It has no broadcasting, and must not compute with what a grid happens to reach."""
    for name in ("interpret", "xla"):
        implementation = pallas_ops.get_operator("matmul").implementations[name]
        for lhs, rhs in (
            ((3, 4), (5, 6)),
            ((2, 3, 4), (4, 6)),
            ((2, 3, 4), (3, 4, 6)),
            ((4,), (4, 6)),
        ):
            with pytest.raises(ValueError, match="operands that do not fit: lhs float32"):
                implementation(jnp.ones(lhs), jnp.ones(rhs))


def test_an_implementation_taken_alone_keeps_each_primals_dtype():
    implementation = pallas_ops.get_operator("matmul").implementations["interpret"]
    x, w = _integers(0, 3, 5).astype(jnp.bfloat16), _integers(1, 4, 5)
    product = functools.partial(implementation, transpose_rhs=True, out_dtype=jnp.float32)
    gradients = jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), (0, 1))(x, w)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    assert product(x, w).dtype == jnp.float32


# Dtypes.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "preferred"),
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", None),
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float32", "bfloat16"),
    ],
    ids=str,
)
def test_a_gradient_has_its_primals_dtype(implementation, lhs_dtype, rhs_dtype, preferred):
    lhs, rhs = _integers(0, 6, 3, 5).astype(lhs_dtype), _integers(1, 4, 5).astype(rhs_dtype)
    product = _ours("NT", implementation=implementation, preferred_element_type=preferred)
    loss = lambda lhs, rhs: jnp.sum(product(lhs, rhs).astype(jnp.float32) ** 2)  # noqa: E731
    transforms = (
        jax.grad(loss, (0, 1)),
        lambda *args: jax.jvp(loss, args, args)[1:] * 2,
        jax.grad(
            lambda *args: jnp.sum(jax.vmap(product, (0, None))(*args).astype("float32")), (0, 1)
        ),
    )
    grads, tangents, mapped = jax.jit(lambda *args: [f(*args) for f in transforms])(lhs, rhs)
    assert [g.dtype for g in grads] == [g.dtype for g in mapped] == [lhs_dtype, rhs_dtype]
    assert tangents[0].dtype == jnp.float32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("batched", ["leading axes", "vmap"])
def test_the_weight_gradient_of_a_mixture_is_as_exact_as_float32(implementation, batched):
    """A bfloat16 activation against a float32 weight, over 1024 rows.

    Rounded to bfloat16 anywhere, or summed over the batch in it, the error would be of the order
    of 2^-8; it is that of a sum in float32.
    """
    rows, k, n = 1024, 24, 16
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, k)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((n, k)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((rows, n)), jnp.float32)
    product = _ours(
        "NT",
        preferred_element_type=jnp.float32,
        implementation=implementation,
        tiles={"rhs_cotangent": TileConfig(128, 128, 128)},
    )

    def loss(w):
        if batched == "vmap":
            out = jax.vmap(lambda row: product(row[None], w)[0])(x)
        else:
            out = product(x.reshape(4, rows // 4, k), w).reshape(rows, n)
        return jnp.sum(out * weights)

    gradient = jax.jit(jax.grad(loss))(w)
    exact = np.asarray(weights, np.float64).T @ np.asarray(x, np.float64)
    absolute = np.abs(np.asarray(weights, np.float64)).T @ np.abs(np.asarray(x, np.float64))
    error = np.abs(np.asarray(gradient, np.float64) - exact)
    # Higham's bound for a sum of 1024 products in float32, whose unit roundoff is 2^-24 ...
    assert (error <= 1.001 * rows * 2.0**-24 * absolute).all()
    # ... and some orders of magnitude below what one rounding to bfloat16 does.
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    assert np.abs(error).max() < np.abs(rounded - exact).max() / 1000


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_operands_under_grad_of_another_argument(implementation):
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.integers(-9, 9, (4, 4), dtype=np.int8)) for _ in range(2))
    product = _ours("NT", implementation=implementation, preferred_element_type=jnp.int32)

    def loss(scale, lhs, rhs):
        return jnp.sum(product(lhs, rhs).astype(jnp.float32) * scale)

    expected = jnp.sum(lhs.astype(jnp.float32) @ rhs.astype(jnp.float32).T)
    _equal(jax.jit(jax.grad(loss))(2.0, lhs, rhs), expected)
    _equal(jax.grad(loss)(2.0, lhs, rhs), expected)
    _equal(jax.jvp(lambda s: loss(s, lhs, rhs), (2.0,), (1.0,)), (2 * expected, expected))
    # Quantised inside: the integers hang on the argument, and carry no gradient back.
    quantised = jax.grad(lambda s: loss(s, (s * lhs.astype("float32")).astype("int8"), rhs))
    _equal(quantised(1.0), expected)
    _equal(
        jax.vmap(jax.grad(loss), (None, 0, None))(2.0, jnp.stack([lhs, lhs]), rhs),
        jnp.stack([expected, expected]),
    )


def test_grad_of_an_int8_activation_and_a_float_weight():
    """Through XLA: the weight has a gradient, the integers have none."""
    x, w = jnp.asarray([[1, -2, 3]], jnp.int8), _integers(0, 4, 3)
    product = _ours("NT", preferred_element_type=jnp.float32)
    gradient = jax.grad(lambda w: jnp.sum(product(x, w) ** 2))(w)
    _equal(gradient, jax.grad(lambda w: jnp.sum((x.astype(jnp.float32) @ w.T) ** 2))(w))
    _, of_w = jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), (0, 1), allow_int=True)(x, w)
    _equal(of_w, gradient)


@pytest.mark.parametrize("dtype", ["complex64", "float64", "complex128", "float16"])
def test_derivatives_of_the_dtypes_that_only_xla_has(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        lhs, rhs = (rng.integers(-2, 3, shape).astype(dtype) for shape in ((3, 2, 5), (4, 5)))
        if "complex" in dtype:
            lhs, rhs = lhs * (1 - 2j), rhs * (2 + 1j)
        lhs, rhs = jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype)

        def gradients(product):
            def loss(lhs, rhs):
                out = product(lhs, rhs)
                return jnp.sum((out * out * jnp.arange(1, 5, dtype=dtype).reshape(1, 1, 4)).real)

            return jax.grad(loss, (0, 1))(lhs, rhs)

        _equal(gradients(_ours("NT")), gradients(_theirs("NT")))


# Tracers.


def test_no_tracer_leaks():
    product = _ours("NT", implementation="interpret")
    x, w = _operands("NT", 3, 5, 4, ((2,), ()))
    with jax.checking_leaks():
        for wrap in (jax.jit, lambda f: f):
            wrap(_both_gradients(product))(x, w)
            wrap(_both_gradients(jax.vmap(product, (0, None))))(x, w)
            wrap(jax.vmap(_both_gradients(product), (0, None)))(x, w)
            wrap(lambda x, w: jax.jvp(product, (x, w), (x, w)))(x, w)
            wrap(jax.hessian(_loss(product)))(x[:, :1, :2], w[:2, :2])


def test_the_options_of_a_call_hold_in_its_gradient_and_batches():
    """The pullback, called later and elsewhere, runs the implementation of the call."""
    x, w = _operands("NT")
    with pallas_ops.options(implementation="interpret"):
        _, pullback = jax.vjp(_ours("NT"), x, w)
        _, mapped_pullback = jax.vjp(jax.vmap(_ours("NT"), (0, None)), jnp.stack([x, x]), w)
    for call, cotangent in (
        (pullback, jnp.ones((3, 4))),
        (jax.vmap(pullback), jnp.ones((2, 3, 4))),
        (mapped_pullback, jnp.ones((2, 3, 4))),
    ):
        found = [one.options.implementation for one in described(call, cotangent)]
        assert found == ["interpret"] * 2
    named = functools.partial(_ours("NT", implementation="interpret"))
    mapped = jax.vmap(_both_gradients(named), (0, None))
    found = [one.options.implementation for one in described(mapped, jnp.stack([x, x]), w)]
    assert found == ["interpret"] * 3
