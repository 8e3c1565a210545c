"""What this process has resolved already."""

import threading
from collections.abc import Hashable

import jax

from ._resolver import Resolution


_resolved: dict[Hashable, Resolution] = {}

lock = threading.RLock()
"""Held while something is looked for, so that two threads never look for the same thing."""


def recall(question: Hashable) -> Resolution | None:
    return _resolved.get(question)


def remember(question: Hashable, resolution: Resolution) -> Resolution:
    _resolved[question] = resolution
    return resolution


def forget() -> None:
    """Forgets every tile that this process has resolved, and every program that holds one.

    A tile is part of a compiled program: tuning, importing a table or clearing the store changes
    nothing for a function that is jitted already. After `forget`, everything is compiled again when
    it is called, with what the store then holds. The store itself is not touched: `pallas-ops tiles
    clear` does that.
    """
    with lock:
        _resolved.clear()
    jax.clear_caches()
