"""What a kernel's schedule says: the loop over the grid, and what one step of it costs."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ._bundles import Predicate, Program, region_starts, UnreadableScheduleError
from ._scalars import Loop, Value


STEPS = ("first", "middle", "last")
"""The kinds of step of the grid, by their place in the sum over k."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step of the grid costs on the TensorCore, if its blocks are there.

    **Arguments:**

    - `bundles`: how many bundles it issues: as many cycles, if none of them waits.
    - `cycles`: the same with the cycles that bundles wait until their MXU is free.
    - `mxu_cycles`: in how many of them the busiest MXU takes rows.
    - `rows`: how many all MXUs take together.
    - `matmuls`, `weight_pushes`, `transposes`, `spills`: operations of each kind, see `Bundle`.
    """

    bundles: int
    cycles: int
    mxu_cycles: int
    rows: int
    matmuls: int
    weight_pushes: int
    transposes: int
    spills: int

    @property
    def mxu_use(self) -> float:
        """The part of the cycles in which the busiest MXU takes rows."""
        return self.mxu_cycles / self.cycles


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The schedule of one kernel.

    **Arguments:**

    - `first`, `middle`, `last`: the cost of a step by its place in the sum over k; all the same
        where that takes one step.
    - `prologue_bundles`, `epilogue_bundles`: what runs once before and after the loop.
    - `bundles`: all bundles of the kernel.
    - `inner_loops`: how many loops there are inside the one over the grid.
    - `start`, `part`: where the first blocks come in parts, the cost of the very first step with a
        single part, and of each part; else `None`. Where there is no other step, `first`, `middle`
        and `last` are that one.
    """

    first: StepCost
    middle: StepCost
    last: StepCost
    prologue_bundles: int
    epilogue_bundles: int
    bundles: int
    inner_loops: int = 0
    start: StepCost | None = None
    part: StepCost | None = None


def read_schedule(
    program: Program,
    rows_per_cycle: dict[int, float],
    sum_steps: int | None = None,
    prologue_parts: int = 1,
) -> KernelSchedule:
    """Finds the loop over the grid, and the ways through it.

    Loops inside that one copy a block that lies in VMEM already, in place of a DMA. They are left
    out, as the time of a DMA is: that is for the model.

    **Arguments:**

    - `program`: the bundles.
    - `rows_per_cycle`: how many rows an MXU takes in a cycle, by the rows in one register: those of
        narrow dtypes are more, and go faster.
    - `sum_steps`: how many steps of the grid make one block of the output. `None` where that is not
        known, and all steps are taken for one kind, of which each runs all that it may.
    - `prologue_parts`: of the first blocks. With several, a loop over them multiplies.

    **Raises:**

    `UnreadableScheduleError` where another loop inside that one multiplies, or where it is not
    known in which rounds of the loop something is multiplied.
    """
    bundles = program.bundles
    starts = region_starts(bundles)
    loops = []
    for address, bundle in enumerate(bundles):
        if bundle.branch is not None and starts.get(bundle.branch[1], len(bundles)) <= address:
            loops.append((starts[bundle.branch[1]], address))
    multiplying = [loop for loop in loops if any(bundles[at].matmuls for at in range(*loop))]
    # In a grid of one step, the loop over the parts of the first blocks is the only one.
    in_one_step = prologue_parts > 1 and len(multiplying) == 1
    has_loop = bool(loops) and not in_one_step
    if has_loop:
        start, end = max(loops, key=lambda loop: loop[1] - loop[0])
        end = min(end + 1 + program.delay_slots, len(bundles))
    else:  # a grid of one step
        start, end = 0, len(bundles)
    inside = [(first, last) for first, last in loops if start < first and last < end]
    over_parts = [loop for loop in inside if loop in multiplying]
    if len(over_parts) != (prologue_parts > 1):
        raise UnreadableScheduleError(
            f"{len(over_parts)} loops inside the grid's multiply, how often is not said"
        )

    def cost(path: Sequence[int]) -> StepCost:
        return _cost(program, path, rows_per_cycle)

    body = _Body(program, starts, start, end)
    of_start = of_part = None
    if has_loop and sum_steps is not None:
        steps = _steps(body, sum_steps)
        costs = {kind: cost(path) for kind, path in _by_kind(steps, sum_steps).items()}
        start_rows = cost(steps[0]).rows
    else:
        costs = dict.fromkeys(STEPS, cost(body.path({})))
        steps, start_rows = [], costs["first"].rows
    if over_parts:
        of_start = cost(steps[0]) if steps else costs["first"]
        first, last = over_parts[0]
        of_part = cost(range(first, last + 1 + program.delay_slots))
        start_rows += (prologue_parts - 1) * of_part.rows
    rows = {start_rows, *(one.rows for one in costs.values())}
    if len(rows) > 1 and steps:
        raise UnreadableScheduleError(
            f"all steps multiply as much, and {sorted(rows)} rows were read of them"
        )
    return KernelSchedule(
        **costs,
        start=of_start,
        part=of_part,
        prologue_bundles=start,
        epilogue_bundles=len(bundles) - end,
        bundles=len(bundles),
        inner_loops=len(inside) - len(over_parts),
    )


@dataclasses.dataclass(frozen=True)
class _Body:
    """What a loop runs in one round.

    **Arguments:**

    - `program`: which holds it.
    - `starts`: the address of each region.
    - `start`, `end`: the addresses of its first bundle, and behind its last one.
    """

    program: Program
    starts: Mapping[int, int]
    start: int
    end: int

    @property
    def forward_branches(self) -> list[tuple[Predicate, range]]:
        """The predicates of branches that may skip something, and what they skip."""
        found = []
        for address in range(self.start, self.end):
            branch = self.program.bundles[address].branch
            if branch is not None and branch[0] is not None:
                target = self.starts.get(branch[1], self.end)
                found.append((branch[0], range(address + 1 + self.program.delay_slots, target)))
        return [(predicate, skipped) for predicate, skipped in found if skipped]

    @property
    def back_branch(self) -> Predicate | None:
        """The predicate of the branch back to the start."""
        for address in reversed(range(self.start, self.end)):
            branch = self.program.bundles[address].branch
            if branch is not None and self.starts.get(branch[1]) == self.start:
                return branch[0]
        return None

    def multiplies(self, addresses: Sequence[int]) -> bool:
        return any(self.program.bundles[address].matmuls for address in addresses)

    def path(self, values: Mapping[str, Value]) -> tuple[int, ...]:
        """The addresses that a round runs through.

        **Arguments:**

        - `values`: of predicates. What is not known to be skipped is run.
        """
        path: list[int] = []
        address = self.start
        while address < self.end:
            path.append(address)
            branch = self.program.bundles[address].branch
            address += 1
            if branch is None:
                continue
            predicate, region = branch
            target = self.starts.get(region, self.end)
            if target > address and (predicate is None or _holds(predicate, values)):
                path += range(address, min(address + self.program.delay_slots, self.end))
                address = target
        return tuple(path)


def _holds(predicate: Predicate, values: Mapping[str, Value]) -> bool | None:
    value = values.get(predicate.register)
    return None if value is None else bool(value) != predicate.negated


# More than two blocks of the output: so that what comes and goes with the places along m and n,
# such as the transfer of a block, is told from what every step does.
_MORE_ROUNDS = 24


def _steps(body: _Body, sum_steps: int) -> list[tuple[int, ...]]:
    """The paths of the first steps of the grid, in order.

    A step is a round of the loop in which its blocks are multiplied. There are rounds before and
    after: transfers are begun in the round before that of their step, and ended in the one after.
    """
    branches, back = body.forward_branches, body.back_branch
    deciding = [skipped for _, skipped in branches if body.multiplies(skipped)]
    wanted = [predicate for predicate, _ in branches] + ([] if back is None else [back])
    loop = Loop(
        body.program,
        body.start,
        body.end,
        [skipped for _, skipped in branches],
        [one.register for one in wanted],
    )
    paths: list[tuple[int, ...]] = []
    ended = False
    for values in itertools.islice(loop.rounds(), 2 * sum_steps + _MORE_ROUNDS):
        path = body.path(values)
        unknown = [skipped for predicate, skipped in branches if _holds(predicate, values) is None]
        if any(skipped in deciding and skipped.start - 1 in path for skipped in unknown):
            raise UnreadableScheduleError("when a step multiplies depends on what is not known")
        paths.append(path)
        ended = back is not None and _holds(back, values) is False
        if ended:
            break
    works = [body.multiplies(path) for path in paths]
    if not any(works):
        # Without an MXU, as for a product with a vector: a round without a step is a shorter one.
        works = [len(path) > len(paths[0]) for path in paths]
    steps = [path for path, work in zip(paths, works, strict=True) if work]
    first = works.index(True) if steps else 0
    if not all(works[first : first + len(steps)]):
        raise UnreadableScheduleError("there are rounds without a step among those with one")
    if not steps or (ended and len(steps) % sum_steps):
        raise UnreadableScheduleError(
            f"{len(steps)} steps multiply, in place of a multiple of {sum_steps}"
        )
    return steps


def _by_kind(steps: Sequence[tuple[int, ...]], sum_steps: int) -> dict[str, tuple[int, ...]]:
    """For each kind of step the path that most of them take.

    Of a kind that there is not, as in a sum of two steps, it is that of another one. The very first
    step of all counts for none, where there are others: its blocks may come in parts.
    """
    counts: dict[str, collections.Counter[tuple[int, ...]]] = {
        kind: collections.Counter() for kind in STEPS
    }
    for number, path in list(enumerate(steps))[1:] or [(0, steps[0])]:
        place = number % sum_steps
        kind = "first" if place == 0 else "last" if place == sum_steps - 1 else "middle"
        counts[kind][path] += 1
    found = {kind: paths.most_common(1)[0][0] for kind, paths in counts.items() if paths}
    others = ("middle", "first", "last")
    return {kind: next(found[one] for one in (kind, *others) if one in found) for kind in STEPS}


def _cost(program: Program, path: Sequence[int], rows_per_cycle: dict[int, float]) -> StepCost:
    """The cost of a path: bundles issue in order, each when the MXUs that it needs are free."""
    free: dict[int, float] = collections.defaultdict(float)
    busy: dict[int, float] = collections.defaultdict(float)
    now = 0.0
    bundles = [program.bundles[address] for address in path]
    for bundle in bundles:
        for unit, _ in bundle.matmuls:
            now = max(now, free[unit])
        for unit, rows in bundle.matmuls:
            cycles = rows / rows_per_cycle[rows]
            free[unit] = now + cycles
            busy[unit] += cycles
        now += 1
    return StepCost(
        bundles=len(path),
        cycles=round(now),
        mxu_cycles=round(max(busy.values(), default=0.0)),
        rows=sum(rows for bundle in bundles for _, rows in bundle.matmuls),
        matmuls=sum(len(bundle.matmuls) for bundle in bundles),
        weight_pushes=sum(bundle.weight_pushes for bundle in bundles),
        transposes=sum(bundle.transposes for bundle in bundles),
        spills=sum(bundle.spills for bundle in bundles),
    )
