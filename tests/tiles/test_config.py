import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.tiles import block_granules, nearest_legal, why_illegal

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


def test_a_tile_says_its_parts_where_there_are_several():
    plain, in_parts = po.TileConfig(8, 512, 128), po.TileConfig(8, 512, 128, 2)
    assert repr(plain) == "TileConfig(block_m=8, block_k=512, block_n=128)"
    assert repr(in_parts) == "TileConfig(block_m=8, block_k=512, block_n=128, prologue_parts=2)"
    assert (plain.numbers, in_parts.numbers) == ((8, 512, 128), (8, 512, 128, 2))
    assert (plain.label, in_parts.label) == ("8x512x128", "8x512x128x2")
    assert plain.blocks == in_parts.blocks
    assert plain != in_parts
    with pytest.raises(ValueError, match=r"TileConfig\.prologue_parts must be positive"):
        po.TileConfig(8, 512, 128, 0)


@pytest.mark.parametrize(
    ("problem", "blocks", "parts"),
    [
        (matmul_problem(16, 1024, 256), (16, 512, 128), 4),
        (matmul_problem(16, 512, 256), (16, 4096, 128), 4),  # cut to the whole axis
        (matmul_problem(20, 1024, 256), (16, 512, 128), 1),  # a ragged edge
        (matmul_problem(16, 1024, 256), (16, 256, 128), 1),  # too shallow for four
        (matmul_problem(4, 1024, 256), (4, 512, 128), 1),  # few rows
        (matmul_problem(16, 1024, 257), (16, 512, 257), 1),  # the whole of an odd axis
    ],
)
def test_blocks_come_in_parts_where_they_can(problem, blocks, parts):
    tile = po.TileConfig(*blocks, prologue_parts=4)
    assert tile.clipped_to(problem).prologue_parts == parts
    assert nearest_legal(problem, tile).prologue_parts == parts


def test_blocks_of_a_batch_come_whole():
    batched = po.MatmulProblem(
        (3, 16, 512), (3, 512, 128), np.dtype("float32"), np.dtype("float32"), np.dtype("float32"),
        sum_leading=(False,),
    )  # fmt: skip
    assert po.TileConfig(16, 512, 128, 4).clipped_to(batched) == po.TileConfig(16, 512, 128)
