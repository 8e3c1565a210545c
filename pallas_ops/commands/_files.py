"""Files that commands write: whether they can, before any work begins, and then all of one."""

import os
import pathlib
import tempfile

import click

from .. import _whole


def read_output(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The callback of an option or argument that names a file to write.

    What would fail after all the work is an error before it.
    """
    if value is not None:
        reason = _why_not_writable(pathlib.Path(value))
        if reason is not None:
            raise click.BadParameter(f"{value!r} cannot be written: {reason}.")
    return value


def read_output_or_dash(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """As `read_output`, where - is standard output."""
    return value if value == "-" else read_output(ctx, parameter, value)


def _why_not_writable(path: pathlib.Path) -> str | None:
    try:
        if path.is_dir():
            return "it is a folder, and a file is expected"
        if _is_written_in_place(path):
            return None if os.access(path, os.W_OK) else "you may not write to it"
        folder = path.resolve().parent
        if not folder.is_dir():
            return f"{folder} is no folder. Make it first, or name a file in another"
        # Only trying tells of, say, a file system that is mounted to be read. It leaves nothing.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{error.strerror}. Name a file in a folder where you can make one"


def _is_written_in_place(path: pathlib.Path) -> bool:
    """Whether it is no file that another can replace: a pipe, `/dev/null`, what is open already."""
    is_descriptor = str(path.absolute()).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    return path.exists() and (is_descriptor or not path.is_file())


def write_whole(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file beside, and renames it: what was there stays until all of the new is.

    What is no file, such as a pipe or `/dev/null`, is written to and stays what it is; so is a file
    that somebody has opened, by the name of its descriptor.

    **Raises:**

    `click.ClickException` where it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_written_in_place(path):
            with path.open("ab") as stream:
                stream.write(data)
            return
        # Where the name is a link, what it points to is replaced.
        path = path.resolve()
        # A file of its owner alone would not do: this one is to be shared.
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        _whole.write_whole(path, data, mode=mode)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}.") from None
