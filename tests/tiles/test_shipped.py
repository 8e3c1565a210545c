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


def by_key(device):
    return {canonical_key(problem_key(problem)): problem for problem in problems_of(device)}


def test_entries_are_of_problems_whose_default_tile_is_another(shipped):
    device, entries = shipped
    problems = by_key(device)
    assert len({canonical_key(entry.key) for entry in entries}) == len(entries) > 0
    for entry in entries:
        check_entry(entry)  # what an import would refuse
        assert entry.key["device"] == device
        assert entry.versions["kernel"] == KERNEL_VERSION
        assert entry.is_predicted
        assert entry.seconds is None
        assert ("uncalibrated" in entry.reason) == (device != "v5e")
        assert "left out by the budget" not in entry.reason
        problem = problems[canonical_key(entry.key)]
        assert entry.tile.clipped_to(problem.matmul) != po.StaticResolver().resolve(problem).tile


def test_they_are_found_and_no_others(shipped):
    device, entries = shipped
    kept = {canonical_key(entry.key) for entry in entries}
    for key, problem in by_key(device).items():
        found = po.CachedResolver(quiet=True).resolve(problem)
        assert (found.source == "table") == (key in kept)
        if key in kept:
            assert found.reason.startswith("found by compiler: predicted")
        else:
            assert found.tile == po.StaticResolver().resolve(problem).tile


@pytest.mark.slow
@pytest.mark.parametrize("device", GENERATIONS)
def test_a_sample_is_what_the_command_gives(device):
    """Problems with few rows, whose kernels compile in no time: with an entry, and without."""
    entries = {canonical_key(entry.key): entry for entry in table(device)}
    few = {
        key: problem
        for key, problem in by_key(device).items()
        if problem.m * problem.k * problem.n <= 512 * 1536 * 1536
    }
    with_entry = sorted(few.keys() & entries.keys())
    assert len(with_entry) >= 4
    sample = {key: few[key] for key in [*list(few)[::14], *with_entry[::3]]}
    if all(entry.versions == versions() for entry in entries.values()):
        made, missing = generate(list(sample.values()))
        assert not missing
        assert {canonical_key(entry.key): entry for entry in made} == {
            key: entries[key] for key in sample.keys() & entries.keys()
        }
        return
    # Another libtpu may prefer another tile, by next to nothing.
    taken = {
        key: entries[key].tile.clipped_to(problem.matmul)
        if key in entries
        else po.StaticResolver().resolve(problem).tile
        for key, problem in sample.items()
    }
    tiles = [
        list(dict.fromkeys([*candidates(problem, most=2), taken[key]]))
        for key, problem in sample.items()
    ]
    problems, chosen = list(sample.values()), [[tile] for tile in taken.values()]
    with CompilePool() as pool:
        best, of_taken = (
            rank(problems, each, pool, budget_seconds=900) for each in (tiles, chosen)
        )
    for key, one, ranking in zip(sample, of_taken, best, strict=True):
        assert one.seconds <= 1.03 * ranking.seconds, key


def kernels(device):
    """Each kernel once: those of one layout, dtype and tile are the same for all batch sizes."""
    problems = by_key(device)
    jobs = {}
    for entry in table(device):
        matmul = problems[canonical_key(entry.key)].matmul
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
    check_kernels({job: jobs[job] for job in list(jobs)[:: max(1, len(jobs) // 8)]})


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
