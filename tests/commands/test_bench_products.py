"""`pallas-ops bench`: products beside XLA, and beside what others published."""

import csv
import json
import statistics

import pytest
from click.testing import CliRunner

from pallas_ops.commands import _bench, _benchmark, _published, main
from pallas_ops.commands._benchmark import measured_rows, predicted_rows, PROVIDERS, rows_csv
from pallas_ops.compiler import chip
from pallas_ops.tiles import CompilerResolver, TileStore


FIELDS = {
    "m",
    "k",
    "n",
    "dtype",
    "product",
    "provider",
    "tile",
    "time_us",
    "tflops",
    "kind",
    "roofline_us",
    "static_mxu_use",
    "note",
}


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "cache"))


def _run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_rows_of_one_shape(tmp_path):
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("json", "csv", "png")}
    result = _run(
        "--shape", "256,512,384", "--json", files["json"], "--csv", files["csv"],
        "--plot", files["png"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(files["json"].read_text())
    products = [("forward", provider) for provider in PROVIDERS]
    products += [(name, provider) for name in ("lhs_grad", "rhs_grad") for provider in PROVIDERS]
    assert [(row["product"], row["provider"]) for row in rows] == products
    for row in rows:
        assert row.keys() == FIELDS
        assert (row["m"], row["k"], row["n"], row["dtype"]) == (256, 512, 384, "bfloat16")
        assert row["kind"] == "predicted"
        assert row["time_us"] >= row["roofline_us"] > 0
        assert row["tflops"] == pytest.approx(2 * 256 * 512 * 384 / row["time_us"] * 1e-6)
        assert (row["tile"] is None) == (row["provider"] == "xla")
        assert 0 < row["static_mxu_use"] <= 1
        assert ("schedule" in row["note"]) == (row["provider"] == "xla")
    by_name = {(row["product"], row["provider"]): row for row in rows}
    for product in ("forward", "lhs_grad", "rhs_grad"):
        assert by_name[product, "tile128"]["tile"] == [128, 128, 128]
        assert by_name[product, "tuned"]["time_us"] < by_name[product, "tile128"]["time_us"]
    with files["csv"].open() as file:
        read = list(csv.DictReader(file))
    assert [row["provider"] for row in read] == [row["provider"] for row in rows]
    assert read[0]["tile"] == "128x128x128"
    assert files["png"].stat().st_size > 10_000
    assert "256 x 512 x 384" in result.stdout
    assert "Predicted for a v5e, not measured: schedules of libtpu" in result.stdout


def test_the_stored_tile_is_the_tuned_one():
    (before,) = predicted_rows([(256, 512, 384)], device="v5e", products=["forward"])
    (case,) = _benchmark._cases([(256, 512, 384)], ["bfloat16"], ["forward"], "NT", "v5e")
    problem = case.problem
    stored = CompilerResolver(most_candidates=1).resolve(problem).tile
    assert len(list(TileStore().entries())) == 1
    (after,) = predicted_rows([(256, 512, 384)], device="v5e", products=["forward"])
    (searched,) = predicted_rows([(256, 512, 384)], device="v5e", products=["forward"], search=True)
    assert after[1].tile == stored.blocks
    assert searched[1].tile == before[1].tile
    assert searched[1].seconds <= after[1].seconds


def test_another_device_is_uncalibrated():
    result = _run("--shape", "128,256,256", "--device", "v6e", "--product", "forward")
    assert "UNCALIBRATED: no timings of a v6e" in result.stdout
    printed = _run("--shape", "128,256,256", "--product", "rhs_grad", "--json", "-")
    assert {row["product"] for row in json.loads(printed.stdout)} == {"rhs_grad"}


def test_measured_here(monkeypatch):
    """What a TPU would do, with the interpreter in its place."""
    timed = []

    def timer(run):
        run(2)
        timed.append(run)
        return 1e-3 * len(timed)

    groups = list(
        measured_rows(
            [(16, 128, 128)],
            device="v5e",
            dtypes=["float32"],
            implementation="interpret",
            timer=timer,
        )
    )
    rows = [row for group in groups for row in group]
    assert [row.seconds for row in rows] == [1e-3 * count for count in range(1, 10)]
    assert {row.kind for row in rows} == {"measured"}
    assert {row.static_mxu_use for row in rows} == {None}
    assert "measured" in rows_csv(rows)

    def broken(run):
        raise RuntimeError("no clock")

    (group,) = measured_rows(
        [(16, 128, 128)],
        device="v5e",
        products=["forward"],
        implementation="interpret",
        timer=broken,
    )
    assert [(row.seconds, row.note) for row in group] == [(None, "RuntimeError: no clock")] * 3
    _bench._print_rows(group, "v5e")  # what failed is said, and the others are not lost


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,2"), "'1,2' is no shape: expected M,K,N"),
        (("--device", "v9"), "Unknown TPU 'v9'"),
        (("--rows", "0"), "0 is not in the range"),
        (("--plot", "missing/p.png"), "missing is no folder"),
        (("--product", "backward"), "'backward' is not one of"),
    ],
)
def test_bad_questions(arguments, message):
    result = _run(*arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


# What others published.


def test_the_published_timings():
    rows = _published.published()
    assert len(rows) == 45
    assert sum(row.can_be_predicted for row in rows) == 41
    assert len({row.source for row in rows}) == 3
    assert {row.problem.layout for row in rows} == {"NN", "NT"}
    forge = [row for row in rows if row.source.startswith("pallas-forge")]
    assert {row.problem.out_dtype.name for row in forge} == {"float32"}


def test_a_fit_by_hand():
    rows = [row for row in _published.published() if row.source.startswith("pallas-forge")]

    def half(row, _):
        return row.wall_seconds - 1e-4

    fit = _published.fit("half", half, rows, [None] * len(rows))
    (constant,) = fit.dispatch.values()
    assert constant == pytest.approx(1e-4)
    assert fit.mean_error == pytest.approx(0, abs=1e-12)
    assert (fit.spearman, fit.best_regret) == (pytest.approx(1), 0)
    alike = _published.fit("alike", lambda *_: 1.0, rows, [None] * len(rows))
    assert alike.spearman is None
    slowest = max(row.wall_seconds for row in rows) / min(row.wall_seconds for row in rows)
    assert alike.best_regret == pytest.approx(slowest - 1)


def test_ranks():
    assert _published.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert _published.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    expected = statistics.correlation([0, 1.5, 1.5, 3], [0, 1, 2, 3])
    assert _published.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(expected)


@pytest.mark.slow
def test_the_model_against_what_was_published(tmp_path, monkeypatch):
    compared = _published.compare(latencies=(4e-7, 5e-7, 6e-7))
    monkeypatch.setattr(_published, "compare", lambda **_: compared)
    file = tmp_path / "published.png"
    result = _run("published", "--json", "--plot", file)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    ours, bundles, roofline = found["models"]
    assert ours["mean_error"] <= 0.06
    assert ours["spearman"] >= 0.98
    # One source's noise: its three fastest tiles are within 4 % of each other.
    assert ours["best_regret"] <= 0.04
    assert ours["mean_error"] < 0.25 * min(bundles["mean_error"], roofline["mean_error"])
    assert ours["spearman"] > bundles["spearman"]
    assert len(found["rows"]) == 41
    assert all(0 < constant < 250 for constant in ours["dispatch_us"].values())
    # The latency in use is the one that fits best.
    variants = found["variants"]
    assert len(variants) == 3 * 9
    plain = [one for one in variants if (one["bandwidth"], one["step_cycles"]) == (1.0, 0)]
    best = min(plain, key=lambda one: one["mean_error"])["latency_us"]
    # No others put the tiles in another order at the top.
    assert {round(one["best_regret"], 3) for one in variants} == {0.038}
    assert best == pytest.approx(chip("v5e").dma_latency_seconds * 1e6, abs=0.01)
    assert file.stat().st_size > 10_000
    text = _run("published").stdout
    for part in ("schedule and time model", "bundle counts", "roofline", "the biggest tile"):
        assert part in text


@pytest.mark.slow
def test_the_vmem_estimate_against_the_compiler():
    result = _run("vmem", "--tiles", 60, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tiles"] >= 60
    assert found["pruned_within_2_percent"] == 0
    assert found["kept_regret"] <= 0.02
    assert found["false_accepts"] < found["kept_and_compile"] / 4
    assert found["pruned_and_refused"] > 10
    assert found["limit_bytes"] == 16 << 20


def test_the_vmem_of_no_device():
    assert "Unknown TPU 'v9'" in _run("vmem", "--device", "v9").output
