"""`pallas-ops tiles why`: who is asked for a tile, and what each answers."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

from .._hardware import find_generation
from ..compiler._topology import why_no_compiler
from ..tiles import (
    CachedResolver,
    estimate_vmem_bytes,
    problem_key,
    Resolution,
    resolve_tile,
    TileChoice,
    TileProblem,
    TileStore,
    versions,
)
from ..tiles._environment import environment_resolver, RESOLVERS, TILES_VARIABLE
from ..tiles._store import shown, why_not
from ..tiles._tables import shipped_table
from ..tiles._vmem import scoped_vmem_limit_bytes
from ._console import default_platform, microseconds
from ._predicting import report, xla_is_faster


@dataclasses.dataclass(frozen=True)
class Step:
    """One who is asked, and the answer."""

    asked: str
    answer: str

    def as_json(self) -> dict[str, str]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Why:
    """A tile, and how it was come by.

    **Arguments:**

    - `problem`: what it is for.
    - `steps`: who was asked, in order.
    - `resolution`: the answer.
    """

    problem: TileProblem
    steps: tuple[Step, ...]
    resolution: Resolution

    @property
    def vmem_bytes(self) -> int:
        return estimate_vmem_bytes(self.problem.matmul, self.resolution.tile)

    @property
    def vmem_limit_bytes(self) -> int:
        named = self.resolution.vmem_limit_bytes
        return scoped_vmem_limit_bytes(self.problem.device) if named is None else named

    @property
    def vmem_capacity_bytes(self) -> int | None:
        generation = find_generation(self.problem.device)
        return None if generation is None else generation.info.vmem_capacity_bytes

    @property
    def grid_steps(self) -> dict[str, int]:
        """How many blocks there are along each axis of the kernel's grid."""
        matmul, tile = self.problem.matmul, self.resolution.tile
        sizes = (matmul.m, matmul.n, matmul.k)
        blocks = (tile.block_m, tile.block_n, tile.block_k)
        steps = [-(-size // int(block)) for size, block in zip(sizes, blocks, strict=True)]
        return {"batch": math.prod(matmul.leading_shape)} | dict(zip("mnk", steps, strict=True))


def _answer_of_store(problem: TileProblem, used: Resolution) -> Step:
    store, key = TileStore(), problem_key(problem)
    path = store.path(key, versions())
    entry = store.get(key, versions())
    if entry is not None:
        answer = f"{entry.tile}" + ("" if used.source == "store" else ", which does not fit here")
    else:
        try:
            path.lstat()
            answer = "a file that cannot be used"
        except FileNotFoundError:
            answer = "nothing"
        except OSError as error:
            answer = f"it cannot be read: {why_not(error)}"
    return Step(f"the store, {shown(path)}", answer)


def _answer_of_table(problem: TileProblem, used: Resolution) -> Step:
    device = problem.device
    table = shipped_table(device)
    if table is None:
        which = "where no TPU is named" if device is None else f"for {device}"
        return Step("the tables that come with the package", f"there is none {which}")
    entry = table.get(problem_key(problem))
    answer = "nothing" if entry is None else f"{entry.tile}"
    if entry is not None and used.source != "table":
        answer += ", which does not fit here"
    return Step(f"the table for {device} that comes with the package", answer)


@contextlib.contextmanager
def named_in_environment(tiles: str | None) -> Iterator[None]:
    """Puts the resolver that `--tiles` names in place of the one that the environment names.

    That one does not count then, and may be none: every call of the operator would say so.
    """
    before = os.environ.get(TILES_VARIABLE)
    try:
        if tiles is not None:
            os.environ[TILES_VARIABLE] = tiles
        yield
    finally:
        if before is not None:
            os.environ[TILES_VARIABLE] = before
        elif tiles is not None:
            del os.environ[TILES_VARIABLE]


def explain(problem: TileProblem, tiles: str | None) -> Why:
    """Asks for a problem's tile as a call that names none would, without measuring anything.

    **Arguments:**

    - `problem`: what to ask.
    - `tiles`: a name out of `RESOLVERS`; `None` is what the environment says, or the default.

    **Raises:**

    `ValueError` where the environment names no resolver.
    """
    steps = [Step("the call, its layer, options(tiles=...)", "a tile named there comes first")]
    # Not read where it does not count: what it says may be wrong.
    resolver = environment_resolver() if tiles is None else None
    if tiles is not None:
        steps.append(Step(f"--tiles {tiles}", "names the resolver"))
        resolver = RESOLVERS[tiles]
    elif resolver is not None:
        named = os.environ[TILES_VARIABLE]
        steps.append(Step(f"{TILES_VARIABLE}={named}", "names the resolver"))
        tiles = named
    else:
        steps.append(Step(TILES_VARIABLE, "is not set: the default resolver, cached"))
        resolver, tiles = RESOLVERS["cached"], "cached"
    if tiles == "compiler":
        resolver = CachedResolver(quiet=True)  # who says what is known, and compiles nothing
    problem = dataclasses.replace(problem, can_be_timed=False)
    resolution = resolve_tile(problem, TileChoice(resolver=resolver))

    if tiles != "static":
        steps.append(_answer_of_store(problem, resolution))
        if tiles == "autotune" and resolution.source != "store":
            steps.append(_answer_of_measuring(problem))
        if tiles == "compiler" and resolution.source != "store":
            answer = "is asked by the first call and by `pallas-ops predict`, not by this command"
            steps.append(Step("the TPU compiler", answer))
        if resolution.source != "store":
            steps.append(_answer_of_table(problem, resolution))
    if resolution.source == "estimate":
        steps.append(Step("the estimate by shape", f"{resolution.tile}"))
    return Why(problem, tuple(steps), resolution)


def _answer_of_measuring(problem: TileProblem) -> Step:
    if problem.implementation == "mosaic" and default_platform() != "tpu":
        return Step("measuring", "cannot be done here, without a TPU")
    return Step("measuring", "is done by the first call, and not by this command")


@dataclasses.dataclass(frozen=True)
class Times:
    """What the compiler says of the tile that was chosen, and of XLA's dot.

    **Arguments:**

    - `seconds`, `xla_seconds`: predicted; `None` where there is no time.
    - `calibrated`: whether the model was compared with timings of this TPU.
    - `why_unknown`: why the tile has no time.
    """

    seconds: float | None
    xla_seconds: float | None
    calibrated: bool
    why_unknown: str | None = None

    @property
    def xla_is_faster(self) -> bool:
        return xla_is_faster(self.seconds, self.xla_seconds)


def predicted_times(why: Why) -> Times | None:
    """Asks the compiler; `None` where there is none, or the TPU is not known."""
    if find_generation(why.problem.device) is None or why_no_compiler() is not None:
        return None
    found = report(why.problem, [why.resolution.tile.numbers], candidates=1)
    (row,) = found.rows
    xla = None if found.xla is None else found.xla.seconds
    return Times(row.seconds, xla, found.calibrated, None if row.seconds is not None else row.error)


def why_json(why: Why, times: Times | None = None) -> dict[str, Any]:
    problem, resolution = why.problem, why.resolution
    return {
        "problem": problem_key(problem) | {"m": problem.m},
        "steps": [step.as_json() for step in why.steps],
        "tile": list(resolution.tile.numbers),
        "source": resolution.source,
        "reason": resolution.reason,
        "vmem_estimate_bytes": why.vmem_bytes,
        "vmem_limit_bytes": why.vmem_limit_bytes,
        "vmem_limit_is_raised": resolution.vmem_limit_bytes is not None,
        "vmem_capacity_bytes": why.vmem_capacity_bytes,
        "grid_steps": why.grid_steps,
        "predicted_us": None if times is None else microseconds(times.seconds),
        "xla_us": None if times is None else microseconds(times.xla_seconds),
        "xla_is_faster": times is not None and times.xla_is_faster,
    }
