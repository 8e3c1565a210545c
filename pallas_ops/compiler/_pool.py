"""Compile workers: processes that each ask the TPU compiler, and what may happen to them."""

import atexit
import collections
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import pickle
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from ._jobs import CompileJob, Verdict
from ._topology import why_no_compiler, worker_environment


COMPILE_SECONDS = 120.0
"""How long one program may take: the slowest tile that `candidates` offers took 25 s."""

_ATTEMPTS = 2
_REST_SECONDS = 15.0
_LOG_PREFIX = re.compile(r"^[DIWEF]\d{4} [\d:.]+ +\d+ ")


class _Lost(Exception):
    """The worker is gone, or did not answer in time."""

    def __init__(self, reason: str, *, timed_out: bool = False, disk_is_full: bool = False):
        super().__init__(reason)
        self.timed_out, self.disk_is_full = timed_out, disk_is_full


# A schedule takes up to 10 MiB, and libtpu aborts where it cannot write one.
_ROOM_BYTES = 64 << 20


def _folder_with_room() -> str:
    """Where a worker's folder can be: the usual place for temporary files, if it is not full.

    Where no place has room, it is the first that can be used at all.

    **Raises:**

    `OSError` where there is none.
    """
    usual = tempfile.gettempdir()
    # libtpu's flags are words with spaces between them: it would take a part of such a name.
    possible = [
        folder
        for folder in (usual, "/dev/shm", "/var/tmp")
        if not any(map(str.isspace, folder)) and os.access(folder, os.W_OK)
    ]
    for folder in possible:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free >= _ROOM_BYTES:
                return folder
    if not possible:
        raise OSError(
            f"libtpu needs a folder that it can write to, without a space in its name; TMPDIR "
            f"names one, and now it is {usual!r}"
        )
    return possible[0]


class _Worker:
    """One process, and the folder that libtpu writes to."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="pallas-ops-compiler-", dir=_folder_with_room())
        self.folder = pathlib.Path(folder)
        try:
            with (self.folder / "stderr").open("wb") as errors:
                self.process = subprocess.Popen(
                    # Not from the folder where the user is, which may hold a file named like one
                    # of Python's modules.
                    [sys.executable, "-P", "-m", "pallas_ops.compiler._worker", str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=worker_environment(self.folder),
                    start_new_session=True,  # Ctrl-C is for the one who asks, who then ends it.
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def ask(self, job: CompileJob, seconds: float) -> Verdict:
        """Sends a job and waits for its verdict.

        **Raises:**

        `_Lost` where the worker ends before, or takes longer than `seconds`.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(job, self.process.stdin)
            self.process.stdin.flush()
        # A verdict is far smaller than what a pipe holds: once it begins, it is there.
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not selector.select(0.5):
                if time.monotonic() > deadline:
                    raise _Lost(f"it took longer than {seconds:g} s", timed_out=True)
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._how_it_ended() from None

    def _how_it_ended(self) -> _Lost:
        code = self.process.wait()
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        disk_is_full, said = False, []
        with contextlib.suppress(OSError):
            disk_is_full = shutil.disk_usage(self.folder).free < _ROOM_BYTES // 16
            said = (self.folder / "stderr").read_text(errors="replace").strip().splitlines()
        if disk_is_full:
            how += f", {self.folder.parent} is full"
        # Without libtpu's time of day and process, the same fault is told in the same words.
        last = _LOG_PREFIX.sub("", said[-1])[:300] if said else ""
        reason = f"the compiler's process ended ({how})" + (f": {last}" if last else "")
        return _Lost(reason, disk_is_full=disk_is_full)

    def kill(self) -> None:
        """Ends the process: who waits for its answer finds that it is lost."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def close(self) -> None:
        """Ends the process and removes its folder."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class CompilePool:
    """Workers that are started when they are first needed, and ended when the pool is closed.

    **Arguments:**

    - `workers`: how many at most; `None` is one for each CPU, up to four.
    - `compile_seconds`: the time limit of one program.
    - `rest_seconds`: how long workers wait for more after a `with` block has ended.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        compile_seconds: float = COMPILE_SECONDS,
        rest_seconds: float = 0.0,
    ):
        self.rest_seconds = rest_seconds
        self._rest: threading.Timer | None = None
        self.workers = min(4, os.cpu_count() or 1) if workers is None else workers
        self.compile_seconds = compile_seconds
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "CompilePool":
        if self._rest is not None:
            self._rest.cancel()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.rest_seconds:
            self.close()
            return
        self._rest = threading.Timer(self.rest_seconds, self.close)
        self._rest.daemon = True
        self._rest.start()

    def close(self) -> None:
        """Ends the workers that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def ask(
        self,
        jobs: Sequence[CompileJob],
        *,
        end: float | None = None,
        told: Callable[[CompileJob, Verdict], None] | None = None,
        wanted: Callable[[CompileJob], bool] | None = None,
    ) -> list[Verdict | None]:
        """Compiles programs in parallel.

        **Arguments:**

        - `jobs`: what to compile.
        - `end`: the `time.monotonic()` after which none is begun; one that runs then is given up.
        - `told`: called with each verdict as it comes, by one thread at a time.
        - `wanted`: asked just before a program is compiled whether it still need be.

        **Returns:**

        The verdicts in the order of the jobs; `None` for those that there was no time for, or that
        were not wanted.
        """
        reason = why_no_compiler()
        if reason is not None:
            unavailable = Verdict(False, reason, transient=True, unavailable=True)
            if told is not None:
                for job in jobs:
                    told(job, unavailable)
            return [unavailable] * len(jobs)
        verdicts: list[Verdict | None] = [None] * len(jobs)
        waiting = collections.deque(enumerate(jobs))
        telling = threading.Lock()
        running: set[_Worker] = set()
        given_up = threading.Event()

        def serve() -> None:
            worker: _Worker | None = None
            try:
                while waiting:
                    try:
                        index, job = waiting.popleft()
                    except IndexError:
                        break
                    with telling:
                        if wanted is not None and not wanted(job):
                            continue
                    worker, verdict = self._verdict(worker, job, end, running, given_up)
                    verdicts[index] = verdict
                    if told is not None and verdict is not None:
                        with telling:
                            told(job, verdict)
                if worker is not None:
                    with self._lock:
                        self._idle.append(worker)
                    worker = None
            finally:
                if worker is not None:
                    worker.close()

        count = max(1, min(self.workers, len(jobs)))
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            try:
                served = [threads.submit(serve) for _ in range(count)]
                done, _ = concurrent.futures.wait(
                    served, return_when=concurrent.futures.FIRST_EXCEPTION
                )
                for one in done:
                    one.result()
            except BaseException:  # such as Ctrl-C, which does not wait for the compiler
                waiting.clear()
                given_up.set()
                for worker in list(running):
                    worker.kill()
                raise
        return verdicts

    def _verdict(
        self,
        worker: "_Worker | None",
        job: CompileJob,
        end: float | None,
        running: set["_Worker"],
        given_up: threading.Event,
    ) -> tuple["_Worker | None", Verdict | None]:
        """Asks a worker, and another one where it is lost: it may not have been the job's fault."""
        verdict: Verdict | None = None
        for attempt in range(_ATTEMPTS):
            left = self.compile_seconds if end is None else end - time.monotonic()
            if left <= 0 or given_up.is_set():
                return worker, verdict
            if worker is None:
                try:
                    worker = self._take()
                except OSError as error:  # no room for its folder, no memory for a process
                    reason = f"no compile worker could be started: {error}"
                    return None, Verdict(False, reason, transient=True)
            asked = worker
            running.add(asked)
            try:
                if given_up.is_set():  # since it was asked above
                    return worker, verdict
                return worker, worker.ask(job, min(left, self.compile_seconds))
            except _Lost as lost:
                if lost.timed_out and left < self.compile_seconds:
                    verdict = None  # there was no more time for it, which says nothing of it
                else:
                    again = attempt == _ATTEMPTS - 1 and not lost.disk_is_full
                    verdict = Verdict(
                        False, str(lost), transient=True, blames_program=lost.timed_out or again
                    )
                asked.close()
                worker = None
                if lost.timed_out:
                    break
            finally:
                running.discard(asked)
        return worker, verdict

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                if not self._idle:
                    break
                worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.close()  # it ended while it rested
        return _Worker()


@functools.cache
def kept_pool(workers: int | None = None) -> CompilePool:
    """A pool for one problem after another: what starts a worker takes seconds.

    Its workers end when they have had nothing to do for a while, and with this process.
    """
    pool = CompilePool(workers, rest_seconds=_REST_SECONDS)
    atexit.register(pool.close)
    return pool
