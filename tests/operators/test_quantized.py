"""`quantized_matmul` and `quantize_int8`: values, derivatives, batches, programs and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pallas_ops as po
from pallas_ops import TileConfig
from pallas_ops.compiler import compile_for_tpu
from pallas_ops.tiles._vmem import estimate_vmem_bytes

from ..program import equations, forms, operator_calls


# Rows, columns and k in several blocks, all of them ragged.
M, K, N = 40, 300, 140
TILE = TileConfig(32, 128, 128)
LHS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8}


def _draw(seed, *shape, dtype=jnp.float32):
    rng = np.random.default_rng([seed, *shape])
    if dtype == jnp.int8:
        return jnp.asarray(rng.integers(-128, 128, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)


def _operands(dtype=jnp.float32, m=M, k=K, n=N):
    """An input, a weight (out, in), its scales and a bias; results are about 1."""
    scale = jnp.abs(_draw(2, n)) / (74 * k**0.5)
    if dtype == jnp.int8:
        scale = scale / 74
    return _draw(0, m, k, dtype=dtype), _draw(1, n, k, dtype=jnp.int8), scale, _draw(3, n)


def _wide(*arrays):
    return [np.asarray(array.astype(jnp.float32), np.float64) for array in arrays]


def _ours(implementation="interpret", tiles=TILE, **keywords):
    if tiles is not None:
        keywords["tiles"] = dict.fromkeys(("forward", "lhs_cotangent", "rhs_cotangent"), tiles)
    return functools.partial(
        po.quantized_matmul, transpose_rhs=True, implementation=implementation, **keywords
    )


def _theirs(x, weight, scale, bias=None, activation=None):
    """By `jax.numpy`, with the weight in floating point."""
    columns = jnp.swapaxes(weight.astype(jnp.float32), -1, -2)
    z = jnp.matmul(x.astype(jnp.float32), columns, precision="highest")
    z = z * jnp.broadcast_to(scale, z.shape)
    z = z if bias is None else z + jnp.broadcast_to(bias, z.shape)
    return z if activation is None else activation(z)


# Values.


@pytest.mark.parametrize(
    "implementation", ["interpret", pytest.param("tpu_interpret", marks=pytest.mark.slow), "xla"]
)
@pytest.mark.parametrize("name", LHS)
def test_every_layout_is_rounded_once(name, implementation):
    x, weight, scale, bias = _operands(LHS[name])
    out = jnp.float32 if name == "f32" else jnp.bfloat16
    wide_x, wide_weight, wide_scale, wide_bias = _wide(x, weight, scale, bias)
    exact = np.tanh(wide_x @ wide_weight.T * wide_scale + wide_bias)
    for transpose_lhs in (False, True):
        for transpose_rhs in (False, True):
            found = po.quantized_matmul(
                x.T if transpose_lhs else x,
                weight if transpose_rhs else weight.T,
                scale,
                transpose_lhs=transpose_lhs,
                transpose_rhs=transpose_rhs,
                bias=bias.astype(out),
                activation=jnp.tanh,
                preferred_element_type=out,
                tiles=TileConfig(128, 128, 128) if transpose_lhs else TILE,
                implementation=implementation,
            )
            assert (found.shape, found.dtype) == ((M, N), out)
            error = np.abs(np.asarray(found.astype(jnp.float32), np.float64) - exact)
            # Rounded inputs of the bias, sums of 300 terms in float32, and the one rounding.
            unit = float(jnp.finfo(out).eps) / 2
            assert (error <= unit * (np.abs(exact) + np.abs(wide_bias)) + 2e-5).all()


def test_the_sums_of_int8_are_exact():
    lhs, rhs, *_ = _operands(jnp.int8, k=1300)
    exact = np.asarray(lhs, np.int64) @ np.asarray(rhs, np.int64).T
    for implementation in ("interpret", "xla"):
        sums = _ours(implementation)(lhs, rhs, None)
        assert sums.dtype == jnp.int32
        np.testing.assert_array_equal(sums, exact)
        # One of them is beyond what float32 counts to, and still only rounded once.
        largest = jnp.full((32, 2048), -128, jnp.int8)
        one = _ours(implementation)(largest, largest.at[:, 0].set(-127), jnp.ones(32))
        np.testing.assert_array_equal(one, np.float32(2048 * 128**2 - 128))


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_scales_of_every_shape(implementation):
    lhs, rhs, scale, bias = _operands(jnp.int8)
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).T
    rows = jnp.abs(_draw(4, M))
    matmul = _ours(implementation, bias=bias, activation=jnp.tanh)
    for columns in (None, scale, jnp.float32(1e-5), 1e-5):
        for factors in (None, rows, jnp.float32(0.5), 0.5):
            if columns is None and factors is None:
                continue
            found = matmul(lhs, rhs, columns, lhs_scale=factors)
            expected = exact * (1.0 if columns is None else np.asarray(columns, np.float64))
            of_rows = np.asarray(1.0 if factors is None else factors, np.float64)
            expected = np.tanh(expected * of_rows[..., None] + np.asarray(bias))
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    narrow = matmul(lhs, rhs, scale.astype(jnp.bfloat16), bias=bias.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    narrow = _ours(implementation, preferred_element_type=jnp.bfloat16)(
        lhs, rhs, scale, lhs_scale=rows
    )
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("dtype", LHS.values(), ids=LHS)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 200, 1), (5, 9, 1)])
def test_empty_and_smallest_products(m, k, n, dtype, implementation):
    x, weight, scale, bias = _operands(dtype, m, k, n)
    found = _ours(implementation, None, bias=bias, preferred_element_type=jnp.float32)(
        x, weight, scale
    )
    np.testing.assert_allclose(found, _theirs(x, weight, scale, bias), rtol=1e-4, atol=1e-5)


def test_leading_axes():
    x, weight, scale, _ = _operands()
    x, weights = x.reshape(4, 10, K), jnp.stack([weight, -weight, weight[::-1], weight])
    scales = jnp.stack([scale, 2 * scale, scale, scale])
    matmul = _ours(tiles=None)
    np.testing.assert_allclose(
        matmul(x, weight, scale), _theirs(x, weight, scale), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        matmul(x, weights, scales),
        jax.vmap(_theirs)(x, weights, scales),
        rtol=1e-4,
        atol=1e-5,
    )
    (call,) = operator_calls(matmul, x, weight, scale)
    assert [v.aval.shape for v in call.invars] == [(M, K), (N, K), (1, N)]


def test_what_is_not_elementwise_is_applied_to_the_scaled_product():
    x, weight, scale, bias = _operands()
    found = _ours(bias=bias, activation=jax.nn.softmax)(x, weight, scale)
    expected = _theirs(x, weight, scale, bias, jax.nn.softmax)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


# Derivatives and batches.


@pytest.mark.parametrize("implementation", ["interpret", "tpu_interpret", "xla"])
@pytest.mark.parametrize("activation", [None, jax.nn.silu], ids=["none", "silu"])
def test_gradients(activation, implementation):
    x, weight, scale, bias = _operands()
    cotangent = _draw(5, M, N)
    ours = _ours(implementation, TileConfig(128, 128, 128), activation=activation)

    def loss(function):
        return lambda x, s, b: jnp.vdot(function(x, weight, s, bias=b), cotangent)

    gradients = [
        jax.jit(jax.grad(loss(f), (0, 1, 2)))(x, scale, bias)
        for f in (ours, functools.partial(_theirs, activation=activation))
    ]
    for one, other in zip(*gradients, strict=True):
        size = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * size)


def test_gradients_in_bfloat16_scale_in_float32():
    """Factors that bfloat16 does not hold are not rounded to it on the way back."""
    x, weight, _, _ = _operands(jnp.bfloat16)
    # Far from a bfloat16 number: rounded to one, which is 1.25, it would be 0.3 % less.
    scale = jnp.full(N, np.float32(1.2537))
    cotangent = _draw(5, M, N, dtype=jnp.bfloat16)
    (of_x,) = jax.vjp(lambda x: _ours()(x, weight, scale), x)[1](cotangent)
    wide = _wide(cotangent, scale, weight)
    exact = (wide[0] * wide[1]) @ wide[2]
    # Each scaled cotangent is rounded, up or down alike.
    factor = (_wide(of_x)[0] * exact).sum() / (exact**2).sum()
    assert abs(factor - 1) < 5e-4


def test_gradients_of_the_scales_of_two_int8_operands():
    lhs, rhs, scale, bias = _operands(jnp.int8)
    rows = jnp.abs(_draw(4, M))

    def ours(scale, rows, bias):
        out = _ours(bias=bias, activation=jnp.tanh)(lhs, rhs, scale, lhs_scale=rows)
        return jnp.sum(jnp.sin(out))

    def theirs(scale, rows, bias):
        z = _theirs(lhs, rhs, scale)
        z = z * jnp.broadcast_to(rows[:, None], z.shape) + jnp.broadcast_to(bias, z.shape)
        return jnp.sum(jnp.sin(jnp.tanh(z)))

    gradients = [jax.grad(f, (0, 1, 2))(scale, rows, bias) for f in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * float(abs(other).max()))


def test_int8_has_no_gradient():
    x, weight, scale, _ = _operands()
    gradient = jax.grad(lambda w: _ours()(x, w, scale).sum(), allow_int=True)(weight)
    assert (gradient.dtype, gradient.shape) == (jax.dtypes.float0, weight.shape)


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_in_both_modes(outer, inner):
    x, weight, scale, bias = _operands(m=3, k=5, n=4)

    def twice(f):
        def loss(x, scale, bias):
            return jnp.sum(jnp.sin(f(x, weight, scale, bias=bias, activation=jnp.tanh)))

        return outer(inner(loss, (0, 1, 2)), (0, 1, 2))(x, scale, bias)

    ours, theirs = twice(_ours(tiles=None)), twice(_theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * float(abs(other).max()))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, None), (None, None, 0),
                                     (0, 0, 0), (1, None, 0), (None, 1, 1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("differentiate", [False, True], ids=["value", "gradient"])
def test_vmap(in_axes, differentiate):
    x, weight, scale = (
        array if axis is None else jnp.moveaxis(jnp.stack([array, array[::-1]]), 0, axis)
        for array, axis in zip(_operands(m=6, k=40, n=20)[:3], in_axes, strict=True)
    )

    def batched(f):
        if differentiate:
            return jax.vmap(jax.grad(lambda x, w, s: jnp.sum(jnp.sin(f(x, w, s))), (0, 2)), in_axes)
        return jax.vmap(f, in_axes)

    for one, other in zip(
        jax.tree.leaves(batched(_ours(tiles=None))(x, weight, scale)),
        jax.tree.leaves(batched(_theirs)(x, weight, scale)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_vmap_and_transformations_compose():
    x, weight, scale, bias = _operands(m=6, k=40, n=40)

    def run(f):
        def loss(x, scale, bias):
            layer = jax.checkpoint(lambda row: f(row[None], weight, scale, bias=bias)[0])
            out, _ = jax.lax.scan(lambda x, _: (jnp.sin(jax.vmap(layer)(x)), None), x, length=3)
            return jnp.sum(out**2)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, scale, bias)

    ours, theirs = run(_ours(tiles=None)), run(_theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * float(abs(other).max()))


# The form of programs.


def _conversions(function, *args, of):
    """How many equations outside of kernels change the dtype of arrays of this shape."""
    return [
        equation
        for equation in equations(function, *args)
        if equation.primitive.name == "convert_element_type" and equation.invars[0].aval.shape == of
    ]


@pytest.mark.parametrize("dtype", LHS.values(), ids=LHS)
def test_one_kernel_reads_the_weight_as_it_lies(dtype):
    x, weight, scale, bias = _operands(dtype, 16, 256, 384)
    bias = bias.astype(jnp.bfloat16)

    def layer(x, weight, scale, bias):
        rows = functools.partial(
            po.quantized_matmul,
            transpose_rhs=True,
            bias=bias,
            activation=jax.nn.gelu,
            preferred_element_type=jnp.bfloat16,
        )
        return jax.vmap(lambda row: rows(row[None], weight, scale)[0])(x)

    (call,) = operator_calls(layer, x, weight, scale, bias)
    assert [v.aval.dtype for v in call.invars[:2]] == [dtype, jnp.int8]
    assert not _conversions(layer, x, weight, scale, bias, of=weight.shape)
    text = compile_for_tpu(layer, x, weight, scale, bias).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert "[384,256]" in text
    assert {line.split("[384,256]")[0].split()[-1] for line in text.splitlines()
            if "[384,256]" in line and "=" in line.split("[384,256]")[0]} == {"s8"}  # fmt: skip


def test_the_gradient_reads_the_weight_as_it_lies():
    x, weight, scale, bias = _operands(jnp.bfloat16, 16, 256, 384)

    def loss(x, scale, bias):
        out = po.quantized_matmul(x, weight, scale, transpose_rhs=True, bias=bias)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    of_x = jax.grad(loss)
    _, backward = operator_calls(of_x, x, scale, bias.astype(jnp.bfloat16))
    assert forms(of_x, x, scale, bias.astype(jnp.bfloat16)) == ["NT + scale + bias", "NN"]
    assert [v.aval.shape for v in backward.invars] == [(16, 384), weight.shape]
    assert not _conversions(of_x, x, scale, bias.astype(jnp.bfloat16), of=weight.shape)
    # With the gradient of the scales: the product without them, once more.
    every = jax.grad(loss, (0, 1, 2))
    assert len(operator_calls(every, x, scale, bias.astype(jnp.bfloat16))) == 3
    text = compile_for_tpu(every, x, scale, bias.astype(jnp.bfloat16)).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "bf16[384,256]" not in text


def test_collect_finds_the_problem():
    x, weight, scale, _ = _operands(jnp.bfloat16)
    loss = lambda x: po.quantized_matmul(x, weight, scale, transpose_rhs=True).sum()  # noqa: E731
    forward, backward = po.tiles.collect(jax.grad(loss), x, device="v5e")
    assert (forward.lhs_dtype, forward.rhs_dtype) == (jnp.bfloat16, jnp.int8)
    assert (forward.epilogue, forward.matmul.is_scaled) == ("scale:float32 identity", True)
    assert (backward.layout, backward.epilogue) == ("NN", "")
    assert forward.matmul.bytes_accessed == 2 * M * K + N * K + 4 * N + 2 * M * N


def test_a_block_of_int8_is_copied_in_vmem_at_half_the_bytes_of_float32():
    x, weight, scale, _ = _operands(jnp.bfloat16, 256, 512, 512)
    (mixed,) = po.tiles.collect(_ours(None), x, weight, scale)
    (wide,) = po.tiles.collect(_ours(None), x.astype(jnp.float32), weight, scale)
    tile = TileConfig(128, 256, 256)
    operands = [2 * (128 * 256 * size + 256 * 256) for size in (2, 4)]
    results = [2 * 128 * 256 * size + 128 * 256 * 4 + 2 * 8 * 256 * 4 for size in (2, 4)]
    # On a v4 twice, and the product of one step.
    copies = [2 * 256 * 256 * size + 128 * 256 * 4 for size in (2, 4)]
    for problem, *parts in zip((mixed, wide), operands, results, copies, strict=True):
        assert estimate_vmem_bytes(problem.matmul, tile) == sum(parts)


# The operator.


def test_the_operator_and_its_implementations():
    operator = po.get_operator("quantized_matmul")
    assert list(operator.implementations) == list(po.get_operator("matmul").implementations)
    x, weight, scale, _ = _operands()
    expected = po.quantized_matmul(x, weight, scale, transpose_rhs=True)
    np.testing.assert_array_equal(operator(x, weight, scale, transpose_rhs=True), expected)
    alone = operator.implementations["interpret"]
    np.testing.assert_allclose(
        alone(x, weight, scale, transpose_rhs=True), expected, rtol=1e-4, atol=1e-5
    )
    of_x = jax.grad(lambda x: alone(x, weight, scale, transpose_rhs=True).sum())(x)
    assert of_x.shape == x.shape
    half = x.astype(jnp.float16)
    assert "float16" in alone.why_not((half, weight, scale), dict(transpose_rhs=True))
    assert alone.why_not((x, weight, scale), dict(transpose_rhs=True)) is None
    with pytest.raises(TypeError, match="argument `rhs` is float32"):
        operator(x, x, scale)


# Errors.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(rhs=jnp.ones((N, K))), TypeError, r"rhs. must be int8.*rhs float32\[140, 300\]"),
        (dict(lhs=jnp.ones((M, K), jnp.int32)), TypeError, "lhs. floating-point or int8"),
        (dict(scale=jnp.ones(K)), ValueError, r"shape \(140,\).*each column.*float32\[300\]"),
        (dict(scale=jnp.ones((N, 1))), ValueError, r"got float32\[140, 1\]"),
        (dict(scale=jnp.ones(N, jnp.int32)), TypeError, "`scale` must be floating-point"),
        (dict(scale="large"), TypeError, "scale"),
        (dict(lhs_scale=jnp.ones(M)), ValueError, "`lhs_scale` is for an int8 `lhs`"),
        (dict(bias=jnp.ones(3)), ValueError, r"quantized_matmul: `bias` must have shape \(140,\)"),
        (dict(activation="relu"), TypeError, "activation"),
        (dict(rhs=jnp.ones((N, 7), jnp.int8)), ValueError, "contracting size k differs"),
        (dict(preferred_element_type=jnp.int32), TypeError, "int32 cannot hold"),
        (dict(implementation="cuda"), ValueError, "no implementation 'cuda'"),
    ],
)
def test_errors_say_what_is_wrong(change, error, message):
    x, weight, scale, _ = _operands()
    arguments = dict(lhs=x, rhs=weight, scale=scale, transpose_rhs=True) | change
    with pytest.raises(error, match=message):
        po.quantized_matmul(**arguments)


def test_scales_of_rows_have_the_rows_of_lhs():
    lhs, rhs, scale, _ = _operands(jnp.int8)
    with pytest.raises(ValueError, match=r"`lhs_scale` must have shape \(40,\).*each row"):
        po.quantized_matmul(lhs, rhs, scale, lhs_scale=jnp.ones(N), transpose_rhs=True)


@pytest.mark.parametrize("bound", [True, False], ids=["when bound", "when lowered"])
def test_a_generation_without_int8_products(bound):
    lhs, rhs, scale, _ = _operands(jnp.int8)
    message = "TPU v4 has no int8 products; v5e, v5p, v6e, tpu7x have.*int8 weights run on every"
    if bound:
        with po.options(device="v4"), pytest.raises(po.UnsupportedCallError, match=message):
            jax.eval_shape(_ours("mosaic"), lhs, rhs, scale)
    else:
        with pytest.raises(po.UnsupportedCallError, match=message):
            compile_for_tpu(_ours("mosaic", None), lhs, rhs, scale, device="v4")
    with po.options(device="v4"):
        jax.eval_shape(_ours("mosaic"), lhs.astype(jnp.bfloat16), rhs, scale)
    # Unnamed, it is XLA's there.
    text = compile_for_tpu(_ours(None, None), lhs, rhs, scale, device="v4").as_text()
    assert "tpu_custom_call" not in text


@pytest.mark.parametrize(("device", "kernels"), [("v4", 0), ("v5e", 1), ("v6e", 1)])
def test_who_multiplies_weights_of_int8(device, kernels):
    """A v4 can, and takes int8 apart so slowly that XLA is asked where nobody is named."""
    x, weight, scale, _ = _operands(jnp.bfloat16)
    for implementation, expected in ((None, kernels), ("mosaic", 1), ("xla", 0)):
        run = _ours(implementation, None)
        text = compile_for_tpu(run, x, weight, scale, device=device).as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == expected


# Rounding to int8.


@settings(deadline=None, max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
def test_no_entry_is_off_by_more_than_half_of_its_scale(shape, exponent, seed, dtype):
    if dtype == jnp.float16:
        exponent = exponent // 4
    array = (_draw(seed, *shape) * 2.0**exponent).astype(dtype)
    values, scale = po.quantize_int8(array)
    assert (values.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    assert (values.shape, scale.shape) == (shape, shape[:1])
    (exact,), factors = _wide(array), np.asarray(scale, np.float64)[:, None]
    error = np.abs(np.asarray(values, np.float64) * factors - exact)
    assert (error <= factors * (0.5 + 1e-4)).all()
    assert np.abs(np.asarray(values, np.int32)).max(axis=1).tolist() == [127] * shape[0]


@pytest.mark.parametrize("axis", [None, 1.0, "a"])
def test_what_is_no_axis(axis):
    with pytest.raises(TypeError):
        po.quantize_int8(jnp.ones((3, 4)), axis)


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), np.int64(1)])
def test_axes_that_share_a_scale(axis):
    array = _draw(0, 6, 9)
    values, scale = po.quantize_int8(array, axis)
    largest = np.abs(np.asarray(array)).max(axis=axis)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
    back = np.asarray(values) * np.expand_dims(np.asarray(scale), axis)
    assert np.abs(back - np.asarray(array)).max() <= largest.max() / 127 * 0.5001


def test_zeros_and_numbers_too_small_for_a_scale():
    array = jnp.zeros((4, 3)).at[1, 0].set(1e-38).at[2, 0].set(-1e-30)
    values, scale = po.quantize_int8(array)
    np.testing.assert_array_equal(scale[jnp.array([0, 1, 3])], 1)
    np.testing.assert_array_equal(values[:, 0], [0, 0, -127, 0])
    for shape in ((0, 3), (3, 0)):
        values, scale = po.quantize_int8(jnp.zeros(shape))
        assert (values.shape, scale.shape) == (shape, shape[:1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_under_jit_stays_visible(bad):
    array = _draw(0, 3, 4).at[1, 2].set(bad)
    with pytest.raises(ValueError, match=r"float32\[3, 4\] has entries that are NaN, infinite"):
        po.quantize_int8(array)
    values, scale = jax.jit(po.quantize_int8)(array)
    np.testing.assert_array_equal(np.isnan(scale), [False, True, False])
    out = po.quantized_matmul(jnp.ones((1, 4)), values, scale, transpose_rhs=True)
    np.testing.assert_array_equal(np.isnan(out), [[False, True, False]])


def test_quantize_refuses_what_it_cannot_round():
    with pytest.raises(TypeError, match=r"floating-point numbers, got int32\[3\]"):
        po.quantize_int8(jnp.arange(3))
    with pytest.raises(ValueError, match=r"no axis 2 in float32\[3, 4\]"):
        po.quantize_int8(jnp.ones((3, 4)), axis=2)
    with pytest.raises(ValueError, match=r"no axis \(\)"):
        po.quantize_int8(jnp.ones((3, 4)), axis=())


def test_quantized_weights_are_near_the_weights():
    """The error of a product: at most half a scale for each weight, and far below that in sum."""
    x, weight = _draw(0, 8, 256), _draw(1, 64, 256)
    values, scale = po.quantize_int8(weight)
    out = np.asarray(_ours("xla")(x, values, scale), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    bound = np.abs(np.asarray(x, np.float64)).sum(axis=1, keepdims=True) * np.asarray(scale) / 2
    assert (np.abs(out - exact) <= bound).all()
    assert np.abs(out - exact).mean() < 0.01 * np.abs(exact).mean()
