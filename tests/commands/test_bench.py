"""`pallas-ops bench`: that it measures what it says. How fast a machine is no test can know."""

import dataclasses
import functools
import json
import os
import time

import pytest
from click.testing import CliRunner

import pallas_ops as po
from pallas_ops.commands import _against, _overhead, main
from pallas_ops.commands._products import make_problem


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PALLAS_OPS_TILES", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(_overhead, "_RUNS", 1)
    monkeypatch.setattr(_against, "_RUNS", 1)
    monkeypatch.setattr(
        _overhead, "measure_against", functools.partial(_against.measure_against, layers=1)
    )
    monkeypatch.setattr(
        _overhead,
        "measure_dispatching",
        functools.partial(_overhead.measure_dispatching, calls=50),
    )


def _run(*arguments):
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


@dataclasses.dataclass(frozen=True)
class _Slow:
    def resolve(self, problem):
        time.sleep(2e-4)
        return po.StaticResolver().resolve(problem)


def _problem():
    return make_problem(
        "forward",
        8,
        32,
        64,
        dtype="float32",
        out_dtype=None,
        layout="NT",
        precision="default",
        device=None,
        implementation="interpret",
    )


def test_overhead(few, cache):
    found = json.loads(_run("overhead", "--json"))
    assert found["target_microseconds"] == 50
    rows = {row["name"]: row for row in found["resolving"]}
    assert len(rows) == 6
    assert [name for name, row in rows.items() if not row["is_known"]] == [
        "CachedResolver, not stored"
    ]
    for row in rows.values():
        assert min(row[f"{name}_microseconds"] for name in ("first", "known", "checked")) > 0
    steps = found["dispatching"]
    assert [step["name"] for step in steps] == [
        "named tiles",
        "StaticResolver",
        "CachedResolver",
        "AutotuneResolver",
    ]
    assert steps[0]["ratio"] == 1
    assert all(step["same_program"] for step in steps)
    assert all(step["ratio"] > 0 for step in steps)
    against = found["against"]
    assert [row["target"] for row in against] == [1.3, 5, 5, 1.5, 1.3]
    for row in against:
        assert row["ratio"] == row["ours_seconds"] / row["theirs_seconds"] > 0
    # An eager call that looks at its activation anew takes 50 times as long.
    assert all(row["ratio"] < 15 for row in against)
    assert f"{os.cpu_count()} cores" in found["where"]
    assert not cache.exists()


def test_overhead_for_people(few):
    output = _run("overhead")
    assert "Target for a known problem, checked: 50 us; " in output
    assert "Measured here, in this run: CPU, " in output


def test_a_slow_resolver_is_seen(few):
    slow = _overhead.measure_resolving("slow", _Slow(), _problem())
    assert slow.known_microseconds >= 200
    assert not slow.is_within_target
    assert dataclasses.replace(slow, is_known=False).is_within_target


def test_another_program_is_seen():
    steps = {"one": po.TileConfig(8, 256, 256), "two": po.TileConfig(8, 128, 256)}
    assert [one.same_program for one in _overhead.measure_dispatching(steps, calls=1)] == [
        True,
        False,
    ]
