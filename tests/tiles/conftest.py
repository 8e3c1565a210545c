"""Each test of tiles begins with an empty store, and in a process that has resolved nothing yet."""

import pytest

from pallas_ops.tiles import _agree, _memory, _store


def forget_what_this_process_knows():
    """As in a new process: nothing is resolved, and every warning is told again."""
    _memory._resolved.clear()
    _store._warned.clear()
    _agree._waited_in_vain = False


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """The folder of this test's store."""
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "cache"))
    forget_what_this_process_knows()
    yield tmp_path / "cache"
    forget_what_this_process_knows()
