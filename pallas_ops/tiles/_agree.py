"""One tile for all processes of a job: that of process 0."""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Hashable
from typing import Any

from .._private import distributed_client
from ._config import TileConfig
from ._key import problem_key
from ._memory import recall, remember, times_forgotten
from ._problem import TileProblem
from ._resolver import Resolution
from ._store import warn_once


_AFTER_A_TIME_OUT_SECONDS = 1.0

# No budget is too long to be said in milliseconds.
_LONGEST_SECONDS = 24 * 3600.0

# Whether this process has waited for process 0 in vain: then it is unlikely to answer at all.
_waited_in_vain = False


@functools.lru_cache(maxsize=256)
def _stable_text(value: Hashable) -> str:
    """A resolver in words that are the same in every process of a job, which runs one program.

    By its fields, as written: so a table counts by its path. By its content it would count as
    another one on a machine with an old copy, and that machine would wait in vain; as it is,
    process 0's copy decides. The folder of the store is left out, since each process may have one
    of its own.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            f"{field.name}={_stable_text(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.compare and field.name != "directory"
        ]
        return f"{type(value).__qualname__}({', '.join(fields)})"
    if isinstance(value, frozenset | tuple):
        parts: Any = map(_stable_text, value)
        # Sets have an order of their own in each process.
        return f"({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _name(problem: TileProblem, who: Hashable) -> str:
    # With the real m: process 0 may have another batch in the same class, and another legal tile.
    # With the count: what was said before a `forget` is no answer after it.
    said = [times_forgotten(), _stable_text(who), problem.m, problem_key(problem)]
    text = json.dumps(said, sort_keys=True)
    return f"pallas_ops/tiles/{hashlib.sha256(text.encode()).hexdigest()}"


def agreed(
    problem: TileProblem,
    who: Hashable,
    decide: Callable[[], Resolution],
    otherwise: Callable[[], Resolution],
    *,
    timeout_seconds: float | int,
) -> Resolution:
    """What process 0 decides; without other processes, what this one does.

    Through the key-value store of `jax.distributed`, and never by a collective: a process that
    lowers a program on its own must not wait for others that do not.

    **Arguments:**

    - `problem`: what is decided.
    - `who`: the resolver. Two that differ in more than the folder of their store have answers of
        their own.
    - `decide`: run by process 0.
    - `otherwise`: run by another process that has waited for `timeout_seconds` in vain.
    """
    job = distributed_client() if problem.can_be_timed else None
    if job is None:
        return decide()
    client, index, _ = job
    question = ("agreed", _stable_text(who), problem)
    known = recall(question)
    if known is not None:
        return known
    name = _name(problem, who)
    if index == 0:
        resolution = decide()
        fields = [resolution.tile.numbers, resolution.source, resolution.vmem_limit_bytes]
        client.key_value_set(name, json.dumps([*fields, resolution.reason]), allow_overwrite=True)
        return remember(question, resolution)
    answer = _answer_of_process_0(client, index, name, problem, timeout_seconds)
    if answer is None:
        # Not remembered: process 0 may be late.
        return otherwise()
    numbers, source, limit, reason = json.loads(answer)
    return remember(
        question, Resolution(TileConfig(*numbers), source, limit, f"process 0's: {reason}")
    )


def _answer_of_process_0(
    client: Any, index: int, name: str, problem: TileProblem, timeout_seconds: float | int
) -> str | None:
    global _waited_in_vain
    patience = _AFTER_A_TIME_OUT_SECONDS if _waited_in_vain else timeout_seconds
    patience = min(patience, _LONGEST_SECONDS)
    try:
        return client.blocking_key_value_get(name, int(patience * 1000))
    except Exception as error:  # XlaRuntimeError: DEADLINE_EXCEEDED, or a coordinator that is gone
        waited = "DEADLINE_EXCEEDED" in str(error)
        _waited_in_vain = _waited_in_vain or waited
        what = f"waited {patience:g} s for" if waited else "could not ask for"
        warn_once(
            "process 0",
            f"process {index} {what} process 0's tile for {problem.describe()}, and takes one "
            f"that was not measured. Processes with different tiles compile different programs. "
            f"({type(error).__name__}: {str(error).splitlines()[0]})",
        )
        return None
