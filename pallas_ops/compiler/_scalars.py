"""What the scalar unit computes in each round of a kernel's loop over its grid.

A kernel's branches compare scalars with constants: its place in the sum over k, but other places
and flags as well, and nothing in the text says which is which. So they are computed, round after
round, from what they are before the loop.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ._bundles import Definition, Program


Value = int | bool | None
"""Of a scalar or a predicate; `None` where it depends on what is not known."""

_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sshll": operator.lshift,
    "sshrl": operator.rshift,
    "sshra": operator.rshift,
    "smin": min,
    "smax": max,
}


def _signed(value: int) -> int:
    """32 bits as a signed number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _unsigned(value: int) -> int:
    return value % (1 << 32)


class Loop:
    """The scalars and predicates of one loop.

    **Arguments:**

    - `program`: which holds the loop.
    - `start`, `end`: the addresses of its first bundle, and behind its last one.
    - `skippable`: the addresses that each of its branches may skip.
    - `wanted`: the names whose values are asked for.
    """

    def __init__(
        self,
        program: Program,
        start: int,
        end: int,
        skippable: Sequence[range],
        wanted: Iterable[str],
    ):
        self.program, self.start, self.end, self.skippable = program, start, end, skippable
        self._order: list[str] = []
        """All names that are needed, each after those of the same round that it is made of."""
        self._carried: dict[str, tuple[str, str]] = {}
        """Of each name that a round takes over: what it is in the first one, and in others what
        name of the round before it is."""
        self._loaded: dict[str, str] = {}
        """Of each spilled scalar that is loaded: what name of the same round it is."""
        seen: set[str] = set()
        roots = list(wanted)
        while roots:
            # By a list, and not by recursion: chains of names are long.
            stack = [(roots.pop(), False)]
            while stack:
                name, is_done = stack.pop()
                if is_done:
                    self._order.append(name)
                elif name not in seen:
                    seen.add(name)
                    stack.append((name, True))
                    stack += [(other, False) for other in self._needs(name)]
                    if name in self._carried:
                        roots.append(self._carried[name][1])

    def _is_inside(self, name: str) -> bool:
        definition = self.program.definitions.get(name)
        return definition is not None and self.start <= definition.address < self.end

    def _needs(self, name: str) -> list[str]:
        """The names of the same round that this one is made of."""
        definition = self.program.definitions.get(name)
        if definition is None:
            return []
        if definition.operation == "sphi":
            before = [one for one in definition.operands if not self._is_inside(one)]
            later = [one for one in definition.operands if self._is_inside(one)]
            # That of another loop is known to nobody here.
            if definition.address == self.start and len(before) == len(later) == 1:
                self._carried[name] = (before[0], later[0])
            return []
        if definition.operation == "load":
            return self._needs_of_load(name, definition)
        words = [word.lstrip("!") for word in definition.operands]
        return [word for word in words if word.startswith("%")]

    def _needs_of_load(self, name: str, load: Definition) -> list[str]:
        """What was stored last in its slot: in this round, the one before, or before the loop."""
        stores = self.program.spills.get(load.operands[0], [])
        earlier = [store for store in stores if store[0] < load.address]
        later = [store for store in stores if load.address <= store[0] < self.end]
        is_carried = (
            self.start <= load.address and later and (not earlier or earlier[-1][0] < self.start)
        )
        for address, _ in [*earlier[-1:], *later[-1:]] if is_carried else earlier[-1:]:
            # It may have been skipped, and then something else is there.
            if any(address in one and load.address not in one for one in self.skippable):
                return []
        if is_carried:
            self._carried[name] = (earlier[-1][1] if earlier else "", later[-1][1])
            return []
        if not earlier:
            return []
        self._loaded[name] = earlier[-1][1]
        return [earlier[-1][1]]

    def rounds(self) -> Iterator[Mapping[str, Value]]:
        """The values in the first round of the loop, in the second one, and so on without end."""
        before: dict[str, Value] | None = None
        while True:
            values: dict[str, Value] = {}
            for name, (first, later) in self._carried.items():
                values[name] = self._outside(first) if before is None else before.get(later)
            for name in self._order:
                if name not in values:
                    values[name] = self._value(name, values)
            yield values
            before = values

    def _outside(self, word: str, depth: int = 0) -> Value:
        """The value of what is written before the loop."""
        if not word.startswith("%"):
            return _number(word)
        definition = self.program.definitions.get(word)
        if definition is None or depth > 16 or not definition.operation.startswith("smov"):
            return None
        return self._outside(definition.operands[0], depth + 1)

    def _value(self, name: str, values: Mapping[str, Value]) -> Value:
        definition = self.program.definitions.get(name)
        if definition is None or definition.operation == "sphi":
            return None
        if definition.operation == "load":
            return values.get(self._loaded.get(name, ""))

        def operand(word: str) -> Value:
            if word.startswith("!"):
                value = values.get(word[1:])
                return None if value is None else not value
            return values.get(word) if word.startswith("%") else _number(word)

        return _apply(definition.operation, [operand(word) for word in definition.operands])


def _number(word: str) -> int | None:
    return _signed(int(word)) if word.isdecimal() else None


def _apply(operation: str, operands: list[Value]) -> Value:
    """The result of one operation. `False and x` is known, whatever `x` is."""
    if operation == "select":
        condition, yes, no = operands
        return (yes if yes == no else None) if condition is None else yes if condition else no
    if operation in ("pand", "pnand", "por"):
        decisive = operation == "por"  # the value of one that decides
        if decisive in operands:
            result = decisive
        elif None in operands:
            return None
        else:
            result = not decisive
        return not result if operation == "pnand" else result
    if None in operands:
        return None
    if operation.startswith("smov") or operation == "pmov":
        return operands[0]
    if operation == "pneg":
        return not operands[0]
    name, _, dtype = operation.rpartition(".")
    left, right = (int(value) for value in operands if value is not None)
    if name in ("sshll", "sshrl", "sshra") and not 0 <= right < 32:
        return None
    if dtype == "u32":
        left, right = _unsigned(left), _unsigned(right)
    if name.startswith("scmp."):
        return _COMPARISONS[name.removeprefix("scmp.")](left, right)
    return _signed(_ARITHMETIC[name](left, right))
