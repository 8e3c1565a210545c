"""One tile for all processes of a job: that of process 0."""

import hashlib
import json
from collections.abc import Callable

from .._private import distributed_client
from ._config import TileConfig
from ._key import problem_key
from ._problem import TileProblem
from ._resolver import Resolution
from ._store import warn_once


_AFTER_A_TIME_OUT_SECONDS = 1.0

# Whether this process has waited for process 0 in vain: then it is unlikely to answer at all.
_waited_in_vain = False


def _name(problem: TileProblem, who: str) -> str:
    # With the real m: process 0 may have another batch in the same class, and another legal tile.
    text = json.dumps([who, problem.m, problem_key(problem)], sort_keys=True)
    return f"pallas_ops/tiles/{hashlib.sha256(text.encode()).hexdigest()}"


def agreed(
    problem: TileProblem,
    who: str,
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
    - `who`: tells resolvers apart that decide differently.
    - `decide`: run by process 0.
    - `otherwise`: run by another process that has waited for `timeout_seconds` in vain.
    """
    global _waited_in_vain
    job = distributed_client() if problem.can_be_timed else None
    if job is None:
        return decide()
    client, index, _ = job
    name = _name(problem, who)
    if index == 0:
        resolution = decide()
        fields = [resolution.tile.blocks, resolution.source, resolution.vmem_limit_bytes]
        client.key_value_set(name, json.dumps([*fields, resolution.reason]), allow_overwrite=True)
        return resolution
    patience = _AFTER_A_TIME_OUT_SECONDS if _waited_in_vain else timeout_seconds
    try:
        answer = client.blocking_key_value_get(name, int(patience * 1000))
    except Exception as error:  # XlaRuntimeError: DEADLINE_EXCEEDED, or a coordinator that is gone
        _waited_in_vain = True
        warn_once(
            "process 0",
            f"process {index} waited {patience:g} s for process 0's tile for "
            f"{problem.describe()}, and takes one that was not measured. Processes with different "
            f"tiles compile different programs. ({type(error).__name__}: "
            f"{str(error).splitlines()[0]})",
        )
        return otherwise()
    blocks, source, limit, reason = json.loads(answer)
    return Resolution(TileConfig(*blocks), source, limit, f"process 0's: {reason}")
