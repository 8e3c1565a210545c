"""`pallas-ops bench`: this package beside XLA, beside what others published, and what it costs."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, TYPE_CHECKING

import click

from ._console import (
    counted,
    default_platform,
    format_seconds,
    make_console,
    print_json,
    read_shapes,
    readable,
    require_compiler,
)
from ._files import read_output, read_output_or_dash, write_whole


if TYPE_CHECKING:
    from rich.console import Console

    from ._benchmark import Row
    from ._default_study import Row as DefaultRow
    from ._overhead import Overhead
    from ._precision import Row as PrecisionRow
    from ._published import Comparison, Variant


def _plot_option(function: Any) -> Any:
    return click.option(
        "--plot",
        metavar="FILE",
        callback=read_output,
        help="Save a picture (needs pallas-ops[plots]).",
    )(function)


@click.group("bench", invoke_without_command=True)
@click.option("--device", default="v5e", show_default=True, help="The TPU, where none is here.")
@click.option(
    "--shape",
    "shapes",
    metavar="M,K,N",
    multiple=True,
    callback=read_shapes,
    help="A shape; may be given several times. Without it, language models' and squares.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    multiple=True,
    help="Of the language models' shapes only those with so many rows.  [default: 1 to 8192]",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["bfloat16", "float32"]),
    multiple=True,
    default=("bfloat16",),
    show_default=True,
)
@click.option(
    "--product",
    "products",
    type=click.Choice(["forward", "lhs_grad", "rhs_grad"]),
    multiple=True,
    help="Only this product of each shape; may be given several times.",
)
@click.option(
    "--layout",
    type=click.Choice(["NN", "NT", "TN", "TT"], case_sensitive=False),
    default="NT",
    show_default=True,
    help="Of the forward product; NT is a linear layer.",
)
@click.option("--search", is_flag=True, help="Look for each tile by the compiler, stored or not.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=read_output_or_dash,
    help="Write the rows as JSON (- to print).",
)
@click.option(
    "--csv", "csv_file", metavar="FILE", callback=read_output, help="Write the rows as CSV."
)
@_plot_option
@click.pass_context
def command(
    ctx: click.Context,
    device: str,
    shapes: list[tuple[int, int, int]],
    rows: tuple[int, ...],
    dtypes: tuple[str, ...],
    products: tuple[str, ...],
    layout: str,
    search: bool,
    json_file: str | None,
    csv_file: str | None,
    plot: str | None,
) -> None:
    """The matmul of this package beside XLA's, for the shapes of language models and for squares.

    Three providers for each product and its gradients: tiles of 128, the tile that this package
    chooses, and XLA. On a TPU they are measured. Elsewhere they are predicted: compiled by the TPU
    compiler in libtpu, and read by the time model, XLA's own dot among them.
    """
    if ctx.invoked_subcommand is not None:
        return
    if plot is not None:
        from ._plots import check_plotting

        check_plotting(plot)
    if rows and shapes:
        raise click.UsageError(
            "--rows chooses among the language models' shapes, and --shape names other ones: give "
            "one of the two."
        )
    platform = default_platform()
    if platform != "tpu":
        require_compiler()
    from ._benchmark import measured_rows, predicted_rows, PRODUCT_NAMES
    from ._products import device_name
    from ._shapes import PROJECTIONS, ROWS, SQUARES

    with readable():
        name = device_name(None if platform == "tpu" else device, platform)
    assert name is not None
    if not shapes:
        shapes = [(m, one.k, one.n) for one in PROJECTIONS for m in rows or ROWS]
        shapes += [(size, size, size) for size in SQUARES if not rows]
    wanted = [key for key, called in PRODUCT_NAMES.items() if called in products or not products]
    given: dict[str, Any] = {
        "device": name,
        "dtypes": dtypes,
        "products": wanted,
        "layout": layout.upper(),
    }
    if platform == "tpu":
        groups = measured_rows(shapes, **given)
    else:
        groups = predicted_rows(shapes, search=search, **given)
    found: list[Row] = []
    with readable():
        for group in _advancing(groups, len(shapes) * len(wanted) * len(dtypes)):
            found += group
    failures = _write_rows(found, name, json_file, csv_file, plot)
    if json_file != "-":
        _print_rows(found, name)
    if failures:
        raise click.ClickException(" ".join(failures))


def _write_rows(
    rows: "list[Row]", device: str, json_file: str | None, csv_file: str | None, plot: str | None
) -> list[str]:
    """Writes what was asked for, and says what could not be: one must not cost the others."""
    import json

    from ._benchmark import rows_csv

    def write_json(file: str) -> None:
        text = json.dumps([row.as_json() for row in rows], indent=1, allow_nan=False) + "\n"
        if file == "-":
            click.echo(text, nl=False)
        else:
            write_whole(pathlib.Path(file), text)

    def write_csv(file: str) -> None:
        write_whole(pathlib.Path(file), rows_csv(rows))

    def write_plot(file: str) -> None:
        from ._plots import plot_rows

        plot_rows(rows, device, file)

    failures = []
    for file, write in ((json_file, write_json), (csv_file, write_csv), (plot, write_plot)):
        try:
            if file is not None:
                write(file)
        except click.ClickException as error:
            failures.append(error.message)
    return failures


def _advancing(groups: Any, total: int | None) -> Any:
    """The groups, with a progress bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        groups, "Products", total, console=console, transient=True, disable=not console.is_terminal
    )


def _print_rows(rows: "list[Row]", device: str) -> None:
    from rich import box
    from rich.table import Table

    from ._benchmark import by_product, PROVIDERS
    from ._predicting import libtpu_name

    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("TFLOP/s of m x k x n")
    table.add_column("dtype")
    table.add_column("product")
    for name in (*PROVIDERS, "roofline", "tuned against XLA", "of the roofline"):
        table.add_column(name, justify="right")
    table.add_column("tuned tile")
    for (m, k, n, dtype, product), by_provider in by_product(rows).items():
        tuned, xla = by_provider["tuned"], by_provider["xla"]
        cells = []
        for name in PROVIDERS:
            tflops = by_provider[name].tflops
            cells.append("" if tflops is None else f"{tflops:.1f}")
        cells.append(f"{tuned.flops / tuned.roofline_seconds / 1e12:.1f}")
        for other in (xla.seconds, tuned.roofline_seconds):
            if tuned.seconds is None or other is None:
                cells.append("")
            else:
                cells.append(f"{other / tuned.seconds:.3f}")
        tile = "x".join(map(str, tuned.tile)) if tuned.tile else ""
        table.add_row(f"{m} x {k} x {n}", dtype, product, *cells, tile)
    console.print(table)
    unread = sum(row.unread for row in rows)
    if unread:
        console.print(
            f"{counted(unread, 'candidate')} compiled and could not be read: ranked by estimate."
        )
    failed = [row for row in rows if row.seconds is None]
    for row in failed:
        console.print(f"No time of {row.provider} for {row.m} x {row.k} x {row.n}: {row.note}")
    _print_slower(rows, console)
    _print_targets(rows, console)
    if all(row.kind == "measured" for row in rows):
        console.print(f"Measured here, on a {device}, without dispatch.")
        return
    if not all(row.calibrated for row in rows):
        console.print(f"UNCALIBRATED: no timings of a {device} were compared with the model.")
    console.print(
        f"Predicted for a {device}, not measured: schedules of {libtpu_name()}, read by a model. "
        f"So is XLA's, but where its note says otherwise: --json, --csv."
    )


def _print_slower(rows: "list[Row]", console: "Console") -> None:
    """The products for which XLA's dot would be the better choice."""
    from ._benchmark import by_product
    from ._predicting import xla_is_faster

    for (m, k, n, dtype, product), by_provider in by_product(rows).items():
        tuned, xla = by_provider["tuned"], by_provider["xla"]
        if xla_is_faster(tuned.seconds, xla.seconds):
            console.print(
                f"XLA's dot is more than a tenth faster for {product} of {m} x {k} x {n} in "
                f'{dtype}: implementation="xla" takes it.'
            )


def _print_targets(rows: "list[Row]", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    from ._targets import targets

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("asked")
    for name in ("at least", "met", "worst"):
        table.add_column(name, justify="right")
    table.add_column("of")
    for target in targets(rows):
        worst, product = target.worst
        met = f"{target.met} of {len(target.ratios)}"
        table.add_row(target.asked, f"{target.least:g}", met, f"{worst:.3f}", product)
    if table.rows:
        console.print(table)


@command.command("published")
@click.option("--fit", is_flag=True, help="Try other constants too: the DMA latency is fitted.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plot_option
def published(fit: bool, as_json: bool, plot: str | None) -> None:
    """What others measured on a v5e, beside what is predicted for the same tiles.

    Their times are wall clock, so that one constant of dispatch is fitted for each source.
    """
    if plot is not None:
        from ._plots import check_plotting

        check_plotting(plot)
    require_compiler()
    from ._published import compare, LATENCIES

    try:
        found = compare(latencies=LATENCIES if fit else ())
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    if plot is not None:
        from ._plots import plot_published

        plot_published(found, plot)
    if as_json:
        print_json(found.as_json())
    else:
        _print_published(found)


def _print_published(found: "Comparison") -> None:
    from rich import box
    from rich.table import Table

    from ._predicting import libtpu_name

    console = make_console()
    ours = found.fits[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("m=k=n", "layout", "what"):
        table.add_column(name)
    for name in ("predicted", "with dispatch", "published", "error"):
        table.add_column(name, justify="right")
    source = ""
    for index, row in enumerate(found.rows):
        if row.source != source:
            source = row.source
            dispatch = ours.dispatch[source] * 1e6
            table.add_row()
            table.add_row("", "", f"{source}; dispatch fitted: {dispatch:.0f} us")
        what = "XLA's own dot" if row.blocks is None else "x".join(map(str, row.blocks))
        seconds = ours.predicted[index]
        table.add_row(
            str(row.problem.m),
            row.problem.layout,
            what,
            f"{seconds * 1e6:.1f} us",
            f"{(seconds + ours.dispatch[source]) * 1e6:.1f} us",
            f"{row.wall_seconds * 1e6:.1f} us",
            f"{ours.errors[index]:+.1%}",
        )
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    for name in ("mean error", "Spearman over tiles", "its best tile is slower by"):
        table.add_column(name, justify="right")
    for one in found.fits:
        rank = "none" if one.spearman is None else f"{one.spearman:.3f}"
        table.add_row(one.name, f"{one.mean_error:.1%}", rank, f"{one.best_regret:.1%}")
    table.add_row("the biggest tile", "", "", f"{found.biggest_regret:.1%}")
    console.print(table)
    _print_variants(found.variants, console)
    console.print(
        f"{counted(len(found.rows), 'published timing')} on a v5e. Predicted, not measured: "
        f"schedules of {libtpu_name()}, read by a model."
    )


def _print_variants(variants: "Sequence[Variant]", console: "Console") -> None:
    if not variants:
        return
    console.print("DMA latency, and the mean error with it:")
    for one in variants:
        if (one.bandwidth, one.step_cycles) == (1.0, 0):
            console.print(f"  {one.latency_seconds * 1e6:.2f} us  {one.mean_error:.1%}")
    least = min(variants, key=lambda one: one.mean_error)
    regrets = [one.best_regret for one in variants]
    console.print(
        f"Of {len(variants)} models, with other latencies, bandwidths and costs of a step, the "
        f"least mean error is {least.mean_error:.1%}: a latency of "
        f"{least.latency_seconds * 1e6:.2f} us, {least.bandwidth:.0%} of the bandwidth, "
        f"{least.step_cycles} cycles more for a step. The best tile of each is slower than the "
        f"true one by {min(regrets):.1%} to {max(regrets):.1%}."
    )


@command.command("vmem")
@click.option("--device", default="v4", show_default=True, help="The TPU.")
@click.option(
    "--tiles",
    type=click.IntRange(min=6),
    default=96,
    show_default=True,
    help="How many tiles near the limit, over all products.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def vmem(device: str, tiles: int, as_json: bool) -> None:
    """The estimate by which tiles are pruned, against the compiler's verdict on VMEM.

    Tiles near the default limit are compiled within it, whether or not the estimate would prune
    them. A v4 is of most use: its limit cannot be raised.
    """
    require_compiler()
    from .._hardware import known_generation
    from ._predicting import libtpu_name
    from ._vmem_study import study

    with readable():
        name = known_generation(device).name
        found = study(name, tiles=tiles)
    numbers = found.as_json()
    if as_json:
        print_json(numbers)
        return
    click.echo(
        f"{numbers['tiles']} tiles near the limit of {found.limit_bytes / 2**20:g} MiB, {name}, "
        f"{libtpu_name()}:\n"
        f"  kept by the estimate, and compile     {numbers['kept_and_compile']}\n"
        f"  kept, and refused (false accepts)     {numbers['false_accepts']}\n"
        f"  pruned, and refused                   {numbers['pruned_and_refused']}\n"
        f"  pruned, though they compile           {numbers['pruned_and_compile']}\n"
        f"    of these within 2 % of the best     {numbers['pruned_within_2_percent']}"
    )
    if found.unanswered:
        click.echo(f"  no verdict, and in no count           {found.unanswered}")
    if found.kept_regret is None:
        click.echo("Nothing can be compared: of some product no tile that is kept has a time.")
        return
    note = "" if found.calibrated else " (uncalibrated)"
    click.echo(
        f"The best that is kept is slower than the best of all by "
        f"{found.kept_regret:.1%} at most, by predicted times{note}."
    )


@command.command("default")
@click.option("--device", default="v5e", show_default=True, help="The TPU.")
@click.option(
    "--shape",
    "shapes",
    metavar="M,K,N",
    multiple=True,
    callback=read_shapes,
    help="A shape, whose products are compared in bfloat16.  [default: generated ones]",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="How many products of generated shapes.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the generated shapes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def default(
    device: str, shapes: list[tuple[int, int, int]], count: int, seed: int, as_json: bool
) -> None:
    """The tile that is taken where nothing is stored, against the best of ten candidates.

    For shapes that nobody chose: k and n of 96 to 16,384, m of 8 to 16,384, in bfloat16, float32
    and int8, forward products and gradients.
    """
    require_compiler()
    from .._hardware import known_generation
    from ._default_study import generated_problems, named_problems, study, Summary

    with readable():
        name = known_generation(device).name
        problems = named_problems(name, shapes) if shapes else generated_problems(name, count, seed)
        rows = [row for rows in _advancing(study(problems), None) for row in rows]
    if as_json:
        summary = dataclasses.asdict(Summary.of(rows))
        print_json({"summary": summary, "rows": [row.as_json() for row in rows]})
    else:
        _print_defaults(rows, name)


def _print_defaults(rows: "Sequence[DefaultRow]", device: str) -> None:
    from rich import box
    from rich.table import Table

    from ..compiler import chip
    from ._default_study import Summary
    from ._predicting import libtpu_name

    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("m x k x n", "layout", "dtype", "default tile"):
        table.add_column(name)
    for name in ("time", "best", "XLA's dot", "best over default"):
        table.add_column(name, justify="right")
    table.add_column("best tile")
    for row in rows:
        problem = row.problem
        times = (row.default_seconds, row.best_seconds, row.xla_seconds)
        table.add_row(
            f"{problem.m} x {problem.k} x {problem.n}",
            problem.layout,
            problem.lhs_dtype.name,
            row.default.label,
            *("" if seconds is None else format_seconds(seconds) for seconds in times),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "" if row.best is None else row.best.label,
        )
    console.print(table)
    for row in rows:
        if row.error is not None:
            console.print(
                f"No time of {row.default.label} for {row.problem.describe()}: {row.error}"
            )
    found = Summary.of(rows)
    if found.median is not None:
        console.print(
            f"Best of ten candidates over the default: {found.median:.3f} in the median, "
            f"{found.worst:.3f} at worst, of {counted(found.rows - found.without_time, 'product')}."
        )
    console.print(
        f"XLA's dot is predicted to be more than a tenth faster than the default in "
        f"{found.xla_is_faster} of {counted(found.rows, 'product')}. Candidates with a schedule "
        f"that could not be read: {found.unread}."
    )
    if not chip(device).calibrated:
        console.print(f"UNCALIBRATED: no timings of a {device} were compared with the model.")
    console.print(
        f"Predicted for a {device}, not measured: schedules of {libtpu_name()}, read by a model."
    )


@command.command("precision")
@click.option("--device", default="v5e", show_default=True, help="The TPU.")
@click.option(
    "--shape",
    "shapes",
    metavar="M,K,N",
    multiple=True,
    callback=read_shapes,
    help="The shape.  [default: 2048,2048,2048]",
)
@click.option(
    "--offset",
    type=float,
    default=0.0,
    show_default=True,
    help="Added to the random numbers: far from zero they cancel less.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def precision(
    device: str, shapes: list[tuple[int, int, int]], offset: float, as_json: bool
) -> None:
    """What each precision of float32 and bfloat16 costs on a TPU, and how exact it is.

    Passes and times are the TPU compiler's and the model's. A CPU has no MXU: the errors of its
    passes are emulated, for normal random numbers, beside those of jax.numpy.dot here.
    """
    if len(shapes) > 1:
        raise click.UsageError("--shape can be given once: the precisions of one shape compare.")
    require_compiler()
    from .._hardware import known_generation
    from ._precision import study

    (shape,) = shapes or [(2048, 2048, 2048)]
    with readable():
        name = known_generation(device).name
        rows = study(name, shape, offset=offset)
    if as_json:
        sizes = dict(zip(("m", "k", "n"), shape, strict=True))
        print_json({"device": name, **sizes, "rows": [row.as_json() for row in rows]})
    else:
        _print_precisions(rows, name, shape)


def _print_precisions(
    rows: "Sequence[PrecisionRow]", device: str, shape: tuple[int, int, int]
) -> None:
    from rich import box
    from rich.table import Table

    from ..compiler import chip
    from ..kernels import mxu_passes
    from ._predicting import libtpu_name

    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("operands", "precision"):
        table.add_column(name)
    for name in ("passes", "in the schedule", "emulated error", "error on this CPU"):
        table.add_column(name, justify="right")
    for name in ("time", "XLA's"):
        table.add_column(name, justify="right")
    table.add_column("tile")
    for row in rows:
        problem, scheduled = row.problem, row.scheduled_passes
        table.add_row(
            f"{problem.lhs_dtype.name} x {problem.rhs_dtype.name}",
            problem.precision.name,
            str(mxu_passes(problem)),
            "" if scheduled is None else f"{scheduled:g}",
            f"{row.emulated_error:.1e}",
            f"{row.cpu_error:.1e}",
            "" if row.seconds is None else format_seconds(row.seconds),
            "" if row.xla is None else format_seconds(row.xla.seconds),
            "x".join(map(str, row.tile)),
        )
    console.print(table)
    for row in rows:
        if row.error is not None:
            console.print(f"No time of {row.problem.describe()}: {row.error}")
    if not chip(device).calibrated:
        console.print(f"UNCALIBRATED: no timings of a {device} were compared with the model.")
    size = " x ".join(map(str, shape))
    console.print(
        f"{size}, layout NT, to float32. Times are predicted for a {device}, not measured: "
        f"schedules of {libtpu_name()}, read by a model. Errors are the largest, relative to "
        f"|lhs| @ |rhs| in float64; those of the passes are an emulation on this CPU."
    )


@command.command("overhead")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def overhead(as_json: bool) -> None:
    """What choosing tiles costs, and what tracing and dispatching cost against Equinox.

    A resolver is asked when a program is compiled, and not again. So a jitted step costs the same
    with any of them, and with a tile that is named.
    """
    default_platform()
    from ._overhead import measure

    with readable():  # such as an environment that names no resolver
        found = measure()
    if as_json:
        print_json(found.as_json())
    else:
        _print(found)


def _print(found: "Overhead") -> None:
    from rich import box
    from rich.table import Table

    from ._overhead import TARGET_MICROSECONDS

    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("to resolve one problem")
    for name in ("first", "later", "later, checked"):
        table.add_column(name, justify="right")
    for row in found.resolving:
        times = (row.first_microseconds, row.known_microseconds, row.checked_microseconds)
        table.add_row(row.name, *(f"{time:.1f} us" for time in times))
    console.print(table)
    slow = [row.name for row in found.resolving if not row.is_within_target]
    verdict = f"slower are: {', '.join(slow)}" if slow else "all that know it are within that"
    console.print(f"Target for a known problem, checked: {TARGET_MICROSECONDS:g} us; {verdict}.\n")

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("one call of a jitted step")
    for name in ("time", "against the named tiles", "same program"):
        table.add_column(name, justify="right")
    for step in found.dispatching:
        same = "yes" if step.same_program else "no"
        table.add_row(step.name, f"{step.microseconds:.1f} us", f"{step.ratio:.3f}", same)
    console.print(table)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("processor time")
    for name in ("without", "with", "ratio", "target"):
        table.add_column(name, justify="right")
    for one in found.against:
        theirs, ours = map(format_seconds, (one.theirs_seconds, one.ours_seconds))
        table.add_row(one.name, theirs, ours, f"{one.ratio:.2f}", f"{one.target:g}")
    console.print(table)
    console.print(f"Measured here, in this run: {found.where}.")
