"""Bad input: what was given, what was expected, and by which operator; eager and under jit."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_ops as po


A = jnp.ones((3, 4))
B = jnp.ones((4, 5))

CASES = {
    "contracting size": (
        lambda: po.matmul(A, A),
        ValueError,
        "contracting size k differs: lhs (..., m, k) has 4, rhs (..., k, n) has 3",
    ),
    "contracting size, transposed": (
        lambda: po.matmul(A, B, transpose_lhs=True, transpose_rhs=True),
        ValueError,
        "contracting size k differs: lhs (..., k, m) has 3, rhs (..., n, k) has 5",
    ),
    "rank 1": (
        lambda: po.matmul(A[0], B),
        ValueError,
        "`lhs` must have rank 2 or more, got rank 1",
    ),
    "rank 0": (
        lambda: po.matmul(A, jnp.float32(1)),
        ValueError,
        "`rhs` must have rank 2 or more, got rank 0",
    ),
    "leading axes": (
        lambda: po.matmul(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))),
        ValueError,
        "leading axes (2,) of lhs and (3,) of rhs do not broadcast",
    ),
    "bias size": (
        lambda: po.matmul(A, B, bias=jnp.ones(4)),
        ValueError,
        "`bias` must have shape (5,), one entry for each column of the result; got float32[4]",
    ),
    "bias rank": (
        lambda: po.matmul(A, B, bias=jnp.ones((1, 5))),
        ValueError,
        "`bias` must have shape (5,)",
    ),
    "activation": (
        lambda: po.matmul(A, B, activation=jnp.ones(3)),
        TypeError,
        "activation",
    ),
    "implementation": (
        lambda: po.matmul(A, B, implementation="cuda"),
        ValueError,
        "matmul has no implementation 'cuda'. It has: 'mosaic', 'xla', 'interpret'",
    ),
    "dtype of the kernel": (
        lambda: po.matmul(A.astype("float16"), B.astype("float16"), implementation="interpret"),
        po.UnsupportedCallError,
        "was given float16 with float16",
    ),
    "dtype of the result": (
        lambda: po.matmul(A, B, preferred_element_type=jnp.int32),
        TypeError,
        "int32 cannot hold the product of floating-point operands",
    ),
    "unknown dtype": (
        lambda: po.matmul(A, B, preferred_element_type="float33"),
        TypeError,
        "`preferred_element_type` must be a dtype of numbers, such as jax.numpy.float32, got",
    ),
    "keys": (
        lambda: po.matmul(jax.random.split(jax.random.key(0), (2, 2)), A),
        TypeError,
        "`lhs` must be an array of numbers, got dtype key<fry>",
    ),
    "promotion": (
        lambda: po.matmul(A, B.astype(jnp.bfloat16)),
        jax.dtypes.TypePromotionError,
        "no available implicit dtype promotion path",
    ),
    "platform": (
        lambda: po.matmul(A, B, implementation="mosaic"),
        ValueError,
        "implementation 'mosaic' runs on tpu, and this program is compiled for another platform",
    ),
    "algorithm": (
        lambda: po.matmul(A, B, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32),
        TypeError,
        "a dot algorithm",
    ),
    "algorithm by name": (
        lambda: po.matmul(A, B, precision="BF16_BF16_F32_X3"),
        TypeError,
        "a dot algorithm",
    ),
    "precision": (
        lambda: po.matmul(A, B, precision="best"),
        ValueError,
        "unknown precision 'best'",
    ),
    "precision of three": (
        lambda: po.matmul(A, B, precision=("high",) * 3),
        ValueError,
        "one entry for lhs and one for rhs",
    ),
    "tiles": (
        lambda: po.matmul(A, B, tiles={"backward": po.TileConfig(8, 128, 128)}),
        ValueError,
        "`tiles` has the keys forward, lhs_cotangent, rhs_cotangent; got ['backward']",
    ),
    "illegal tile": (
        lambda: po.matmul(
            jnp.ones((30, 4)), B, tiles=po.TileConfig(12, 4, 5), implementation="interpret"
        ),
        ValueError,
        "block_m=12 is neither a multiple of 8 nor the whole axis m=30",
    ),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, jit):
    call, error, message = CASES[case]
    with pytest.raises(error, match=re.escape(message)) as caught:
        (jax.jit(call) if jit else call)()
    text = str(caught.value).split("\n----")[0]  # without JAX's own note on its traceback
    assert len(text) < 700, "a one-screen error"
    if error is not jax.dtypes.TypePromotionError:
        assert "matmul" in text or "tile" in text


def test_a_list_is_no_array():
    with pytest.raises(TypeError, match="lhs"):
        po.matmul([[1.0]], A)


def test_an_error_leaves_the_next_call_alone():
    for call, error, _ in CASES.values():
        with pytest.raises(error):
            call()
    assert (po.matmul(A, B, implementation="interpret") == 4).all()
