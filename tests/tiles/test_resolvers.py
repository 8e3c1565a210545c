import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import pallas_ops as po
from pallas_ops.tiles import (
    as_tile_choice,
    block_granules,
    estimate_vmem_bytes,
    resolve_tile,
    TileChoice,
    vmem_budget_bytes,
    why_illegal,
)


SIZES = st.integers(1, 20_000)
DEVICES = st.sampled_from([None, "v4", "v5e", "TPU v5 lite", "TPU v5", "v6e", "TPU7x", "TPU v99"])
DTYPES = st.sampled_from(
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("int8", "int8", "int32"),
    ]
)


@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    layout=st.tuples(st.booleans(), st.booleans()),
    dtypes=DTYPES,
    precision=st.sampled_from(list(lax.Precision)),
    device=DEVICES,
)
@settings(max_examples=300, deadline=None)
def test_the_static_tile_is_legal_and_within_the_budget(sizes, layout, dtypes, precision, device):
    m, k, n = sizes
    lhs, rhs, out = map(jnp.dtype, dtypes)
    problem = po.MatmulProblem(
        lhs_shape=(k, m) if layout[0] else (m, k),
        rhs_shape=(n, k) if layout[1] else (k, n),
        lhs_dtype=lhs,
        rhs_dtype=rhs,
        out_dtype=out,
        transpose_lhs=layout[0],
        transpose_rhs=layout[1],
        precision=precision,
    )
    resolution = po.StaticResolver().resolve(problem, device)
    tile = resolution.tile
    assert why_illegal(problem, tile) is None
    assert estimate_vmem_bytes(problem, tile) <= vmem_budget_bytes(device)
    assert resolution.source == "static estimate"
    assert resolution == po.StaticResolver().resolve(problem, device)
    # No block is so uneven that a whole granule of every step is wasted.
    for size, block, granule in zip(sizes, tile.blocks, block_granules(problem), strict=True):
        steps = -(-size // block)
        assert steps * block - size < steps * granule


@pytest.mark.parametrize(
    ("mkn", "blocks"),
    [
        ((4096, 4096, 4096), (1024, 1024, 512)),
        ((1, 1536, 8960), (1, 768, 512)),
        ((7, 9, 3), (7, 9, 3)),
    ],
)
def test_static_tiles_by_hand(mkn, blocks):
    m, k, n = mkn
    bf16 = jnp.dtype(jnp.bfloat16)
    problem = po.MatmulProblem((m, k), (k, n), bf16, bf16, bf16)
    assert po.StaticResolver().resolve(problem, "v5e").tile.blocks == blocks


def _float32_problem(m=300, k=300, n=300):
    f32 = jnp.dtype(jnp.float32)
    return po.MatmulProblem((m, k), (k, n), f32, f32, f32)


def test_an_illegal_tile_is_named_with_its_source():
    with pytest.raises(ValueError, match=r"named by the call.*block_m=9 is neither"):
        resolve_tile(_float32_problem(), TileChoice(forward=po.TileConfig(9, 128, 128)), None)


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

        def resolve(self, problem, device):
            return po.StaticResolver().resolve(problem, device)

    with pytest.raises(TypeError, match="must be hashable"):
        as_tile_choice(Unhashable())


@dataclasses.dataclass(frozen=True)
class Recording:
    """A resolver that remembers what it was asked; equal to itself alone."""

    asked: list = dataclasses.field(default_factory=list, compare=False)
    name: str = ""

    def resolve(self, problem, device):
        self.asked.append((problem, device))
        return po.StaticResolver().resolve(problem, device)


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
    asked = {(p.layout, p.m, p.k, p.n) for p, _ in resolver.asked}
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

    def resolve(self, problem, device):
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
        # Four copies of the lhs block of 4 MiB.
        ("float32 float32 float32", "highest", "NN", 4096, 34),
        # lhs raised to float32: one copy.
        ("bfloat16 float32 float32", "default", "NN", 4096, 18),
    ],
)
def test_vmem_by_hand(dtypes, precision, layout, k, mib):
    lhs, rhs, out = map(jnp.dtype, dtypes.split())
    problem = po.MatmulProblem(
        (k, 4096) if layout == "TN" else (4096, k),
        (k, 4096),
        lhs,
        rhs,
        out,
        transpose_lhs=layout == "TN",
        precision=lax.Precision(precision),
    )
    assert estimate_vmem_bytes(problem, po.TileConfig(1024, 1024, 512)) == mib * MIB


def test_cost_of_a_problem():
    problem = _float32_problem(2, 3, 5)
    assert problem.flops == 2 * 2 * 3 * 5
    assert problem.bytes_accessed == 4 * (2 * 3 + 3 * 5 + 2 * 5)
