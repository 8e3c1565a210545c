"""Tiles of products with an epilogue: their own where there is one, else the product's."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pallas_ops as po
from pallas_ops.kernels import Activation, Columns, Epilogue
from pallas_ops.tiles import (
    as_tile_choice,
    candidates,
    Entry,
    estimate_vmem_bytes,
    forget,
    problem_key,
    resolve_tile,
    TileStore,
    versions,
)
from pallas_ops.tiles._sweep import sweep

from .tools import matmul_problem


def _problem(outputs=1, m=512, k=4096, n=4096, device="v5e", implementation="mosaic"):
    bare = matmul_problem(m, k, n, "bfloat16", "bfloat16", "bfloat16", "NT")
    activation = Activation.of(jax.nn.silu, jnp.dtype(jnp.float32))
    epilogue = Epilogue(
        bias=Columns((1, n), jnp.dtype(jnp.bfloat16)), functions=activation.programs[:outputs]
    )
    matmul = dataclasses.replace(bare, epilogue=epilogue)
    return po.TileProblem(matmul, device=device, implementation=implementation)


def _store_tile(problem, store):
    tile = candidates(problem, most=2)[1]  # not the default one
    assert TileStore(store).put(Entry(problem_key(problem), versions(), tile))


def test_its_outputs_count():
    one, two = _problem(1), _problem(2)
    tile = po.TileConfig(512, 1024, 512)
    block = 512 * 512 * 2
    assert (
        estimate_vmem_bytes(two.matmul, tile) - estimate_vmem_bytes(one.matmul, tile) == 2 * block
    )
    assert two.matmul.bytes_accessed - one.matmul.bytes_accessed == 512 * 4096 * 2
    bare = one.bare.matmul.bytes_accessed
    assert one.matmul.bytes_accessed - bare == 4096 * 2


def test_keys_tell_epilogues_apart():
    keys = [problem_key(problem)["epilogue"] for problem in (_problem(1), _problem(2))]
    assert len({*keys, ""}) == 3


def test_the_products_own_tile_serves_until_there_is_another(store):
    problem = _problem(2)
    _store_tile(problem.bare, store)
    bare = po.CachedResolver().resolve(problem.bare)
    assert bare.source == "store"
    found = po.CachedResolver().resolve(problem)
    assert (found.tile, found.source) == (bare.tile, "store")
    assert "without its epilogue" in found.reason
    # With room for the second output.
    limits = [
        resolve_tile(asked, as_tile_choice(po.CachedResolver())).vmem_limit_bytes
        for asked in (problem, problem.bare)
    ]
    assert limits[0] is None or limits[0] >= estimate_vmem_bytes(problem.matmul, found.tile)
    assert limits[0] is not None or limits[1] is None


def test_a_tile_that_may_not_fit_with_the_outputs_is_shrunk(store):
    """A v4 has no more VMEM to give than the compiler's default."""
    for m in (512, 2048, 8192):
        problem = _problem(2, m=m, device="v4")
        _store_tile(problem.bare, store)
        found = po.CachedResolver().resolve(problem)
        assert found.source == "store"
        assert estimate_vmem_bytes(problem.matmul, found.tile) <= 12 * 2**20


@pytest.mark.parametrize("scaled", [False, True])
def test_the_tile_of_bfloat16_serves_beside_weights_of_int8(scaled, store):
    for device, layout in (("v5e", "NT"), ("v5e", "NN"), ("v4", "NT"), ("v4", "NN")):
        wide = po.TileProblem(
            matmul_problem(8192, 4096, 4096, "bfloat16", layout=layout), device=device
        )
        _store_tile(wide, store)
        scale = Epilogue(scale=Columns((1, 4096), jnp.dtype(jnp.float32)))
        matmul = dataclasses.replace(
            wide.matmul, rhs_dtype=jnp.dtype(jnp.int8), epilogue=scale if scaled else None
        )
        problem = po.TileProblem(matmul, device=device)
        found = po.CachedResolver().resolve(problem)
        expected = po.CachedResolver().resolve(wide)
        assert found.source == expected.source == "store"
        assert "of bfloat16 alone" in found.reason
        if device == "v4":
            assert estimate_vmem_bytes(problem.matmul, found.tile) <= 12 * 2**20
        else:
            assert found.tile == expected.tile
        resolve_tile(problem, as_tile_choice(po.CachedResolver()))


def test_it_can_be_tuned(store):
    problem = _problem(2, m=16, k=256, n=128, implementation="interpret")
    result = sweep(problem, candidates(problem, most=3), budget_seconds=60.0)
    assert result.seconds
    assert not result.failures


@pytest.mark.slow
def test_the_compiler_chooses_for_it(store):
    problem = _problem(2, m=128, k=512, n=512)
    resolution = po.CompilerResolver("v5e", most_candidates=2).resolve(problem)
    assert resolution.source == "compiler"
    forget()
    assert po.CachedResolver().resolve(problem) == dataclasses.replace(
        resolution, source="store", reason=f"found by compiler: {resolution.reason}"
    )
