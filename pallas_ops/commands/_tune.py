"""`pallas-ops tune`: measures tiles before a program needs them."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ._console import (
    COMPILE_BUDGET_SECONDS,
    COMPILE_CANDIDATES,
    counted,
    default_platform,
    format_seconds,
    KERNEL_IMPLEMENTATIONS,
    make_console,
    print_json,
    problem_options,
    read_shapes,
    readable,
    TUNE_BUDGET_SECONDS,
    TUNE_CANDIDATES,
)


if TYPE_CHECKING:
    from rich.console import Console

    from ..tiles import TileProblem
    from ._tuning import Tuned


_PRODUCTS = ("forward", "lhs_cotangent", "rhs_cotangent")


@click.command("tune")
@click.argument("sizes", metavar="[M K N]", nargs=-1, type=click.IntRange(min=1))
@click.option(
    "--shape",
    "shapes",
    metavar="M,K,N",
    multiple=True,
    callback=read_shapes,
    help="One more shape; may be given several times.",
)
@click.option(
    "--from",
    "source",
    metavar="FILE.py:FUNCTION",
    help="Tune every product that FUNCTION() computes; it takes no arguments, and is not run.",
)
@problem_options
@click.option(
    "--product",
    "products",
    type=click.Choice(_PRODUCTS),
    multiple=True,
    help="Only this of a shape's three products; may be given several times.",
)
@click.option(
    "--implementation",
    type=click.Choice(KERNEL_IMPLEMENTATIONS),
    default="mosaic",
    show_default=True,
    help="What runs the kernel: mosaic needs a TPU.",
)
@click.option(
    "--device",
    help="The TPU that the tiles are stored for; the one that is here, else any.",
)
@click.option(
    "--without-tpu",
    is_flag=True,
    help="Measure nothing: ask the TPU compiler, and predict. Needs --device, and no TPU.",
)
@click.option(
    "--budget",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help=(
        f"For each problem: no tile is begun after so long.  "
        f"[default: {TUNE_BUDGET_SECONDS:g}; without a TPU {COMPILE_BUDGET_SECONDS:g}]"
    ),
)
@click.option(
    "--candidates",
    metavar="N",
    type=click.IntRange(min=1),
    help=(
        f"How many tiles are tried at most for each problem.  "
        f"[default: {TUNE_CANDIDATES}; without a TPU {COMPILE_CANDIDATES}]"
    ),
)
@click.option("--again", is_flag=True, help="Measure what is stored already, and replace it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    sizes: tuple[int, ...],
    shapes: list[tuple[int, int, int]],
    source: str | None,
    dtype: str,
    weights: str | None,
    out_dtype: str | None,
    layout: str,
    precision: str,
    products: tuple[str, ...],
    implementation: str,
    device: str | None,
    without_tpu: bool,
    budget: float | None,
    candidates: int | None,
    again: bool,
    as_json: bool,
) -> None:
    """Measure tiles, and store the fastest for each product.

    Of a shape, M x K by K x N, the product and its two gradients are tuned. What is stored already
    is not measured again. With --without-tpu the TPU compiler is asked in place of a TPU: what is
    stored is then a prediction, which a measurement replaces. A program that is jitted already
    keeps its tiles: start it again, or call pallas_ops.tiles.forget() in it. The exit code is 1 if
    a product has no tile after all.
    """
    if sizes and len(sizes) != 3:
        raise click.UsageError(f"A shape is three sizes, M K N; got {len(sizes)}.")
    if len(sizes) == 3:
        shapes = [(sizes[0], sizes[1], sizes[2]), *shapes]
    if bool(shapes) == (source is not None):
        raise click.UsageError(
            "Say what to tune: either shapes (M K N, or --shape M,K,N), or --from FILE.py:FUNCTION."
        )
    if without_tpu:
        device = _check_compiled_device(implementation, device)
    else:
        device = _check_device(implementation, device)
    if source is not None:
        problems = _problems_from(source, device, implementation)
    else:
        from ._products import make_problem

        if not products:
            # Integers have no gradients.
            is_float = (True, dtype != "int8", (weights or dtype) != "int8")
            products = tuple(itertools.compress(_PRODUCTS, is_float))
        with readable():
            problems = [
                make_problem(
                    product,
                    *shape,
                    dtype=dtype,
                    weights=weights,
                    out_dtype=out_dtype,
                    layout=layout,
                    precision=precision,
                    device=device,
                    implementation=implementation,
                )
                for shape in shapes
                for product in products
            ]

    from ._tuning import one_for_each_entry

    console = make_console()
    problems = one_for_each_entry(problems)
    if budget is None:
        budget = COMPILE_BUDGET_SECONDS if without_tpu else TUNE_BUDGET_SECONDS
    if candidates is None:
        candidates = COMPILE_CANDIDATES if without_tpu else TUNE_CANDIDATES
    if not as_json:
        console.print(f"{counted(len(problems), 'problem')}, at most about {budget:g} s each.")
        if without_tpu:
            console.print(f"Nothing is measured: the compiler is asked for a {device}.")
        elif implementation != "mosaic":
            console.print(
                f"Timed is {implementation!r}, which tells nothing about a TPU. The tiles are "
                f"stored for {implementation!r} alone."
            )
    found = []
    for tuned in _tune(problems, without_tpu, budget, candidates, again):
        found.append(tuned)
        if not as_json:
            _print_tuned(console, tuned)
    if as_json:
        print_json([tuned.as_json() for tuned in found])
    bad = [tuned for tuned in found if tuned.status in ("failed", "not stored")]
    if bad:
        raise click.ClickException(
            f"No tile is stored for {len(bad)} of {counted(len(found), 'problem')} after all."
        )


def _tune(
    problems: "list[TileProblem]", without_tpu: bool, budget: float, candidates: int, again: bool
) -> "Iterator[Tuned]":
    from ..compiler import CompilePool
    from ._tuning import tune, tune_without_tpu

    if not without_tpu:
        for problem in problems:
            yield tune(problem, budget_seconds=budget, most_candidates=candidates, again=again)
        return
    with CompilePool() as pool:
        for problem in problems:
            yield tune_without_tpu(
                problem, pool, budget_seconds=budget, most_candidates=candidates, again=again
            )


def _check_compiled_device(implementation: str, device: str | None) -> str:
    """The device that is compiled for; an error where that is not said."""
    if implementation != "mosaic":
        raise click.UsageError(
            f"--without-tpu compiles the kernel for a TPU, which is mosaic and not "
            f"{implementation}."
        )
    if device is None:
        raise click.UsageError("--without-tpu compiles for one TPU: say which, as --device v5e.")
    from ._products import device_name

    with readable():
        name = device_name(device, "cpu")
    assert name is not None
    return name


def _check_device(implementation: str, device: str | None) -> str | None:
    """The device that tiles are stored for; an error where they cannot be measured here."""
    platform = default_platform()
    if implementation == "mosaic" and platform != "tpu":
        raise click.ClickException(
            f"Measuring tiles for a TPU needs one, and JAX runs on {platform} here. Run the same "
            f"command where the TPU is; `pallas-ops tiles export` and `import` carry its tiles "
            f"elsewhere. `--implementation interpret` tries the command out here, and tells "
            f"nothing about a TPU. `--without-tpu --device v5e` asks the TPU compiler instead."
        )
    from ._products import device_name

    with readable():
        wanted = device_name(device, platform)
        here = device_name(None, platform)
    if implementation == "mosaic" and wanted != here:
        raise click.ClickException(
            f"--device {device}: the TPU here is a {here}, and only its tiles can be measured here."
        )
    return wanted


def _problems_from(source: str, device: str | None, implementation: str) -> "list[TileProblem]":
    import traceback

    from ._tuning import collect_from, load_function, SourceError

    try:
        problems = collect_from(load_function(source), device=device, implementation=implementation)
    except SourceError as error:
        raise click.BadParameter(str(error), param_hint="--from") from None
    except Exception as error:
        # The person's own code: they need to see where.
        click.echo(traceback.format_exc(), err=True)
        raise click.ClickException(
            f"{source} could not be traced: {type(error).__name__}, see above."
        ) from None
    if not problems:
        raise click.ClickException(
            f"{source} computes no product that {implementation!r} could run. Only those of "
            f"pallas_ops.matmul and PallasLinear are found: pallas_ops.swap_linear puts that layer "
            f"into a model."
        )
    return problems


def _print_tuned(console: "Console", tuned: "Tuned") -> None:
    from ..tiles._store import shown

    console.print(f"\n{tuned.problem.describe()}")
    entry = tuned.entry
    if entry is not None:
        seconds = entry.seconds if entry.seconds is not None else tuned.predicted_seconds
        time = "" if seconds is None else f": {format_seconds(seconds)}"
        time += ", predicted" if time and entry.seconds is None else ""
        console.print(f"  {entry.tile}{time}")
        if tuned.status == "known":
            console.print(f"  stored before in {tuned.path} (--again looks again)")
        else:
            console.print(f"  {_against_estimate(tuned)}")
            console.print(f"  {entry.reason}")
        if tuned.status == "tuned":
            console.print(f"  stored in {tuned.path}")
        elif tuned.status == "not stored":
            console.print(f"  could not be stored in {shown(tuned.path)}")
    for message in tuned.told:
        console.print(f"  Warning: {message}")


def _against_estimate(tuned: "Tuned") -> str:
    assert tuned.entry is not None
    if tuned.entry.tile == tuned.estimate:
        return "which is the tile by shape alone"
    if tuned.entry.seconds is None:
        return f"the tile by shape alone is {tuned.estimate}"
    if tuned.estimate_seconds is None:
        return f"the tile by shape alone, {tuned.estimate}, was not measured"
    ratio = tuned.estimate_seconds / tuned.entry.seconds
    return (
        f"{ratio:.2f} times as fast as the tile by shape alone, {tuned.estimate}: "
        f"{format_seconds(tuned.estimate_seconds)}"
    )
