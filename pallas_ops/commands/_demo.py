"""`pallas-ops demo`: the same network trained with `eqx.nn.Linear` and with `PallasLinear`."""

import functools
import importlib.metadata
import io
import pathlib
import sys
from typing import TYPE_CHECKING

import click

from ._files import write_whole


if TYPE_CHECKING:
    from rich.console import Console

    from ._digits import Digits, Run, Training


_REQUIRED_ACCURACY = 0.95
_TPU = "v5e"
_PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def _check_implementation(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    from ..operators import get_operator

    try:
        get_operator("matmul").check_implementation(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _check_plot(
    ctx: click.Context, parameter: click.Parameter, value: pathlib.Path | None
) -> pathlib.Path | None:
    """Refuses a file that could not be written, before there is anything to lose."""
    if value is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs matplotlib ({error}). Install it: pip install 'pallas-ops[plots]'"
        ) from None
    if value.suffix.lower() not in _PLOT_SUFFIXES:
        raise click.BadParameter(f"{value} must end in one of: {', '.join(_PLOT_SUFFIXES)}.")
    # To open it is the only honest test: permission bits do not bind root, nor a read-only disk.
    existed = value.exists()
    try:
        value.open("ab").close()
        if not existed:
            value.unlink()
    except OSError as error:
        raise click.BadParameter(f"{value} cannot be written: {error.strerror}.") from None
    return value


@click.command("demo")
@click.option(
    "--implementation",
    default="interpret",
    show_default=True,
    callback=_check_implementation,
    help="How PallasLinear multiplies: mosaic (on a TPU), interpret, tpu_interpret (slow) or xla.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How often each training image is seen.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=0,
    show_default=True,
    help="For the initial weights and the order of the batches.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    callback=_check_plot,
    help=f"Save both loss curves and their difference to FILE ({', '.join(_PLOT_SUFFIXES)}).",
)
def command(implementation: str, epochs: int, seed: int, plot: pathlib.Path | None) -> None:
    """Train a network twice: with Linear, and with PallasLinear.

    Both runs start from the same key and see the same batches of scikit-learn's 1,797 images. Then
    the kernel calls in one training step are counted, and the step is compiled for a TPU, without
    one. The exit code is 1 if either run's test accuracy is 95 % or less.
    """
    _check_platform(implementation)
    try:
        import optax  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            f"The demo needs scikit-learn and optax ({error}). Install them: "
            f"pip install 'pallas-ops[demo]'"
        ) from None

    import jax
    import numpy as np
    from rich.console import Console

    from ..nn import swap_linear
    from . import _digits

    # No line is broken where a program reads the output, and no `[...]` of a message is lost.
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    digits = _digits.load_digits()
    model = _digits.make_model(jax.random.key(seed))
    swapped = swap_linear(model, implementation=implementation)
    names = ("eqx.nn.Linear", f"PallasLinear ({implementation})")
    trainings = (_digits.make_training(model), _digits.make_training(swapped))

    console.print(
        f"Digits: {len(digits.train_labels)} images to train on, {len(digits.test_labels)} to "
        f"test on.\n"
        f"Network: {_digits.PIXELS} -> {_digits.HIDDEN} -> {_digits.CLASSES}, Adam, seed {seed}.\n"
        f"Steps: {epochs} x {digits.steps_per_epoch}, of {_digits.BATCH_SIZE} images each.\n"
    )
    runs = _train_both(names, trainings, digits, seed=seed, epochs=epochs)
    _print_runs(console, names, runs)
    difference = float(np.max(np.abs(runs[0].losses - runs[1].losses)))
    console.print(f"\nLargest difference between the two runs' losses: {difference:.3g}")
    calls = _digits.operator_calls(trainings[1])
    console.print(f"Kernel calls in one training step, counted in its jaxpr: {calls}")
    console.print(_describe_compilation(_digits.make_training(swap_linear(model))))
    device = jax.devices()[0]
    console.print(f"Measured on this {device.platform.upper()} with jax {jax.__version__}.")
    if plot is not None:
        _save_plot(plot, names, runs)
        console.print(f"Loss curves: {plot}")

    low = [
        name for name, run in zip(names, runs, strict=True) if not run.accuracy > _REQUIRED_ACCURACY
    ]
    if low:
        raise click.ClickException(
            f"Test accuracy is not above {_REQUIRED_ACCURACY:.0%} for {' and '.join(low)}. "
            f"Too few epochs? There were {epochs}."
        )


def _check_platform(implementation: str) -> None:
    import jax

    from ..operators import get_operator

    try:
        platform = jax.default_backend()
    except RuntimeError as error:  # such as JAX_PLATFORMS=tpu without a TPU
        raise click.ClickException(f"JAX does not start: {error}") from None
    platforms = get_operator("matmul").implementations[implementation].platforms
    if platforms is not None and platform not in platforms:
        raise click.ClickException(
            f"The implementation {implementation!r} runs on {' or '.join(platforms)}, and JAX runs "
            f"on {platform} here. `--implementation interpret` runs the same kernel anywhere."
        )


def _train_both(
    names: tuple[str, ...],
    trainings: "tuple[Training, ...]",
    digits: "Digits",
    *,
    seed: int,
    epochs: int,
) -> "list[Run]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ._digits import train

    # On standard error, and only for a terminal: what the command says on standard output can be
    # piped on.
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        steps = epochs * digits.steps_per_epoch
        tasks = [progress.add_task(name, total=steps, start=False) for name in names]
        for task, training in zip(tasks, trainings, strict=True):
            progress.start_task(task)
            advance = functools.partial(progress.advance, task)
            runs.append(train(training, digits, seed=seed, epochs=epochs, on_step=advance))
    return runs


def _print_runs(console: "Console", names: tuple[str, ...], runs: "list[Run]") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    table.add_row("loss before the first step", *(f"{run.losses[0]:.6f}" for run in runs))
    table.add_row("loss before the last step", *(f"{run.losses[-1]:.6f}" for run in runs))
    table.add_row("test accuracy", *(f"{run.accuracy:.2%}" for run in runs))
    console.print(table)


def _describe_compilation(training: "Training") -> str:
    """Whether the step compiles for a TPU, with `implementation` left out as a user would."""
    from ..compiler import CompilerUnavailableError
    from ._digits import tpu_kernels

    try:
        kernels = tpu_kernels(training, _TPU)
    except CompilerUnavailableError as error:
        return f"The same step was not compiled for a TPU {_TPU}: {error}"
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:  # a nightly one has another name
        version = "of unknown version"
    return (
        f"The same step compiles for a TPU {_TPU}, with {kernels} Mosaic kernels in the program "
        f"(tpu_custom_call): compiled by libtpu {version}, not run."
    )


def _save_plot(path: pathlib.Path, names: tuple[str, ...], runs: "list[Run]") -> None:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Without pyplot: no window system is looked for, and no global state is left behind.
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = np.arange(1, len(runs[0].losses) + 1)
    # The curves lie on each other: the first is wide and pale, so that both are seen.
    styles = (dict(color="#9ecae1", linewidth=5), dict(color="#08306b", linewidth=1))
    for name, run, style in zip(names, runs, styles, strict=True):
        top.plot(steps, run.losses, label=name, **style)
    top.set_yscale("log")
    top.set_ylabel("training loss (cross-entropy)")
    top.set_title("Handwritten digits: the same training, two linear layers")
    top.legend(frameon=False)
    bottom.plot(steps, np.abs(runs[0].losses - runs[1].losses), color="#a63603", linewidth=1)
    bottom.set_ylabel("|difference| of the losses")
    bottom.set_xlabel("training step")
    bottom.set_ylim(bottom=0)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix.removeprefix(".").lower())
    write_whole(path, picture.getvalue())
