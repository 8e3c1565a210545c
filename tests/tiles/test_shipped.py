"""The tables that come with the package: whole, legal, made by their command, and compiled."""

import dataclasses
import functools
import importlib.resources

import pytest

import pallas_ops as po
from pallas_ops._hardware import GENERATIONS
from pallas_ops.commands._entries import canonical_key, check_entry
from pallas_ops.commands._generating import generate, shipped_problems
from pallas_ops.compiler import CompilePool, judge
from pallas_ops.compiler._stand_in import stand_in
from pallas_ops.kernels import KERNEL_VERSION
from pallas_ops.tiles import candidates, problem_key, read_table, versions
from pallas_ops.tiles._ranking import compile_job, rank


@functools.cache
def traced_problems():
    return shipped_problems("v5e")


def problems_of(device):
    """As `shipped_problems(device)`: tracing all of them takes seconds, and once is enough."""
    return [dataclasses.replace(problem, device=device) for problem in traced_problems()]


def table(device):
    file = importlib.resources.files("pallas_ops.tiles") / "tables" / f"{device}.json"
    return read_table(file.read_bytes())


@pytest.fixture(scope="module", params=GENERATIONS)
def shipped(request):
    return request.param, table(request.param)


def test_every_problem_has_a_tile(shipped):
    device, entries = shipped
    wanted = {canonical_key(problem_key(problem)) for problem in problems_of(device)}
    assert {canonical_key(entry.key) for entry in entries} == wanted
    assert len(entries) == len(wanted)
    for entry in entries:
        check_entry(entry)  # what an import would refuse
        assert entry.key["device"] == device
        assert entry.versions["kernel"] == KERNEL_VERSION
        assert entry.is_predicted
        assert entry.seconds is None
        assert ("uncalibrated" in entry.reason) == (device != "v5e")
        assert "left out by the budget" not in entry.reason


@pytest.mark.parametrize("device", GENERATIONS)
def test_the_default_finds_them(device):
    for problem in problems_of(device)[::37]:
        found = po.CachedResolver(quiet=True).resolve(problem)
        assert found.source == "table"
        assert found.reason.startswith("found by compiler: predicted")
    few = next(problem for problem in problems_of(device) if problem.m == 8)
    assert po.CachedResolver(quiet=True).resolve(few).source == "table"


@pytest.mark.slow
@pytest.mark.parametrize("device", GENERATIONS)
def test_a_sample_is_what_the_command_gives(device):
    """Problems with few rows, whose kernels compile in no time."""
    entries = {canonical_key(entry.key): entry for entry in table(device)}
    problems = [
        problem
        for problem in problems_of(device)
        if problem.m * problem.k * problem.n <= 512 * 1536 * 1536
    ][::14]
    assert len(problems) >= 4
    made, missing = generate(problems)
    assert not missing
    for problem, entry in zip(problems, made, strict=True):
        kept = entries[canonical_key(problem_key(problem))]
        if kept.versions == versions():
            assert entry == kept
            continue
        # Another libtpu may prefer another tile, by next to nothing.
        tiles = list(dict.fromkeys([*candidates(problem, most=2), kept.tile]))
        with CompilePool() as pool:
            (ranking,) = rank([problem], [tiles], pool, budget_seconds=60)
        assert not ranking.estimated
        times = {tile: one.prediction.seconds for tile, one in ranking.judgements}
        assert times.get(kept.tile, 0.0) <= 1.03 * min(times.values())


def kernels(device):
    """Each kernel once: those of one layout, dtype and tile are the same for all batch sizes."""
    by_key = {canonical_key(problem_key(problem)): problem for problem in problems_of(device)}
    jobs = {}
    for entry in table(device):
        matmul = by_key[canonical_key(entry.key)].matmul
        tile = entry.tile.clipped_to(matmul)
        job = compile_job(po.TileProblem(matmul, device), tile)
        job = dataclasses.replace(job, vmem_limit_bytes=entry.vmem_limit_bytes)
        jobs[stand_in(job)] = entry
    return jobs


def check_kernels(jobs):
    with CompilePool() as pool:
        judged = judge(list(jobs), pool)
    for (job, entry), judgement in zip(jobs.items(), judged, strict=True):
        assert judgement.error is None, (job, entry, judgement)
        assert judgement.prediction is not None


@pytest.mark.slow
@pytest.mark.parametrize("device", GENERATIONS)
def test_some_shipped_tiles_compile(device):
    jobs = kernels(device)
    check_kernels({job: jobs[job] for job in list(jobs)[:: len(jobs) // 8]})


@pytest.mark.sweep
@pytest.mark.parametrize("device", GENERATIONS)
def test_every_shipped_tile_compiles(device):
    check_kernels(kernels(device))


@pytest.mark.sweep
@pytest.mark.parametrize("device", GENERATIONS)
def test_every_default_tile_compiles(device):
    """What is taken where nothing was compiled."""
    jobs = {}
    for problem in problems_of(device):
        tile = po.StaticResolver().resolve(problem).tile
        jobs[stand_in(compile_job(problem, tile))] = problem
    check_kernels(jobs)
