"""`pallas-ops tune`: what is measured, what is stored, and what is told."""

import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import pallas_ops as po
from pallas_ops.commands import _console, _tune, _tuning, main
from pallas_ops.commands._products import make_problem
from pallas_ops.tiles import problem_key, TileStore, versions
from pallas_ops.tiles._timing import Timing


_SMALL = ("--dtype", "float32", "--implementation", "interpret")

_MODEL = '''
"""A model of somebody's, with a neighbour to import."""

from __future__ import annotations  # a dataclass then looks for its module

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp

import pallas_ops
from jax import Array
from neighbour import FEATURES


@dataclasses.dataclass
class Data:
    x: Array


def step():
    model = pallas_ops.swap_linear(eqx.nn.MLP(FEATURES, 4, 32, 1, key=jax.random.key(0)))
    data = Data(jnp.zeros((24, FEATURES)))
    return eqx.filter_jit(eqx.filter_grad(lambda model: jax.vmap(model)(data.x).sum()))(model)


def other():
    with pallas_ops.options(implementation="tpu_interpret"):
        return pallas_ops.matmul(jnp.zeros((8, 8)), jnp.zeros((8, 8)))


def needs(x, y=2):
    return x


def none():
    return jnp.zeros((2, 2)) @ jnp.zeros((2, 2))


def broken():
    raise KeyError("of the person's own")


constant = 3
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the store's files."""
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PALLAS_OPS_TILES", raising=False)
    return tmp_path / "cache" / "tiles"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file of somebody's; what loading it leaves behind in this process is taken back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "neighbour.py").write_text("FEATURES = 16\n")
    path = tmp_path / "model.py"
    path.write_text(_MODEL)
    yield path
    for name in set(sys.modules) - known:
        if name == "neighbour" or name.startswith("pallas_ops_tuned_"):
            del sys.modules[name]


class _Clock:
    """In place of `time_per_call`: each tile takes longer than the one before, or as it is told."""

    def __init__(self):
        self.count = 0
        self.seconds = itertools.count(1)

    def __call__(self, run, *, hopeless_seconds):
        self.count += 1
        return Timing(float(next(self.seconds)) * 1e-6)


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(_tuning, "time_per_call", clock)
    return clock


def _run(*arguments):
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def _tuned(*arguments, code=0):
    result = _run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def _error(result):
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)  # an error of click's, and no traceback
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


def _problem(product, m, k, n, **fields):
    fields = dict(dtype="float32", out_dtype=None, layout="NT", precision="default") | fields
    return make_problem(product, m, k, n, device=None, implementation="interpret", **fields)


@dataclasses.dataclass(frozen=True)
class _Nobody:
    """A fallback that must not be asked."""

    def resolve(self, problem):
        raise AssertionError(f"not stored: {problem.describe()}")


def test_a_shape_and_both_its_gradients_are_stored_for_the_program_to_find(clock):
    result = _run(24, 256, 128, *_SMALL, "--candidates", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "3 problems, at most about 60 s each." in result.stdout
    assert "tells nothing about a TPU" in result.stdout
    assert result.stdout.count("stored in ") == 3
    assert clock.count > 3

    def loss(x, weight):
        return po.matmul(x, weight, transpose_rhs=True, implementation="interpret").sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with po.options(tiles=po.CachedResolver(fallback=_Nobody(), quiet=True)):
        step.lower(jnp.zeros((24, 256)), jnp.zeros((128, 256)))
        # Other rows of the same class, but no other class.
        jax.jit(loss).lower(jnp.zeros((32, 256)), jnp.zeros((128, 256)))
        with pytest.raises(AssertionError, match=r"not stored: lhs float32\[40, 256\]"):
            jax.jit(loss).lower(jnp.zeros((40, 256)), jnp.zeros((128, 256)))


def test_what_is_told_is_what_is_stored(clock):
    tuned = _tuned(256, 256, 256, *_SMALL, "--candidates", 2)
    assert [one["problem"]["layout"] for one in tuned] == ["NT", "NN", "TN"]
    for one in tuned:
        stored = json.loads(pathlib.Path(one["file"]).read_text())
        assert one["status"] == "tuned"
        assert (one["tile"], one["seconds"]) == (stored["tile"], stored["seconds"])
        # The clock lets each tile take longer: the first is the fastest, whichever it is.
        assert one["seconds"] <= one["estimate_seconds"]


@pytest.mark.parametrize("fastest", [(128, 128, 128), (128, 256, 128)])
def test_against_the_tile_by_shape(fastest, monkeypatch):
    def timer(problem, tile, run, hopeless_seconds):
        if tile.blocks == fastest:
            return 1e-6
        return 4e-6 if tile.blocks == (128, 256, 128) else 9e-6

    monkeypatch.setattr(_tuning, "tune", functools.partial(_tuning.tune, timer=timer))
    result = _run(128, 256, 128, *_SMALL, "--product", "forward")
    assert result.exit_code == 0, result.output
    m, k, n = fastest
    assert f"  TileConfig(block_m={m}, block_k={k}, block_n={n}): 1 us\n" in result.stdout
    if fastest == (128, 256, 128):
        assert "which is the tile by shape alone" in result.stdout
    else:
        assert "4.00 times as fast as the tile by shape alone, TileConfig(" in result.stdout


def test_products_can_be_named(clock):
    (one,) = _tuned(8, 32, 64, *_SMALL, "--product", "rhs_cotangent")
    assert one["problem"]["layout"] == "TN"
    (one,) = _tuned(32, 64, 128, "--dtype", "int8", "--implementation", "interpret")
    assert (one["problem"]["lhs_dtype"], one["problem"]["layout"]) == ("int8", "NT")


def test_several_shapes(clock):
    shapes = ("--shape", "8,32,64", "--shape", "16,32,64")
    tuned = _tuned(*shapes, *_SMALL, "--product", "forward")
    assert [one["problem"]["m"] for one in tuned] == [8, 16]
    tuned = _tuned(4, 8, 16, *shapes, *_SMALL, "--product", "forward")
    assert [one["status"] for one in tuned] == ["tuned", "known", "known"]


def test_shapes_that_one_entry_serves_are_one_problem():
    problems = [_problem("forward", m, 32, 64) for m in (40, 64, 33, 65)]
    assert [one.m for one in _tuning.one_for_each_entry(problems)] == [64, 65]


def test_what_is_stored_is_not_measured_again_unless_asked(clock, folder):
    arguments = (24, 32, 64, *_SMALL, "--product", "forward")
    (first,) = _tuned(*arguments)
    count = clock.count
    assert count >= 1
    (second,) = _tuned(*arguments)
    assert (second["status"], clock.count) == ("known", count)
    assert (second["tile"], second["seconds"]) == (first["tile"], first["seconds"])
    assert "stored before in" in _run(*arguments).stdout
    clock.seconds = itertools.repeat(77)
    (third,) = _tuned(*arguments, "--again")
    assert (third["status"], clock.count) == ("tuned", 2 * count)
    assert json.loads(pathlib.Path(first["file"]).read_text())["seconds"] == pytest.approx(77e-6)
    assert len(list(folder.iterdir())) == 1


def test_a_broken_file_is_measured_again(clock, folder):
    arguments = (24, 32, 64, *_SMALL, "--product", "forward")
    (first,) = _tuned(*arguments)
    (path,) = folder.iterdir()
    path.write_bytes(b"\xff")
    (second,) = _tuned(*arguments)
    assert (second["status"], second["tile"]) == ("tuned", first["tile"])
    assert any("it is no JSON" in warning for warning in second["warnings"])


def test_nothing_could_be_measured(clock, folder):
    clock.seconds = itertools.repeat(math.nan)
    result = _run(24, 32, 96, *_SMALL, "--product", "forward")
    assert "No tile is stored for 1 of 1 problem after all." in _error(result)
    assert "the timer says nan seconds" in result.stdout
    assert not folder.exists()
    # Half of it, and the half that worked stays.
    clock.seconds = itertools.chain([1e6], itertools.repeat(math.nan))
    tuned = _tuned("--shape", "8,8,8", "--shape", "8,8,24", *_SMALL, "--product", "forward", code=1)
    assert [one["status"] for one in tuned] == ["tuned", "failed"]
    assert len(list(folder.iterdir())) == 1


def test_again_in_vain_keeps_what_is_stored(clock, folder):
    arguments = (24, 32, 48, *_SMALL, "--product", "forward")
    _tuned(*arguments)
    (path,) = folder.iterdir()
    before = path.read_bytes()
    clock.seconds = itertools.repeat(-1)
    (one,) = _tuned(*arguments, "--again", code=1)
    assert one["status"] == "failed"
    assert path.read_bytes() == before


def test_a_store_that_cannot_be_written(clock, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "file"))
    result = _run(24, 32, 64, *_SMALL, "--product", "forward")
    assert "No tile is stored for 1 of 1 problem after all." in _error(result)
    assert f"could not be stored in {tmp_path / 'file' / 'tiles'}" in result.stdout
    assert "Warning: " in result.stdout


def test_every_product_of_a_model(clock, model):
    tuned = _tuned("--from", f"{model}:step", "--implementation", "interpret")
    shapes = [[one["problem"][axis] for axis in ("m", "k", "n", "layout")] for one in tuned]
    assert sorted(shapes) == [
        [4, 24, 32, "TN"],
        [24, 4, 32, "NN"],
        [24, 16, 32, "NT"],
        [24, 32, 4, "NT"],
        [32, 24, 16, "TN"],
    ]
    # What a person trains finds all of them.
    sys.path.insert(0, str(model.parent))
    import neighbour  # noqa: F401

    program = _tuning.load_function(f"{model}:step")
    with po.options(
        implementation="interpret", tiles=po.CachedResolver(fallback=_Nobody(), quiet=True)
    ):
        jax.jit(program).lower()


def test_a_file_that_is_loaded_elsewhere(clock, model, monkeypatch):
    monkeypatch.chdir(model.parent)
    tuned = _tuned("--from", "model.py:step", "--implementation", "interpret", "--device", "v5e")
    assert {one["problem"]["device"] for one in tuned} == {"v5e"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{model}", "names no function: expected path.py:function"),
        ("no/such.py:step", "no/such.py is no file"),
        ("{model}:missing", "has no function 'missing'. It has: step, other, needs, none, broken."),
        ("{model}:constant", "has no function 'constant'"),
        ("{model}:needs", "called without arguments, and that does not fit: missing a required"),
        ("{model}:none", "computes no product that 'interpret' could run"),
        ("{model}:other", "computes no product that 'interpret' could run"),
        ("{model}:broken", "could not be traced: KeyError, see above."),
    ],
)
def test_functions_that_are_none(source, message, model, clock):
    result = _run("--from", source.format(model=model), "--implementation", "interpret")
    assert message in _error(result)
    assert clock.count == 0
    if "broken" in source:
        assert 'raise KeyError("of the person\'s own")' in result.stderr


EXITS = """
import argparse, sys
import jax.numpy as jnp
import pallas_ops

def product():
    x = jnp.ones((8, 8))
    return pallas_ops.matmul(x, x)

def ends():
    product()
    sys.exit(0)

parsed = argparse.ArgumentParser().parse_args()
if "loading" in __file__:
    sys.exit()
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loading.py:product", "loading.py ended with SystemExit(None) when it was loaded."),
        ("other.py:ends", "other.py ended with SystemExit(0) when it was traced."),
    ],
)
def test_a_program_that_ends_is_an_error(name, message, clock, tmp_path, monkeypatch):
    (tmp_path / name.partition(":")[0]).write_text(EXITS)
    # The command's own arguments are none of the file's.
    monkeypatch.setattr(sys, "argv", ["pallas-ops", "tune", "--from"])
    before = list(sys.argv)
    result = _run("--from", f"{tmp_path}/{name}", "--implementation", "interpret")
    assert message in _error(result)
    assert "if __name__ == '__main__':" in _error(result)
    assert (clock.count, sys.argv) == (0, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Say what to tune"),
        ([8, 8], "A shape is three sizes, M K N; got 2."),
        ([8, 8, 8, "--from", "x.py:f"], "Say what to tune"),
        (["--shape", "8,8"], "'8,8' is no shape: expected M,K,N"),
        (["--shape", "8,8,-8"], "'8,8,-8' is no shape"),
        ([8, 0, 8], "0 is not in the range"),
        ([8, 8, 8, "--budget", 0], "0.0 is not in the range"),
        ([8, 8, 8, "--candidates", 0], "0 is not in the range"),
        ([8, 8, 8, "--device", "v9", *_SMALL], "Unknown TPU 'v9'"),
        ([8, 8, 8, "--implementation", "xla"], "'xla' is not one of 'mosaic'"),
        (
            [8, 8, 8, "--dtype", "int8", "--product", "lhs_cotangent", *_SMALL[2:]],
            "a product of int8 has no gradients",
        ),
    ],
)
def test_bad_options(arguments, message, clock):
    result = _run(*arguments)
    assert message in _error(result)
    assert (result.stdout, clock.count) == ("", 0)


def test_a_tpu_is_needed_for_its_tiles():
    message = _error(_run(8, 8, 8))
    assert "needs one, and JAX runs on cpu here" in message
    assert "`--implementation interpret` tries the command out here" in message


def test_only_the_tiles_of_the_tpu_that_is_here(clock, monkeypatch):
    monkeypatch.setattr(_tune, "default_platform", lambda: "tpu")
    kind = jax.devices()[0].device_kind  # what stands in for the TPU
    message = _error(_run(8, 8, 8, "--device", "v5e"))
    assert f"--device v5e: the TPU here is a {kind}, and only its tiles" in message
    assert clock.count == 0


def test_somebody_elses_warning_stays_a_warning():
    told = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with _console.told_warnings(told):
            warnings.warn("pallas_ops: ours", stacklevel=1)
            warnings.warn("theirs", stacklevel=1)
    assert told == ["ours"]
    assert [str(warning.message) for warning in shown] == ["theirs"]


def test_the_defaults_are_those_of_the_resolver():
    parameters = inspect.signature(po.AutotuneResolver).parameters
    assert parameters["budget_seconds"].default == _console.TUNE_BUDGET_SECONDS
    assert parameters["most_candidates"].default == _console.TUNE_CANDIDATES


def test_as_a_person_runs_it(folder):
    # The platform is left to JAX, which then loads libtpu and hears its complaints. Nothing is in
    # place of the clock here: large enough to be measured, small enough to be quick.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    arguments = ["256", "256", "256", *_SMALL, "--product", "forward", "--candidates", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "pallas_ops", "tune", *arguments, "--budget", "5"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "TileConfig(block_m=" in result.stdout
    key = problem_key(_problem("forward", 256, 256, 256))
    assert TileStore().get(key, versions()) is not None
