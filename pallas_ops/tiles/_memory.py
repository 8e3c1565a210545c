"""What this process has resolved already, and who may wait for what."""

import contextlib
import threading
from collections.abc import Hashable, Iterator

import jax

from ._resolver import Resolution


_resolved: dict[Hashable, Resolution] = {}

_forgotten = 0

lock = threading.RLock()
"""Held while something is looked for, so that two threads never look for the same thing. A thread
that measures must not wait for it, because its owner waits for that thread: see `is_measuring`."""

_thread = threading.local()


def recall(question: Hashable) -> Resolution | None:
    return _resolved.get(question)


def remember(question: Hashable, resolution: Resolution) -> Resolution:
    _resolved[question] = resolution
    return resolution


def times_forgotten() -> int:
    """How often this process has called `forget`."""
    return _forgotten


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Marks this thread as one that measures for another, which holds `lock` and waits."""
    _thread.measuring = True
    try:
        yield
    finally:
        _thread.measuring = False


def is_measuring() -> bool:
    """Whether this thread measures, and runs somebody's timer: then a resolver takes no lock and
    measures nothing."""
    return getattr(_thread, "measuring", False)


def forget() -> None:
    """Forgets every tile that this process has resolved, and every program that holds one.

    A tile is part of a compiled program: tuning, importing a table or clearing the store changes
    nothing for a function that is jitted already. After `forget`, everything is compiled again when
    it is called, with what the store then holds. The store itself is not touched: `pallas-ops tiles
    clear` does that.

    With several processes (`jax.distributed`), all of them must call it, equally often: what they
    agree on afterwards is another answer than before.
    """
    global _forgotten
    # Without the lock: a timer may call this, while who started it holds the lock and waits.
    _forgotten += 1
    _resolved.clear()
    jax.clear_caches()
