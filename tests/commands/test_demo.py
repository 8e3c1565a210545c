"""`pallas-ops demo`, in this process and as a person runs it."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from pallas_ops import compiler, swap_linear
from pallas_ops.commands import _demo, _digits, main


def _run(*arguments):
    return CliRunner().invoke(main, ["demo", *arguments])


def _accuracies(output):
    (line,) = [line for line in output.splitlines() if "test accuracy" in line]
    return [float(percent) for percent in re.findall(r"([\d.]+)%", line)]


def _assert_facts(output):
    accuracies = _accuracies(output)
    assert len(accuracies) == 2
    assert min(accuracies) > 95
    assert "1347 images to train on, 450 to test on" in output
    difference = re.search(r"difference between the two runs' losses: (\S+)", output)
    assert 0 <= float(difference[1]) < 1e-4
    # Two layers: two products forward, two weight gradients, and the hidden layer's input
    # gradient. Nobody asks for the gradient of the images.
    assert "Kernel calls in one training step, counted in its jaxpr: 5\n" in output
    assert "compiles for a TPU v5e, with 5 Mosaic kernels" in output
    assert "compiled by libtpu" in output


def test_as_a_person_runs_it(tmp_path):
    plot = tmp_path / "curves.png"
    # The platform is left to JAX, which then loads libtpu and hears its complaints.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    result = subprocess.run(
        [sys.executable, "-m", "pallas_ops", "demo", "--epochs", "12", "--plot", str(plot)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    _assert_facts(result.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_in_this_process(implementation):
    result = _run("--epochs", "12", "--seed", "3", "--implementation", implementation)
    assert result.exit_code == 0, result.output
    assert f"PallasLinear ({implementation})" in result.stdout
    assert result.stderr == ""
    _assert_facts(result.stdout)


def test_too_low_an_accuracy_is_a_failure():
    result = _run("--epochs", "1")
    assert result.exit_code == 1
    assert max(_accuracies(result.stdout)) <= 95
    assert "not above 95% for eqx.nn.Linear and PallasLinear (interpret)" in result.stderr


def test_no_compiler(monkeypatch):
    def unavailable(*args, **kwargs):
        raise compiler.CompilerUnavailableError("it comes with jax[tpu]")

    monkeypatch.setattr(_digits, "compile_for_tpu", unavailable)
    result = _run("--epochs", "1")
    assert "was not compiled for a TPU v5e: it comes with jax[tpu]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--implementation", "cuda"],
            "no implementation 'cuda'. It has: 'mosaic', 'xla', 'interpret', 'tpu_interpret'.",
        ),
        (
            ["--implementation", "mosaic"],
            "'mosaic' runs on tpu, and JAX runs on cpu here. `--implementation interpret`",
        ),
        (["--epochs", "0"], "0 is not in the range"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--plot", "curves.docx"], "must end in one of: .png, .pdf, .svg"),
        (["--plot", "no/such/folder/curves.png"], "cannot be written: No such file or directory"),
    ],
)
def test_bad_options(arguments, message, monkeypatch):
    def must_not_start(*args, **kwargs):
        raise AssertionError("the training started")

    monkeypatch.setattr(_digits, "train", must_not_start)
    result = _run(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)  # an error of click's, and no traceback
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert message in line
    assert result.stdout == ""


def test_checking_the_plot_leaves_files_as_they_are(tmp_path):
    new, old = tmp_path / "new.png", tmp_path / "old.png"
    old.write_bytes(b"old")
    for path in (new, old):
        assert _demo._check_plot(None, None, path) == path
    assert not new.exists()
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("sklearn", [], "demo"),
        ("optax", [], "demo"),
        ("matplotlib", ["--plot", "curves.png"], "plots"),
    ],
)
def test_a_missing_package_names_the_extra(missing, arguments, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # what an import makes of a missing package
    result = _run(*arguments)
    assert result.exit_code == 1
    assert f"pip install 'pallas-ops[{extra}]'" in result.stderr


def test_help_is_quick():
    # Its price is that of `import jax`: none of what one command needs is loaded.
    program = (
        "import sys\n"
        "from pallas_ops.commands import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "late = {'sklearn', 'optax', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not late, late\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "demo" in result.stdout


def test_runs_differ_only_in_the_layer():
    digits = _digits.load_digits()
    model = _digits.make_model(jax.random.key(0))
    trainings = (
        _digits.make_training(model),
        _digits.make_training(swap_linear(model, implementation="interpret")),
    )
    runs = [_digits.train(training, digits, seed=0, epochs=1) for training in trainings]
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0], abs=1e-6)
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-5)
    assert [_digits.operator_calls(training) for training in trainings] == [0, 5]
