"""Tiles by the compiler, from the command line: `tune --without-tpu` and `tiles generate`."""

import json

import pytest
from click.testing import CliRunner

import pallas_ops as po
from pallas_ops.commands import _console, _generating, _shapes, main
from pallas_ops.compiler import Verdict
from pallas_ops.tiles import (
    _ranking,
    Entry,
    problem_key,
    read_table,
    TileConfig,
    TileStore,
    versions,
)

from ..compiler.tools import answering


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_ranking, "_verdicts", {})
    po.tiles.forget()
    yield TileStore()
    po.tiles.forget()


def _run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def _tune(*arguments):
    result = _run("tune", "--without-tpu", "--device", "v5e", *arguments, "--json")
    return result, json.loads(result.stdout)


def test_a_shape(store):
    result, found = _tune(256, 512, 384, "--candidates", 2)
    assert result.exit_code == 0, result.output
    assert [one["status"] for one in found] == ["tuned"] * 3
    assert {one["source"] for one in found} == {"compiler"}
    for one in found:
        assert one["seconds"] is None
        assert one["predicted_seconds"] > 0
        assert one["reason"].startswith("predicted ")
    assert len(list(store.entries())) == 3
    # Known the second time, and looked for again where that is asked for.
    _, again = _tune(256, 512, 384, "--candidates", 2)
    assert [one["status"] for one in again] == ["known"] * 3
    _, again = _tune(256, 512, 384, "--candidates", 2, "--again", "--product", "forward")
    assert [one["status"] for one in again] == ["tuned"]
    assert again[0]["tile"] == found[0]["tile"]
    text = _run("tune", "--without-tpu", "--device", "v5e", 256, 512, 384).stdout
    assert "Nothing is measured: the compiler is asked for a v5e." in text
    why = _run(
        *("tiles", "why", 256, 512, 384, "--device", "v5e"),
        *("--tiles", "compiler", "--no-compile", "--json"),
    )
    assert json.loads(why.stdout)["source"] == "store"


def test_a_measured_tile_stays(store):
    _tune(256, 512, 384, "--candidates", 1, "--product", "forward")
    ((_, entry),) = store.entries()
    measured = Entry(entry.key, versions(), TileConfig(128, 128, 128), seconds=1.0)
    store.put(measured)
    _, (again,) = _tune(256, 512, 384, "--again", "--product", "forward")
    assert (again["status"], again["tile"]) == ("known", [128, 128, 128])
    assert "a prediction does not replace it" in again["warnings"][0]
    assert [one for _, one in store.entries()] == [measured]


def test_every_product_of_a_model(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "import jax, jax.numpy as jnp, equinox as eqx, pallas_ops\n"
        "def step():\n"
        "    layer = pallas_ops.PallasLinear(256, 128, key=jax.random.key(0), dtype=jnp.bfloat16)\n"
        "    x = jnp.zeros((64, 256), jnp.bfloat16)\n"
        "    loss = lambda layer: jnp.sum(jnp.tanh(jax.vmap(layer)(x)).astype(jnp.float32))\n"
        "    return eqx.filter_grad(loss)(layer)\n"
    )
    _, found = _tune("--from", f"{file}:step", "--candidates", 1)
    layouts = [(one["problem"]["layout"], one["problem"]["m"]) for one in found]
    assert layouts == [("NT", 64), ("TN", 128)]


def test_no_compiler(monkeypatch, store):
    answering(monkeypatch, Verdict(False, "there is none", transient=True, unavailable=True))
    result, found = _tune(256, 512, 384, "--product", "forward")
    assert result.exit_code == 1
    assert found[0]["status"] == "failed"
    assert "the compiler gave no answer" in found[0]["warnings"][0]
    assert "there is none" in found[0]["warnings"][0]
    assert list(store.entries()) == []


def test_a_budget_that_is_too_short(store):
    result, found = _tune(256, 512, 384, "--product", "forward", "--budget", 0.001)
    assert result.exit_code == 1
    assert "the budget left no time for any of 12 tiles" in found[0]["warnings"][0]
    assert list(store.entries()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 8, 8), "--without-tpu compiles for one TPU: say which, as --device v5e."),
        ((8, 8, 8, "--device", "v9"), "Unknown TPU 'v9'"),
        (
            (8, 8, 8, "--device", "v5e", "--implementation", "interpret"),
            "which is mosaic and not interpret",
        ),
    ],
)
def test_bad_questions(arguments, message):
    result = _run("tune", "--without-tpu", *arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_the_defaults_are_the_resolver_own():
    resolver = po.CompilerResolver()
    assert resolver.budget_seconds == _console.COMPILE_BUDGET_SECONDS
    assert resolver.most_candidates == _console.COMPILE_CANDIDATES


def test_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(_generating, "PROJECTIONS", (_shapes.Projection("small", "q", 128, 256),))
    monkeypatch.setattr(_generating, "ROWS", (8, 64))
    monkeypatch.setattr(_generating, "SQUARES", ())
    file = tmp_path / "table.json"
    arguments = ("tiles", "generate", file, "--device", "v5e", "--dtype", "bfloat16")
    # The first candidate of these is the default tile, and no entry is worth its place.
    result = _run(*arguments, "--candidates", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("0 tiles written to")
    assert result.stdout.endswith("The default tile is as good for 6 products.\n")
    assert read_table(file.read_bytes()) == []
    monkeypatch.setattr(_generating, "_WORTH", 1.01)
    result = _run(*arguments, "--candidates", 1)
    assert result.exit_code == 0, result.output
    entries = read_table(file.read_bytes())
    wanted = _generating.shipped_problems("v5e", ["bfloat16"])
    assert len(entries) == len(wanted) == 6
    assert result.stdout.startswith("6 tiles written to")
    before = file.read_bytes()
    _run(*arguments, "--candidates", 1)
    assert file.read_bytes() == before
    found = po.CachedResolver(table=file, quiet=True).resolve(wanted[0])
    assert found.source == "table"
    assert problem_key(wanted[0]) in [dict(entry.key) for entry in entries]
    assert _run("tiles", "import", file).exit_code == 0
