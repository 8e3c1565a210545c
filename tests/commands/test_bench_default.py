"""`pallas-ops bench default`: the tile of a person who tunes nothing, against the best of ten."""

import json

import pytest
from click.testing import CliRunner

import pallas_ops as po
from pallas_ops.commands import main
from pallas_ops.commands._default_study import generated_problems, Row, Summary
from pallas_ops.commands._products import kernel_problem


def _run(*arguments):
    result = CliRunner().invoke(main, ["bench", "default", *map(str, arguments)])
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


def test_a_shape_that_is_named():
    found = json.loads(_run("--shape", "256,384,256", "--json"))
    rows = found["rows"]
    assert [(row["product"], row["layout"]) for row in rows] == [
        ("forward", "NT"),
        ("lhs_cotangent", "NN"),
        ("rhs_cotangent", "TN"),
    ]
    for row in rows:
        problem = kernel_problem(row["product"], (256, 384, 256), dtype="bfloat16", device="v5e")
        assert row["default_tile"] == list(po.StaticResolver().resolve(problem).tile.numbers)
        # The default is one of those that are compared.
        assert 0 < row["best_us"] <= row["default_us"]
        assert row["best_over_default"] == row["best_us"] / row["default_us"]
        assert row["xla_us"] > 0
        assert row["error"] is None
    assert found["summary"]["rows"] == 3
    assert found["summary"]["worst"] == min(row["best_over_default"] for row in rows)


def test_as_a_person_reads_it():
    text = _run("--count", 2, "--seed", 3, "--device", "v6e")
    assert "Best of ten candidates over the default: " in text
    assert "UNCALIBRATED: no timings of a v6e" in text
    assert "Predicted for a v6e, not measured: schedules of libtpu" in text


@pytest.mark.parametrize("device", ["v4", "v5e"])
def test_generated_shapes(device):
    problems = generated_problems(device, 60, seed=1)
    assert problems == generated_problems(device, 60, seed=1)
    assert len({(problem.m, problem.k, problem.n) for _, problem in problems}) == 60
    assert {problem.layout for _, problem in problems} == {"NN", "NT", "TN"}
    dtypes = {problem.lhs_dtype.name for _, problem in problems}
    assert dtypes == {"bfloat16", "float32"} | ({"int8"} if device == "v5e" else set())
    assert any(problem.k % 64 for _, problem in problems)


def test_what_the_summary_counts():
    problem = kernel_problem("forward", (64, 128, 128), dtype="bfloat16", device="v5e")
    tile = po.TileConfig(64, 128, 128)

    def row(default, best, xla, **fields):
        seconds = dict(default_seconds=default, best_seconds=best, xla_seconds=xla)
        return Row(problem, "forward", tile, best=tile, **seconds, **fields)

    rows = [
        row(1.0, 1.0, 1.0),
        row(1.0, 0.9, 0.95, unread=2),
        row(1.2, 1.2, 1.0),
        row(None, 1.0, 1.0, unread=1, error="no"),
    ]
    assert Summary.of(rows) == Summary(
        rows=4, median=1.0, worst=0.9, xla_is_faster=1, unread=3, without_time=1
    )
    assert Summary.of([]).median is None
