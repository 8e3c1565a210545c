"""The program that is timed, as it is compiled for a TPU: the kernel in the loop, fed from HBM."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_ops as po
from pallas_ops._hardware import GENERATIONS
from pallas_ops.compiler import compile_only_device
from pallas_ops.tiles._timing import lower_chain

from .tools import matmul_problem


def compiled_chain(problem, tile, device):
    """The HLO of the timed program for a TPU that is not here."""
    sharding = jax.sharding.make_single_device_sharding(compile_only_device(device))
    operands = tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (
            (problem.lhs_shape, problem.lhs_dtype),
            (problem.rhs_shape, problem.rhs_dtype),
        )
    )
    return lower_chain(problem, tile, "mosaic", None, operands).compile().as_text()


def computation_of(text, instruction):
    """The name of the computation that the one instruction with this in it is in."""
    name, found = None, []
    for line in text.splitlines():
        begins = re.match(r"(?:ENTRY )?%([\w.\-]+) .*\{$", line)
        name = begins[1] if begins else name
        if instruction in line:
            found.append(name)
    (name,) = found
    return name


def check(problem, tile, device):
    text = compiled_chain(problem, tile, device)
    # In no array of the program, so in no operand and no result: S(1) is VMEM.
    assert "S(1)" not in text
    (body,) = re.findall(r"while\(.*body=%([\w.\-]+)", text)
    assert computation_of(text, 'custom_call_target="tpu_custom_call"') == body


@pytest.mark.parametrize("sizes", [(2048, 4096, 4096), (512, 512, 512)])
def test_the_timed_kernel_reads_hbm_in_every_step(sizes):
    tile = po.TileConfig(512, 512, 512)
    check(matmul_problem(*sizes, "bfloat16"), tile, "v5e")


@pytest.mark.slow
@pytest.mark.parametrize("device", GENERATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("sizes", [(2048, 4096, 4096), (32, 4096, 4096), (512, 512, 512)])
def test_the_timed_kernel_reads_hbm_on_every_generation(sizes, layout, dtype, device):
    problem = matmul_problem(*sizes, dtype, layout=layout)
    check(problem, po.TileConfig(256, 512, 512).clipped_to(problem), device)
