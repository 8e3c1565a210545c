"""`pallas-ops bench`: products beside XLA, and beside what others published."""

import csv
import dataclasses
import json
import statistics

import click
import pytest
from click.testing import CliRunner

from pallas_ops.commands import (
    _bench,
    _benchmark,
    _files,
    _plots,
    _products,
    _published,
    _vmem_study,
    main,
)
from pallas_ops.commands._benchmark import measured_rows, predicted_rows, PROVIDERS, rows_csv
from pallas_ops.compiler import _topology, chip, CompilePool, Judgement, Prediction, Verdict
from pallas_ops.tiles import CompilerResolver, estimate_vmem_bytes, TileConfig, TileStore

from ..compiler.tools import answering


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
    "calibrated",
    "roofline_us",
    "roofline_bound",
    "static_mxu_use",
    "xla_estimate_us",
    "note",
    "unread",
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
        assert row["calibrated"] is True
        assert row["unread"] == 0
        assert row["time_us"] >= row["roofline_us"] > 0
        assert row["tflops"] == pytest.approx(2 * 256 * 512 * 384 / row["time_us"] * 1e-6)
        assert (row["tile"] is None) == (row["provider"] == "xla")
        assert 0 < row["static_mxu_use"] <= 1
        assert ("schedule" in row["note"]) == (row["provider"] == "xla")
        assert (row["xla_estimate_us"] is not None) == (row["provider"] == "xla")
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
    assert "of all three products" in result.stdout


def test_the_stored_tile_is_the_tuned_one():
    (before,) = predicted_rows([(256, 512, 384)], device="v5e", products=["forward"])
    (case,) = _benchmark._cases([(256, 512, 384)], ["bfloat16"], ["forward"], "NT", "v5e")
    problem = case.problem
    stored = CompilerResolver(most_candidates=1).resolve(problem).tile
    assert len(list(TileStore().entries())) == 1
    (after,) = predicted_rows([(256, 512, 384)], device="v5e", products=["forward"])
    (searched,) = predicted_rows([(256, 512, 384)], device="v5e", products=["forward"], search=True)
    assert after[1].tile == stored.numbers
    assert searched[1].tile == before[1].tile
    assert searched[1].seconds <= after[1].seconds


@pytest.fixture
def figures(monkeypatch):
    """The pictures that are made, in place of files."""
    made = []
    monkeypatch.setattr(_plots, "_save", lambda figure, file: made.append(figure))
    return made


def test_another_device_is_uncalibrated(tmp_path, figures):
    files = (
        "--json",
        tmp_path / "r.json",
        "--csv",
        tmp_path / "r.csv",
        "--plot",
        tmp_path / "r.png",
    )
    result = _run("--shape", "128,256,256", "--device", "v6e", "--product", "forward", *files)
    assert "UNCALIBRATED: no timings of a v6e" in result.stdout
    rows = json.loads((tmp_path / "r.json").read_text())
    assert {row["calibrated"] for row in rows} == {False}
    with (tmp_path / "r.csv").open() as file:
        assert {row["calibrated"] for row in csv.DictReader(file)} == {"False"}
    assert figures[0].get_suptitle() == "v6e, predicted, UNCALIBRATED"
    printed = _run("--shape", "128,256,256", "--product", "rhs_grad", "--json", "-")
    assert {row["product"] for row in json.loads(printed.stdout)} == {"rhs_grad"}


def _row(product, provider, m):
    return _benchmark.Row(
        m=m, k=256, n=256, dtype="bfloat16", product=product, provider=provider, tile=None,
        seconds=1e-6, flops=2 * m * 256 * 256, kind="predicted", roofline_seconds=1e-7,
            roofline_bound="mxu",
        calibrated=True,
    )  # fmt: skip


def test_the_legend_covers_no_bars(figures):
    rows = [
        _row(product, provider, m)
        for product in ("forward", "lhs_grad")
        for provider in PROVIDERS
        for m in (128, 256)
    ]
    _plots.plot_rows(rows, "v5e", "rows.png")
    (figure,) = figures
    assert figure.get_suptitle() == "v5e, predicted"
    figure.canvas.draw()
    (legend,) = [*figure.legends, *(panel.legend_ for panel in figure.axes if panel.legend_)]
    assert {text.get_text() for text in legend.get_texts()} == {*PROVIDERS, "roofline"}
    for panel in figure.axes:
        assert not legend.get_window_extent().overlaps(panel.get_window_extent())


# Without a compiler, and where nothing can be written: an error before any work.


@pytest.fixture
def no_work(monkeypatch):
    def never(self, jobs, **given):
        raise AssertionError(f"asked for {jobs}")

    monkeypatch.setattr(CompilePool, "ask", never)


@pytest.mark.parametrize(
    "arguments", [(), ("published",), ("precision",), ("vmem",), ("vmem", "--json")]
)
def test_without_libtpu(arguments, monkeypatch, no_work):
    reason = "The TPU compiler is in libtpu, which is not installed here."
    monkeypatch.setattr(_topology, "why_no_compiler", lambda: reason)
    result = _run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: This is predicted by the TPU compiler. {reason}\n"


@pytest.mark.parametrize(
    "arguments", [("--shape", "256,512,384"), ("precision",), ("vmem", "--tiles", 6)]
)
def test_a_libtpu_that_does_not_start(arguments, monkeypatch):
    unavailable = Verdict(False, "it does not start", transient=True, unavailable=True)
    answering(monkeypatch, unavailable)
    result = _run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: it does not start\n"


def test_where_a_tpu_is_no_compiler_is_asked(monkeypatch):
    monkeypatch.setattr(_topology, "why_no_compiler", lambda: "there is none")
    monkeypatch.setattr(_bench, "default_platform", lambda: "tpu")
    monkeypatch.setattr(_products, "device_name", lambda device, platform: "v5e")
    rows = [_row("forward", provider, 8) for provider in PROVIDERS]
    monkeypatch.setattr(_benchmark, "measured_rows", lambda *_, **given: iter([rows]))
    result = _run("--shape", "8,256,256")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
@pytest.mark.parametrize("command", [(), ("published",)])
def test_what_cannot_be_written_is_told_before_any_work(option, command, tmp_path, no_work):
    if command and option != "--plot":
        command = ()
    file = tmp_path / "missing" / "rows.png"
    result = _run(*command, option, file)
    assert result.exit_code == 2
    assert f"'{file}' cannot be written: {file.parent} is no folder. Make it" in result.stderr
    assert _run(*command, option, tmp_path).exit_code == 2


def test_a_folder_in_which_no_file_can_be_made(no_work):
    result = _run("--json", "/proc/rows.json")
    assert result.exit_code == 2
    assert "'/proc/rows.json' cannot be written: " in result.stderr
    assert "Name a file in a folder where you can make one" in result.stderr


def test_one_file_that_fails_costs_no_other(monkeypatch, tmp_path):
    rows = [_row("forward", provider, 8) for provider in PROVIDERS]
    monkeypatch.setattr(_benchmark, "predicted_rows", lambda *_, **given: iter([rows]))
    files = {kind: tmp_path / kind / f"rows.{kind}" for kind in ("json", "csv", "png")}
    for file in files.values():
        file.parent.mkdir()
    write_whole = _files.write_whole

    def full(path, content):
        if path == files["json"]:
            raise click.ClickException(f"{path} cannot be written: No space left on device.")
        write_whole(path, content)

    monkeypatch.setattr(_bench, "write_whole", full)
    result = _run("--json", files["json"], "--csv", files["csv"], "--plot", files["png"])
    assert result.exit_code == 1
    assert result.stderr == f"Error: {files['json']} cannot be written: No space left on device.\n"
    assert "8 x 256 x 256" in result.stdout
    assert len(list(csv.DictReader(files["csv"].read_text().splitlines()))) == 3
    assert files["png"].stat().st_size > 10_000


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
        (("--rows", "8", "--shape", "8,8,8"), "--rows chooses among the language models' shapes"),
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
    # Fewer than the command tries: with the types checked, the simulation is ten times slower.
    monkeypatch.setattr(_published, "_BANDWIDTHS", (1.0, 0.8))
    monkeypatch.setattr(_published, "_STEP_CYCLES", (0, 300))
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
    assert len(variants) == 3 * 4
    plain = [one for one in variants if (one["bandwidth"], one["step_cycles"]) == (1.0, 0)]
    best = min(plain, key=lambda one: one["mean_error"])["latency_us"]
    # No others put the tiles in another order at the top.
    assert {round(one["best_regret"], 3) for one in variants} == {0.038}
    assert best == pytest.approx(chip("v5e").dma_latency_seconds * 1e6, abs=0.01)
    assert file.stat().st_size > 10_000
    text = _run("published").stdout
    for part in ("schedule and time model", "bundle counts", "roofline", "the biggest tile"):
        assert part in text


# The VMEM estimate.


@pytest.mark.slow
def test_the_vmem_estimate_against_the_compiler():
    result = _run("vmem", "--tiles", 60, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["device"], found["calibrated"]) == ("v4", False)
    assert (found["tiles"], found["unanswered"]) == (60, 0)
    counts = ("kept_and_compile", "false_accepts", "pruned_and_compile", "pruned_and_refused")
    assert sum(found[name] for name in counts) == 60
    assert found["pruned_within_2_percent"] == 0
    assert found["kept_regret"] <= 0.02
    assert found["false_accepts"] < found["kept_and_compile"] / 4
    assert found["pruned_and_refused"] > 10
    assert found["limit_bytes"] == 16 << 20


def _judged(monkeypatch, verdict, seconds=None):
    """Sets what is said of every kernel, in place of a compiler and the model."""

    def judge(jobs, pool, **given):
        predicted = None if seconds is None else Prediction(seconds, 0.0, 0.0, 0.0, 0, 1)
        return [Judgement(job, verdict, predicted) for job in jobs]

    monkeypatch.setattr(_vmem_study, "judge", judge)


def test_so_many_tiles_near_the_limit_are_counted_as_are_asked_for(monkeypatch):
    _judged(monkeypatch, Verdict(True), 1e-3)
    for count in (6, 61, 96):
        found = _vmem_study.study("v4", tiles=count)
        assert found.as_json()["tiles"] == len(found.near) == count
        assert len(found.cases) > count  # those to compare with
        for case in found.near:
            part = estimate_vmem_bytes(case.problem.matmul, case.tile) / found.limit_bytes
            assert 0.6 <= part <= 1.15
        assert len({(case.problem, case.tile) for case in found.cases}) == len(found.cases)
    everything = _vmem_study.study("v4", tiles=10**6)
    assert 400 < len(everything.near) < 10**4
    text = _run("vmem").stdout
    assert text.startswith("96 tiles near the limit of 16 MiB, v4, ")
    assert text.endswith(" at most, by predicted times (uncalibrated).\n")
    assert _run("vmem", "--device", "v5e").stdout.endswith(" at most, by predicted times.\n")


def test_losses_are_among_the_tiles_that_are_counted():
    problem = _products.kernel_problem("forward", (512,) * 3, dtype="bfloat16", device="v4")

    def case(is_near, kept, seconds):
        return _vmem_study.Case(
            problem, TileConfig(128, 128, 128), is_near, kept, seconds is not None, seconds
        )

    lost, usual = case(True, False, 1.01), case(False, False, 1.0)
    cases = (lost, usual, case(True, True, 1.1), case(True, True, None))
    found = _vmem_study.Study("v4", 16 << 20, cases)
    assert found.losses == [lost]  # within 2 % of a usual candidate
    assert found.kept_regret == pytest.approx(0.1)
    assert found.as_json()["tiles"] == 3


def test_a_tile_without_a_verdict_is_in_no_count(monkeypatch):
    _judged(monkeypatch, Verdict(False, "a worker was lost", transient=True))
    found = _vmem_study.study("v4", tiles=12)
    assert found.cases == ()
    assert found.unanswered > 12
    assert found.kept_regret is None
    text = _run("vmem", "--tiles", 12).stdout
    assert f"no verdict, and in no count           {found.unanswered}\n" in text
    assert text.endswith("of some product no tile that is kept has a time.\n")


def test_shares():
    assert _vmem_study.share_out(7, [5, 5, 5]) == [3, 2, 2]
    assert _vmem_study.share_out(12, [1, 9, 9]) == [1, 6, 5]
    assert _vmem_study.share_out(99, [1, 2, 3]) == [1, 2, 3]


def test_the_vmem_of_no_device():
    assert "Unknown TPU 'v9'" in _run("vmem", "--device", "v9").output


def test_candidates_that_could_not_be_read_are_counted(monkeypatch):
    rank = _benchmark.rank

    def with_unread(*arguments, **given):
        return [dataclasses.replace(one, unread=2) for one in rank(*arguments, **given)]

    monkeypatch.setattr(_benchmark, "rank", with_unread)
    arguments = ("--shape", "256,512,384", "--search")
    rows = json.loads(_run(*arguments, "--json", "-").stdout)
    assert [row["unread"] for row in rows] == [0, 2, 0] * 3
    assert "6 candidates compiled and could not be read: ranked by" in _run(*arguments).stdout
