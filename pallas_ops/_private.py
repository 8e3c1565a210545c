"""The private names of JAX that are used, all of them; `tests/test_private.py` holds versions."""

from typing import Any

from jax._src import distributed


def distributed_client() -> tuple[Any, int, int] | None:
    """The key-value store that `jax.distributed` keeps for its processes.

    JAX has no public way to it: what is public there, `multihost_utils`, is collective, and not
    every process need lower the same program.

    **Returns:**

    The client, this process' index and the number of processes; `None` where there is one alone.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes is None or state.num_processes < 2:
        return None
    return state.client, state.process_id or 0, state.num_processes
