"""What several commands print with, and what they read from a command line."""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TYPE_CHECKING

import click


if TYPE_CHECKING:
    from rich.console import Console


# Written out, so that `--help` does not load JAX; a test holds them against the resolvers' own.
TUNE_BUDGET_SECONDS = 60.0
TUNE_CANDIDATES = 24
COMPILE_BUDGET_SECONDS = 50.0
COMPILE_CANDIDATES = 12

KERNEL_IMPLEMENTATIONS = ("mosaic", "interpret", "tpu_interpret")


def make_console() -> "Console":
    """Standard output, without a line broken or cut where it is no terminal."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 1000
    return Console(highlight=False, markup=False, width=wide, soft_wrap=wide is not None)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def microseconds(seconds: float | None) -> float | None:
    """For JSON, whose times are in microseconds; no time stays none."""
    return None if seconds is None else seconds * 1e6


def format_bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tile_json(tile: Any) -> dict[str, int]:
    return dict(zip(vars(tile), tile.numbers, strict=False))


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """An error of the library as one line, without a traceback: its messages are for people."""
    from ..compiler import CompilerUnavailableError

    try:
        yield
    except (ValueError, TypeError, NotImplementedError, CompilerUnavailableError) as error:
        raise click.ClickException(str(error)) from error


def require_compiler() -> None:
    """Before any work begins: one error where there is no TPU compiler, which names what to
    install."""
    from ..compiler._topology import why_no_compiler

    reason = why_no_compiler()
    if reason is not None:
        raise click.ClickException(f"This is predicted by the TPU compiler. {reason}")


@contextlib.contextmanager
def told_warnings(told: list[str]) -> Iterator[None]:
    """Collects our warnings as text: for a person their file and line only hide what they say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="pallas_ops: ")
        yield
    for warning in caught:
        text = str(warning.message)
        if text.startswith("pallas_ops: "):
            told.append(text.removeprefix("pallas_ops: "))
        else:  # somebody else's: shown as it would have been
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def read_numbers(noun: str, axes: str, example: str, counts: tuple[int, ...] = (3,)) -> Callable:
    """The callback of an option that may be given several times, each with several sizes.

    **Arguments:**

    - `noun`, `axes`, `example`: what a value is, and how it is written, for the error.
    - `counts`: how many sizes a value may have.
    """

    def read(
        ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
    ) -> list[tuple[int, ...]]:
        found = []
        for value in values:
            parts = [part.strip() for part in value.split(",")]
            if len(parts) not in counts or not all(
                part.isdecimal() and int(part) > 0 for part in parts
            ):
                raise click.BadParameter(
                    f"{value!r} is no {noun}: expected {axes} of positive numbers, such as "
                    f"{example}."
                )
            found.append(tuple(map(int, parts)))
        return found

    return read


read_shapes = read_numbers("shape", "M,K,N", "2048,4096,512")


def default_platform() -> str:
    """The platform that JAX runs on here."""
    import jax

    try:
        return jax.default_backend()
    except RuntimeError as error:  # such as JAX_PLATFORMS=tpu without a TPU
        raise click.ClickException(f"JAX does not start: {error}") from None


product_option = click.option(
    "--product",
    type=click.Choice(["forward", "lhs_cotangent", "rhs_cotangent"]),
    default="forward",
    show_default=True,
    help="The product of M x K and K x N itself, or one of its gradients.",
)


def problem_options(function: Callable) -> Callable:
    """The options that say what is multiplied beside its sizes, for every command that asks."""
    for option in reversed(
        (
            click.option(
                "--dtype",
                type=click.Choice(["bfloat16", "float32", "int8"]),
                default="bfloat16",
                show_default=True,
                help="Of both operands.",
            ),
            click.option(
                "--weights",
                type=click.Choice(["int8"]),
                help="Of the right operand, with a scale for each column of the result.",
            ),
            click.option(
                "--out-dtype",
                type=click.Choice(["bfloat16", "float32", "int8", "int32"]),
                help="Of the result; the operands' where it is left out.",
            ),
            click.option(
                "--layout",
                type=click.Choice(["NN", "NT", "TN", "TT"], case_sensitive=False),
                metavar="[NN|NT|TN|TT]",
                default="NT",
                show_default=True,
                help="T for an operand that is stored transposed; NT is a linear layer.",
            ),
            click.option(
                "--precision",
                type=click.Choice(["default", "high", "highest"]),
                default="default",
                show_default=True,
                help="For float32, as in jax.lax.Precision.",
            ),
        )
    ):
        function = option(function)
    return function
