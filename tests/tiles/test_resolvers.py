import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import pallas_ops as po
from pallas_ops._hardware import find_generation
from pallas_ops.tiles import (
    as_tile_choice,
    block_granules,
    estimate_seconds,
    estimate_vmem_bytes,
    most_added_bytes,
    resolve_tile,
    TileChoice,
    why_illegal,
)
from pallas_ops.tiles._config import TileArray

from .tools import matmul_problem, tile_problem


MIB = 1024 * 1024
SIZES = st.integers(1, 20_000)
DEVICES = st.sampled_from([None, "v4", "v5e", "TPU v5 lite", "TPU v5", "v6e", "TPU7x", "TPU v99"])
DTYPES = st.sampled_from(
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("int8", "int8", "int32"),
        ("bfloat16", "int8", "bfloat16"),
        ("int8", "float32", "float32"),
    ]
)


@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    layout=st.sampled_from(["NN", "NT", "TN", "TT"]),
    dtypes=DTYPES,
    precision=st.sampled_from(list(lax.Precision)),
    device=DEVICES,
)
@settings(max_examples=300, deadline=None)
def test_the_default_tile_is_legal_and_sure_to_fit(sizes, layout, dtypes, precision, device):
    m, k, n = sizes
    lhs, rhs, out = dtypes
    problem = matmul_problem(m, k, n, lhs, rhs, out, layout, precision=precision)
    asked = po.TileProblem(problem, device=device)
    resolution = po.StaticResolver().resolve(asked)
    tile = resolution.tile
    assert why_illegal(problem, tile) is None
    assert tile == tile.clipped_to(problem)
    generation = find_generation(device)
    limit = resolve_tile(asked, TileChoice(resolver=po.StaticResolver())).vmem_limit_bytes
    default = 16 * MIB if generation is None else generation.scoped_vmem_limit_bytes
    # All that the compiler is known to add to the blocks has room.
    needed = estimate_vmem_bytes(problem, tile) + most_added_bytes(problem, tile)
    assert needed <= (default if limit is None else limit)
    if generation is None or generation.name == "v4":  # where no more can be asked for
        assert limit is None
    assert resolution.source == "estimate"
    assert resolution == po.StaticResolver().resolve(asked)
    # No block is so uneven that a whole granule of every step is wasted.
    of_m, of_k, of_n = block_granules(problem)
    granules = (of_m, max(of_k, 128), of_n)
    for size, block, granule in zip(sizes, tile.blocks, granules, strict=True):
        steps = -(-size // block)
        assert steps * block - size < steps * granule


@pytest.mark.parametrize(
    ("mkn", "device", "numbers"),
    [
        ((4096, 4096, 4096), "v5e", (512, 4096, 1024, 8)),  # 709 us by the compiler, the best 708
        ((4096, 4096, 4096), "v4", (512, 1024, 1024)),
        ((4096, 4096, 4096), None, (512, 1024, 1024)),
        ((1, 1536, 8960), "v5e", (1, 1536, 256)),
        ((7, 9, 3), "v5e", (7, 9, 3)),
    ],
)
def test_default_tiles_by_hand(mkn, device, numbers):
    m, k, n = mkn
    problem = po.TileProblem(matmul_problem(m, k, n, "bfloat16"), device=device)
    assert po.StaticResolver().resolve(problem).tile.numbers == numbers


@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    layout=st.sampled_from(["NN", "NT", "TN", "TT"]),
    dtypes=DTYPES,
    precision=st.sampled_from(list(lax.Precision)),
    device=DEVICES,
    tiles=st.lists(st.tuples(SIZES, SIZES, SIZES, st.integers(1, 8)), min_size=1, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_many_tiles_at_once_are_what_each_is_alone(sizes, layout, dtypes, precision, device, tiles):
    """The default is chosen among thousands in one go, and checked and ranked by itself."""
    problem = po.TileProblem(
        matmul_problem(*sizes, *dtypes, layout, precision=precision), device=device
    )
    tiles = [po.TileConfig(*numbers).clipped_to(problem.matmul) for numbers in tiles]
    numbers = [(*tile.blocks, int(tile.prologue_parts)) for tile in tiles]
    many = TileArray(*np.array(numbers, np.int64).T)
    alone = [estimate_vmem_bytes(problem.matmul, tile) for tile in tiles]
    assert all(type(count) is int for count in alone)
    np.testing.assert_array_equal(estimate_vmem_bytes(problem.matmul, many), alone)
    np.testing.assert_array_equal(
        most_added_bytes(problem.matmul, many),
        [most_added_bytes(problem.matmul, tile) for tile in tiles],
    )
    np.testing.assert_allclose(
        estimate_seconds(problem, many),
        [estimate_seconds(problem, tile) for tile in tiles],
        rtol=1e-12,
    )


def test_an_illegal_tile_is_named_with_its_source():
    with pytest.raises(ValueError, match=r"named by the call.*block_m=9 is neither"):
        resolve_tile(tile_problem(300, 300, 300), TileChoice(forward=po.TileConfig(9, 128, 128)))


@pytest.mark.parametrize(
    ("tiles", "error", "message"),
    [
        ((128, 128, 128), TypeError, "A tile is written TileConfig"),
        ({"backward": po.TileConfig(8, 128, 128)}, ValueError, "'backward'"),
        ({"forward": 128}, TypeError, r"tiles\['forward'\]"),
        (po.StaticResolver, TypeError, "must be a TileConfig"),
    ],
)
def test_what_tiles_does_not_take(tiles, error, message):
    with pytest.raises(error, match=message):
        as_tile_choice(tiles)


def test_a_resolver_must_be_hashable():
    class Unhashable:
        __hash__ = None

        def resolve(self, problem):
            return po.StaticResolver().resolve(problem)

    with pytest.raises(TypeError, match="must be hashable"):
        as_tile_choice(Unhashable())


@dataclasses.dataclass(frozen=True)
class Recording:
    """A resolver that remembers what it was asked; equal to itself alone."""

    asked: list = dataclasses.field(default_factory=list, compare=False)
    name: str = ""

    def resolve(self, problem):
        self.asked.append(problem)
        return po.StaticResolver().resolve(problem)


def test_a_resolver_is_asked_once_for_each_product_in_its_final_shape():
    resolver = Recording(name="final shape")
    assert isinstance(resolver, po.TileResolver)
    x, w = jnp.ones((5, 3, 7)), jnp.ones((4, 7))

    def loss(x, w):
        row = lambda x: po.matmul(  # noqa: E731
            x, w, transpose_rhs=True, tiles=resolver, implementation="interpret"
        )
        return (jax.vmap(row)(x) ** 2).sum()

    jax.jit(jax.grad(loss, (0, 1)))(x, w)
    asked = {(p.layout, p.m, p.k, p.n) for p in resolver.asked}
    assert asked == {("NT", 15, 7, 4), ("NN", 15, 4, 7), ("TN", 4, 15, 7)}
    assert len(resolver.asked) == 3


def test_a_mapping_names_the_tiles_of_the_gradients():
    x, w = jnp.ones((40, 300)), jnp.ones((300, 200))

    def gradient(role):
        tiles = {role: po.TileConfig(9, 9, 9)}
        f = lambda x, w: po.matmul(x, w, tiles=tiles, implementation="interpret").sum()  # noqa: E731
        return jax.grad(f, (0, 1))(x, w)

    for role, layout in (("forward", "NN"), ("lhs_cotangent", "NT"), ("rhs_cotangent", "TN")):
        with pytest.raises(ValueError, match=re.escape("TileConfig(block_m=9")) as error:
            gradient(role)
        assert f"layout {layout}" in str(error.value)


@pytest.mark.parametrize("implementation", ["interpret", "tpu_interpret"])
def test_every_kernel_implementation_refuses_an_illegal_tile(implementation):
    with pytest.raises(ValueError, match="not a tile that a TPU takes"):
        po.matmul(
            jnp.ones((30, 30)),
            jnp.ones((30, 30)),
            tiles=po.TileConfig(9, 9, 9),
            implementation=implementation,
        )


def test_an_illegal_tile_is_refused_where_xla_computes_too():
    x = jnp.ones((200, 300))
    with pytest.raises(ValueError, match="block_k=100 is neither"):
        po.matmul(x, x.T, tiles=po.TileConfig(8, 100, 128))


@dataclasses.dataclass(frozen=True)
class Wrong:
    answer: object

    def resolve(self, problem):
        return self.answer


@pytest.mark.parametrize("answer", [None, po.TileConfig(8, 128, 128), (8, 128, 128)])
def test_a_resolver_that_answers_with_something_else_is_named(answer):
    x = jnp.ones((8, 8))
    with pytest.raises(TypeError, match=r"Wrong\(answer=.*expected a pallas_ops\.Resolution"):
        po.matmul(x, x, tiles=Wrong(answer), implementation="interpret")


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("dtypes", "precision", "layout", "k", "mib"),
    [
        # Two buffers of 2, 1 and 1 MiB, and a float32 accumulator of 2 MiB.
        ("bfloat16 bfloat16 bfloat16", "default", "NN", 4096, 10),
        # No accumulator for a single step of k.
        ("bfloat16 bfloat16 bfloat16", "default", "NN", 1024, 8),
        # A transposed and masked copy of lhs.
        ("bfloat16 bfloat16 bfloat16", "default", "TN", 4000, 12),
        ("float32 float32 float32", "default", "NN", 4096, 18),
        # Three pieces of bfloat16 of 6 MiB, and three products of 2.
        ("float32 float32 float32", "highest", "NN", 4096, 33),
        # lhs raised to float32: one copy.
        ("bfloat16 float32 float32", "default", "NN", 4096, 18),
    ],
)
def test_vmem_by_hand(dtypes, precision, layout, k, mib):
    precision = lax.Precision(precision)
    problem = matmul_problem(4096, k, 4096, *dtypes.split(), layout, precision=precision)
    assert estimate_vmem_bytes(problem, po.TileConfig(1024, 1024, 512)) == mib * MIB


def test_cost_of_a_problem():
    problem = matmul_problem(2, 3, 5)
    assert problem.flops == 2 * 2 * 3 * 5
    assert problem.bytes_accessed == 4 * (2 * 3 + 3 * 5 + 2 * 5)


TILE = po.TileConfig(8, 128, 128)
OTHER = po.TileConfig(16, 128, 128)


def _by_rows(problem):
    return TILE if problem.m == 300 else None


@pytest.mark.parametrize(
    "tiles",
    [
        TILE,
        {(300, 300, 300): TILE},
        # What is said of the problem itself goes before what is said of its sizes.
        {(300, 300, 300): OTHER, tile_problem(300, 300, 300): TILE},
        _by_rows,
    ],
    ids=["tile", "sizes", "problem", "function"],
)
def test_what_was_said_to_a_static_resolver(tiles):
    resolver = po.StaticResolver(tiles)
    assert hash(resolver) == hash(po.StaticResolver(tiles))
    assert resolver == po.StaticResolver(tiles)
    resolution = resolver.resolve(tile_problem(300, 300, 300))
    assert (resolution.tile, resolution.source) == (TILE, "static")
    if tiles is not TILE:
        other = tile_problem(301, 300, 300)
        assert resolver.resolve(other) == po.StaticResolver().resolve(other)


def test_a_large_mapping_is_read_once_and_stays_hashable():
    class Counting(dict):
        def items(self):
            reads.append(1)
            return super().items()

    reads, tile = [], po.TileConfig(8, 128, 128)
    said = Counting({(m, 128, 256): tile for m in range(8, 808, 8)})
    resolver = po.StaticResolver(said)
    assert resolver == po.StaticResolver(dict(said))
    assert hash(resolver) == hash(po.StaticResolver(dict(said)))
    said.clear()  # what was said is said
    reads.clear()
    for m in (8, 400, 800):
        assert resolver.resolve(tile_problem(m, 128, 256)).source == "static"
    assert resolver.resolve(tile_problem(9, 128, 256)).source == "estimate"
    # No dictionary is made of it for a question.
    assert isinstance(resolver._mapping, dict)
    assert reads == []
    assert "_mapping" not in repr(resolver)


def test_a_collected_problem_is_a_key_for_a_static_resolver():
    """Whether a program can be timed here is no part of what a person says about a problem."""
    x = jax.ShapeDtypeStruct((300, 300), jnp.float32)
    (collected,) = po.tiles.collect(po.matmul, x, x, implementation="interpret")
    resolver = po.StaticResolver({collected: TILE})
    assert resolver.resolve(tile_problem(300, 300, 300)).source == "static"
    x = jnp.ones((300, 300))
    text = (
        jax.jit(lambda x: po.matmul(x, x, tiles=resolver, implementation="interpret"))
        .lower(x)
        .as_text()
    )
    named = jax.jit(lambda x: po.matmul(x, x, tiles=TILE, implementation="interpret"))
    assert text == named.lower(x).as_text()


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (po.TileConfig, "or nothing; got"),
        ({(8, 128): TILE}, "a key of the mapping is"),
        ({(8, 128, 0): TILE}, "a key of the mapping is"),
        ({(8, 128, 128): (8, 128, 128)}, "is no TileConfig"),
    ],
)
def test_what_a_static_resolver_does_not_take(tiles, message):
    with pytest.raises(TypeError, match=message):
        po.StaticResolver(tiles)


def test_a_static_function_that_returns_something_else_is_named():
    resolver = po.StaticResolver(lambda problem: (8, 128, 128))
    with pytest.raises(TypeError, match="must return a TileConfig or None"):
        resolver.resolve(tile_problem(300, 300, 300))


def test_an_illegal_tile_of_a_resolver_is_refused_with_what_it_is():
    with pytest.raises(ValueError, match=r"said to StaticResolver.*block_m=9 is neither"):
        resolve_tile(
            tile_problem(300, 300, 300),
            TileChoice(resolver=po.StaticResolver(po.TileConfig(9, 128, 128))),
        )


def test_device_kinds_become_generations():
    names = {"TPU v5 lite": "v5e", "TPU v6e": "v6e", "TPU7x": "tpu7x", "TPU v99": "TPU v99"}
    for kind, name in names.items():
        assert tile_problem(8, 8, 8, device=kind).device == name
