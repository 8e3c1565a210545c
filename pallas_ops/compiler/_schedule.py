"""What a kernel's schedule says: the loop over the grid, and what one step of it costs."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from ._bundles import Program, region_starts, UnreadableScheduleError


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
    last_steps: frozenset[int],
    prologue_parts: int = 1,
) -> KernelSchedule:
    """Finds the loop over the grid, and the ways through it.

    Loops inside that one copy a block that lies in VMEM already, in place of a DMA. They are left
    out, as the time of a DMA is: that is for the model.

    **Arguments:**

    - `program`: the bundles.
    - `last_steps`: the last place along each axis of the grid that is summed and has several.
    - `rows_per_cycle`: how many rows an MXU takes in a cycle, by the rows in one register: those of
        narrow dtypes are more, and go faster.
    - `prologue_parts`: of the first blocks. With several, a loop over them multiplies.

    **Raises:**

    `UnreadableScheduleError` where another loop inside that one multiplies.
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
    if loops and not in_one_step:
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
    is_start: dict[tuple[str, str], bool] = {}
    if over_parts and not in_one_step:
        is_start = _skips(program, starts, *over_parts[0])

    def cost(place: _Place) -> StepCost:
        return _cost(program, _path(program, starts, start, end, place), rows_per_cycle)

    later = {pair: not equal for pair, equal in is_start.items()}
    costs = {kind: cost(_Place(kind, last_steps, later)) for kind in STEPS}
    of_start = of_part = None
    if over_parts:
        of_start = cost(_Place("first", last_steps, is_start))
        first, last = over_parts[0]
        of_part = _cost(program, list(range(first, last + 1 + program.delay_slots)), rows_per_cycle)
        rows = of_start.rows + (prologue_parts - 1) * of_part.rows
        if not in_one_step and rows != costs["first"].rows:
            raise UnreadableScheduleError(
                f"{rows} rows in the first step, {costs['first'].rows} in others"
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
class _Place:
    """Where in the sum a step is: its kind, and what the last place is compared with.

    `known` holds comparisons whose outcome is known: of which two operands, and whether they are
    equal.
    """

    kind: str
    last_steps: frozenset[int]
    known: Mapping[tuple[str, str], bool] = dataclasses.field(default_factory=dict)

    def equals(self, compared: str, constant: int) -> bool | None:
        """Whether the step's place in the sum is this; `None` where something else is compared."""
        known = self.known.get((compared, str(constant)))
        if known is not None:
            return known
        if not self.last_steps or constant not in (0, *self.last_steps):
            return None
        return self.kind == ("first" if constant == 0 else "last")


def _skips(
    program: Program, starts: dict[int, int], first: int, last: int
) -> dict[tuple[str, str], bool]:
    """What is compared where a loop is skipped, and whether it is equal where it is run."""
    for address in reversed(range(first)):
        branch = program.bundles[address].branch
        if branch is None or starts.get(branch[1], 0) <= last:
            continue
        predicate = branch[0]
        definition = None if predicate is None else program.definitions.get(predicate.register)
        if predicate is None or definition is None:
            break
        operation, left, right = definition
        if operation.split(".")[:2] in (["scmp", "eq"], ["scmp", "ne"]):
            # The branch skips the loop where the comparison holds, unless it is negated.
            return {(left, right): (operation.split(".")[1] == "eq") == predicate.negated}
        break
    raise UnreadableScheduleError("when the loop over the parts of the first blocks is run")


def _path(
    program: Program, starts: dict[int, int], start: int, end: int, place: _Place
) -> list[int]:
    """The addresses that one step runs through.

    What is not known to be skipped is run: the guard around the body of the loop, which is there
    for the step before the first and the one after the last, is of that kind.
    """
    path: list[int] = []
    address = start
    while address < end:
        path.append(address)
        branch = program.bundles[address].branch
        address += 1
        if branch is None:
            continue
        predicate, region = branch
        target = starts.get(region, end)
        taken = True
        if predicate is not None:
            value = _evaluate(program, predicate.register, place)
            taken = value is not None and value != predicate.negated
        if taken and target > address:
            path += range(address, min(address + program.delay_slots, end))
            address = target
    return path


def _evaluate(program: Program, register: str, place: _Place, depth: int = 0) -> bool | None:
    """The value of a predicate in a step at this place; `None` where that does not decide it.

    A kernel compares its place in the sum with the first one, which is 0, and with the last one.
    """
    definition = program.definitions.get(register)
    if definition is None or depth > 16:
        return None
    operation, left, right = definition

    def operand(name: str) -> bool | None:
        negated, name = name.startswith("!"), name.lstrip("!%")
        value = _evaluate(program, name, place, depth + 1)
        return None if value is None else value != negated

    if operation.startswith("scmp."):
        relation = operation.split(".")[1]
        if relation not in ("eq", "ne") or not right.isdecimal():
            return None
        equal = place.equals(left, int(right))
        return None if equal is None else equal == (relation == "eq")
    if operation in ("pneg", "pmov"):
        value = operand(left)
        return None if value is None else value != (operation == "pneg")
    values = (operand(left), operand(right))
    if operation == "por":
        return True if True in values else None if None in values else False
    both = False if False in values else None if None in values else True
    if operation == "pand" or both is None:
        return both
    return not both  # pnand


def _cost(program: Program, path: list[int], rows_per_cycle: dict[int, float]) -> StepCost:
    """The cost of a path: bundles issue in order, each when the MXUs that it needs are free."""
    free: dict[int, float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
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
