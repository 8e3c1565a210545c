"""`pallas-ops predict`."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pallas_ops.commands import _plots, _predicting, main
from pallas_ops.compiler import CompilePool, Verdict

from ..compiler.tools import answering


FIELDS = {
    "block_m",
    "block_k",
    "block_n",
    "prologue_parts",
    "compiles",
    "error",
    "vmem_bytes",
    "vmem_limit_bytes",
    "static_mxu_use",
    "spills",
    "predicted_us",
    "tflops",
    "bound",
    "analytic_us",
    "estimated_us",
}


def _run(*arguments):
    return CliRunner().invoke(main, ["predict", *map(str, arguments)])


def _json(*arguments):
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (["--bias"], "bias:bfloat16 identity"),
        (["--bias", "--activation", "silu", "--derivative"], "bias:bfloat16 "),
    ],
)
def test_an_epilogue(options, label):
    """Its kernel is another one, and little slower than that of the product alone."""
    of = (512, 1024, 512, "--tile", "256,1024,256")
    bare, fused = (_json(*of, *more)["tiles"][0] for more in ([], options))
    assert fused["compiles"]
    assert 1 < fused["predicted_us"] / bare["predicted_us"] < 1.5
    assert f"epilogue {label}" in _run(*of, *options).stdout


@pytest.mark.parametrize(
    ("m", "parts", "reason"),
    [
        (512, 7, "parts of whole multiples of 16x128x128, and k is 1024"),
        (513, 8, "blocks that divide m, k and n evenly"),
    ],
)
def test_parts_that_a_tile_cannot_have_are_told(m, parts, reason):
    result = _run(m, 1024, 512, "--tile", f"512,1024,512,{parts}")
    assert result.exit_code != 0
    assert reason in result.stderr
    assert "expected block_m,block_k,block_n[,parts]" in _run(8, 8, 8, "--tile", "8,8").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--derivative"], "is that of an activation"),
        (["--bias", "--product", "lhs_cotangent"], "'lhs_cotangent' has none"),
        (["--activation", "softmax"], "'softmax' is not one of"),
    ],
)
def test_an_epilogue_that_is_none(options, message):
    result = _run(512, 1024, 512, *options)
    assert result.exit_code != 0
    assert message in result.stderr


@pytest.fixture
def answers(monkeypatch):
    """Sets what every pool says, in place of a compiler."""
    return functools.partial(answering, monkeypatch)


def test_named_tiles():
    found = _json(
        1024, 1024, 1024, "--layout", "NN", "--out-dtype", "float32",
        "--tile", "128,128,128", "--tile", "512,512,256", "--tile", "512,512,256",
    )  # fmt: skip
    assert {key: found[key] for key in ("device", "m", "k", "n", "layout")} == {
        "device": "v5e",
        "m": 1024,
        "k": 1024,
        "n": 1024,
        "layout": "NN",
    }
    assert (found["dtype"], found["out_dtype"]) == ("bfloat16", "float32")
    assert found["calibrated"] is True
    assert found["kind"] == "predicted"
    assert found["roofline_us"] == pytest.approx(2 * 1024**3 / 197e12 * 1e6)
    assert found["xla_estimate_us"] > 0.9 * found["roofline_us"]
    assert found["xla_source"] == "schedule"
    assert found["roofline_us"] < found["xla_us"] < found["tiles"][1]["predicted_us"]
    # Best first, each once.
    first, second = found["tiles"]
    assert (first["block_m"], second["block_m"]) == (512, 128)
    for tile in found["tiles"]:
        assert tile.keys() == FIELDS
        assert tile["compiles"] is True
        assert tile["error"] is None
        assert tile["vmem_limit_bytes"] == 16 << 20
        assert 0 < tile["vmem_bytes"] < tile["vmem_limit_bytes"]
        assert 0 < tile["static_mxu_use"] < 1
        assert tile["predicted_us"] > found["roofline_us"]
        assert tile["tflops"] == pytest.approx(2 * 1024**3 / tile["predicted_us"] * 1e-6)
        assert tile["bound"] in ("mxu", "hbm", "latency")
    assert second["bound"] == "latency"
    assert first["predicted_us"] < second["predicted_us"]


@pytest.mark.parametrize(("m", "ratio"), [(1, 0.56), (16, 0.56)])
def test_weights_of_half_the_bytes_are_near_half_the_time(m, ratio):
    """A few rows wait for the weights: their conversion in VMEM takes less than their transfer."""
    tile = ("--tile", f"{m},4096,256")
    wide = _json(m, 4096, 4096, *tile)
    narrow = _json(m, 4096, 4096, *tile, "--weights", "int8")
    assert (wide["rhs_dtype"], narrow["dtype"], narrow["rhs_dtype"]) == (
        "bfloat16",
        "bfloat16",
        "int8",
    )
    times = [found["tiles"][0]["predicted_us"] for found in (narrow, wide)]
    assert 0.5 < times[0] / times[1] < ratio
    assert narrow["tiles"][0]["bound"] == "hbm"
    gradient = _json(m, 4096, 4096, "--tile", f"{m},4096,256", "--weights", "int8",
                     "--product", "lhs_cotangent")  # fmt: skip
    assert (gradient["layout"], gradient["rhs_dtype"]) == ("NN", "int8")


def test_the_best_of_the_candidates():
    found = _json(512, 512, 512, "--candidates", 4, "--best", 2, "--device", "v6e")
    assert found["calibrated"] is False
    assert len(found["tiles"]) == 2
    times = [tile["predicted_us"] for tile in found["tiles"]]
    assert times == sorted(times)
    text = _run(512, 512, 512, "--candidates", 4, "--best", 2, "--device", "v6e").stdout
    assert "UNCALIBRATED: no published timings of a v6e" in text
    assert "The best 2 of 4 that were compiled." in text
    assert "Predicted, not measured: schedules of libtpu" in text


def test_a_tile_whose_first_blocks_come_in_parts():
    tiles = ("--tile", "256,1024,512", "--tile", "256,1024,512,4")
    first, second = _json(1024, 1024, 1024, *tiles)["tiles"]
    assert (first["prologue_parts"], second["prologue_parts"]) == (4, 1)
    assert first["predicted_us"] < second["predicted_us"]
    assert "256x1024x512x4 " in _run(1024, 1024, 1024, *tiles).stdout


def test_tiles_that_are_none(monkeypatch):
    def never(self, jobs, **given):
        assert all(job.blocks is None for job in jobs)  # XLA's own, and nothing else
        return [Verdict(True, xla_cycles=1)] * len(jobs)

    monkeypatch.setattr(CompilePool, "ask", never)
    found = _json(4096, 4096, 4096, "--tile", "4096,4096,4096", "--tile", "100,128,128")
    large, odd = found["tiles"]
    assert large["compiles"] is odd["compiles"] is False
    assert "of VMEM by estimate, and a TPU v5e has at most 128 MiB" in large["error"]
    assert "neither a multiple of 16 nor the whole axis" in odd["error"]
    assert "the nearest legal tile is TileConfig(block_m=96," in odd["error"]
    assert large["predicted_us"] is None


def test_what_the_compiler_refuses(answers):
    answers(Verdict(False, "E1001: too much", vmem_bytes=20 << 20))
    (tile,) = _json(1024, 1024, 1024, "--tile", "256,256,256")["tiles"]
    assert (tile["compiles"], tile["error"]) == (False, "E1001: too much")
    assert tile["vmem_bytes"] == 20 << 20
    assert "E1001: too much" in _run(1024, 1024, 1024, "--tile", "256,256,256").stdout


def _table(text):
    """The rows of the table by tile, each a list of its cells that are not empty."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if "MiB " in line}


def test_a_refused_tile_has_no_time_and_its_reason_is_told_once(answers):
    reason = "E1001: " + "much too much of it " * 20
    answers(Verdict(False, reason, vmem_bytes=20 << 20))
    text = _run(1024, 1024, 1024, "--tile", "256,256,256", "--tile", "256,256,512").stdout
    assert _table(text) == {
        "256x256x256": ["20.0", "MiB", "16.0", "MiB", "refused"],
        "256x256x512": ["20.0", "MiB", "16.0", "MiB", "refused"],
    }
    (told,) = [line for line in text.splitlines() if line.startswith("256x256x") and "E10" in line]
    assert sorted(told.partition(": refused: ")[0].split(", ")) == ["256x256x256", "256x256x512"]
    assert max(len(line) for line in text.splitlines() if reason.strip() not in line) < 110
    assert "Predicted, not measured" not in text  # nothing was


def test_a_verdict_that_was_not_given(answers):
    answers(Verdict(False, "the compiler's process ended (SIGKILL)", transient=True))
    found = _json(1024, 1024, 1024, "--tile", "256,256,256")
    (tile,) = found["tiles"]
    assert tile["compiles"] is None
    assert tile["error"] == found["xla_error"] == "the compiler's process ended (SIGKILL)"
    assert found["no_compiler"] is None
    text = _run(1024, 1024, 1024, "--tile", "256,256,256").stdout
    assert _table(text)["256x256x256"][2:] == ["no", "verdict"]
    assert "XLA's own estimate   none: the compiler's process ended (SIGKILL)\n" in text
    assert "carries no cycles" not in text


def test_a_program_of_xla_without_cycles(answers):
    answers(Verdict(True, schedule_error="none is read"))
    found = _json(1024, 1024, 1024, "--tile", "256,256,256")
    assert found["xla_estimate_us"] is found["xla_error"] is None
    text = _run(1024, 1024, 1024, "--tile", "256,256,256").stdout
    assert "none: its program of this product carries no cycles" in text
    assert _table(text)["256x256x256"][-1] == "(estimate)"


def test_candidates_without_a_time_are_counted(monkeypatch):
    ask = CompilePool.ask

    def some(self, jobs, *, told=None, **given):
        if jobs[0].blocks is None:
            return ask(self, jobs, told=told, **given)
        refused = Verdict(False, "E1001: too much")
        answered = [ask(self, jobs[:1])[0], *[refused] * (len(jobs) - 1)]
        for job, verdict in zip(jobs, answered, strict=True):
            told(job, verdict)
        return answered

    monkeypatch.setattr(CompilePool, "ask", some)
    text = _run(512, 512, 512, "--candidates", 4, "--best", 2).stdout
    assert "The best 1 of 1 that were compiled. 3 more have no time.\n" in text


def test_a_schedule_that_cannot_be_read(answers):
    answers(Verdict(True, schedule_error="the schedule cannot be read", vmem_bytes=1 << 20))
    found = _json(1024, 1024, 1024, "--tile", "256,256,256")
    (tile,) = found["tiles"]
    assert (tile["compiles"], tile["error"]) == (True, "the schedule cannot be read")
    assert tile["predicted_us"] is None
    assert tile["estimated_us"] == tile["analytic_us"] > 0
    assert found["xla_estimate_us"] is found["xla_us"] is found["xla_source"] is None
    text = _run(1024, 1024, 1024, "--tile", "256,256,256").stdout
    assert re.search(r"256x256x256.* ~ [\d.]+ us.*\(estimate\)", text)
    assert "256x256x256: ranked by the analytic estimate: the schedule cannot be read" in text


def test_a_candidate_that_cannot_be_read_is_ranked_by_the_estimate(monkeypatch):
    ask = CompilePool.ask

    def some(self, jobs, *, told=None, **given):
        if told is None:  # XLA's
            return ask(self, jobs, told=told, **given)
        unread = Verdict(True, schedule_error="the schedule cannot be read")
        answered = [unread, *ask(self, jobs[1:])]
        for job, verdict in zip(jobs, answered, strict=True):
            told(job, verdict)
        return answered

    monkeypatch.setattr(CompilePool, "ask", some)
    found = _json(512, 512, 512, "--candidates", 3)["tiles"]
    (unread,) = (tile for tile in found if tile["predicted_us"] is None)
    read = [tile for tile in found if tile is not unread]
    scale = max(tile["predicted_us"] / tile["analytic_us"] for tile in read)
    assert unread["estimated_us"] == pytest.approx(scale * unread["analytic_us"])
    times = [tile["predicted_us"] or tile["estimated_us"] for tile in found]
    assert times == sorted(times)
    text = _run(512, 512, 512, "--candidates", 3, "--best", 2).stdout
    assert "The best 2 of 3 that were compiled. 1 of these could not be read: ranked by" in text


def test_without_a_compiler(answers):
    answers(Verdict(False, "The TPU compiler is not here", transient=True, unavailable=True))
    found = _json(4096, 4096, 4096, "--best", 3)
    assert found["kind"] == "analytic estimate"
    assert found["no_compiler"] == "The TPU compiler is not here"
    analytic = [tile["analytic_us"] for tile in found["tiles"]]
    assert analytic == sorted(analytic)
    assert {tile["compiles"] for tile in found["tiles"]} == {None}
    assert {tile["predicted_us"] for tile in found["tiles"]} == {None}
    text = _run(4096, 4096, 4096).stdout
    assert "No TPU compiler: The TPU compiler is not here\n" in text
    assert text.count("The TPU compiler is not here") == 1
    assert "The best 5 of 12 candidates.\n" in text
    assert "compiled" not in text.replace("which compiles nothing", "")
    assert "XLA" not in text
    (heading,) = [line for line in text.splitlines() if line.startswith(" tile ")]
    assert heading.split() == ["tile", "analytic", "estimate"]
    assert "The times are of the analytic estimate, which compiles nothing." in text
    assert "Predicted, not measured" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4), "Missing argument 'N'"),
        ((4, 4, 4, "--device", "v9"), "Unknown TPU 'v9'. Known are"),
        ((4, 4, 4, "--tile", "8,8"), "'8,8' is no tile: expected block_m,block_k,block_n"),
        ((4, 4, 4, "--tile", "8,0,8"), "is no tile"),
        ((4, 4, 4, "--dtype", "float16"), "'float16' is not one of"),
        ((4, 4, 4, "--dtype", "int8", "--device", "v4"), "v4"),
        ((4, 4, 4, "--plot", "missing/p.png"), "missing is no folder. Make it first"),
        ((4, 4, 4, "--plot", "."), "it is a folder, and a file is expected"),
        ((4, 4, 4, "--plot", "p.nothing"), "has no suffix that matplotlib knows"),
    ],
)
def test_bad_questions(arguments, message):
    result = _run(*arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_no_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(_plots.importlib.util, "find_spec", lambda name: None)
    result = _run(4, 4, 4, "--plot", tmp_path / "p.png")
    assert "--plot needs matplotlib: pip install 'pallas-ops[plots]'" in result.output


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(tmp_path, suffix):
    file = tmp_path / f"roofline.{suffix}"
    found = _json(512, 512, 512, "--candidates", 3, "--plot", file)
    assert found["tiles"]
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize("tile", ["256,256,256", "100,128,128"])
def test_a_picture_of_one_tile_or_of_none_warns_of_nothing(tmp_path, tile):
    """A warning is an error here, as in all tests."""
    file = tmp_path / "roofline.png"
    _json(512, 512, 512, "--tile", tile, "--plot", file)
    assert file.stat().st_size > 10_000


def test_a_picture_without_a_compiler_says_that_nothing_is_predicted(
    answers, monkeypatch, tmp_path
):
    answers(Verdict(False, "there is none", transient=True, unavailable=True))
    figures = []
    monkeypatch.setattr(_plots, "_save", lambda figure, file: figures.append(figure))
    _json(512, 512, 512, "--plot", tmp_path / "p.png")
    assert figures[0].get_suptitle().endswith("\nno TPU compiler: nothing is predicted")


def test_the_numbers_of_a_map_can_be_read(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(_plots, "_save", lambda figure, file: figures.append(figure))
    tiles = ("--tile", "128,128,128", "--tile", "512,512,512", "--tile", "256,256,256")
    _json(512, 512, 512, *tiles, "--plot", tmp_path / "p.png")
    _, tiles, _ = figures[0].axes
    (image,) = tiles.images
    ground = [tuple(image.to_rgba(float(text.get_text()))) for text in tiles.texts]
    colors = [text.get_color() for text in tiles.texts]
    assert len(colors) == 3
    assert {"black", "white"} == set(colors)  # on yellow, and on violet
    for (red, green, blue, _), color in zip(ground, colors, strict=True):
        assert (0.3 * red + 0.6 * green + 0.1 * blue > 0.5) == (color == "black")


def test_a_process_of_its_own_is_quiet(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "pallas_ops", "predict", "256", "256", "256", "--candidates", "1"],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "256x256x256" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_three_runs_are_the_same_byte_for_byte():
    runs = {_run(512, 768, 640, "--candidates", 3, "--json").stdout for _ in range(3)}
    assert len(runs) == 1


def test_the_version_that_compiled_is_named():
    assert _predicting.libtpu_name().startswith("libtpu 0.0.")
