"""`pallas-ops bench`: measurements of this package, made where they are run."""

from typing import TYPE_CHECKING

import click

from ._console import default_platform, make_console, print_json


if TYPE_CHECKING:
    from ._overhead import Overhead


@click.group("bench")
def command() -> None:
    """Measure what this package costs, here."""


@command.command("overhead")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def overhead(as_json: bool) -> None:
    """What choosing tiles costs: for a known problem, and in a jitted step.

    A resolver is asked when a program is compiled, and not again. So a jitted step costs the same
    with any of them, and with a tile that is named.
    """
    default_platform()
    from ._overhead import measure

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
    console.print(f"Measured here, in this run: {found.where}.")
