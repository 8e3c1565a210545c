"""`pallas-ops predict`: what the TPU compiler makes of a tile, and the time that follows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ._console import (
    counted,
    format_bytes,
    make_console,
    print_json,
    problem_options,
    product_option,
    read_numbers,
    readable,
)
from ._files import read_output


if TYPE_CHECKING:
    from rich.console import Console

    from ._predicting import Report, Row


@click.command("predict")
@click.argument("m", type=click.IntRange(min=1))
@click.argument("k", type=click.IntRange(min=1))
@click.argument("n", type=click.IntRange(min=1))
@problem_options
@product_option
@click.option("--bias", is_flag=True, help="The kernel adds a bias.")
@click.option(
    "--activation",
    type=click.Choice(["relu", "gelu", "exact-gelu", "silu", "tanh"]),
    help="The kernel applies an activation.",
)
@click.option(
    "--derivative", is_flag=True, help="And returns its derivative too, as under jax.grad."
)
@click.option("--device", default="v5e", show_default=True, help="The TPU to compile for.")
@click.option(
    "--tile",
    "tiles",
    metavar="BM,BK,BN[,PARTS]",
    multiple=True,
    callback=read_numbers("tile", "block_m,block_k,block_n[,parts]", "512,1024,1024", (3, 4)),
    help="A tile to judge, and in how many parts its first blocks are fetched; may be given "
    "several times. Without it, the best of the candidates.",
)
@click.option(
    "--candidates",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="How many tiles are compiled where none is named.",
)
@click.option(
    "--best",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How many of the candidates are shown.",
)
@click.option(
    "--plot",
    metavar="FILE",
    callback=read_output,
    help="Save a roofline and a map of the tiles as a picture (needs pallas-ops[plots]).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    m: int,
    k: int,
    n: int,
    dtype: str,
    weights: str | None,
    out_dtype: str | None,
    layout: str,
    precision: str,
    product: str,
    bias: bool,
    activation: str | None,
    derivative: bool,
    device: str,
    tiles: list[tuple[int, ...]],
    candidates: int,
    best: int,
    plot: str | None,
    as_json: bool,
) -> None:
    """Predict the time of a product on a TPU that need not be here.

    Each tile is compiled by the TPU compiler in libtpu, its schedule is read, and a model of the
    chip makes a time out of it: a prediction, and no measurement. Nothing runs.
    """
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"  # What compiles is another process; here, no TPU is asked.
    if plot is not None:
        from ._plots import check_plotting

        check_plotting(plot)
    from ._predicting import report
    from ._products import device_name, make_problem

    with readable():
        problem = make_problem(
            product,
            m,
            k,
            n,
            dtype=dtype,
            weights=weights,
            out_dtype=out_dtype,
            layout=layout,
            precision=precision,
            bias=bias,
            activation=activation,
            derivative=derivative,
            device=device_name(device, "cpu"),
            implementation="mosaic",
        )
        found = report(problem, tiles, candidates=candidates)
    if plot is not None:
        from ._plots import plot_report

        plot_report(found, plot)
    if as_json:
        print_json(found.as_json(best=None if tiles else best))
    else:
        _print(found, None if tiles else best)


def _print(found: "Report", best: int | None) -> None:
    console = make_console()
    problem = found.problem
    console.print(f"{problem.describe()}\n")
    if not found.calibrated:
        console.print(
            f"UNCALIBRATED: no published timings of a {problem.device} were compared with the "
            f"model. Its times order tiles; they are not to be relied on.\n"
        )
    shown = found.rows[:best]
    if found.no_compiler is None:
        _print_tiles(found, shown, console)
    else:
        console.print(f"No TPU compiler: {found.no_compiler}")
        console.print("The times are of the analytic estimate, which compiles nothing.\n")
        _print_estimates(shown, console)
    _print_reasons(found, shown, console)
    if len(found.rows) > len(shown):
        console.print(f"{_what_is_shown(found, shown)}\n")
    console.print(
        f"Roofline             {found.roofline_seconds * 1e6:.1f} us, by JAX's hardware table"
    )
    if found.no_compiler is None:
        _print_xla(found, console)
    has_time = found.xla is not None or any(row.seconds is not None for row in found.rows)
    if found.no_compiler is None and has_time:
        console.print(f"\nPredicted, not measured: schedules of {found.libtpu}, read by a model.")


_WITHOUT_A_TIME = {False: "refused", None: "no verdict", True: "ranked by the analytic estimate"}
"""What is said of a tile without a predicted time, by whether it compiles."""


def _print_tiles(found: "Report", shown: "Sequence[Row]", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tile", "VMEM", "of", "MXU use", "spills", "time", "TFLOP/s", "bound by"):
        table.add_column(name, justify="left" if name in ("tile", "bound by") else "right")
    for row in shown:
        vmem = "" if row.vmem_bytes is None else format_bytes(row.vmem_bytes)
        limit = format_bytes(row.vmem_limit_bytes)
        cells = ["", "", "", "", _WITHOUT_A_TIME[row.compiles]]
        if row.seconds is not None:
            cells = [
                f"{row.static_mxu_use:.1%}",
                str(row.spills),
                f"{row.seconds * 1e6:.1f} us",
                f"{row.tflops:.1f}",
                row.bound or "",
            ]
        elif row.estimated_seconds is not None:
            cells = ["", "", f"~ {row.estimated_seconds * 1e6:.1f} us", "", "(estimate)"]
        table.add_row(row.label, vmem, limit, *cells)
    console.print(table)


def _print_estimates(shown: "Sequence[Row]", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tile")
    table.add_column("analytic estimate", justify="right")
    for row in shown:
        seconds = row.analytic_seconds
        table.add_row(row.label, "refused" if seconds is None else f"{seconds * 1e6:.1f} us")
    console.print(table)


def _print_reasons(found: "Report", shown: "Sequence[Row]", console: "Console") -> None:
    """Why tiles have no time, each reason once: in the table it would be the widest column."""
    tiles: dict[tuple[str, str], list[str]] = {}
    for row in shown:
        if row.error is not None and row.error != found.no_compiler:
            tiles.setdefault((_WITHOUT_A_TIME[row.compiles], row.error), []).append(row.label)
    for (what, reason), names in tiles.items():
        console.print(f"{', '.join(names)}: {what}: {reason}")
    if tiles:
        console.print()


def _what_is_shown(found: "Report", shown: "Sequence[Row]") -> str:
    if found.no_compiler is not None:
        return f"The best {len(shown)} of {counted(len(found.rows), 'candidate')}."
    unread = sum(row.estimated_seconds is not None for row in found.rows)
    timed = sum(row.seconds is not None for row in found.rows) + unread
    without = len(found.rows) - timed
    if not timed:
        return f"{len(shown)} of {counted(len(found.rows), 'candidate')}, none of them with a time."
    text = f"The best {min(len(shown), timed)} of {timed} that were compiled."
    if unread:
        text += f" {unread} of these could not be read: ranked by the estimate."
    return text if not without else f"{text} {without} more have no time."


_XLA_SOURCES = {
    "schedule": "by its schedule and the same model",
    "estimate": "by that estimate",
    "transfers": "the time of its transfers, which is longer than its schedule or estimate says",
}


def _print_xla(found: "Report", console: "Console") -> None:
    if found.xla_error is not None:
        console.print(f"XLA's own estimate   none: {found.xla_error}")
        return
    if found.xla_estimate_seconds is None:
        console.print("XLA's own estimate   none: its program of this product carries no cycles")
    else:
        estimate = found.xla_estimate_seconds * 1e6
        console.print(f"XLA's own estimate   {estimate:.1f} us for its dot, in this run")
    if found.xla is not None:
        time, source = found.xla.seconds * 1e6, _XLA_SOURCES[found.xla.source]
        unread = f": {found.xla_unread}" if found.xla.source == "estimate" else ""
        console.print(f"XLA's dot            {time:.1f} us, {source}{unread}")
        if found.xla.source != "transfers":
            console.print("That leaves out what XLA moves to VMEM beforehand.")
