import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.tiles import block_granules, why_illegal

from .tools import matmul_problem


@pytest.mark.parametrize("block", [0, -8])
def test_blocks_are_positive(block):
    with pytest.raises(ValueError, match=r"TileConfig\.block_k must be positive"):
        po.TileConfig(8, block, 128)


@pytest.mark.parametrize("block", [1.5, "8", True, None])
def test_blocks_are_integers(block):
    with pytest.raises(TypeError, match="block_k"):
        po.TileConfig(8, block, 128)


def test_numpy_integers_are_taken_and_equal_python_ones():
    assert po.TileConfig(np.int64(8), 128, 256) == po.TileConfig(8, 128, 256)
    assert hash(po.TileConfig(np.int64(8), 128, 256)) == hash(po.TileConfig(8, 128, 256))


@pytest.mark.parametrize(
    ("dtype", "out", "layout", "granules"),
    [
        ("float32", "float32", "NN", (8, 128, 128)),
        ("float32", "float32", "NT", (8, 128, 128)),
        ("float32", "float32", "TN", (128, 8, 128)),
        ("float32", "float32", "TT", (128, 128, 128)),
        ("bfloat16", "bfloat16", "NN", (16, 128, 128)),
        ("bfloat16", "float32", "TN", (128, 16, 128)),
        ("int8", "int32", "NN", (32, 128, 128)),
        ("int8", "int8", "TN", (128, 32, 128)),
    ],
)
def test_granules(dtype, out, layout, granules):
    assert block_granules(matmul_problem(999, 999, 999, dtype, out=out, layout=layout)) == granules


def test_a_block_is_a_multiple_or_the_whole_axis():
    p = matmul_problem(100, 300, 300)
    assert why_illegal(p, po.TileConfig(8, 128, 128)) is None
    assert why_illegal(p, po.TileConfig(100, 300, 300)) is None
    reason = why_illegal(p, po.TileConfig(9, 100, 300))
    assert "block_m=9 is neither a multiple of 8 nor the whole axis m=100" in reason
    assert "block_k=100 is neither a multiple of 128 nor the whole axis k=300" in reason
    assert "block_n" not in reason


def test_larger_blocks_are_cut_to_the_axis():
    p = matmul_problem(100, 300, 50)
    assert po.TileConfig(512, 128, 512).clipped_to(p) == po.TileConfig(100, 128, 50)
