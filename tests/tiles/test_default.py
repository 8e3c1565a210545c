"""The tile of a person who tunes nothing: the compiler takes it, whatever is multiplied."""

import dataclasses
import math
import random

import jax
import pytest

import pallas_ops as po
from pallas_ops._hardware import GENERATIONS
from pallas_ops.compiler import CompilePool
from pallas_ops.compiler._stand_in import stand_in
from pallas_ops.tiles import estimate_seconds
from pallas_ops.tiles._ranking import compile_job

from .tools import matmul_problem, tile_problem


DTYPES = [
    *[("bfloat16", "bfloat16", "bfloat16")] * 3,
    *[("float32", "float32", "float32")] * 3,
    *[("int8", "int8", "int32")] * 2,
    ("bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("bfloat16", "int8", "bfloat16"),
    ("int8", "float32", "float32"),
]


def generated(count, seed):
    """Products for each generation in turn: ragged sizes and whole ones, all layouts and dtypes."""
    draw = random.Random(seed)

    def size(least):
        number = round(math.exp(draw.uniform(math.log(least), math.log(16_384))))
        return max(64, number // 64 * 64) if draw.random() < 0.4 else number

    problems = []
    for index in range(count):
        device = list(GENERATIONS)[index % len(GENERATIONS)]
        dtypes = draw.choice(DTYPES)
        if dtypes[:2] == ("int8", "int8") and device == "v4":  # which has no such products
            dtypes = DTYPES[0]
        matmul = matmul_problem(
            *(size(least) for least in (1, 96, 96)),
            *dtypes,
            draw.choice(["NN", "NT", "TN", "TT"]),
            precision=draw.choice([jax.lax.Precision.DEFAULT] * 2 + list(jax.lax.Precision)),
        )
        leading = draw.choice([(), (), (), (3,)])
        matmul = dataclasses.replace(
            matmul,
            lhs_shape=(*leading, *matmul.lhs_shape),
            rhs_shape=(*leading, *matmul.rhs_shape),
            sum_leading=(draw.random() < 0.5,) * len(leading),
        )
        problems.append(po.TileProblem(matmul, device=device))
    return problems


def check_default_tiles(problems):
    jobs = {}
    for problem in problems:
        tile = po.StaticResolver().resolve(problem).tile
        jobs[stand_in(compile_job(problem, tile))] = problem, tile
    with CompilePool() as pool:
        verdicts = pool.ask(list(jobs))
    refused = [
        (problem.describe(), problem.precision, tile.label, verdict.error)
        for (problem, tile), verdict in zip(jobs.values(), verdicts, strict=True)
        if not verdict.compiles
    ]
    assert not refused, refused


def test_the_compiler_takes_default_tiles():
    check_default_tiles(generated(15, seed=0))


@pytest.mark.slow
def test_the_compiler_takes_more_default_tiles():
    check_default_tiles(generated(60, seed=1))


@pytest.mark.sweep
def test_the_compiler_takes_500_default_tiles():
    check_default_tiles(generated(500, seed=2))


@pytest.mark.sweep
@pytest.mark.parametrize("device", GENERATIONS)
def test_where_no_tpu_is_named_the_tile_is_one_for_all(device):
    """As under `jax.export` from a machine without a TPU."""
    jobs = {}
    for problem in generated(60, seed=3):
        if (problem.lhs_dtype, problem.rhs_dtype) == ("int8", "int8"):
            continue
        unnamed = dataclasses.replace(problem, device=None)
        tile = po.StaticResolver().resolve(unnamed).tile
        named = dataclasses.replace(problem, device=device)
        job = dataclasses.replace(compile_job(named, tile), vmem_limit_bytes=None)
        jobs[stand_in(job)] = problem, tile
    with CompilePool() as pool:
        verdicts = pool.ask(list(jobs))
    refused = [
        (problem.describe(), tile.label, verdict.error)
        for (problem, tile), verdict in zip(jobs.values(), verdicts, strict=True)
        if not verdict.compiles
    ]
    assert not refused, refused


def test_a_known_problem_is_not_estimated_again(monkeypatch):
    from pallas_ops.tiles import _candidates

    asked = []

    def counting(problem, tiles):
        asked.append(problem)
        return estimate_seconds(problem, tiles)

    monkeypatch.setattr(_candidates, "estimate_seconds", counting)
    problem = tile_problem(1234, 567, 891, "bfloat16", device="v5e")
    for _ in range(3):
        po.StaticResolver().resolve(dataclasses.replace(problem))
    assert asked == [problem]
