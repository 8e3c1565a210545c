"""Several processes: all take the tile of process 0, and none waits for ever."""

import json
import math
import os
import socket
import subprocess
import sys
import warnings

import pytest

import pallas_ops as po
from pallas_ops.tiles import _agree, _memory, Entry, problem_key, TileStore, versions

from .tools import RecordingTimer, ROOT, run_python, tile_problem


PROBLEM = tile_problem(8, 256, 8)
SMALL, WHOLE = po.TileConfig(8, 128, 8), po.TileConfig(8, 256, 8)
ESTIMATE = po.StaticResolver().resolve(PROBLEM)

pytestmark = pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")


class FakeClient:
    """The key-value store of a job, in one process."""

    def __init__(self):
        self.values, self.waits, self.error = {}, [], "DEADLINE_EXCEEDED: nobody said it\nand more"

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        self.waits.append(timeout_in_ms)
        if key not in self.values:
            raise RuntimeError(self.error)
        return self.values[key]


@pytest.fixture
def job(monkeypatch):
    """Makes this process one of a job; what the others said stays."""
    client = FakeClient()

    def be(index):
        monkeypatch.setattr(_agree, "distributed_client", lambda: (client, index, 2))
        _memory._resolved.clear()
        return client

    return be


def test_process_1_takes_the_tile_of_process_0_and_does_not_measure(job, store):
    job(0)
    first = RecordingTimer()
    said = po.AutotuneResolver(timer=first, directory=store / "0").resolve(PROBLEM)
    job(1)
    second = RecordingTimer(lambda problem, tile: 1 / tile.block_k)
    taken = po.AutotuneResolver(timer=second, directory=store / "1").resolve(PROBLEM)
    assert said.tile == taken.tile == SMALL
    assert (first.sweeps, second.calls) == ([PROBLEM], [])
    assert taken.reason.startswith("process 0's: ")
    assert taken.source == said.source == "autotune"


def test_process_0_may_say_it_again(job, store):
    client = job(0)
    tiles = po.AutotuneResolver(timer=RecordingTimer())
    assert tiles.resolve(PROBLEM) == tiles.resolve(PROBLEM)
    assert len(client.values) == 1


@pytest.mark.parametrize("resolver", [po.CachedResolver, po.AutotuneResolver])
def test_a_limit_is_part_of_what_is_said(job, store, resolver):
    TileStore(store).put(Entry(problem_key(PROBLEM), versions(), SMALL, vmem_limit_bytes=1 << 25))
    job(0)
    said = resolver().resolve(PROBLEM)
    job(1)
    taken = resolver(directory=store / "empty").resolve(PROBLEM)
    assert taken.vmem_limit_bytes == said.vmem_limit_bytes == 1 << 25
    assert taken.source == "store"


def test_each_problem_and_each_kind_of_resolver_has_an_answer_of_its_own(job):
    client = job(0)
    # Two batches of one class: a tile that is legal for one may not be for the other.
    for m in (100, 120):
        for resolver in (po.CachedResolver(quiet=True), po.AutotuneResolver(timer=lambda *_: 1.0)):
            resolver.resolve(tile_problem(m, 8, 8))
    assert len(client.values) == 4
    assert all(name.startswith("pallas_ops/tiles/") for name in client.values)


def test_without_process_0_the_fallback_is_taken_after_one_warning(job, monkeypatch):
    client = job(1)
    tiles = po.AutotuneResolver(timer=RecordingTimer(), budget_seconds=0.5)
    with pytest.warns(UserWarning, match="process 1 waited 61 s for process 0's tile") as caught:
        assert tiles.resolve(PROBLEM).source == "estimate"
    assert "RuntimeError: DEADLINE_EXCEEDED: nobody said it)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = tile_problem(8, 256, 16)
        assert tiles.resolve(other).source == "estimate"
    # A process that did not answer once is not waited for so long again.
    assert client.waits == [61_000, 1000]


def test_a_stored_tile_is_the_fallback_of_a_process_that_waited_in_vain(job, store):
    TileStore(store).put(Entry(problem_key(PROBLEM), versions(), SMALL))
    job(1)
    with pytest.warns(UserWarning, match="process 1 waited"):
        resolution = po.AutotuneResolver(timer=RecordingTimer()).resolve(PROBLEM)
    assert (resolution.tile, resolution.source) == (SMALL, "store")


def test_a_budget_without_end_is_waited_for_and_not_for_ever(job):
    client = job(1)
    tiles = po.AutotuneResolver(timer=RecordingTimer(), budget_seconds=math.inf)
    with pytest.warns(UserWarning, match="process 1 waited 86400 s"):
        tiles.resolve(PROBLEM)
    assert client.waits == [24 * 3600 * 1000]


def test_a_coordinator_that_is_gone_is_no_waiting(job):
    client = job(1)
    client.error = "UNAVAILABLE: no route"
    tiles = po.AutotuneResolver(timer=RecordingTimer(), budget_seconds=0.5)
    with pytest.warns(UserWarning, match="process 1 could not ask for process 0's tile"):
        tiles.resolve(PROBLEM)
    tiles.resolve(tile_problem(8, 256, 16))
    assert client.waits == [61_000, 61_000]


def test_after_forget_all_ask_again(job, store):
    """Process 1 must not take what process 0 said before both forgot it."""
    tiles = po.CachedResolver(quiet=True)
    client = job(0)
    before = tiles.resolve(PROBLEM)
    job(1)
    assert tiles.resolve(PROBLEM).tile == before.tile == ESTIMATE.tile
    TileStore(store).put(Entry(problem_key(PROBLEM), versions(), SMALL))
    job(0)
    po.tiles.forget()  # the count is the same in both: one process plays them all
    assert tiles.resolve(PROBLEM).tile == SMALL
    job(1)
    assert tiles.resolve(PROBLEM).tile == SMALL
    assert len(client.values) == 2


@pytest.mark.filterwarnings("ignore:.*table of tiles")
def test_resolvers_that_decide_differently_have_answers_of_their_own(job, store):
    client = job(0)
    resolvers = [
        po.CachedResolver(quiet=True),
        po.CachedResolver(quiet=True, fallback=po.StaticResolver(SMALL)),
        po.CachedResolver(quiet=True, fallback=po.StaticResolver(WHOLE)),
        po.CachedResolver(quiet=True, fallback=po.StaticResolver({(8, 256, 8): SMALL})),
        po.CachedResolver(quiet=True, table="old/tiles.json"),
        po.CachedResolver(quiet=True, table="new/tiles.json"),
        po.AutotuneResolver(fallback=po.StaticResolver(SMALL), timer=RecordingTimer()),
    ]
    said = [resolver.resolve(PROBLEM).tile for resolver in resolvers]
    assert len(client.values) == len(resolvers)
    job(1)
    assert [resolver.resolve(PROBLEM).tile for resolver in resolvers] == said
    # Each process may have a store of its own.
    for resolver in (po.CachedResolver(store / "1", quiet=True), po.CachedResolver(quiet=True)):
        assert resolver.resolve(PROBLEM).reason.startswith("process 0's: ")


TELL = """
import os
from pallas_ops.tiles import _agree, CachedResolver, StaticResolver, TileConfig, AutotuneResolver
from pallas_ops.tiles._problem import TileProblem
from pallas_ops.kernels import MatmulProblem
import jax.numpy as jnp

def timer(problem, tile, run, hopeless_seconds):
    return 1.0

class Own:
    def resolve(self, problem):
        pass

f = jnp.dtype("float32")
def problem(n):
    return TileProblem(MatmulProblem((8, 128), (128, n), f, f, f), device="v5e")
tiles = {problem(n): TileConfig(8, 128, n) for n in range(128, 1280, 128)}
print(_agree._stable_text(AutotuneResolver(
    directory=str(os.getpid()), fallback=CachedResolver(
        directory=str(os.getpid()), table="t.json", fallback=StaticResolver(tiles)), timer=timer)))
print(_agree._stable_text(CachedResolver(fallback=Own())))
"""


def test_a_resolver_is_called_the_same_in_every_process():
    first, second = (run_python(TELL, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first == second
    assert "timer=<function timer>" in first
    assert "t.json" in first


@pytest.mark.parametrize("index", [0, 1])
def test_what_was_agreed_on_is_not_asked_for_again(job, index, monkeypatch):
    tiles = po.CachedResolver(quiet=True)
    job(0)
    tiles.resolve(PROBLEM)
    client = job(index)
    first = tiles.resolve(PROBLEM)

    def never(*args, **kwargs):
        raise AssertionError("asked again")

    monkeypatch.setattr(client, "blocking_key_value_get", never)
    monkeypatch.setattr(client, "key_value_set", never)
    assert tiles.resolve(PROBLEM) == first
    po.tiles.forget()
    with pytest.raises(AssertionError) if index == 0 else pytest.warns(UserWarning, match="again"):
        tiles.resolve(PROBLEM)


def test_nothing_is_agreed_on_for_a_program_that_does_not_run_here(job):
    """One process may export a program alone."""
    client = job(1)
    elsewhere = tile_problem(8, 256, 8, can_be_timed=False)
    for resolver in (po.CachedResolver(quiet=True), po.AutotuneResolver()):
        assert resolver.resolve(elsewhere).source == "estimate"
    assert client.waits == []


def test_a_static_tile_needs_nobody(job):
    client = job(1)
    assert po.StaticResolver().resolve(PROBLEM).source == "estimate"
    assert client.waits == []


# The real thing.

PROCESS = """
import json, sys, time, warnings
index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax, jax.numpy as jnp
jax.distributed.initialize(f"localhost:{port}", 2, index)
import pallas_ops as po
from pallas_ops.tiles import _agree, _autotune, Entry, problem_key, TileStore, versions
_autotune.AGREE_SECONDS = 20.0
timed, said, warned = [], [], []

def timer(problem, tile, run, hopeless_seconds):
    run(1)
    timed.append(tile.block_k)
    # Process 0 finds the small block fast, and the other one the large block.
    return tile.block_k if index == 0 else 1 / tile.block_k

class Keeping:
    def __init__(self, resolver):
        self.resolver = resolver
    def resolve(self, problem):
        resolution = self.resolver.resolve(problem)
        said.append([resolution.source, *resolution.tile.blocks])
        return resolution

def product(m, resolver):
    x, w = jnp.ones((m, 256)), jnp.ones((256, 8))
    tiles = Keeping(resolver)
    f = jax.jit(lambda x: po.matmul(x, w, tiles=tiles, implementation="interpret"))
    assert (f(x) == 256).all()
    return f.lower(x).as_text()

warnings.showwarning = lambda message, *_: warned.append(str(message))
tuned = po.AutotuneResolver(timer=timer, directory=folder, budget_seconds=30.0)
if index == 0:
    time.sleep(1.0)  # the other one waits
text = product(8, tuned)
# A tile that is in the store of one process alone.
if index == 0:
    problem = po.tiles.TileProblem(
        po.MatmulProblem((16, 256), (256, 8), *[jnp.dtype("float32")] * 3),
        implementation="interpret",
    )
    TileStore(folder).put(Entry(problem_key(problem), versions(), po.TileConfig(16, 128, 8)))
text += product(16, po.CachedResolver(directory=folder, quiet=True))
# What process 0 never comes to.
_autotune.AGREE_SECONDS = 0.0
start = time.monotonic()
if index == 1:
    product(32, po.AutotuneResolver(timer=timer, directory=folder, budget_seconds=0.5))
waited = time.monotonic() - start
print(json.dumps([said, timed, warned, waited, text]))
"""


def _free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_two_real_processes_that_disagree(tmp_path):
    port = _free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(index), str(port), str(tmp_path / str(index))],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        done = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, done, strict=True):
        assert process.returncode == 0, errors
    (said_0, timed_0, warned_0, _, text_0), (said_1, timed_1, warned_1, waited, text_1) = (
        json.loads(out.splitlines()[-1]) for out, _ in done
    )
    assert said_0 == [["autotune", 8, 128, 8], ["store", 16, 128, 8]]
    assert said_1 == [*said_0, ["estimate", 32, 256, 8]]
    assert (sorted(timed_0), timed_1) == ([128, 256], [])
    assert text_0 == text_1
    (message,) = [text for text in warned_1 if "waited" in text]
    assert "process 1 waited 1 s for process 0's tile" in message
    assert not [text for text in warned_0 if "waited" in text]
    assert waited > 1.0
