"""First blocks that come in parts: the same product, and what the compiler makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.compiler import CompileJob, CompilePool, judge
from pallas_ops.kernels import run_kernel, why_no_parts

from ..compiler.tools import problem


BLOCKS = (16, 256, 128)
# Every way in which a block may stay where it is: the grid's steps over m, k and n.
GRIDS = [(1, 1, 1), (1, 1, 3), (3, 1, 1), (2, 1, 3), (1, 3, 1), (2, 2, 1), (1, 2, 2), (2, 3, 2)]


def _operands(given):
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.integers(-8, 8, shape), dtype)
        for shape, dtype in (
            (given.lhs_shape, given.lhs_dtype),
            (given.rhs_shape, given.rhs_dtype),
        )
    ]


def _check(given, implementation, blocks=BLOCKS, parts=2):
    lhs, rhs = _operands(given)
    found = jax.jit(
        lambda lhs, rhs: run_kernel(
            given, blocks, lhs, rhs, implementation=implementation, prologue_parts=parts
        )
    )(lhs, rhs)
    lhs = np.asarray(lhs, np.float64).T if given.transpose_lhs else np.asarray(lhs, np.float64)
    rhs = np.asarray(rhs, np.float64).T if given.transpose_rhs else np.asarray(rhs, np.float64)
    np.testing.assert_array_equal(found, lhs @ rhs)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_product(grid):
    sizes = [block * steps for block, steps in zip(BLOCKS, grid, strict=True)]
    _check(problem(*sizes, dtype="float32", layout="NT"), "interpret")


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_layouts_and_dtypes(layout, dtype):
    out = "int32" if dtype == "int8" else "float32"
    given = problem(256, 1024, 384, dtype=dtype, layout=layout, out=out)
    _check(given, "interpret", (128, 512, 128), 4)


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 2), (2, 2, 2)])
def test_nothing_is_read_before_it_arrives(grid):
    """This interpreter simulates DMA, and fills what was never written with NaN."""
    sizes = [block * steps for block, steps in zip(BLOCKS, grid, strict=True)]
    _check(problem(*sizes, dtype="float32"), "tpu_interpret")


def test_a_named_tile_and_its_gradients():
    tiles = po.TileConfig(*BLOCKS, prologue_parts=2)
    x, weight = _operands(problem(32, 512, 256, dtype="float32", layout="NT"))

    def loss(x, weight, **call):
        return jnp.sum(po.matmul(x, weight, transpose_rhs=True, **call) ** 2)

    found = jax.grad(loss, (0, 1))(x, weight, tiles=tiles, implementation="interpret")
    expected = jax.grad(loss, (0, 1))(x, weight, implementation="xla")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_with_bias_and_activation():
    x, weight = _operands(problem(32, 512, 256, dtype="float32", layout="NT"))
    call = dict(bias=jnp.arange(256.0), activation=jax.nn.relu, transpose_rhs=True)
    for blocks in (BLOCKS, (16, 512, 128)):
        tiles = po.TileConfig(*blocks, prologue_parts=2)
        found = po.matmul(x, weight, tiles=tiles, implementation="interpret", **call)
        expected = po.matmul(x, weight, implementation="xla", **call)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("given", "blocks", "parts", "reason"),
    [
        (problem(32, 512, 256), (16, 512, 128), 1, None),
        (problem(32, 512, 256), (16, 512, 128), 4, None),
        (problem(32, 512, 256), (16, 512, 128), 3, "whole multiples of 16x128x128"),
        (problem(33, 512, 256), (16, 512, 128), 2, "divide m, k and n evenly"),
        (problem(4, 512, 256), (4, 512, 128), 2, "whole multiples"),
        (problem(32, 512, 257), (16, 512, 257), 2, "whole multiples"),
        (
            problem(32, 512, 256, leading=(3,), summed=(True,)),
            (16, 512, 128),
            2,
            "without leading axes",
        ),
    ],
)
def test_why_there_are_no_parts(given, blocks, parts, reason):
    found = why_no_parts(given, blocks, parts, (16, 128, 128))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "device", ["v5e", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e", "tpu7x"))]
)
def test_the_compiler_takes_it_and_it_pays(device):
    """One step of k, several, and a grid of a single step."""
    given = problem(512, 1024, 1024)
    jobs = [
        CompileJob(given, device, blocks, 64 << 20, prologue_parts=parts)
        for blocks in ((256, 1024, 1024), (512, 512, 1024), (512, 1024, 1024))
        for parts in (1, 2)
    ]
    with CompilePool() as pool:
        judged = judge(jobs, pool)
    for plain, in_parts in zip(judged[::2], judged[1::2], strict=True):
        assert plain.error is None
        assert in_parts.error is None
        schedule, part = in_parts.verdict.schedule, in_parts.verdict.schedule.part
        assert 2 * part.rows == plain.verdict.schedule.middle.rows
        assert 2 * part.mxu_cycles == plain.verdict.schedule.middle.mxu_cycles
        assert schedule.start.cycles >= part.cycles
        # Every other step costs what it did, to 3 %.
        if in_parts.prediction.steps > 1:
            assert schedule.middle.rows == plain.verdict.schedule.middle.rows
            assert schedule.middle.cycles <= 1.03 * plain.verdict.schedule.middle.cycles
        if device == "v5e":  # the others wait for HBM
            assert in_parts.prediction.seconds < plain.prediction.seconds
        assert in_parts.prediction.hbm_bytes == plain.prediction.hbm_bytes
