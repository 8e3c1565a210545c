"""The values of `matmul`, against `jax.numpy.matmul` and a float64 product in NumPy."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_ops
from pallas_ops import TileConfig


SIZES = (1, 2, 7, 8, 9, 100, 127, 128, 129, 200, 300)

# lhs, rhs, preferred_element_type
DTYPES = {
    "f32": ("float32", "float32", None),
    "bf16": ("bfloat16", "bfloat16", None),
    "bf16->f32": ("bfloat16", "bfloat16", "float32"),
    "f32->bf16": ("float32", "float32", "bfloat16"),
    "f32*bf16": ("float32", "bfloat16", "float32"),
    "bf16*f32": ("bfloat16", "float32", "float32"),
    "bf16*f32->bf16": ("bfloat16", "float32", "bfloat16"),
    "int8->int32": ("int8", "int8", "int32"),
    "int8": ("int8", "int8", None),
}

# The leading axes of lhs and of rhs: ranks 0 to 3, broadcast in every way.
LEADING = (
    ((), ()),
    ((3,), ()),
    ((), (3,)),
    ((3,), (3,)),
    ((1,), (3,)),
    ((2, 3), ()),
    ((), (2, 3)),
    ((2, 3), (3,)),
    ((2, 1), (1, 3)),
    ((2, 1), (3,)),
    ((1, 3), (2, 1)),
    ((2, 3), (2, 3)),
    ((2, 1, 3), ()),
    ((2, 2, 2), (2,)),
    ((2, 1, 2), (1, 3, 1)),
    ((3,), (2, 2, 1)),
    ((2, 2, 2), (2, 2, 2)),
    ((), (2, 1, 2)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One product. `m`, `k` and `n` are those of the mathematics, whatever the layout."""

    m: int
    k: int
    n: int
    layout: str = "NN"
    dtypes: str = "f32"
    leading: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    tile: tuple[int, int, int] | None = None
    implementation: str = "interpret"
    seed: int = 0

    def __str__(self) -> str:
        lhs, rhs = (",".join(map(str, axes)) for axes in self.leading)
        parts = [self.implementation, self.layout, self.dtypes, f"{self.m}x{self.k}x{self.n}"]
        if any(self.leading):
            parts.append(f"({lhs})({rhs})")
        if self.tile is not None:
            parts.append("tile" + "x".join(map(str, self.tile)))
        return "-".join(parts)

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(
            transpose_lhs=self.layout[0] == "T",
            transpose_rhs=self.layout[1] == "T",
            preferred_element_type=DTYPES[self.dtypes][2],
            tiles=None if self.tile is None else TileConfig(*self.tile),
            implementation=self.implementation,
        )

    @functools.cached_property
    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, self.m, self.k, self.n])
        lhs = (self.k, self.m) if self.layout[0] == "T" else (self.m, self.k)
        rhs = (self.n, self.k) if self.layout[1] == "T" else (self.k, self.n)
        return tuple(
            _draw(rng, (*leading, *matrix), dtype)
            for leading, matrix, dtype in zip(
                self.leading, (lhs, rhs), DTYPES[self.dtypes][:2], strict=True
            )
        )

    @property
    def straight_operands(self) -> tuple[np.ndarray, np.ndarray]:
        """The operands as (..., m, k) and (..., k, n)."""
        return tuple(
            np.swapaxes(x, -1, -2) if letter == "T" else x
            for x, letter in zip(self.operands, self.layout, strict=True)
        )


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-128, 128, shape, dtype=np.int8)
    if dtype.startswith("complex"):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def _rows(dtype: str) -> int:
    """Rows of a TPU's smallest tile. Written out, so as not to ask the code under test."""
    return {"float32": 8, "int32": 8, "bfloat16": 16, "int8": 32}[dtype]


def _random_tile(rng: random.Random, layout: str, dtypes: str) -> tuple[int, int, int] | None:
    """A legal tile of small blocks, which seldom divide; `None` in one of four cases."""
    if rng.random() < 0.25:
        return None
    lhs, rhs, out = DTYPES[dtypes]
    least_m = 128 if layout[0] == "T" else max(_rows(lhs), _rows(out or lhs))
    # Rows of k in an operand that is stored with k first, lanes in one that has it last.
    least_k = max(_rows(lhs), _rows(rhs)) if layout == "TN" else 128
    block_m = least_m * rng.choice([x for x in (1, 2, 3, 8) if x * least_m <= 128])
    block_k = least_k * rng.choice([x for x in (1, 3, 7) if x * least_k <= 128])
    return block_m, block_k, 128


def _generated(count: int, seed: int, sizes: tuple[int, ...], implementation: str) -> list[Case]:
    """Seeded cases in which every size, layout, pair of dtypes and of leading axes comes often.

    Each axis walks through its own shuffles of the possibilities: each appears equally often, and
    the pairs of possibilities are spread evenly.
    """
    rng = random.Random(seed)

    def walk(values):
        while True:
            yield from rng.sample(values, len(values))

    m, k, n = walk(sizes), walk(sizes), walk(sizes)
    layouts, dtypes, leading = walk(("NN", "NT", "TN", "TT")), walk(list(DTYPES)), walk(LEADING)
    cases = []
    for number in range(count):
        layout, pair = next(layouts), next(dtypes)
        cases.append(
            Case(
                m=next(m),
                k=next(k),
                n=next(n),
                layout=layout,
                dtypes=pair,
                # Half of them plain matrices.
                leading=next(leading) if number % 2 else ((), ()),
                tile=_random_tile(rng, layout, pair),
                implementation=implementation,
                seed=seed + number,
            )
        )
    return cases


GROUP = 12

# Every layout and pair of dtypes with several ragged blocks on each axis: 129 is one more than a
# block, 300 two blocks and a part.
RAGGED = [
    Case(
        m=300,
        k=300 if layout != "TN" else 129,
        n=129,
        layout=layout,
        dtypes=dtypes,
        tile=(128 if layout[0] == "T" else 64, 128 if layout != "TN" else 32, 128),
        seed=7,
    )
    for layout, dtypes in itertools.product(("NN", "NT", "TN"), DTYPES)
]
COMPILED_IN_GROUPS = [
    *RAGGED,
    *_generated(141, 1, SIZES, "interpret"),
    *_generated(72, 2, SIZES, "xla"),
]
ONE_BY_ONE = [
    # The TPU interpreter is slow: few and small, and each meets the edge of every axis.
    Case(9, 200, 129, "NN", "f32", ((), ()), (8, 128, 128), "tpu_interpret"),
    Case(17, 129, 7, "NT", "bf16", ((), ()), (16, 128, 128), "tpu_interpret"),
    Case(129, 9, 100, "TN", "f32", ((), ()), (128, 8, 128), "tpu_interpret"),
    Case(2, 200, 9, "NT", "int8->int32", ((2,), ()), (32, 128, 128), "tpu_interpret"),
    Case(33, 40, 129, "TN", "int8", ((), ()), (128, 32, 128), "tpu_interpret"),
    Case(9, 200, 8, "NN", "f32*bf16", ((2,), (2,)), (8, 128, 128), "tpu_interpret"),
    Case(1, 1, 1, "NN", "bf16*f32", ((1, 2), (2, 1)), None, "tpu_interpret"),
]


def _unit_roundoff(dtype: Any) -> float:
    """Half the gap between 1 and the next number: 2^-24 for float32, 2^-8 for bfloat16."""
    return float(jnp.finfo(dtype).eps) / 2


def _check_against_float64(out: jax.Array, case: Case) -> None:
    """Elementwise, within a proven bound; integers exactly.

    Summing k products in any order, with unit roundoff u, is off by at most gamma_k * (|A| |B|)
    in each entry, where gamma_k = k u / (1 - k u) (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd edition, section 3.1 and equation 3.13). Here u is float32's, whatever the
    operands: that is the accumulation which is promised. Rounding once to the result's dtype adds
    that dtype's unit roundoff, relative to what is rounded.
    """
    lhs, rhs = case.straight_operands
    out_dtype = jnp.dtype(DTYPES[case.dtypes][2] or DTYPES[case.dtypes][0])
    assert out.dtype == out_dtype
    got = np.asarray(out)
    if np.issubdtype(out_dtype, np.integer):
        # Beyond the range of the dtype it wraps around, as two's complement does.
        exact = np.matmul(lhs.astype(np.int64), rhs.astype(np.int64)).astype(out_dtype)
        np.testing.assert_array_equal(got, exact, strict=True)
        return
    exact = np.matmul(lhs.astype(np.float64), rhs.astype(np.float64))
    absolute = np.matmul(np.abs(lhs.astype(np.float64)), np.abs(rhs.astype(np.float64)))
    k_u = case.k * _unit_roundoff(np.float32)
    summed = k_u / (1 - k_u) * absolute
    bound = summed + _unit_roundoff(out_dtype) * (np.abs(exact) + summed)
    assert got.shape == exact.shape
    excess = np.abs(got.astype(np.float64) - exact) - bound
    worst = np.unravel_index(np.argmax(excess), excess.shape)  # NaN is the largest
    assert (excess <= 0).all(), (
        f"{case}: at {worst} got {got[worst]}, exact {exact[worst]}, allowed {bound[worst]}"
    )


def _jnp_matmul(lhs: jax.Array, rhs: jax.Array, case: Case) -> jax.Array:
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    lhs = jnp.swapaxes(lhs, -1, -2) if case.layout[0] == "T" else lhs
    rhs = jnp.swapaxes(rhs, -1, -2) if case.layout[1] == "T" else rhs
    preferred = DTYPES[case.dtypes][2]
    out = jax.eval_shape(functools.partial(jnp.matmul, preferred_element_type=preferred), lhs, rhs)
    # XLA for CPUs may sum in bfloat16 where the result is bfloat16, as ours never does.
    wide = jnp.float32 if out.dtype == jnp.bfloat16 else out.dtype
    return jnp.matmul(lhs, rhs, preferred_element_type=wide).astype(out.dtype)


def _check_against_jnp(out: jax.Array, expected: jax.Array, case: Case) -> None:
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype), str(case)
    if jnp.issubdtype(out.dtype, jnp.integer):
        np.testing.assert_array_equal(np.asarray(out), np.asarray(expected), str(case))
        return
    # Each of the two is within the bound above of the exact product.
    absolute = np.matmul(*(np.abs(x.astype(np.float64)) for x in case.straight_operands))
    bound = case.k * _unit_roundoff(np.float32) + _unit_roundoff(out.dtype)
    difference = np.abs(np.asarray(out, np.float64) - np.asarray(expected, np.float64))
    assert (difference <= 2.1 * bound * absolute).all(), str(case)


def _all_products(cases: Sequence[Case]) -> list[tuple[jax.Array, jax.Array]]:
    """Ours and `jax.numpy`'s for each case, in one program: compiling is what costs time."""

    def products(operands):
        ours = (
            pallas_ops.matmul(*pair, **case.keywords)
            for pair, case in zip(operands, cases, strict=True)
        )
        theirs = (_jnp_matmul(*pair, case) for pair, case in zip(operands, cases, strict=True))
        return list(zip(ours, theirs, strict=True))

    # LLVM at -O0 compiles faster, and these programs hardly run.
    compiled = jax.jit(products, compiler_options={"xla_backend_optimization_level": 0})
    return compiled([case.operands for case in cases])


def test_the_generated_cases_cover_what_they_should():
    by_axis = {
        axis: {getattr(case, axis) for case in COMPILED_IN_GROUPS if case.tile is not None}
        for axis in ("m", "k", "n", "layout", "dtypes")
    }
    assert by_axis["m"] == by_axis["k"] == by_axis["n"] == set(SIZES)
    assert by_axis["layout"] == {"NN", "NT", "TN", "TT"}
    assert by_axis["dtypes"] == set(DTYPES)
    assert {case.leading for case in COMPILED_IN_GROUPS} == set(LEADING)
    pairs = {(case.layout, case.dtypes) for case in COMPILED_IN_GROUPS}
    assert pairs == set(itertools.product(by_axis["layout"], DTYPES))
    assert len(set(map(str, COMPILED_IN_GROUPS))) == 240


@pytest.mark.parametrize("start", range(0, len(COMPILED_IN_GROUPS), GROUP))
def test_generated_cases(start):
    cases = COMPILED_IN_GROUPS[start : start + GROUP]
    failures = []
    for case, (ours, theirs) in zip(cases, _all_products(cases), strict=True):
        try:
            _check_against_float64(ours, case)
            _check_against_jnp(ours, theirs, case)
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("case", ONE_BY_ONE, ids=str)
def test_tpu_interpreter(case):
    out = pallas_ops.matmul(*case.operands, **case.keywords)
    _check_against_float64(out, case)
    _check_against_jnp(out, _jnp_matmul(*map(jnp.asarray, case.operands), case), case)


def test_unnamed_implementation():
    case = Case(9, 129, 7, "NT", "bf16*f32", ((2,), ()))
    out = pallas_ops.matmul(*case.operands, **case.keywords | {"implementation": None})
    _check_against_float64(out, case)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_precision_highest(implementation):
    case = Case(9, 129, 7, "NT", "f32*bf16", implementation=implementation)
    out = pallas_ops.matmul(*case.operands, **case.keywords, precision="highest")
    _check_against_float64(out, case)


# What lies past the edge.

_INTERPRETERS = {
    "interpret": True,
    "tpu_interpret": pltpu.InterpretParams(out_of_bounds_reads="uninitialized"),
}


@pytest.mark.parametrize("implementation", _INTERPRETERS)
def test_the_interpreters_put_nan_past_the_edge(implementation):
    """Or the tests below, and every ragged case above, would say nothing about masking."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((2, 8, 128), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((None, 8, 128), lambda i: (i, 0, 0)),
        interpret=_INTERPRETERS[implementation],
    )
    blocks = np.asarray(jax.jit(call)(jnp.ones((9, 128))))
    assert (blocks.reshape(16, 128)[:9] == 1).all()
    assert np.isnan(blocks.reshape(16, 128)[9:]).all()


@pytest.mark.parametrize("implementation", _INTERPRETERS)
@pytest.mark.parametrize(
    ("layout", "tile", "k"),
    [
        ("NN", (8, 128, 128), 129),
        ("NT", (8, 128, 128), 129),
        ("TN", (128, 8, 128), 9),
        ("TT", (128, 128, 128), 129),
        ("NT", (8, 128, 128), 257),
    ],
)
def test_nan_past_the_edge_of_k_stays_out(implementation, layout, tile, k):
    case = Case(9, k, 7, layout, "f32", ((), ()), tile, implementation)
    out = pallas_ops.matmul(*case.operands, **case.keywords)
    assert np.isfinite(np.asarray(out)).all()
    _check_against_float64(out, case)


@pytest.mark.parametrize("implementation", ["interpret", "xla", "tpu_interpret"])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_users_nan_and_inf_go_where_they_go_in_jnp(implementation, value):
    """Also beside the edge of k, and to no other row or column."""
    lhs, rhs = (x.copy() for x in Case(10, 129, 9).operands)
    lhs[2, 0] = lhs[4, 128] = value
    rhs[0, 3] = rhs[128, 5] = value
    rhs[7, 6], lhs[6, 7] = 0, value  # inf * 0 is NaN
    tile = TileConfig(8, 128, 128)
    got = pallas_ops.matmul(lhs, rhs, tiles=tile, implementation=implementation)
    expected = jnp.matmul(lhs, rhs)
    touched = ~np.isfinite(np.asarray(expected))
    assert touched[[2, 4, 6]].all()
    assert touched[:, [3, 5]].all()
    assert not np.delete(np.delete(touched, [2, 4, 6], 0), [3, 5], 1).any()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)  # equal NaNs, equal infinities


# Accumulation.


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("block_k", [128, 4096])
def test_bfloat16_is_summed_in_float32(implementation, layout, block_k):
    """256 and then 4096 times 1/128: the sum in bfloat16, of numbers or of blocks, stays at 256."""
    k, m, n = 4097, 8, 8
    column = np.full((k, n), 1 / 128, np.float32)
    column[0] = 256
    lhs, rhs = np.ones((m, k), jnp.bfloat16), column.astype(jnp.bfloat16)
    if layout == "TN":
        lhs = lhs.T
    if layout == "NT":
        rhs = rhs.T
    out = pallas_ops.matmul(
        lhs,
        rhs,
        transpose_lhs=layout == "TN",
        transpose_rhs=layout == "NT",
        tiles=TileConfig(16, block_k, 128),
        implementation=implementation,
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 256 + 4096 / 128)


def test_xla_is_asked_for_sums_in_float32():
    """On a CPU it makes them so in any case; elsewhere it does what it is told."""
    xla = pallas_ops.get_operator("matmul").implementations["xla"]
    for dtype, accumulator in (("bfloat16", "float32"), ("float16", "float32"), ("int8", "int32")):
        operands = jnp.ones((2, 3), dtype), jnp.ones((3, 4), dtype)
        jaxpr = str(jax.make_jaxpr(xla.function)(*operands))
        assert f"preferred_element_type={accumulator}" in jaxpr


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_int8_is_summed_in_int32(implementation):
    lhs, rhs = np.full((2, 300), -128, np.int8), np.full((300, 3), -128, np.int8)
    call = functools.partial(
        pallas_ops.matmul, lhs, rhs, tiles=TileConfig(32, 128, 128), implementation=implementation
    )
    np.testing.assert_array_equal(call(preferred_element_type=jnp.int32), 300 * 128 * 128)
    lhs[:, 1:] = 0
    lhs[:, 0], rhs[0] = 1, 127
    lhs[:, 299], rhs[299] = 1, 1
    wrapped = call()
    assert wrapped.dtype == jnp.int8
    np.testing.assert_array_equal(wrapped, -128)  # 127 + 1, as in two's complement
    np.testing.assert_array_equal(wrapped, jnp.matmul(lhs, rhs))


# Nothing to multiply.


@pytest.mark.parametrize("implementation", ["interpret", "xla", "tpu_interpret", None])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (0, 3, 0)])
def test_zero_sized_matrices(implementation, layout, m, k, n):
    case = Case(m, k, n, layout, "bf16", implementation=implementation)
    out = pallas_ops.matmul(*case.operands, **case.keywords, bias=jnp.full(n, 5, jnp.bfloat16))
    assert (out.shape, out.dtype) == ((m, n), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 5)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize(
    "leading", [((0,), ()), ((), (0,)), ((0,), (1,)), ((2, 0), (2, 1)), ((0, 3), (3,))], ids=str
)
def test_zero_sized_leading_axes(implementation, leading):
    case = Case(2, 3, 4, leading=leading, implementation=implementation)
    out = pallas_ops.matmul(*case.operands, **case.keywords)
    assert out.shape == jnp.matmul(*case.operands).shape
    assert out.dtype == jnp.float32


# Bias and activation.


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("leading", [((), ()), ((2, 3), (3,))], ids=str)
def test_bias_and_activation(implementation, leading):
    case = Case(5, 129, 7, "NT", "bf16", leading, (16, 128, 128), implementation)
    bias = jnp.arange(-3, 4).astype(jnp.bfloat16)
    wide = dict(case.keywords, preferred_element_type=jnp.float32)
    product = pallas_ops.matmul(*case.operands, **wide)
    with_bias = pallas_ops.matmul(*case.operands, **case.keywords, bias=bias)
    both = pallas_ops.matmul(*case.operands, **case.keywords, bias=bias, activation=jax.nn.relu)
    activated = pallas_ops.matmul(*case.operands, **case.keywords, activation=jnp.tanh)
    expected = product + bias.reshape((1,) * (product.ndim - 1) + (7,)).astype(jnp.float32)
    # All of it before the one rounding, which tanh of two compilations need not share.
    np.testing.assert_array_equal(with_bias, expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(both, jnp.maximum(expected, 0).astype(jnp.bfloat16))
    difference = np.abs(np.asarray(activated, np.float32) - np.tanh(product))
    assert difference.max() <= 2**-8
    assert (np.asarray(expected) < 0).any()
    assert both.dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(), (1,), (8,), (5, 7), (1, 7)], ids=str)
def test_bias_of_the_wrong_shape(shape):
    case = Case(5, 3, 7)
    message = r"matmul: `bias` must have shape \(7,\).*float32\[5, 3\].*float32\[3, 7\]"

    def call(bias):
        return pallas_ops.matmul(*case.operands, bias=bias)

    with pytest.raises(ValueError, match=message):
        call(jnp.ones(shape))
    with pytest.raises(ValueError, match=message):
        jax.jit(call)(jnp.ones(shape))


# What surrounds a call.


@pytest.mark.parametrize("implementation", ["interpret", "xla", "tpu_interpret"])
def test_a_second_call_gives_the_same(implementation):
    case = Case(9, 129, 100, "NT", "f32", ((2,), ()), (8, 128, 128), implementation)
    jitted = jax.jit(functools.partial(pallas_ops.matmul, **case.keywords))
    eager = [pallas_ops.matmul(*case.operands, **case.keywords) for _ in range(2)]
    compiled = [jitted(*case.operands) for _ in range(2)]
    np.testing.assert_array_equal(eager[0], eager[1])
    np.testing.assert_array_equal(compiled[0], compiled[1])
    for out in (*eager, *compiled):
        _check_against_float64(out, case)


def test_other_values_through_the_same_program():
    one, other = Case(9, 129, 7, seed=1), Case(9, 129, 7, seed=2)
    for case in (one, other, one):
        _check_against_float64(pallas_ops.matmul(*case.operands, **case.keywords), case)


def test_numpy_and_jax_operands_are_the_same():
    case = Case(9, 129, 7, "TN", "bf16")
    lhs, rhs = case.operands
    on_device = pallas_ops.matmul(jnp.asarray(lhs), jnp.asarray(rhs), **case.keywords)
    for operands in ((lhs, rhs), (jnp.asarray(lhs), rhs), (lhs, jnp.asarray(rhs))):
        out = pallas_ops.matmul(*operands, **case.keywords)
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(out, on_device)


def test_operands_are_left_alone():
    case = Case(9, 129, 7, tile=(8, 128, 128))
    before = [x.copy() for x in case.operands]
    pallas_ops.matmul(*case.operands, **case.keywords).block_until_ready()
    for x, y in zip(before, case.operands, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_mixture_is_refused_under_strict_promotion():
    lhs, rhs = Case(2, 3, 4, dtypes="bf16*f32").operands
    for call in (pallas_ops.matmul, jax.jit(pallas_ops.matmul), jnp.matmul):
        with pytest.raises(Exception, match="no available implicit dtype promotion") as caught:
            call(lhs, rhs)
        assert type(caught.value).__name__ == "TypePromotionError"
    with jax.numpy_dtype_promotion("standard"):
        assert pallas_ops.matmul(lhs, rhs).dtype == jnp.matmul(lhs, rhs).dtype == jnp.float32


# Dtypes that only XLA has.


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
def test_64_bit_mode_and_complex(dtype, layout):
    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        lhs, rhs = _draw(rng, (2, 9, 100), dtype), _draw(rng, (100, 7), dtype)
        exact = np.matmul(lhs.astype(np.clongdouble), rhs.astype(np.clongdouble))
        out = pallas_ops.matmul(
            np.swapaxes(lhs, -1, -2) if layout == "TN" else lhs,
            rhs.T if layout == "NT" else rhs,
            transpose_lhs=layout == "TN",
            transpose_rhs=layout == "NT",
        )
        assert out.dtype == dtype
        # A complex product is four real ones, and k of them two sums of 2 k: Higham, section 3.6.
        bound = 2 * 2 * 100 * _unit_roundoff(dtype) * np.matmul(np.abs(lhs), np.abs(rhs))
        assert (np.abs(np.asarray(out) - exact) <= bound).all()


def test_float32_stays_float32_in_64_bit_mode():
    with jax.enable_x64(True):
        case = Case(9, 129, 7, "NT", "f32", ((2,), ()), (8, 128, 128))
        _check_against_float64(pallas_ops.matmul(*case.operands, **case.keywords), case)
        int8 = Case(9, 129, 7, "NT", "int8->int32", ((2,), ()), (32, 128, 128))
        _check_against_float64(pallas_ops.matmul(*int8.operands, **int8.keywords), int8)


@pytest.mark.parametrize("dtype", ["float16", "uint8", "int16", "int32", "bool"])
def test_other_dtypes_are_those_of_jnp(dtype):
    rng = np.random.default_rng(4)
    lhs = rng.integers(0, 2 if dtype == "bool" else 9, (2, 5, 30)).astype(dtype)
    rhs = rng.integers(0, 2 if dtype == "bool" else 9, (30, 4)).astype(dtype)
    out, expected = pallas_ops.matmul(lhs, rhs), jnp.matmul(lhs, rhs)
    assert out.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(out, expected)  # integers, which each of these holds
    with pytest.raises(pallas_ops.UnsupportedCallError, match=f"interpret.*{dtype}"):
        pallas_ops.matmul(lhs, rhs, implementation="interpret")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_8_bits_are_those_of_jnp(dtype):
    lhs, rhs = jnp.full((2, 3), 0.5, dtype), jnp.full((3, 4), 2.0, dtype)
    out, expected = pallas_ops.matmul(lhs, rhs), jnp.matmul(lhs, rhs)
    assert out.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), 3)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_integers_of_4_bits_are_those_of_jnp(dtype):
    lhs = jnp.asarray(np.arange(12).reshape(3, 4) % 3, dtype)
    out, expected = pallas_ops.matmul(lhs, lhs, transpose_rhs=True), lhs @ lhs.T
    assert out.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out, np.int32), np.asarray(expected, np.int32))


@pytest.mark.parametrize(
    ("operands", "out", "value", "k"),
    [
        ("int32", "int64", 2**30, 3),
        ("uint16", "float32", 60_000, 3),
        ("float32", "float64", 0.1, 99),
    ],
)
def test_a_wider_result_has_wider_sums(operands, out, value, k):
    with jax.enable_x64(True):
        lhs, rhs = jnp.full((1, k), value, operands), jnp.full((k, 1), value, operands)
        product = pallas_ops.matmul(lhs, rhs, preferred_element_type=out)
        exact = np.matmul(np.asarray(lhs, out), np.asarray(rhs, out))
        assert product.dtype == out
        np.testing.assert_allclose(product, exact, rtol=1e-15 if out == "float64" else 1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_debug_nans_finds_the_product(jit):
    lhs, rhs = jnp.ones((5, 7)).at[0, 0].set(jnp.inf), jnp.ones((7, 6)).at[0].set(0)
    call = jax.jit(pallas_ops.matmul) if jit else pallas_ops.matmul
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        call(lhs, rhs)
    with jax.debug_nans(True):
        assert (call(jnp.ones((5, 7)), rhs) == 6).all()


def test_without_jit():
    with jax.disable_jit():
        out = pallas_ops.matmul(jnp.ones((5, 7)), jnp.ones((7, 6)), implementation="interpret")
    assert (out == 7).all()
