"""Files that are written whole or not at all, whatever ends the one who writes."""

import contextlib
import functools
import os
import pathlib
import secrets
from typing import Any


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


UNFINISHED = (".new-", ".tmp")
"""How the name of a file that is not ready begins and ends."""


def hold(file: Any) -> bool:
    """Locks an open file until it is closed; `False` where another has it, or nothing is locked.

    The system keeps the lock, and drops it when its process ends, however that ends. So it tells a
    living process from a killed one where the number of a process does not: in containers that
    share a folder, and on another machine, as NFS asks its server. Where a file system has no locks
    nobody gets one, and nothing is taken for left behind.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_whole(path: pathlib.Path, data: bytes, *, mode: int | None = None) -> None:
    """Writes a file beside, held while it is not ready, and renames it.

    **Arguments:**

    - `path`: the file; what is there stays until all of the new one is.
    - `data`: what it shall hold.
    - `mode`: the permissions; `None` lets its owner alone read it.

    **Raises:**

    `OSError` where it cannot be written, and `ValueError` for a path that can be none: then it is
    not. Of these `FileNotFoundError` may also mean that somebody removed the file beside.
    """
    # An interrupt may come between any two steps. The name is decided before there is such a file,
    # and removed twice, since the first removal may be what is interrupted.
    beside = path.with_name(secrets.token_hex(8).join(UNFINISHED))
    try:
        try:
            with open(beside, "xb", opener=functools.partial(os.open, mode=0o600)) as held:
                if not hold(held):
                    held.close()  # Windows renames no file that is open
                # Another stream, closed before the renaming: a full disk may tell only then.
                with open(beside, "r+b") as file:
                    file.write(data)
                if mode is not None:
                    os.chmod(beside, mode)
                os.replace(beside, path)
        finally:
            _remove(beside)
    finally:
        _remove(beside)


def _remove(path: pathlib.Path) -> None:
    # Mostly it is gone already. What the writing met is told, and not this.
    with contextlib.suppress(OSError, ValueError):
        os.unlink(path)
