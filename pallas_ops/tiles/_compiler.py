"""`CompilerResolver`: tiles that the TPU compiler's own schedule predicts to be fastest."""

import dataclasses
import os

from .._hardware import find_generation, known_generation
from ..compiler import kept_pool
from ._agree import agreed
from ._budget import check_budget
from ._cached import AGREE_SECONDS, CachedResolver, DEFAULT_FALLBACK, stored_tile
from ._candidates import candidates
from ._key import problem_key, versions
from ._memory import is_measuring, lock, recall, remember
from ._problem import TileProblem
from ._ranking import rank, Ranking
from ._resolver import check_fallback, Resolution, TileResolver
from ._store import COMPILER_SOURCE, default_directory, Entry, TileStore, warn_once


@dataclasses.dataclass(frozen=True)
class CompilerResolver:
    """Asks the TPU compiler in libtpu for the schedule of several tiles, and takes the fastest.

    No TPU is needed: the compiler runs on any Linux machine on x86-64, in processes of its own. A
    model makes a time of what it says, which is a prediction and no measurement; for all but a v5e
    that model was not compared with measurements. The tile is stored, if the compiler answered for
    every one that it was asked about. One that was measured for the same problem goes before it.

    ```python
    with pallas_ops.options(tiles=pallas_ops.CompilerResolver("v5e")):
        loss, gradients = step(model, x, y)
    ```

    **Arguments:**

    - `device`: the TPU, such as `"v5e"`; `None` is the one that the program is compiled for, or
        that `options(device=...)` names.
    - `budget_seconds`: for each problem, what is not compiled by then is left out.
    - `most_candidates`: how many tiles are compiled at most, the most promising first.
    - `workers`: how many processes compile at once; `None` is one for each CPU, up to four.
    - `directory`: the folder of the store, as in [`pallas_ops.CachedResolver`][].
    - `fallback`: who is asked where there is no compiler, no known TPU, or no tile that compiles.

    **Raises:**

    `ValueError` for an unknown TPU, or a budget that is not positive.
    """

    device: str | None = None
    budget_seconds: float | int = 50.0
    most_candidates: int = 12
    workers: int | None = None
    directory: str | os.PathLike | None = None
    fallback: TileResolver = DEFAULT_FALLBACK

    def __post_init__(self):
        if self.device is not None:
            object.__setattr__(self, "device", known_generation(self.device).name)
        check_budget("CompilerResolver", self.budget_seconds, self.most_candidates)
        check_fallback("CompilerResolver", self.fallback)
        workers = self.workers
        is_count = isinstance(workers, int) and not isinstance(workers, bool)
        if workers is not None and not (is_count and workers >= 1):
            raise ValueError(f"CompilerResolver: `workers` must be at least 1, got {workers!r}.")

    def problem_for_tpu(self, problem: TileProblem) -> TileProblem:
        """The problem as it is on the TPU: an interpreter gets the tile that the TPU would."""
        return dataclasses.replace(
            problem, device=self.device or problem.device, implementation="mosaic"
        )

    def resolve(self, problem: TileProblem) -> Resolution:
        """As in [`pallas_ops.TileResolver`][]."""
        directory = os.fspath(default_directory() if self.directory is None else self.directory)
        on_tpu = self.problem_for_tpu(problem)

        def without_compiling():
            return CachedResolver(directory, fallback=self.fallback, quiet=True).look_up(on_tpu)

        def compiled():
            before = stored_tile(on_tpu, directory) or recall((self, directory, on_tpu))
            return before or self._compile(on_tpu, directory)

        if find_generation(on_tpu.device) is None:
            warn_once(
                "compiler without a TPU's name",
                f"CompilerResolver compiles for one TPU, and none that it knows is named for "
                f"{problem.describe()}: CompilerResolver('v5e') or options(device='v5e') names "
                f"one. Taken is the fallback's tile.",
            )
            return without_compiling()
        if is_measuring():  # a timer's own product: who started the timer holds the lock and waits
            return without_compiling()
        with lock:
            return agreed(
                on_tpu,
                self,
                compiled,
                without_compiling,
                timeout_seconds=2 * self.budget_seconds + AGREE_SECONDS,
            )

    def ranking(self, problem: TileProblem) -> Ranking:
        """The candidates for a problem, compiled."""
        tiles = candidates(problem, most=self.most_candidates)
        with kept_pool(self.workers) as pool:
            (found,) = rank([problem], [tiles], pool, budget_seconds=self.budget_seconds)
        return found

    def _compile(self, problem: TileProblem, directory: str) -> Resolution:
        ranking = self.ranking(problem)
        if not ranking.judgements:
            warn_once(
                "no compiler" if ranking.unanswered else f"compiler {problem}",
                f"the TPU compiler has no tile for {problem.describe()}; taken is the fallback's: "
                f"{ranking.why_not_stored()}",
            )
            # Not stored: it may be there the next time. Not tried again in this process.
            fallback = CachedResolver(directory, fallback=self.fallback, quiet=True)
            return remember((self, directory, problem), fallback.look_up(problem))
        entry = compiler_entry(problem, ranking)
        resolution = Resolution(
            entry.tile, COMPILER_SOURCE, entry.vmem_limit_bytes, reason=entry.reason
        )
        if not ranking.may_be_stored:
            warn_once(
                f"compiler {problem}",
                f"the tile of {problem.describe()} is not stored, and taken in this process alone: "
                f"{ranking.why_not_stored()}",
            )
            return remember((self, directory, problem), resolution)
        TileStore(directory).put(entry)
        return remember(("store", directory, problem), resolution)


def compiler_entry(problem: TileProblem, ranking: Ranking) -> Entry:
    """The fastest tile of a ranking, as it is stored."""
    tile, judgement = ranking.judgements[0]
    prediction = judgement.prediction
    generation = find_generation(problem.device)
    assert generation is not None
    time = f"{ranking.seconds * 1e6:.4g} us at m={problem.m}"
    if prediction is None:
        reason = f"estimated {time}, since its schedule could not be read: {judgement.error}"
    else:
        kind = "predicted" if generation.is_calibrated else "predicted, uncalibrated,"
        reason = f"{kind} {time}, bound by {prediction.bound}"
    others = len(ranking.estimated) - (prediction is None)
    if others:
        reason += f", before {others} that could not be read and are estimated to be slower"
    if ranking.left_out:
        reason += f", {ranking.left_out} candidates left out by the budget"
    return Entry(
        key=problem_key(problem),
        versions=versions(),
        tile=tile,
        vmem_limit_bytes=judgement.job.vmem_limit_bytes,
        source=COMPILER_SOURCE,
        reason=reason,
        failures={tile.label: why for tile, why in ranking.failures.items()},
    )
