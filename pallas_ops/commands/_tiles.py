"""`pallas-ops tiles`: what is stored, and how a tile is chosen."""

import contextlib
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any, TYPE_CHECKING

import click

from ._console import (
    counted,
    default_platform,
    format_bytes,
    format_seconds,
    KERNEL_IMPLEMENTATIONS,
    make_console,
    print_json,
    problem_options,
    product_option,
    readable,
    tile_json,
    told_warnings,
)
from ._files import read_output, write_whole


if TYPE_CHECKING:
    from ..tiles import TileStore
    from ._entries import Stored
    from ._why import Times, Why


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("tiles")
def command() -> None:
    """The store of tiles: what is in it, moving it, and why a tile was chosen.

    The store is a folder of your user's cache; PALLAS_OPS_CACHE_DIR in the environment moves it.
    """


@contextlib.contextmanager
def _usable(store: "TileStore", verb: str) -> Iterator[None]:
    """An error of the system, of a store that cannot be read or cleared, as one line."""
    from ..tiles._store import CACHE_DIR_VARIABLE, shown, why_not

    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"The store {shown(store.directory)} cannot be {verb}: {why_not(error)}. Make it a "
            f"folder that you may read and write; {CACHE_DIR_VARIABLE} names another."
        ) from None


def _stored() -> "tuple[pathlib.Path, list[Stored]]":
    from ..tiles import TileStore
    from ._entries import read_store

    store = TileStore()
    with _usable(store, "read"):
        return store.directory, list(read_store(store))


def _how_used(stored: "Stored") -> str:
    from ._entries import describe_versions

    if stored.status == "used":
        return "yes"
    if stored.error is not None:
        return f"no: {stored.error}"
    assert stored.entry is not None
    return f"no: found with {describe_versions(stored.entry.versions)}"


@command.command("list")
@_json
def list_(as_json: bool) -> None:
    """One row for each stored tile, those that cannot be used among them.

    A row's m is the largest of the sizes that it serves: the next power of two.
    """
    from rich import box
    from rich.table import Table

    directory, everything = _stored()
    if as_json:
        rows = [stored.as_json() for stored in everything]
        print_json({"directory": str(directory), "entries": rows})
        return
    if not everything:
        click.echo(f"Nothing is stored in {directory}. `pallas-ops tune` measures tiles.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "m", "k", "n", "batch", "layout", "dtypes", "device", "implementation"):
        table.add_column(name)
    for name in ("tile", "time", "from", "used"):
        table.add_column(name, overflow="fold")
    for stored in everything:
        entry, problem = stored.entry, stored.problem
        if entry is None or problem is None:
            table.add_row(stored.id[:8], *("",) * 11, _how_used(stored))
            continue
        key = entry.key
        dtypes = f"{key['lhs_dtype']} {key['rhs_dtype']} -> {key['out_dtype']}"
        if key["precision"] != "DEFAULT":
            dtypes += f" {key['precision']}"
        table.add_row(
            stored.id[:8],
            *(str(key[axis]) for axis in "mkn"),
            "x".join(map(str, problem.batch)),
            key["layout"],
            dtypes,
            key["device"] or "any",
            key["implementation"],
            entry.tile.label,
            "" if entry.seconds is None else format_seconds(entry.seconds),
            entry.source,
            _how_used(stored),
        )
    console = make_console()
    console.print(table)
    console.print(f"{len(everything)} in {directory}")


def _find(prefix: str) -> "Stored":
    directory, everything = _stored()
    found = [one for one in everything if one.id.startswith(prefix)]
    found = found or [one for one in everything if one.path.stem.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise click.ClickException(
            f"No stored tile has an id that begins with {prefix!r} in {directory}. "
            f"`pallas-ops tiles list` shows what there is."
        )
    ids = ", ".join(one.id[: len(prefix) + 8] for one in found)
    raise click.ClickException(
        f"{len(found)} stored tiles have an id that begins with {prefix!r}: {ids}. Give more of it."
    )


@command.command("show")
@click.argument("prefix", metavar="ID")
@_json
def show(prefix: str, as_json: bool) -> None:
    """All of one entry. ID is its id, as `list` shows it, or any beginning of that alone."""
    stored = _find(prefix)
    if as_json:
        print_json(stored.as_json())
        return
    console = make_console()
    console.print(f"file            {stored.path}")
    console.print(f"used            {_how_used(stored)}")
    entry = stored.entry
    if entry is None:
        return
    if stored.problem is not None:
        console.print(f"problem         {stored.problem.describe()}")
    console.print(f"tile            {entry.tile}")
    if entry.vmem_limit_bytes is not None:
        console.print(f"VMEM limit      {format_bytes(entry.vmem_limit_bytes)}")
    if entry.seconds is not None:
        console.print(f"time            {format_seconds(entry.seconds)}")
    console.print(f"found by        {entry.source}: {entry.reason}")
    for title, part in (("key", entry.key), ("versions", entry.versions)):
        console.print(title)
        for name, value in part.items():
            console.print(f"  {name:<16}{value}")
    if entry.failures:
        console.print("tiles that failed")
        for tile, reason in entry.failures.items():
            console.print(f"  {tile}: {reason}")


@command.command("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=str))
@click.option("--device", help="Only the tiles of one TPU, such as v5e.")
def export(file: str, device: str | None) -> None:
    """Write what is stored to FILE as a table (- is standard output).

    A table can be committed, read by CachedResolver(table=FILE), and imported on another machine.
    What cannot be used is left out. Of one problem under several versions of JAX or libtpu, the
    entry of now is taken, else the latest.
    """
    from .._hardware import known_generation
    from ..tiles import table_json
    from ._entries import entries_to_export

    if device is not None:
        with readable():
            device = known_generation(device).name
    directory, everything = _stored()
    entries = entries_to_export(everything, device)
    if not entries:
        what = "Nothing" if device is None else f"Nothing for a {device}"
        raise click.ClickException(f"{what} that could be used is stored in {directory}.")
    text = table_json(entries)
    if file in ("-", "/dev/stdout"):  # opened anew, a file there would be written over
        click.echo(text, nl=False)
        return
    write_whole(pathlib.Path(file), text)
    out = len(everything) - len(entries)
    click.echo(
        f"{counted(len(entries), 'tile')} written to {file}"
        + (f", {out} left out." if out else ".")
    )


@command.command("generate")
@click.argument("file", callback=read_output)
@click.option("--device", required=True, help="The TPU, such as v5e.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["bfloat16", "float32"]),
    multiple=True,
    default=("bfloat16", "float32"),
    show_default=True,
)
@click.option("--candidates", type=click.IntRange(min=1), help="How many are compiled for each.")
def generate(file: str, device: str, dtypes: tuple[str, ...], candidates: int | None) -> None:
    """Write the table that comes with the package for one TPU to FILE, by its compiler.

    Of the three products of the layers of Bielik-1.5B and of Llama's architecture, for 1 to 8192
    rows, it holds the tiles that are predicted to be more than 2 % faster than the default tile,
    which is taken without a table. No TPU is needed; it takes a while.
    """
    from rich.console import Console
    from rich.progress import Progress

    from .._hardware import known_generation
    from ..tiles import table_json
    from ._generating import generate, shipped_problems

    with readable():
        problems = shipped_problems(known_generation(device).name, dtypes)
    console = Console(stderr=True)
    # How many kernels there are to compile is not known: most need not be.
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Compiling for {device}", total=None)
        entries, missing = generate(
            problems, most_candidates=candidates, told=lambda _: progress.advance(task)
        )
    if len(missing) == len(problems):
        problem, reason = next(iter(missing.items()))
        raise click.ClickException(f"Nothing was written. {problem.describe()}: {reason}")
    write_whole(pathlib.Path(file), table_json(entries))
    as_good = len(problems) - len(missing) - len(entries)
    click.echo(
        f"{counted(len(entries), 'tile')} written to {file}. The default tile is as good for "
        f"{counted(as_good, 'product')}."
    )
    for problem, reason in missing.items():
        click.echo(f"Without a tile: {problem.describe()}: {reason}")


@command.command("import")
@click.argument("file", type=click.File("rb"))
def import_(file: Any) -> None:
    """Store the tiles of the table FILE (- is standard input).

    All of FILE is checked first: one wrong entry, and nothing is stored. Tiles found with another
    JAX or libtpu are stored under the versions of now, and say so; those of another version of the
    kernel are left out. A tile that is stored for the same problem is replaced.
    """
    from ..tiles import forget, InvalidEntryError, TileStore
    from ..tiles._store import why_not
    from ._entries import read_import

    try:
        table = read_import(file.read())
    except (OSError, InvalidEntryError) as error:
        reason = why_not(error)
        raise click.ClickException(f"{file.name}: {reason}. Nothing was imported.") from None
    verb = "was" if table.left_out == 1 else "were"
    left_out = (
        f"{counted(table.left_out, 'tile')} of another version of the kernel {verb} left out."
    )
    if not table.entries:
        why = left_out if table.left_out else "it holds no entries."
        raise click.ClickException(f"{file.name}: {why} Nothing was imported.")
    store = TileStore()
    told: list[str] = []
    replaced = 0
    for count, entry in enumerate(table.entries):
        replaced += os.path.exists(store.path(entry.key, entry.versions))
        with told_warnings(told):
            stored = store.put(entry)
        if not stored:
            reason = told[-1] if told else f"{store.directory} cannot be written to."
            raise click.ClickException(f"{count} of {len(table.entries)} imported: {reason}")
    forget()
    message = f"{counted(len(table.entries), 'tile')} imported to {store.directory}"
    message += f", {replaced} of them in place of another." if replaced else "."
    click.echo(message + (f" {left_out}" if table.left_out else ""))


@command.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove everything that is stored."""
    from ..tiles import forget, TileStore

    store = TileStore()
    with _usable(store, "read"):
        entries, leftovers = store.files()
    parts = ((entries, "stored tile"), (leftovers, "unfinished file"))
    what = " and ".join(counted(len(paths), name) for paths, name in parts if paths)
    if not what:
        click.echo(f"Nothing is stored in {store.directory}.")
        return
    if not yes:
        click.confirm(f"Remove {what} from {store.directory}?", abort=True)
    with _usable(store, "cleared"):
        store.clear()
    forget()
    click.echo(f"{what} removed.")


@command.command("why")
@click.argument("m", type=click.IntRange(min=1))
@click.argument("k", type=click.IntRange(min=1))
@click.argument("n", type=click.IntRange(min=1))
@problem_options
@product_option
@click.option("--device", help="The TPU, such as v5e; the one that is here, else any.")
@click.option(
    "--implementation",
    type=click.Choice(KERNEL_IMPLEMENTATIONS),
    default="mosaic",
    show_default=True,
    help="What runs the kernel.",
)
@click.option(
    "--tiles",
    type=click.Choice(["static", "cached", "autotune", "compiler"]),
    help="The resolver; PALLAS_OPS_TILES where it is left out, else cached.",
)
@click.option(
    "--compile/--no-compile",
    "compiles",
    default=True,
    show_default=True,
    help="Whether the TPU compiler is asked for the tile's time and that of XLA's dot, where the "
    "TPU is known.",
)
@_json
def why(
    m: int,
    k: int,
    n: int,
    dtype: str,
    weights: str | None,
    out_dtype: str | None,
    layout: str,
    precision: str,
    product: str,
    device: str | None,
    implementation: str,
    tiles: str | None,
    compiles: bool,
    as_json: bool,
) -> None:
    """Who is asked for the tile of a product, and what each answers. Nothing is measured.

    Beside the tile stands its predicted time, and that of XLA's dot.
    """
    from ._products import device_name, make_problem
    from ._why import explain, named_in_environment, predicted_times, why_json

    told: list[str] = []
    with readable(), told_warnings(told), named_in_environment(tiles):
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
            device=device_name(device, "" if device else default_platform()),
            implementation=implementation,
        )
        found = explain(problem, tiles)
        times = predicted_times(found) if compiles else None
    if as_json:
        print_json(why_json(found, times) | {"warnings": told})
    else:
        _print_why(found, times, told)


def _print_why(why: "Why", times: "Times | None", told: list[str]) -> None:
    console = make_console()
    resolution = why.resolution
    console.print(f"{why.problem.describe()}\n")
    for number, step in enumerate(why.steps, start=1):
        console.print(f"{number}. {step.asked}: {step.answer}")
    for message in told:
        console.print(f"Warning: {message}")
    blocks = ", ".join(f"{name}={size}" for name, size in tile_json(resolution.tile).items())
    steps = " x ".join(f"{name} {count}" for name, count in why.grid_steps.items())
    total = math.prod(why.grid_steps.values())
    limit = f"limit {format_bytes(why.vmem_limit_bytes)}"
    limit += " (raised for it)" if resolution.vmem_limit_bytes is not None else " (the default)"
    if why.vmem_capacity_bytes is not None:
        limit += f", of {format_bytes(why.vmem_capacity_bytes)} in all"
    console.print(f"\nTile    {blocks}")
    console.print(f"Source  {resolution.source}: {resolution.reason}")
    console.print(f"VMEM    {format_bytes(why.vmem_bytes)} by estimate, {limit}")
    console.print(f"Grid    {counted(total, 'step')}: {steps}")
    if times is None:
        return
    ours, xla = (
        "unknown" if seconds is None else format_seconds(seconds)
        for seconds in (times.seconds, times.xla_seconds)
    )
    how = "" if times.calibrated else ", uncalibrated"
    console.print(f"Time    {ours} predicted{how}; XLA's dot {xla}")
    if times.why_unknown is not None:
        console.print(f"        {times.why_unknown}")
    if times.xla_is_faster:
        console.print(
            "XLA's dot is predicted to be more than a tenth faster than this tile: "
            'implementation="xla" takes it, and `pallas-ops tune` looks for a better tile.'
        )
