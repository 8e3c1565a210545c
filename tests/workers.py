"""Compile workers for the whole run: what one test leaves, the next one takes.

To start a worker takes seconds, and most tests that need the TPU compiler ask it about one or two
programs. So a pool that is closed does not end its workers here, and a program that was compiled
already is not compiled again. A test about workers themselves is marked `own_workers`.
"""

import atexit
import os
import tempfile

from pallas_ops.compiler import _pool


_OwnWorker, _close = _pool._Worker, _pool.CompilePool.close

# What every test sets for itself, and no worker reads.
_OF_A_TEST = ("PYTEST_CURRENT_TEST", "PALLAS_OPS_CACHE_DIR", "PALLAS_OPS_TILES")

_left: dict = {}
_verdicts: dict = {}
_shared = True


def _surroundings():
    """All that a worker's answers may depend on beside the job."""
    environment = {name: text for name, text in os.environ.items() if name not in _OF_A_TEST}
    return tempfile.gettempdir(), tuple(sorted(environment.items()))


class _SharedWorker(_OwnWorker):
    def __init__(self):
        self.surroundings = _surroundings()
        super().__init__()

    def ask(self, job, seconds):
        known = _verdicts.get((self.surroundings, job))
        if known is None:
            known = super().ask(job, seconds)
            if not known.transient:
                _verdicts[self.surroundings, job] = known
        return known


def _start():
    if not _shared:
        return _OwnWorker()
    waiting = _left.get(_surroundings(), [])
    while waiting:
        worker = waiting.pop()
        if worker.process.poll() is None:
            return worker
        worker.close()
    return _SharedWorker()


def _leave(pool):
    with pool._lock:
        idle, pool._idle = pool._idle, []
    for worker in idle:
        if isinstance(worker, _SharedWorker):
            _left.setdefault(worker.surroundings, []).append(worker)
        else:
            worker.close()


def _end():
    for worker in (worker for workers in _left.values() for worker in workers):
        worker.close()


def share():
    """From now on, in this process."""
    _pool._Worker, _pool.CompilePool.close = _start, _leave
    atexit.register(_end)


def own(is_own):
    """Whether pools start and end workers of their own, as they do for users."""
    global _shared
    _shared = not is_own
    _pool.CompilePool.close = _close if is_own else _leave
