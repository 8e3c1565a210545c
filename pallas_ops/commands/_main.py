"""`pallas-ops`: the group that finds each command in its own file."""

import importlib
import io
import sys

import click

from ..compiler import quiet_libtpu


# A command lives in `_<name>.py` as `command`. Of other packages such a file imports only click
# when it is loaded, so that `--help` does not wait for what one command needs.
_COMMANDS = ("bench", "demo", "predict", "tiles", "tune")


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return importlib.import_module(f"{__package__}._{cmd_name}").command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pallas-ops")
def main() -> None:
    """Pallas TPU matrix multiplication as a typed, differentiable JAX operator."""
    # Before any command starts JAX's backends, which load libtpu wherever it is installed.
    quiet_libtpu()
    # The name of a folder may hold bytes that are no text; they are printed as numbers.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
