"""What is used of JAX's private names still means what `pallas_ops/_private.py` takes it to mean.

That two real processes find each other by it is shown in `tests/tiles/test_processes.py`.
"""

from jax._src import distributed
from jaxlib import _jax

from pallas_ops._private import distributed_client


def test_there_is_no_client_in_a_process_alone(monkeypatch):
    assert distributed_client() is None
    # `jax.distributed` may be initialised for one process, which then has a client.
    monkeypatch.setattr(distributed.global_state, "client", object())
    monkeypatch.setattr(distributed.global_state, "num_processes", 1)
    assert distributed_client() is None


def test_the_state_has_what_is_read():
    state = distributed.global_state
    assert state.client is None
    assert state.num_processes in (None, 1)
    assert state.process_id in (None, 0)


def test_a_client_is_this_process_and_how_many_there_are(monkeypatch):
    client = object()
    for name, value in dict(client=client, num_processes=3, process_id=2).items():
        monkeypatch.setattr(distributed.global_state, name, value)
    assert distributed_client() == (client, 2, 3)


def test_the_client_has_the_methods_that_are_called():
    for method in ("key_value_set", "blocking_key_value_get"):
        assert callable(getattr(_jax.DistributedRuntimeClient, method))
