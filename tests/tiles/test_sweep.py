"""Sweeps in which things go wrong, and the clock: nothing wrong is ever stored or chosen."""

import dataclasses
import itertools
import math
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops as po
from pallas_ops.tiles import _sweep, candidates, TileStore
from pallas_ops.tiles._sweep import sweep
from pallas_ops.tiles._timing import lower_chain, random_operands, time_per_call

from .tools import matmul_problem, RecordingTimer, run_python, tile_problem


PROBLEM = tile_problem(8, 256, 8)
SMALL, WHOLE = po.TileConfig(8, 128, 8), po.TileConfig(8, 256, 8)
ESTIMATE = po.StaticResolver().resolve(PROBLEM)

pytestmark = pytest.mark.filterwarnings("ignore:.*which tells nothing about a TPU")


def raising(problem, tile):
    raise RuntimeError("no clock here")


def nothing(problem, tile):
    return None


NONSENSE = {
    "zero": lambda problem, tile: 0.0,
    "negative": lambda problem, tile: -1e-3,
    "nan": lambda problem, tile: math.nan,
    "inf": lambda problem, tile: math.inf,
    "minus inf": lambda problem, tile: -math.inf,
    "raising": raising,
    "none": nothing,
    "words": lambda problem, tile: "fast",
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_a_timer_that_says_nonsense_is_one_warning_and_the_fallback(store, nonsense):
    timer = RecordingTimer(nonsense)
    tiles = po.AutotuneResolver(timer=timer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [tiles.resolve(PROBLEM) for _ in range(2)]
    assert found == [ESTIMATE] * 2
    (message,) = [
        str(w.message) for w in caught if "tells nothing about a TPU" not in str(w.message)
    ]
    assert message.startswith("pallas_ops: no tile could be measured for lhs float32[8, 256]")
    assert "TileConfig(" in message.split("the fallback's")[1]
    assert list(TileStore(store).entries()) == []
    # Not tried again in this process, in which it would fail again.
    assert timer.sweeps == [PROBLEM]


@pytest.mark.parametrize("nonsense", ["nan", "none"])
def test_one_good_timing_among_nonsense_wins(store, nonsense):
    nonsense = NONSENSE[nonsense]
    timer = RecordingTimer(lambda p, tile: 1.0 if tile == WHOLE else nonsense(p, tile))
    resolution = po.AutotuneResolver(timer=timer).resolve(PROBLEM)
    assert (resolution.tile, resolution.source) == (WHOLE, "autotune")
    ((_, entry),) = TileStore(store).entries()
    assert entry.tile == WHOLE
    # The failure is kept with its reason.
    assert list(entry.failures) == ["8x128x8"]
    assert entry.failures["8x128x8"]


@pytest.mark.parametrize("number", [np.float32(2.5), 2])
def test_any_number_is_a_timing(store, number):
    """A timer may use NumPy; what it says is stored as JSON."""
    assert po.AutotuneResolver(timer=lambda *_: number).resolve(PROBLEM).source == "autotune"
    ((_, entry),) = TileStore(store).entries()
    assert entry.seconds == float(number)


def _fails(monkeypatch, name, tiles, action):
    """`run_kernel`, or what lowers it, does something else for these tiles."""
    real = getattr(_sweep, name)

    def instead(*args, **kwargs):
        blocks = getattr(args[1], "blocks", args[1])
        result = None if action is None else real(*args, **kwargs)
        if blocks not in [tile.blocks for tile in tiles]:
            return real(*args, **kwargs)
        if action is None:
            raise ValueError(f"Mosaic refuses {blocks}")
        return action(result)

    monkeypatch.setattr(_sweep, name, instead)


def test_a_tile_that_does_not_lower_is_left_out(store, monkeypatch):
    _fails(monkeypatch, "lower_chain", [SMALL], None)
    timer = RecordingTimer()
    assert po.AutotuneResolver(timer=timer).resolve(PROBLEM).tile == WHOLE
    ((_, entry),) = TileStore(store).entries()
    assert entry.failures == {"8x128x8": "ValueError: Mosaic refuses (8, 128, 8)"}
    assert [tile for _, tile in timer.calls] == [WHOLE]


class _NotCompiling:
    def __init__(self, lowered):
        pass

    def compile(self):
        raise RuntimeError("E1001:\n   VMEM " + "x" * 10_000)


def test_a_tile_that_does_not_compile_is_left_out(store, monkeypatch):
    _fails(monkeypatch, "lower_chain", [SMALL], _NotCompiling)
    assert po.AutotuneResolver(timer=RecordingTimer()).resolve(PROBLEM).tile == WHOLE
    ((_, entry),) = TileStore(store).entries()
    reason = entry.failures["8x128x8"]
    assert reason.startswith("RuntimeError: E1001: VMEM xxx")
    assert len(reason) < 400


@pytest.mark.parametrize("stage", ["lower_chain", "run_kernel"])
def test_all_candidates_failing_is_the_fallback(store, monkeypatch, stage):
    _fails(monkeypatch, stage, [SMALL, WHOLE], None)
    with pytest.warns(UserWarning, match="no tile could be measured") as caught:
        assert po.AutotuneResolver(timer=RecordingTimer()).resolve(PROBLEM) == ESTIMATE
    text = "".join(str(warning.message) for warning in caught)
    assert "Mosaic refuses (8, 128, 8)" in text
    assert "Mosaic refuses (8, 256, 8)" in text
    assert list(TileStore(store).entries()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out.at[0, 0].add(100.0),
        lambda out: jnp.full_like(out, jnp.nan),
    ],
    ids=["one entry", "nan"],
)
def test_the_fastest_loses_if_its_product_is_wrong(store, monkeypatch, wrong):
    _fails(monkeypatch, "run_kernel", [SMALL], wrong)
    timer = RecordingTimer()
    x = jnp.ones((8, 256))
    out = po.matmul(x, x.T, tiles=po.AutotuneResolver(timer=timer), implementation="interpret")
    np.testing.assert_array_equal(out, x @ x.T)
    ((_, entry),) = TileStore(store).entries()
    assert entry.tile == WHOLE
    assert entry.failures == {"8x128x8": "its product differs from XLA's"}


@pytest.mark.parametrize(
    ("problem", "seconds"),
    [
        (tile_problem(32, 256, 8, "int8", out="int32"), 0.5),
        (tile_problem(32, 256, 8, "int8"), 0.5),
        (tile_problem(16, 256, 8, "bfloat16"), 0.5),
        (tile_problem(16, 256, 8, "bfloat16", "float32", "bfloat16"), 0.5),
        (tile_problem(16, 256, 8, "bfloat16", "int8", "bfloat16", layout="NT"), 0.5),
        (tile_problem(1, 300, 1), 0.5),
        (tile_problem(8, 256, 8, precision=jax.lax.Precision.HIGHEST, layout="TT"), 0.5),
    ],
    ids=["int8 to int32", "int8", "bf16", "mixed", "int8 weight", "ragged vector", "highest"],
)
def test_a_right_product_passes_the_check_in_every_dtype(problem, seconds):
    result = sweep(
        problem, candidates(problem, most=2), budget_seconds=60.0, timer=lambda *_: seconds
    )
    assert result.failures == {}
    assert set(result.seconds.values()) == {seconds}


def test_an_integer_product_is_checked_to_the_last_digit(monkeypatch):
    problem = tile_problem(32, 256, 8, "int8", out="int32")
    small = po.TileConfig(32, 128, 8)
    _fails(monkeypatch, "run_kernel", [small], lambda out: out.at[0, 0].add(1))
    result = sweep(problem, candidates(problem), budget_seconds=60.0, timer=RecordingTimer())
    assert result.failures == {small: "its product differs from XLA's"}
    assert result.winner == po.TileConfig(32, 256, 8)


def test_no_operands_can_be_made(monkeypatch):
    def too_large(problem):
        raise MemoryError("no room")

    monkeypatch.setattr(_sweep, "random_operands", too_large)
    with pytest.warns(UserWarning, match="its operands could not be made: MemoryError") as caught:
        assert po.AutotuneResolver(timer=RecordingTimer()).resolve(PROBLEM) == ESTIMATE
    # No tile is to blame.
    assert not [warning for warning in caught if "TileConfig" in str(warning.message)]


def test_many_reasons_are_told_in_few_lines():
    problem = tile_problem(64, 512, 512)
    numbers = itertools.count()

    def timer(problem, tile, run, hopeless_seconds):
        raise RuntimeError(f"reason {min(next(numbers), 7)}")

    assert len(candidates(problem)) > 8
    with pytest.warns(UserWarning, match="no tile could be measured") as caught:
        po.AutotuneResolver(timer=timer).resolve(problem)
    (text,) = [str(w.message) for w in caught if "no tile" in str(w.message)]
    assert text.count("\n") <= 7
    assert "other reasons" in text


# The budget and the clock.


class Clock:
    """Time that passes only when something is done."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_budget_ends_a_sweep():
    problem, clock = tile_problem(8, 512, 256), Clock()
    tiles = candidates(problem, most=5)
    assert len(tiles) == 5

    def timer(problem, tile, run, hopeless_seconds):
        clock.now += 10
        return 1.0 + tiles.index(tile)

    result = sweep(problem, tiles, budget_seconds=25.0, timer=timer, clock=clock)
    # The third begins at 20 s, the fourth would at 30 s.
    assert list(result.seconds) == list(tiles[:3])
    assert result.left_out == len(tiles) - 3
    # One is always measured, also where the budget is over before it begins.
    ticks = itertools.count()
    result = sweep(
        problem, tiles, budget_seconds=1e-9, timer=timer, clock=lambda: float(next(ticks))
    )
    assert (list(result.seconds), result.left_out) == ([tiles[0]], len(tiles) - 1)


def test_no_more_candidates_than_were_asked_for():
    problem, timer = tile_problem(8, 512, 512), RecordingTimer()
    resolution = po.AutotuneResolver(most_candidates=2, timer=timer).resolve(problem)
    assert [tile for _, tile in timer.calls] == list(candidates(problem, most=2))
    assert "fastest of 2 measured" in resolution.reason


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(budget_seconds="3"), "`budget_seconds` must be a number, got '3'"),
        (dict(budget_seconds=True), "`budget_seconds` must be a number, got True"),
        (dict(most_candidates=2.5), "`most_candidates` must be an int, got 2.5"),
        (dict(timer=3), "`timer` must be a function, got 3"),
        (dict(fallback="static"), "`fallback` must be a tile resolver.*got 'static'"),
        (dict(fallback=SMALL), "`fallback` must be a tile resolver.*got TileConfig"),
        (dict(fallback=po.StaticResolver), "`fallback` must be a tile resolver.*got <class"),
    ],
)
def test_what_an_autotune_resolver_does_not_take(wrong, message):
    for kind in (po.AutotuneResolver, po.CachedResolver):
        if wrong.keys() <= {field.name for field in dataclasses.fields(kind)}:
            # Past its constructor, which the checks of types that are on in tests would refuse.
            resolver = kind()
            for name, value in wrong.items():
                object.__setattr__(resolver, name, value)
            with pytest.raises(TypeError, match=f"{kind.__name__}: {message}"):
                resolver.__post_init__()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(budget_seconds=0.0),
        dict(budget_seconds=-1.0),
        dict(budget_seconds=math.nan),
        dict(most_candidates=0),
    ],
)
def test_a_budget_must_be_positive(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        po.AutotuneResolver(**wrong)


def test_the_timer_is_told_when_a_tile_is_hopeless():
    told = []

    def timer(problem, tile, run, hopeless_seconds):
        told.append(hopeless_seconds)
        return 3.0 if len(told) == 1 else 5.0

    sweep(PROBLEM, candidates(PROBLEM), budget_seconds=60.0, timer=timer)
    assert told == [math.inf, 6.0]


def chains(clock, seconds, dispatch=0.0):
    """A `run` on a fake clock: so long for each call, and once for each chain."""
    lengths = []

    def run(count):
        lengths.append(count)
        clock.now += dispatch + count * seconds

    return run, lengths


@pytest.mark.parametrize("dispatch", [0.0, 1.5e-4, 1.0])
@pytest.mark.parametrize("seconds", [1e-6, 3e-4, 0.25])
def test_dispatch_is_no_part_of_a_timing(seconds, dispatch):
    clock = Clock()
    run, lengths = chains(clock, seconds, dispatch)
    timing = time_per_call(run, clock=clock)
    assert timing.seconds == pytest.approx(seconds, rel=1e-6)
    assert not timing.abandoned
    # Long enough for the clock, and not longer than needed.
    assert 2e-3 <= max(lengths) * seconds / 2 <= max(4e-3, seconds)


def test_a_hopeless_tile_is_abandoned_early():
    clock = Clock()
    run, lengths = chains(clock, 1.0)
    timing = time_per_call(run, hopeless_seconds=0.5, clock=clock)
    assert (timing.seconds, timing.abandoned) == (1.0, True)
    patient, all_lengths = chains(clock, 1.0)
    assert not time_per_call(patient, hopeless_seconds=1.5, clock=clock).abandoned
    assert sum(lengths) < sum(all_lengths) / 2


def test_one_disturbed_measurement_does_not_count():
    clock = Clock()
    run, lengths = chains(clock, 1.0)

    def disturbed(count):
        run(count)
        clock.now += 100.0 if len(lengths) == 4 else 0.0

    assert time_per_call(disturbed, clock=clock).seconds == 1.0


def test_a_clock_that_stands_still_ends():
    run, lengths = chains(Clock(), 0.0)
    assert time_per_call(run, clock=Clock()).seconds == 0.0
    assert len(lengths) < 60


def test_a_chain_is_as_many_products_as_it_says():
    """None is moved out of the loop, and none removed: the cost of the program says so."""
    problem = matmul_problem(8, 256, 8)
    operands = random_operands(problem)
    lowered = lower_chain(problem, SMALL, "interpret", None, operands)
    out = lowered.compile()(jnp.int32(3), *operands)
    np.testing.assert_allclose(out, operands[0] @ operands[1], rtol=1e-4, atol=1e-4)
    text = lowered.as_text()
    loop = text[text.index("stablehlo.while") :]
    assert "optimization_barrier" in loop
    for one, other in zip(operands, random_operands(problem), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_default_timer_measures(store):
    resolution = po.AutotuneResolver(budget_seconds=5.0).resolve(PROBLEM)
    assert resolution.source == "autotune"
    ((_, entry),) = TileStore(store).entries()
    assert 0 < entry.seconds < 1
    assert "us at m=8: fastest of" in entry.reason


def test_what_the_interpreters_timings_are_worth_is_told_once():
    with pytest.warns(UserWarning, match="times 'interpret', which tells nothing about a TPU"):
        po.AutotuneResolver(timer=RecordingTimer()).resolve(PROBLEM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.AutotuneResolver(timer=RecordingTimer()).resolve(tile_problem(8, 256, 9))


def test_a_sweep_writes_nothing_where_no_terminal_is(capfd):
    po.AutotuneResolver(timer=RecordingTimer()).resolve(PROBLEM)
    assert capfd.readouterr() == ("", "")


# What a timer may do, while who started it waits.

IN_A_TIMER = """
import dataclasses, os, sys, warnings
os.environ["PALLAS_OPS_TILES"] = "autotune"
warnings.simplefilter("ignore")
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import jax.numpy as jnp
import pallas_ops as po

def forgets(problem, tile, run, hopeless_seconds):
    po.tiles.forget()
    run(1)
    return 1e-3

def multiplies(problem, tile, run, hopeless_seconds):
    x = jnp.ones((8, 128))
    assert (po.matmul(x, x.T, implementation="interpret") == 128).all()
    run(1)
    return 1e-3

tiles = po.AutotuneResolver(timer=globals()[sys.argv[1]])
print(po.matmul(jnp.ones((8, 256)), jnp.ones((256, 8)), tiles=tiles, implementation="interpret")[0])
product = lambda: po.matmul(jnp.ones((8, 256)), jnp.ones((256, 8)))
problem = po.tiles.collect(product, implementation="interpret")[0]
# As it would be asked by a program that runs here: the answer is there, and nothing is measured.
print(tiles.resolve(dataclasses.replace(problem, can_be_timed=True)).source)
"""


@pytest.mark.parametrize("action", ["forgets", "multiplies"])
def test_a_timer_may_forget_and_multiply(action, tmp_path):
    """Both would wait for the lock that is held until the timer is done."""
    out = run_python(IN_A_TIMER, action, PALLAS_OPS_CACHE_DIR=str(tmp_path))
    assert out.split() == ["[256."] + ["256."] * 6 + ["256.]", "autotune"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("jax_transfer_guard", "disallow_explicit"), ("jax_disable_jit", True)],
)
def test_what_the_person_set_for_the_process_does_not_hold_in_a_sweep(store, flag, value):
    before = getattr(jax.config, flag)
    timed = []

    def timer(problem, tile, run, hopeless_seconds):
        run(2)
        timed.append((jax.config.jax_disable_jit, jax.config.jax_transfer_guard))
        return 1e-3

    try:
        jax.config.update(flag, value)
        assert po.AutotuneResolver(timer=timer).resolve(PROBLEM).source == "autotune"
    finally:
        jax.config.update(flag, before)
    assert set(timed) == {(False, "allow")}


def test_an_interrupted_sweep_begins_no_other_tile():
    stop = threading.Event()
    timed = []

    def interrupted(problem, tile, run, hopeless_seconds):
        timed.append(tile)
        stop.set()
        return 1e-3

    result = sweep(PROBLEM, [SMALL, WHOLE], budget_seconds=60, timer=interrupted, stop=stop)
    assert timed == [SMALL]
    assert result.left_out == 1
