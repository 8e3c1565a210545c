"""Legality, VMEM, candidates, classes of m: the checks that every path makes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pallas_ops as po
from pallas_ops._hardware import GENERATIONS
from pallas_ops.compiler import compile_for_tpu
from pallas_ops.kernels import pallas_matmul, why_no_parts
from pallas_ops.tiles import (
    block_granules,
    candidates,
    Entry,
    estimate_seconds,
    estimate_vmem_bytes,
    nearest_legal,
    problem_key,
    resolve_tile,
    TileChoice,
    TileStore,
    versions,
    vmem_limit_bytes,
    why_illegal,
    why_too_large,
)
from pallas_ops.tiles._key import m_class

from .conftest import forget_what_this_process_knows
from .tools import matmul_problem, RecordingTimer, tile_problem


MIB = 1024 * 1024

# One row, primes, whole granules and one off them, and whatever else.
SIZES = st.one_of(
    st.sampled_from([1, 2, 7, 8, 127, 128, 129, 1021, 1024, 4096, 4097, 8192, 65_537]),
    st.integers(1, 20_000),
)
DTYPES = [
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("int8", "int8", "int32"),
    ("int8", "int8", "int8"),
    ("bfloat16", "int8", "bfloat16"),
    ("int8", "float32", "float32"),
]
LAYOUTS = ["NN", "NT", "TN", "TT"]
DEVICES = [None, *GENERATIONS, "TPU v5 lite", "TPU v99"]


def problem_from(sizes, dtypes, layout, precision, leading, summed, device):
    matmul = matmul_problem(*sizes, *dtypes, layout, precision=precision)
    return po.TileProblem(
        dataclasses.replace(
            matmul,
            lhs_shape=(*leading, *matmul.lhs_shape),
            rhs_shape=(*leading, *matmul.rhs_shape),
            sum_leading=(summed,) * len(leading),
        ),
        device=device,
    )


# Drawn in parts, and put together in the test: the check of types at run time, which is on in
# tests, takes samples with `random`, and no strategy may.
PARTS = st.fixed_dictionaries(
    dict(
        sizes=st.tuples(SIZES, SIZES, SIZES),
        dtypes=st.sampled_from(DTYPES),
        layout=st.sampled_from(LAYOUTS),
        precision=st.sampled_from(list(jax.lax.Precision)),
        leading=st.sampled_from([(), (), (3,), (2, 5)]),
        summed=st.booleans(),
        device=st.sampled_from(DEVICES),
    )
)


@given(parts=PARTS, most=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_candidates(parts, most):
    problem = problem_from(**parts)
    matmul = problem.matmul
    found = candidates(problem, most=most)
    assert 1 <= len(found) <= most
    assert len(set(found)) == len(found)
    default = po.StaticResolver().resolve(problem).tile
    assert default in found
    generation = GENERATIONS.get(problem.device)
    most_vmem = generation.info.vmem_capacity_bytes if generation else 16 * MIB
    for tile in found:
        assert why_illegal(matmul, tile) is None
        assert why_too_large(problem, tile) is None
        assert tile == tile.clipped_to(matmul)
        limit = vmem_limit_bytes(problem, tile)
        default_limit = generation.scoped_vmem_limit_bytes if generation else 16 * MIB
        assert estimate_vmem_bytes(matmul, tile) <= (limit or default_limit) <= most_vmem
        # As it is resolved, it is the same.
        assert resolve_tile(problem, TileChoice(forward=tile)).tile == tile
    times = [estimate_seconds(problem, tile) for tile in found]
    assert all(time > 0 for time in times)
    # The default is put last where it is not among the best.
    ordered = times if found[-1] != default else times[:-1]
    assert ordered == sorted(ordered)
    assert found == candidates(problem, most=most)


def test_candidates_for_shapes_that_matter():
    """A tuner must have the tile that is known to be best (the project's design, "Tiles")."""
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device="v5e")
    # Among the first, or a sweep would spend its budget on others.
    assert po.TileConfig(1024, 4096, 512, 8) in candidates(problem, most=4)
    # On a v4, where the limit cannot be raised, it is not.
    v4 = tile_problem(4096, 4096, 4096, "bfloat16", device="v4")
    assert po.TileConfig(1024, 4096, 512) not in candidates(v4, most=10_000)
    assert candidates(tile_problem(1, 1, 1)) == (po.TileConfig(1, 1, 1),)
    with pytest.raises(ValueError, match="`most` must be at least 1"):
        candidates(problem, most=0)


@pytest.mark.parametrize(
    ("device", "in_parts"),
    [("v4", False), ("v5e", True), ("v5p", False), ("v6e", True), ("tpu7x", True), (None, False)],
)
def test_first_blocks_come_in_parts_on_one_core(device, in_parts):
    """Two TensorCores of a v4 or v5p may share the grid of a kernel that Pallas fetches for."""
    problem = tile_problem(2048, 2048, 2048, "bfloat16", device=device)
    found = candidates(problem, most=100)
    assert any(tile.prologue_parts > 1 for tile in found) == in_parts
    assert (po.StaticResolver().resolve(problem).tile.prologue_parts > 1) == in_parts
    # Each choice of blocks in one way.
    assert len({tile.blocks for tile in found}) == len(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_candidates_are_those_that_the_kernel_takes(layout):
    """`candidates` has its own arithmetic for many tiles at once: none of them may lose parts."""
    for sizes in ((2048, 4096, 1024), (512, 1792, 640), (1000, 2048, 384)):
        problem = tile_problem(*sizes, "bfloat16", device="v5e", layout=layout)
        granules = block_granules(problem.matmul)
        found = candidates(problem, most=1000)
        assert len(found) > 50
        for tile in found:
            parts = int(tile.prologue_parts)
            assert why_no_parts(problem.matmul, tile.blocks, parts, granules) is None


def test_parts_are_for_a_product_that_waits_for_its_multiplications():
    decode = tile_problem(8, 4096, 14336, "bfloat16", device="v5e", layout="NT")
    assert candidates(decode, most=1)[0].prologue_parts == 1
    ragged = tile_problem(2000, 4096, 4096, "bfloat16", device="v5e", layout="NT")
    for tile in candidates(ragged, most=100):
        assert tile.prologue_parts == 1 or 2000 % tile.block_m == 0
    deep = tile_problem(2048, 4096, 4096, "bfloat16", device="v5e", layout="NT")
    for tile in candidates(deep, most=100):
        assert tile.block_k // tile.prologue_parts >= 256 or tile.prologue_parts == 1


def test_the_estimate_orders_tiles_as_published_timings_do():
    """Bfloat16 at 4096^3 on a v5e: 12, 153, 185 and 190 TFLOP/s (the project's design)."""
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device="v5e")
    tiles = [(128, 128, 128), (512, 512, 512), (1024, 1024, 512), (1024, 4096, 512)]
    times = [estimate_seconds(problem, po.TileConfig(*blocks)) for blocks in tiles]
    # The last two are too near to each other for an estimate.
    assert times[0] > times[1] > max(times[2:])
    for seconds, tflops in zip(times, (12, 153, 185, 190), strict=True):
        assert tflops / 2 < problem.matmul.flops / seconds / 1e12 < 1.1 * tflops


# What is asked for and cannot be.


@given(
    parts=PARTS,
    blocks=st.tuples(*[st.one_of(st.integers(1, 400), st.integers(1, 9000))] * 3),
)
@settings(max_examples=150, deadline=None)
def test_the_nearest_legal_tile_is_legal_and_nearest(parts, blocks):
    matmul = problem_from(**parts).matmul
    tile = po.TileConfig(*blocks).clipped_to(matmul)
    nearest = nearest_legal(matmul, tile)
    assert why_illegal(matmul, nearest) is None
    assert nearest_legal(matmul, nearest) == nearest
    sizes, granules = (matmul.m, matmul.k, matmul.n), block_granules(matmul)
    for size, granule, block, found in zip(
        sizes, granules, tile.blocks, nearest.blocks, strict=True
    ):
        around = block // granule * granule
        legal = {size, *(x for x in (around, around + granule) if 0 < x <= size)}
        assert abs(found - block) == min(abs(other - block) for other in legal)
    if why_illegal(matmul, tile) is None:
        assert nearest == tile


def _tiles_in(message):
    found = re.findall(r"TileConfig\(block_m=(\d+), block_k=(\d+), block_n=(\d+)\)", message)
    return [po.TileConfig(*map(int, blocks)) for blocks in found]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_illegal_tile_is_told_with_axis_rule_and_nearest(device, layout):
    problem = tile_problem(300, 1000, 500, "bfloat16", layout=layout, device=device)
    asked = po.TileConfig(9, 100, 300)
    with pytest.raises(ValueError, match="is not a tile that a TPU takes") as error:
        resolve_tile(problem, TileChoice(forward=asked))
    text = str(error.value)
    granules = block_granules(problem.matmul)
    for axis, size, block, granule in zip(
        "mkn", (300, 1000, 500), asked.blocks, granules, strict=True
    ):
        rule = f"block_{axis}={block} is neither a multiple of {granule} nor the whole axis"
        assert f"{rule} {axis}={size}" in text
    named, nearest = _tiles_in(text)
    assert named == asked
    assert resolve_tile(problem, TileChoice(forward=nearest)).tile == nearest


def test_a_tile_that_is_illegal_and_too_large_ends_at_one_that_runs():
    """The tile that the error names is one that fits as well."""
    problem = tile_problem(9000, 9000, 9000, device="v5e")
    tile = po.TileConfig(8999, 8999, 8999)
    with pytest.raises(ValueError, match="takes is") as error:
        resolve_tile(problem, TileChoice(forward=tile))
    tile = _tiles_in(str(error.value))[-1]
    assert resolve_tile(problem, TileChoice(forward=tile)).tile == tile


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tile_that_is_too_large_is_told_with_estimate_limit_and_largest(device, dtype):
    problem = tile_problem(8192, 8192, 8192, dtype, device=device)
    asked = po.TileConfig(8192, 4096, 8192)
    with pytest.raises(ValueError, match="is too large for") as error:
        resolve_tile(problem, TileChoice(forward=asked))
    text = str(error.value)
    needed = estimate_vmem_bytes(problem.matmul, asked) / MIB
    generation = GENERATIONS.get(problem.device)
    capacity = generation.info.vmem_capacity_bytes / MIB if generation else 128
    assert f"the blocks need {needed:.1f} MiB of VMEM by estimate" in text
    assert f"has at most {capacity:g} MiB" in text
    _, largest = _tiles_in(text)
    resolution = resolve_tile(problem, TileChoice(forward=largest))
    assert resolution.tile == largest
    # And it is no token: half of what there is, or more, is used.
    assert estimate_vmem_bytes(problem.matmul, largest) >= capacity * MIB / 4


LARGE = po.TileConfig(1024, 4096, 512)


@pytest.mark.parametrize("device", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_the_vmem_limit_is_raised_where_it_must_and_can(device):
    """28 MiB of blocks, 36 with what a v6e's compiler adds: too much for any without being asked,
    out of reach on a v4."""
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device=device)
    if device == "v4":
        with pytest.raises(ValueError, match="TPU v4 has at most 16 MiB"):
            resolve_tile(problem, TileChoice(forward=LARGE))
        assert vmem_limit_bytes(problem, LARGE) is None
        return
    limit = resolve_tile(problem, TileChoice(forward=LARGE)).vmem_limit_bytes
    generation = GENERATIONS[device]
    assert 36.3 * MIB <= limit <= generation.info.vmem_capacity_bytes
    small = po.TileConfig(512, 512, 512)
    assert resolve_tile(problem, TileChoice(forward=small)).vmem_limit_bytes is None


def test_the_vmem_limit_leaves_room_for_what_the_compiler_adds():
    """16 MiB of blocks fill the default limit of a v5e to the last byte: more must be asked for."""
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device="v5e")
    tile = po.TileConfig(1024, 1024, 1024)
    assert estimate_vmem_bytes(problem.matmul, tile) == 16 * MIB
    assert vmem_limit_bytes(problem, tile) >= 20 * MIB


@pytest.mark.parametrize("device", [None, "TPU v99"])
def test_an_unknown_device_gets_a_raised_limit_for_a_named_tile_alone(device):
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device=device)
    for tile in candidates(problem, most=1000):
        assert vmem_limit_bytes(problem, tile) is None
    assert resolve_tile(problem, TileChoice(forward=LARGE)).vmem_limit_bytes > 28 * MIB


def test_a_resolvers_own_limit_is_kept():
    class Fixed:
        def resolve(self, problem):
            return po.Resolution(po.TileConfig(8, 128, 8), "mine", vmem_limit_bytes=1 << 24)

    assert resolve_tile(tile_problem(8, 256, 8), TileChoice(resolver=Fixed())) == po.Resolution(
        po.TileConfig(8, 128, 8), "mine", 1 << 24
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vmem_limit_bytes", "1"),
        ("vmem_limit_bytes", 2.0**24),
        ("vmem_limit_bytes", True),
        ("vmem_limit_bytes", 0),
        ("vmem_limit_bytes", -1),
        ("source", None),
        ("reason", 3),
    ],
)
def test_a_resolution_is_checked_with_all_its_fields(field, value):
    class Wrong:
        def resolve(self, problem):
            resolution = po.Resolution(po.TileConfig(8, 128, 8), "mine")
            # Past its constructor, which the checks of types that are on in tests would refuse.
            object.__setattr__(resolution, field, value)
            return resolution

    with pytest.raises(TypeError, match=f"Wrong.*{field}={value!r}, expected a "):
        resolve_tile(tile_problem(8, 256, 8), TileChoice(resolver=Wrong()))


@pytest.mark.parametrize("limit", [1, 2**30])
def test_a_stored_limit_that_cannot_be_is_left_out(store, limit):
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device="v5e")
    TileStore(store).put(Entry(problem_key(problem), versions(), LARGE, vmem_limit_bytes=limit))
    resolution = resolve_tile(problem, TileChoice(resolver=po.CachedResolver()))
    assert (resolution.tile, resolution.source) == (LARGE, "store")
    assert resolution.vmem_limit_bytes == vmem_limit_bytes(problem, LARGE)


def test_a_large_block_is_cut_to_its_axis_before_it_is_judged():
    huge = po.TileConfig(1 << 20, 1 << 20, 1 << 20)
    assert resolve_tile(tile_problem(7, 9, 11), TileChoice(forward=huge)).tile.blocks == (7, 9, 11)


# Classes of m.


@given(m=st.integers(1, 1 << 40))
@settings(max_examples=100, deadline=None)
def test_a_class_is_at_most_twice_its_members(m):
    size = m_class(m)
    assert m <= size
    assert size < 2 * m or size == 8
    assert m_class(size) == size


def test_k_and_n_are_never_rounded():
    key = problem_key(tile_problem(100, 257, 129))
    assert (key["m"], key["k"], key["n"]) == (128, 257, 129)
    assert (
        key == problem_key(tile_problem(65, 257, 129)) == problem_key(tile_problem(128, 257, 129))
    )
    for other in [(64, 257, 129), (129, 257, 129), (100, 256, 129), (100, 257, 128)]:
        assert problem_key(tile_problem(*other)) != key


@pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")
def test_a_tile_found_for_one_m_is_made_legal_for_another_of_its_class(store):
    timer = RecordingTimer(lambda problem, tile: 1.0 / tile.block_m)
    tiles = po.AutotuneResolver(timer=timer)
    assert tiles.resolve(tile_problem(100, 256, 8)).tile.block_m == 100
    for m in (120, 97, 65, 128):
        problem = tile_problem(m, 256, 8)
        resolution = tiles.resolve(problem)
        assert resolution.source == "store"
        # A block of 100 rows is no multiple of 8.
        assert resolution.tile.block_m in (m, 96, 104)
        assert resolve_tile(problem, TileChoice(resolver=tiles)).tile == resolution.tile
        x = jnp.ones((m, 256))
        out = po.matmul(x, x[:8].T, tiles=tiles, implementation="interpret")
        np.testing.assert_array_equal(out, np.full((m, 8), 256.0))
        forget_what_this_process_knows()
    assert timer.sweeps == [tile_problem(100, 256, 8)]


def test_a_stored_tile_that_does_not_fit_the_actual_m_is_a_miss(store):
    """In a table for a v4 that somebody wrote by hand: never an error, and never used."""
    problem = tile_problem(8192, 8192, 8192, device="v4")
    entry = Entry(problem_key(problem), versions(), po.TileConfig(8192, 8192, 8192))
    assert TileStore(store).put(entry)
    assert po.CachedResolver(quiet=True).resolve(problem).source == "estimate"


# What Pallas and the compiler say about the same blocks.


def _pallas_takes(matmul, tile):
    """Whether Pallas' own check of blocks passes: the kernel lowered for a TPU, not compiled."""
    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            (matmul.lhs_shape, matmul.lhs_dtype),
            (matmul.rhs_shape, matmul.rhs_dtype),
        )
    ]
    kernel = pallas_matmul(matmul, *tile.blocks)
    try:
        jax.export.export(jax.jit(kernel), platforms=["tpu"])(*operands)
    except ValueError as error:
        if "divisible by" not in str(error):
            raise
        return False
    return True


@functools.cache
def _sample(count):
    """Blocks of all kinds, some legal: on granules, one beside, the whole axis, or anything."""
    generator = np.random.default_rng(3)
    cases = []
    for number in range(count):
        sizes = generator.integers(1, 700, 3)
        dtypes = DTYPES[number % len(DTYPES)]
        layout = LAYOUTS[number // len(DTYPES) % 4]
        matmul = matmul_problem(*map(int, sizes), *dtypes, layout)
        blocks = []
        for size, granule in zip(map(int, sizes), block_granules(matmul), strict=True):
            kind = generator.integers(5)
            block = granule * int(generator.integers(1, 3)) if kind < 2 else size
            block += kind == 3
            blocks.append(max(1, min(block - (kind == 4), size)))
        cases.append((matmul, po.TileConfig(*map(int, blocks))))
    return cases


def _agree(cases):
    verdicts = [(why_illegal(matmul, tile) is None) for matmul, tile in cases]
    # Both kinds are in the sample, or it proves little.
    assert 0.2 < np.mean(verdicts) < 0.8
    for legal, (matmul, tile) in zip(verdicts, cases, strict=True):
        taken = _pallas_takes(matmul, tile)
        # Pallas asks for 8 rows of any dtype; the compiler for as many as fill a register.
        packed = min(matmul.lhs_dtype.itemsize, matmul.rhs_dtype.itemsize) < 4
        assert taken >= legal if packed else taken == legal, (matmul.describe(), tile, legal)


def test_legality_is_what_pallas_own_check_says():
    _agree(_sample(28))


@pytest.mark.slow
def test_legality_is_what_pallas_own_check_says_on_more():
    _agree(_sample(280))


def _compile(problem, tiles, device):
    """All of a problem's tiles in one program, which the compiler takes as a whole or not."""
    matmul = problem.matmul
    lhs = jax.ShapeDtypeStruct(matmul.lhs_shape, matmul.lhs_dtype)
    rhs = jax.ShapeDtypeStruct(matmul.rhs_shape, matmul.rhs_dtype)

    def program(lhs, rhs):
        return [
            po.matmul(
                lhs,
                rhs,
                transpose_lhs=matmul.transpose_lhs,
                transpose_rhs=matmul.transpose_rhs,
                preferred_element_type=matmul.out_dtype,
                implementation="mosaic",
                tiles=tile,
            )
            for tile in tiles
        ]

    text = compile_for_tpu(program, lhs, rhs, device=device).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == len(tiles)
    return text


COMPILED = [
    ((512, 1021, 640), ("bfloat16", "bfloat16", "bfloat16"), "NT"),
    ((1, 1000, 300), ("float32", "float32", "float32"), "NN"),
    ((300, 257, 1000), ("bfloat16", "float32", "float32"), "TN"),
    ((257, 1024, 129), ("float32", "bfloat16", "float32"), "TT"),
]


@pytest.mark.parametrize("device", ["v4", "v6e"])
def test_the_compiler_takes_the_candidates(device):
    sizes, dtypes, layout = COMPILED[0]
    problem = po.TileProblem(matmul_problem(*sizes, *dtypes, layout), device=device)
    _compile(problem, candidates(problem, most=3), device)


def test_near_a_limit_that_cannot_be_raised_the_compiler_is_asked():
    """Some of a v4's candidates it refuses; the default tile it takes, and one that is better."""
    problem = tile_problem(4096, 4096, 4096, "bfloat16", device="v4")
    tiles = candidates(problem, most=10_000)
    near = po.TileConfig(256, 4096, 512)  # 12.5 of 16 MiB, and the compiler adds 2.2
    assert estimate_vmem_bytes(problem.matmul, near) > 12 * MIB
    assert near in tiles
    _compile(problem, [near, po.StaticResolver().resolve(problem).tile], "v4")
    assert all(estimate_vmem_bytes(problem.matmul, tile) <= 15 * MIB for tile in tiles)


@pytest.mark.slow
@pytest.mark.parametrize("device", GENERATIONS)
@pytest.mark.parametrize(("sizes", "dtypes", "layout"), COMPILED)
def test_the_compiler_takes_more_candidates(device, sizes, dtypes, layout):
    problem = po.TileProblem(matmul_problem(*sizes, *dtypes, layout), device=device)
    _compile(problem, candidates(problem, most=6), device)


def test_the_raised_limit_reaches_the_compiled_kernel():
    """A block of k of 4096 rows needs 20 MiB, and a v5e gives 16 unless asked."""
    problem = po.TileProblem(matmul_problem(512, 8192, 512, "bfloat16"), device="v5e")
    tile = po.TileConfig(512, 4096, 512)
    limit = vmem_limit_bytes(problem, tile)
    assert limit > 16 * MIB
    assert str(limit) in _lowered(problem, tile)
    _compile(problem, [tile], "v5e")


def _lowered(problem, tile):
    x = jax.ShapeDtypeStruct(problem.matmul.lhs_shape, problem.matmul.lhs_dtype)
    w = jax.ShapeDtypeStruct(problem.matmul.rhs_shape, problem.matmul.rhs_dtype)
    with po.options(device=problem.device):
        function = jax.jit(lambda x, w: po.matmul(x, w, tiles=tile, implementation="mosaic"))
        return jax.export.export(function, platforms=["tpu"])(x, w).mlir_module()


@pytest.mark.slow
def test_the_best_tile_of_a_large_product_compiles_for_a_v5e():
    problem = po.TileProblem(matmul_problem(4096, 4096, 4096, "bfloat16"), device="v5e")
    assert vmem_limit_bytes(problem, LARGE) is not None
    _compile(problem, [LARGE], "v5e")


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("v4", "bfloat16"), pytest.param("v5e", "float32", marks=pytest.mark.slow)],
)
def test_the_compiler_takes_the_largest_tile_that_is_said_to_fit(device, dtype):
    problem = po.TileProblem(matmul_problem(8192, 8192, 8192, dtype), device=device)
    (largest,) = _tiles_in(why_too_large(problem, po.TileConfig(8192, 2048, 1024)))
    _compile(problem, [largest], device)
