"""`CompilerResolver`: tiles by the TPU compiler's schedules."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

import pallas_ops as po
from pallas_ops.compiler import compile_for_tpu, CompilePool, Verdict
from pallas_ops.compiler._stand_in import stand_in
from pallas_ops.tiles import (
    _autotune,
    _compiler,
    _ranking,
    candidates,
    Entry,
    problem_key,
    TileConfig,
    TileStore,
    versions,
)
from pallas_ops.tiles._ranking import scaled_estimates

from ..compiler import tools
from .tools import RecordingTimer, ROOT, tile_problem


SMALL = tile_problem(
    256, 512, 256, "bfloat16", device="v5e", implementation="mosaic", can_be_timed=False
)
FEW = po.CompilerResolver(most_candidates=2)


@pytest.fixture
def asked(monkeypatch):
    """The jobs that any pool was given."""
    asked = []
    ask = CompilePool.ask

    def recording(self, jobs, **given):
        asked.extend(jobs)
        return ask(self, jobs, **given)

    monkeypatch.setattr(_ranking, "_verdicts", {})
    monkeypatch.setattr(CompilePool, "ask", recording)
    return asked


def answering(monkeypatch, verdict):
    """Every pool says this, and nothing was said before."""
    monkeypatch.setattr(_ranking, "_verdicts", {})
    tools.answering(monkeypatch, verdict)


def test_one_problem(asked, store):
    found = FEW.resolve(SMALL)
    assert found.source == "compiler"
    assert found.tile in candidates(SMALL, most=2)
    assert found.reason.startswith("predicted ")
    assert "m=256, bound by" in found.reason
    entry = TileStore().get(problem_key(SMALL), versions())
    assert (entry.tile, entry.source, entry.seconds) == (found.tile, "compiler", None)
    # The winner is compiled as it is, at the end.
    assert asked[-1].problem == SMALL.matmul
    assert asked[-1].blocks == found.tile.blocks

    asked.clear()
    assert FEW.resolve(SMALL) == found
    po.tiles.forget()
    again = FEW.resolve(SMALL)
    assert (again.tile, again.source) == (found.tile, "store")
    assert asked == []


def test_other_batches_are_not_compiled_again(asked, tmp_path, monkeypatch):
    tiles = (TileConfig(512, 512, 256), TileConfig(256, 512, 256))
    monkeypatch.setattr(_compiler, "candidates", lambda problem, most: tiles)
    resolvers = [po.CompilerResolver("v5e", directory=tmp_path / name) for name in "ab"]
    large, larger = (
        tile_problem(m, 512, 256, "bfloat16", layout="NT", implementation="mosaic")
        for m in (4096, 8192)
    )
    resolvers[0].resolve(large)
    count = len(asked)
    resolvers[1].resolve(larger)
    # Only the winner, as it is.
    assert len(asked) == count + 1


def test_in_a_program_for_a_tpu(asked):
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    product = functools.partial(po.matmul, tiles=FEW, implementation="mosaic")
    compiled = compile_for_tpu(product, x, y, device="v5e")
    assert "tpu_custom_call" in compiled.as_text()
    assert {job.device for job in asked} == {"v5e"}
    assert TileStore().get(problem_key(SMALL), versions()) is not None


def test_three_products_of_a_step(asked):
    def loss(w, x):
        return jnp.sum(jnp.tanh(po.matmul(x, w)).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
    with po.options(tiles=po.CompilerResolver(most_candidates=1), implementation="mosaic"):
        compile_for_tpu(jax.grad(loss, argnums=(0, 1)), w, x, device="v5e")
    layouts = {(job.problem.layout, job.problem.m) for job in asked}
    assert layouts == {("NN", 256), ("NT", 256), ("TN", 512)}


def test_an_interpreter_gets_the_tile_of_the_tpu(asked):
    here = tile_problem(256, 512, 256, "bfloat16")
    found = po.CompilerResolver("v5e", most_candidates=2).resolve(here)
    assert found.tile == FEW.resolve(SMALL).tile
    x = jnp.ones((256, 512), jnp.bfloat16)
    tiles = po.CompilerResolver("v5e", most_candidates=2)
    out = po.matmul(x, x, transpose_rhs=True, tiles=tiles, implementation="interpret")
    assert jnp.all(out == 512)


@pytest.mark.parametrize("device", [None, "TPU v99"])
def test_a_tpu_that_is_not_known(asked, device):
    problem = dataclasses.replace(SMALL, device=device)
    with pytest.warns(UserWarning, match="compiles for one TPU, and none that it knows") as told:
        found, _ = (FEW.resolve(problem) for _ in range(2))
    assert len(told) == 1
    assert found == po.StaticResolver().resolve(problem)
    assert asked == []


def test_what_was_measured_goes_first(asked, store):
    tile = TileConfig(128, 128, 128)
    measured = Entry(problem_key(SMALL), versions(), tile, source="autotune", seconds=1e-3)
    TileStore().put(measured)
    assert FEW.resolve(SMALL).tile == tile
    assert asked == []


def test_what_was_predicted_is_measured_all_the_same(store):
    here = tile_problem(64, 128, 128)
    tile = TileConfig(64, 128, 128)
    TileStore().put(Entry(problem_key(here), versions(), tile, source="compiler"))
    assert po.CachedResolver().resolve(here).tile == tile
    timer = RecordingTimer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = po.AutotuneResolver(most_candidates=2, timer=timer).resolve(here)
    assert found.source == "autotune"
    assert timer.calls
    assert TileStore().get(problem_key(here), versions()).source == "autotune"


def test_no_compiler_is_one_warning(monkeypatch, store):
    answering(monkeypatch, Verdict(False, "there is none", transient=True, unavailable=True))
    other = tile_problem(128, 512, 256, device="v5e", implementation="mosaic", can_be_timed=False)
    with pytest.warns(UserWarning, match="has no tile for .* taken is the fallback's") as told:
        found = [FEW.resolve(problem) for problem in (SMALL, other, SMALL)]
    assert len(told) == 1
    assert "there is none" in str(told[0].message)
    assert found[0] == found[2] == po.StaticResolver().resolve(SMALL)
    # It may be there the next time.
    assert not list(TileStore().entries())


LOST = Verdict(False, "the compiler's process ended (SIGABRT)", transient=True)


@pytest.fixture
def the_best_is_lost(monkeypatch):
    """The compiler gives no answer for the tile that is predicted to be the fastest."""
    best = stand_in(FEW.ranking(SMALL).judgements[0][1].job)
    monkeypatch.setattr(_ranking, "_verdicts", {})
    ask, answer = CompilePool.ask, [LOST]

    def losing(self, jobs, *, told=None, **given):
        lost = [job for job in jobs if stand_in(job) == best]
        for job in lost:
            told(job, answer[0])
        others = iter(ask(self, [job for job in jobs if job not in lost], told=told, **given))
        return [answer[0] if job in lost else next(others) for job in jobs]

    monkeypatch.setattr(CompilePool, "ask", losing)
    return answer


def test_without_all_answers_nothing_is_stored(the_best_is_lost, store):
    with pytest.warns(UserWarning, match="a tile may be faster for which the compiler") as told:
        found, again = FEW.resolve(SMALL), FEW.resolve(SMALL)
    assert len(told) == 1
    assert "is not stored" in str(told[0].message)
    assert "SIGABRT" in str(told[0].message)
    assert found == again
    assert found.source == "compiler"
    assert not list(TileStore().entries())


def test_what_takes_too_long_to_compile_is_out(the_best_is_lost, store):
    the_best_is_lost[0] = dataclasses.replace(LOST, blames_program=True)
    found = FEW.resolve(SMALL)
    ((_, entry),) = TileStore().entries()
    assert entry.tile == found.tile
    assert list(entry.failures.values()) == [LOST.error]


def test_every_tile_refused(monkeypatch, store):
    answering(monkeypatch, Verdict(False, "E1001: too much"))
    with pytest.warns(UserWarning, match="E1001: too much"):
        found = FEW.resolve(SMALL)
    assert found.source == "estimate"


def test_schedules_that_cannot_be_read(monkeypatch, store):
    answering(monkeypatch, Verdict(True, schedule_error="it cannot be read: what is this"))
    with pytest.warns(UserWarning, match="what is this"):
        assert FEW.resolve(SMALL).source == "estimate"


UNREAD = Verdict(True, schedule_error="no time is read from the schedule that libtpu 9 wrote")


def test_what_cannot_be_read_is_ranked_by_the_estimate(the_best_is_lost, store):
    (other,) = {tile for tile, _ in FEW.ranking(SMALL).judgements}
    the_best_is_lost[0] = UNREAD
    ranking = FEW.ranking(SMALL)
    (unread,) = set(candidates(SMALL, most=2)) - {other}
    assert {tile for tile, _ in ranking.judgements} == {other, unread}
    assert ranking.unread == 1
    read = {tile: one.prediction.seconds for tile, one in ranking.judgements if one.prediction}
    assert ranking.estimated == scaled_estimates(SMALL, read, [unread])
    assert not ranking.failures
    assert not ranking.unanswered
    assert ranking.may_be_stored
    found = FEW.resolve(SMALL)
    assert found.tile == ranking.judgements[0][0]
    assert "could not be read" in found.reason
    ((_, entry),) = TileStore().entries()
    assert entry.tile == found.tile


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_an_estimate_goes_before_predictions_only_where_it_is_shorter(
    the_best_is_lost, monkeypatch, store, factor
):
    estimate = _ranking.estimate_seconds
    (other,) = {tile for tile, _ in FEW.ranking(SMALL).judgements}
    the_best_is_lost[0] = UNREAD
    monkeypatch.setattr(
        _ranking,
        "estimate_seconds",
        lambda problem, tile: estimate(problem, tile) * (1 if tile == other else factor),
    )
    ranking = FEW.ranking(SMALL)
    (unread,) = ranking.estimated
    assert ranking.judgements[0][0] == (unread if factor < 1 else other)
    assert min(ranking.seconds, ranking.estimated[unread]) == ranking.seconds
    reason = FEW.resolve(SMALL).reason
    wanted = "estimated .* since its schedule could not be read: no time is read"
    assert re.match(
        wanted if factor < 1 else "predicted .* before 1 that could not be read", reason
    )


def test_the_scale_of_an_estimate_is_the_largest_of_those_that_were_read():
    tiles = candidates(SMALL, most=3)
    estimates = [_ranking.estimate_seconds(SMALL, tile) for tile in tiles]
    read = {tiles[0]: 1.5 * estimates[0], tiles[1]: 1.2 * estimates[1]}
    assert scaled_estimates(SMALL, read, tiles[2:]) == {tiles[2]: pytest.approx(1.5 * estimates[2])}
    assert scaled_estimates(SMALL, {}, tiles[2:]) == {tiles[2]: estimates[2]}


def test_no_time_at_all(monkeypatch, store):
    monkeypatch.setattr(_ranking, "_verdicts", {})
    hurried = po.CompilerResolver("v5e", budget_seconds=1e-6)
    with pytest.warns(UserWarning, match="left no time for any of 12 tiles"):
        assert hurried.resolve(SMALL).source == "estimate"


def test_autotuning_on_a_tpu_measures_what_is_predicted_best(monkeypatch):
    problem = dataclasses.replace(SMALL, can_be_timed=True)
    resolver = po.AutotuneResolver(most_candidates=20)
    everything = candidates(problem, most=20)
    worth = resolver._worth_measuring(problem)
    assert len(worth) <= _autotune._MEASURED + 1
    assert set(worth) <= set(everything)
    assert po.StaticResolver().resolve(problem).tile in worth
    # Without a compiler to ask, all of them.
    answering(monkeypatch, Verdict(False, "none", transient=True, unavailable=True))
    assert resolver._worth_measuring(problem) == everything
    # An interpreter has no schedule.
    here = tile_problem(256, 512, 256)
    assert resolver._worth_measuring(here) == candidates(here, most=20)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"device": "v99"}, ValueError, "Unknown TPU 'v99'"),
        ({"budget_seconds": 0}, ValueError, "must be positive"),
        ({"workers": 0}, ValueError, "`workers` must be at least 1"),
        ({"workers": True}, ValueError, "`workers` must be at least 1"),
        ({"fallback": "static"}, TypeError, "fallback"),
    ],
)
def test_bad_arguments(given, error, message):
    with pytest.raises(error, match=message):
        po.CompilerResolver(**given)


def test_it_is_a_value():
    assert po.CompilerResolver("TPU v5 lite") == po.CompilerResolver("v5e")
    assert hash(po.CompilerResolver()) == hash(po.CompilerResolver())
    assert isinstance(po.CompilerResolver(), po.TileResolver)


TUNE = """
import json, sys
import jax.numpy as jnp, jax
import pallas_ops as po
from pallas_ops.tiles import collect
resolver = po.CompilerResolver("v5e", most_candidates=2, workers=1)
found = []
for m in range(1, 21):
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16 * m, 256), (256, 128 * m)))
    (problem,) = collect(po.matmul, x, w)
    found.append(resolver.resolve(problem).tile.blocks)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_tune_twenty_shapes_at_once(tmp_path):
    scratch, cache = tmp_path / "scratch", tmp_path / "both"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TUNE],
            env={**environment, "PALLAS_OPS_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    one, other = (json.loads(out) for out, _ in said)
    assert one == other
    assert [errors for _, errors in said] == ["", ""]
    entries = dict(TileStore(cache).entries())
    assert len(entries) == 20
    assert all(isinstance(entry, Entry) for entry in entries.values())
    assert list(scratch.iterdir()) == []
    assert not list(pathlib.Path(cache).rglob("*.tmp"))
