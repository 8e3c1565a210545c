"""`pallas-ops bench precision`: the passes of an MXU, which a CPU can but emulate."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.lax import Precision

from pallas_ops.commands import main
from pallas_ops.commands._precision import (
    ASKED,
    emulated_product,
    relative_error,
)
from pallas_ops.compiler import Verdict

from ..compiler.tools import answering, schedule
from ..tiles.tools import matmul_problem


def _run(*arguments):
    return CliRunner().invoke(main, ["bench", "precision", *map(str, arguments)])


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# The emulation.


def _emulated(lhs, rhs, precision, **given):
    problem = matmul_problem(
        lhs.shape[0], *rhs.shape, lhs.dtype, rhs.dtype, "float32", precision=precision
    )
    return emulated_product(lhs, rhs, problem, **given)


@pytest.mark.parametrize("offset", [0, 10])
@pytest.mark.parametrize("k", [300, 14_336])
def test_the_emulated_errors(k, offset):
    """Each precision within what its pieces leave out, and in their order by a wide margin.

    A number less its top 8 bits is below 2^-7 of it. So rounding both operands costs 2^-8; three
    passes leave out the product of two rests, 2^-14, and round each rest, 2^-16 twice; six leave
    out 2^-21 and less, and sum in float32. The rests have the signs of their numbers: where all are
    positive, what three passes leave out does not cancel.
    """
    lhs, rhs = _normal(32, k) + np.float32(offset), _normal(k, 32, seed=1) + np.float32(offset)
    one, three, six = (relative_error(_emulated(lhs, rhs, p), lhs, rhs) for p in Precision)
    in_float32 = relative_error(jnp.dot(lhs, rhs), lhs, rhs)
    assert one <= 1.01 * 2**-8
    assert three <= 2**-14 + 2**-15
    assert six <= 2**-21
    assert one >= 4 * three >= 4 * 20 * six
    # Six passes are float32: of the order of what a sum in float32 is off by.
    assert six <= 4 * in_float32


@pytest.mark.parametrize("precision", Precision)
def test_bfloat16_is_exact_in_one_pass(precision):
    lhs, rhs = (x.astype(jnp.bfloat16) for x in (_normal(16, 300), _normal(300, 16, seed=1)))
    once = _emulated(lhs, rhs, precision)
    assert relative_error(once, lhs, rhs) < 1e-6
    np.testing.assert_array_equal(once, _emulated(lhs, rhs, Precision.DEFAULT))


def test_passes_of_a_mixture_cut_one_operand():
    lhs, rhs = _normal(32, 300).astype(jnp.bfloat16), _normal(300, 32, seed=1)
    one, two, three = (relative_error(_emulated(lhs, rhs, p), lhs, rhs) for p in Precision)
    assert one <= 1.01 * 2**-9
    assert two <= 1.01 * 2**-16
    assert three <= 2**-21


@pytest.mark.parametrize("precision", Precision)
def test_infinity_in_several_passes_is_infinity(precision):
    lhs, rhs = _normal(4, 1000), _normal(1000, 4, seed=1)
    lhs[1, 7] = np.inf
    got = _emulated(lhs, rhs, precision)
    assert np.isfinite(np.delete(got, 1, 0)).all()
    np.testing.assert_array_equal(got[1], np.asarray(jnp.dot(lhs, rhs))[1])


# The command.


def test_the_rows(monkeypatch):
    answering(monkeypatch, Verdict(True, schedule=schedule(9, 9, 9), xla_cycles=1_500_000))
    result = _run("--shape", "256,300,256", "--device", "v5e", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert {name: found[name] for name in ("device", "m", "k", "n")} == {
        "device": "v5e",
        "m": 256,
        "k": 300,
        "n": 256,
    }
    rows = {(row["lhs_dtype"], row["rhs_dtype"], row["asked"]): row for row in found["rows"]}
    assert list(rows) == [(lhs, rhs, asked.name) for lhs, rhs, asked in ASKED]
    assert [row["passes"] for row in rows.values()] == [1, 3, 6, 1, 2, 3, 1]
    for (lhs, rhs, _), row in rows.items():
        assert row["predicted_us"] > 0
        assert row["xla_us"] == pytest.approx(1000, rel=0.1)  # of 1.5 GHz
        assert row["xla_source"] == "estimate"
        exact = (lhs, rhs) == ("bfloat16", "bfloat16") or row["asked"] == "HIGHEST"
        assert (row["emulated_error"] < 1e-6) == exact
        assert row["cpu_error"] < 1e-6
    text = _run("--shape", "256,300,256").stdout
    assert "emulated error" in text
    assert "those of the passes are an emulation on this CPU." in text
    assert "UNCALIBRATED" not in text
    assert "UNCALIBRATED" in _run("--shape", "256,300,256", "--device", "v6e").stdout


def test_an_offset_reaches_the_numbers(monkeypatch):
    answering(monkeypatch, Verdict(True))
    near, far = (
        [
            row["emulated_error"]
            for row in json.loads(_run("--shape", "64,512,64", "--offset", x, "--json").stdout)[
                "rows"
            ]
        ]
        for x in (0, 10)
    )
    assert far[1] > 2 * near[1]  # what three passes leave out does not cancel


def test_what_does_not_compile_is_told(monkeypatch):
    answering(monkeypatch, Verdict(False, error="too large"))
    text = _run("--shape", "256,300,256").stdout
    assert text.count("too large") == len(ASKED)
    rows = json.loads(_run("--shape", "256,300,256", "--json").stdout)["rows"]
    for row in rows:
        assert (row["predicted_us"], row["xla_us"], row["error"]) == (None, None, "too large")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,2"), "is no shape"),
        (("--shape", "8,8,8", "--shape", "9,9,9"), "can be given once"),
        (("--device", "h100"), "h100"),
    ],
)
def test_what_a_person_gets_wrong(arguments, message):
    result = _run(*arguments)
    assert result.exit_code != 0
    assert message in result.stderr


def test_what_the_compiler_says():
    """The real one: its schedules make the passes that the table says, and time follows them."""
    result = _run("--shape", "256,512,256", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = json.loads(result.stdout)["rows"]
    assert [row["scheduled_passes"] for row in rows] == [row["passes"] for row in rows]
    one_pass, six_passes = rows[0], rows[2]
    assert six_passes["predicted_us"] > one_pass["predicted_us"]
