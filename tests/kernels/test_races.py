"""The kernel under the TPU interpreter's race detector, on two cores that share its grid.

Each core takes a half of the axes that the kernel calls parallel, as on a v4 or v5p: an axis that
is called so and is not shows as a race. So does a block that is read while its transfer runs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.kernels import (
    _pallas,
    Columns,
    Epilogue,
    MatmulProblem,
    pallas_matmul,
    sum_columns,
    xla_matmul,
)
from pallas_ops.kernels._epilogue import IDENTITY


FLOAT32, BFLOAT16, INT8, INT32 = map(np.dtype, ("float32", jnp.bfloat16, "int8", "int32"))


def _params():
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="uninitialized", num_cores_or_threads=2
    )
    # Since jax 0.12 a race may end the program; then the state does not say so.
    if any(field.name == "on_race" for field in dataclasses.fields(params)):
        params = dataclasses.replace(params, **{"on_race": "warn"})
    return params


def _run(call, *operands):
    """The result, and whether two accesses raced. The state that says so has no public name."""
    out = jax.tree.map(np.asarray, jax.jit(call)(*operands))
    watched = interpreter.races
    assert watched.reads, "nothing was watched"
    assert watched.writes, "nothing was watched"
    return out, watched.races_found


def _problem(k, m=16, n=128, layout="NN", dtype=FLOAT32, leading=((), ()), summed=()):
    lhs = (k, m) if layout[0] == "T" else (m, k)
    rhs = (n, k) if layout[1] == "T" else (k, n)
    return MatmulProblem(
        (*leading[0], *lhs),
        (*leading[1], *rhs),
        *(dtype, dtype, INT32 if dtype == INT8 else FLOAT32),
        transpose_lhs=layout[0] == "T",
        transpose_rhs=layout[1] == "T",
        sum_leading=summed,
    )


# Two blocks of the output at least, so that each core has one.
CASES = {
    "one step": (_problem(128), (8, 128, 128)),
    "a ragged step": (_problem(100), (8, 128, 128)),
    "three steps": (_problem(384), (8, 128, 128)),
    "a ragged end": (_problem(300), (8, 128, 128)),
    "transposed, all edges ragged": (_problem(20, 130, 7, "TN"), (128, 8, 128)),
    "bfloat16": (_problem(256, 32, layout="NT", dtype=BFLOAT16), (16, 128, 128)),
    "integers": (_problem(200, 33, dtype=INT8), (32, 128, 128)),
    "a shared operand": (_problem(256, 8, leading=((2,), (1,)), summed=(False,)), (8, 128, 128)),
    "summed axes": (_problem(256, leading=((2,), (2,)), summed=(True,)), (8, 128, 128)),
    "summed axes, one step of k": (
        _problem(128, leading=((2,), (2,)), summed=(True,)),
        (8, 128, 128),
    ),
    "summed axes, ragged": (
        _problem(200, 8, leading=((2, 2), (2, 2)), summed=(False, True)),
        (8, 128, 128),
    ),
}
FORMS = [
    *((name, "as it is") for name in CASES),
    ("three steps", "one body"),
    ("three steps", "textbook"),
]


def _form(monkeypatch, form):
    if form == "one body":  # as steps above 2**30 multiplications have it
        monkeypatch.setattr(_pallas, "_MOST_FOR_TWO_BODIES", 0)
    return {"interpret": _params(), "textbook": form == "textbook"}


def _operands(problem):
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.integers(-8, 8, shape), problem.lhs_dtype)
        for shape in (problem.lhs_shape, problem.rhs_shape)
    ]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_no_accesses_race(monkeypatch, name, form):
    problem, blocks = CASES[name]
    lhs, rhs = _operands(problem)
    kernel = pallas_matmul(problem, *blocks, **_form(monkeypatch, form))
    out, raced = _run(kernel, lhs, rhs)
    assert not raced
    np.testing.assert_array_equal(out, xla_matmul(problem, lhs, rhs))  # of small integers: exact


@pytest.mark.parametrize("name", ["one step", "three steps"])
def test_no_accesses_of_an_epilogue_race(name):
    """It reads a block for some columns more, and stores two results."""
    bare, blocks = CASES[name]
    epilogue = Epilogue(bias=Columns((1, 128), FLOAT32), functions=(IDENTITY, IDENTITY))
    problem = dataclasses.replace(bare, epilogue=epilogue)
    lhs, rhs = _operands(bare)
    bias = jnp.arange(128, dtype=jnp.float32)[None]
    kernel = pallas_matmul(problem, *blocks, interpret=_params())
    outs, raced = _run(kernel, lhs, rhs, bias)
    assert not raced
    expected = xla_matmul(bare, lhs, rhs) + jnp.broadcast_to(bias, bare.out_shape)
    for out in outs:
        np.testing.assert_array_equal(out, expected)


# Several blocks of m for the cores to share, and of n, of which only the first is summed at.
SUMS = {
    "one step": (_problem(128, 256, 256, "TN"), (128, 128, 128)),
    "three steps, ragged": (_problem(20, 250, 200, "TN"), (128, 8, 128)),
    "summed axes": (
        _problem(16, 256, 256, "TN", leading=((2, 2), (2, 2)), summed=(False, True)),
        (128, 8, 128),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_no_accesses_of_column_sums_race(name):
    problem, blocks = SUMS[name]
    lhs, rhs = _operands(problem)
    kernel = pallas_matmul(problem, *blocks, interpret=_params(), column_sums=True)
    (product, sums), raced = _run(kernel, lhs, rhs)
    assert not raced
    np.testing.assert_array_equal(product, xla_matmul(problem, lhs, rhs))
    np.testing.assert_array_equal(sums, sum_columns(problem, lhs))


def test_column_sums_that_two_cores_share_are_found(monkeypatch):
    """One block of m: the cores could share nothing but steps of n, and each would store sums."""
    own = pltpu.CompilerParams

    def parallel_n(dimension_semantics, **given):
        return own(dimension_semantics=("parallel", "parallel", "arbitrary"), **given)

    monkeypatch.setattr(pltpu, "CompilerParams", parallel_n)
    problem = _problem(128, 128, 256, "TN")
    kernel = pallas_matmul(problem, 128, 128, 128, interpret=_params(), column_sums=True)
    _, raced = _run(kernel, *_operands(problem))
    assert raced


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("three steps", "as it is"),
        ("three steps", "one body"),
        ("summed axes, one step of k", "as it is"),
    ],
)
def test_a_sum_that_two_cores_share_is_found(monkeypatch, name, form):
    """The same kernel with all of its axes called parallel: or the test above would say nothing."""
    own = pltpu.CompilerParams

    def all_parallel(dimension_semantics, **given):
        return own(dimension_semantics=("parallel",) * len(dimension_semantics), **given)

    monkeypatch.setattr(pltpu, "CompilerParams", all_parallel)
    problem, blocks = CASES[name]
    # One block of the output, so that the cores can share nothing but the sum.
    problem = _problem(
        problem.k, 8, leading=(problem.leading_shape,) * 2, summed=problem.sum_leading
    )
    kernel = pallas_matmul(problem, *blocks, **_form(monkeypatch, form))
    _, raced = _run(kernel, *_operands(problem))
    assert raced


def test_a_block_that_is_read_while_its_transfer_runs_is_found():
    def kernel(x_ref, out_ref, block_ref, arrived):
        transfer = pltpu.make_async_copy(x_ref, block_ref, arrived)
        transfer.start()
        out_ref[...] = block_ref[...]
        transfer.wait()

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=_params(),
    )
    _, raced = _run(call, jnp.ones((8, 128)))
    assert raced
