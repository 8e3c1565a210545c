"""Reading the compiler's final schedule: bundles, and what is in each.

The text is what libtpu writes with `--xla_jf_dump_llo_text` for its pass `final_bundles`. A bundle
is what a TensorCore issues in one cycle. Nothing about this text is promised: whatever is not as
expected is an `UnreadableScheduleError`, and never a guess.
"""

import dataclasses
import re


READABLE_LIBTPU = ("0.0.42.1", "0.0.50.1", "0.0.52")
"""The versions of libtpu whose schedules this reader was made for, and is tested with."""


class UnreadableScheduleError(ValueError):
    """A schedule of libtpu's that this reader does not understand."""


@dataclasses.dataclass(slots=True)
class Bundle:
    """One bundle of the schedule.

    **Arguments:**

    - `matmuls`: the MXU of each matrix multiplication that it issues, and the rows that it
        multiplies: those of one vector register.
    - `weight_pushes`: how many rows of registers it pushes into an MXU as weights.
    - `transposes`: how many registers it gives to the transpose unit (XLU), or pushes transposed.
    - `spills`: how many vector registers it stores to, or loads from, VMEM for want of registers.
    - `branch`: the predicate and the region that it jumps to, if it does. The predicate is `None`
        where it always jumps.
    - `starts`, `ends`: the regions that begin, or end, here.
    """

    matmuls: tuple[tuple[int, int], ...] = ()
    weight_pushes: int = 0
    transposes: int = 0
    spills: int = 0
    branch: tuple["Predicate | None", int] | None = None
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Predicate:
    """A predicate register with its `%`, and whether the branch wants it false."""

    register: str
    negated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Definition:
    """What writes a scalar or a predicate. Each name is written in one place, as in SSA form.

    **Arguments:**

    - `address`: of the bundle.
    - `operation`: such as `"sadd"` or `"scmp.eq.s32"`, without what says nothing about the value.
    - `operands`: names of scalars and predicates with their `%`, a predicate perhaps after a `!`;
        and numbers, or whatever else is written there. `"select"` has a condition, what the value
        is where that holds, and what it is where not. `"load"` has the slot of a spilled scalar.
    """

    address: int
    operation: str
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """All bundles of one kernel, in order.

    **Arguments:**

    - `bundles`: the bundles by address.
    - `definitions`: what writes each scalar and each predicate register, as far as it is integer
        arithmetic or logic.
    - `spills`: where scalars are stored in each slot for want of registers: the addresses, in
        order, and their names.
    - `delay_slots`: how many bundles after a branch run before it jumps.
    """

    bundles: list[Bundle]
    definitions: dict[str, Definition]
    spills: dict[str, list[tuple[int, str]]]
    delay_slots: int


_ADDRESS = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)*:")
_MATMUL = re.compile(r"\bvmatmul([.\w\[\]]*?)\.mxu(\d)")
_DTYPE = re.compile(r"\.(f32|bf16|s8|u8|f8|s4|u4)")

# A register holds 8 rows of 32 bits, and of narrower numbers so many more.
_ROWS = {"f32": 8, "bf16": 16, "s8": 32, "u8": 32, "f8": 32, "s4": 64, "u4": 64}

# v5e and v5p multiply a transposed operand with `vmatmul.lmr.bf16.gmra.16`, half a register each:
# only so do the rows of a kernel add up to those of its product (tests/compiler/test_rows.py).
_HALF = ".lmr."

_WEIGHT_PUSH = re.compile(r"\bvmatpush\w*\.")
_TRANSPOSE = re.compile(r"\bvxpose\.|\bvmatpush\w*[.\w]*\.xpose|\bvtranspose\.")
_SPILL = re.compile(r"vmem:\[#allocation\d+_spill")
_BRANCH = re.compile(r"\bsbr\.\w+ (?:\((!?)(%\w+)\) )?target = \$region(\d+)")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_ENDS = re.compile(r"(?<!Start/)End region (\d+)")

# Scalars (%s..) and predicates (%p..). What is not listed, such as addresses of memory and what is
# loaded from it, is not known to this reader.
_DEFINITION = re.compile(
    r"(%[sp]\d\w*) = "
    r"(sphi|smov|sadd|ssub|smul|sand|sor|sshll|sshrl|sshra|smin|smax|scalar_select"
    r"|scmp\.\w+\.[su]32|pmov|pneg|pand|pnand|por)"
    r"(\.[su]32)?(?:\.totalorder)? ([^;}]*)"
)
_GUARD = re.compile(r"\((!?%\w+)(?:, ([^)]*))?\), ")
_COMMENT = re.compile(r"/\*.*?\*/")
_SPILLED = re.compile(r"sst \[smem:\[#allocation(\d+)_spill\]\] (?:\(!?%\w+\), )?(%s\w+)")
_LOADED = re.compile(r"(%s\w+) = sld \[smem:\[#allocation(\d+)_spill\]\]")


def read_program(text: str) -> Program:
    """Reads the text of a schedule.

    **Raises:**

    `UnreadableScheduleError` where it is cut off, or is none.
    """
    chunks: list[list[str]] = []
    for line in text.splitlines():
        address = _ADDRESS.match(line)
        if address:
            if int(address.group(1), 16) != len(chunks):
                raise UnreadableScheduleError(
                    f"bundle {address.group(1)} follows {len(chunks)} bundles"
                )
            chunks.append([line])
        elif chunks:
            chunks[-1].append(line)
    if not chunks or "exit bundle" not in "".join(chunks[-1]):
        raise UnreadableScheduleError(
            f"its {len(chunks)} bundles end without an exit bundle: it is cut off, or no schedule"
        )
    bundles: list[Bundle] = []
    definitions: dict[str, Definition] = {}
    spills: dict[str, list[tuple[int, str]]] = {}
    for at, chunk in enumerate(chunks):
        content = chunk[0] if len(chunk) == 1 else "\n".join(chunk)
        bundles.append(_read_bundle(content))
        for name, operation, dtype, rest in _DEFINITION.findall(_COMMENT.sub("", content)):
            definitions[name] = _definition(at, operation, dtype, rest)
        if "_spill" in content:
            for slot, name in _SPILLED.findall(content):
                spills.setdefault(slot, []).append((at, name))
            for name, slot in _LOADED.findall(content):
                definitions[name] = Definition(at, "load", (slot,))
    return Program(bundles, definitions, spills, _delay_slots(bundles))


def _definition(address: int, operation: str, dtype: str, rest: str) -> Definition:
    guard = _GUARD.match(rest)
    # A guard alone says when the operation is run, and its value is not used otherwise.
    operands = [word.strip() for word in rest[guard.end() if guard else 0 :].split(",")]
    if operation == "scalar_select":
        return Definition(address, "select", tuple(operands))
    if operation == "smov" and guard and guard.group(2) is not None:
        return Definition(address, "select", (guard.group(1), operands[0], guard.group(2)))
    return Definition(address, operation + dtype, tuple(operands))


def _read_bundle(content: str) -> Bundle:
    bundle = Bundle()
    if "vmat" in content:
        bundle.matmuls = tuple(
            (int(unit), _rows(operation)) for operation, unit in _MATMUL.findall(content)
        )
        bundle.weight_pushes = len(_WEIGHT_PUSH.findall(content))
    if "xpose" in content or "vtranspose" in content:
        bundle.transposes = len(_TRANSPOSE.findall(content))
    if "_spill" in content:
        bundle.spills = len(_SPILL.findall(content))
    if "sbr" in content:
        branches = _BRANCH.findall(content)
        if len(branches) > 1:
            raise UnreadableScheduleError(f"two branches in one bundle: {content[:200]}")
        for negation, register, region in branches:
            predicate = Predicate(register, bool(negation)) if register else None
            bundle.branch = (predicate, int(region))
    if "region" in content:
        bundle.starts = tuple(int(region) for region in _STARTS.findall(content))
        bundle.ends = tuple(int(region) for region in _ENDS.findall(content))
    return bundle


def _rows(operation: str) -> int:
    """The rows of one register of operands, by the dtype in an operation's name."""
    found = _DTYPE.search(operation)
    if found is None:
        raise UnreadableScheduleError(
            f"a matrix multiplication of unknown dtype: vmatmul{operation}"
        )
    rows = _ROWS[found.group(1)]
    return rows // 2 if _HALF in operation else rows


def _delay_slots(bundles: list[Bundle]) -> int:
    """How many bundles run after a branch: the region that it leaves ends among them or before.

    1 on a v4, 4 on v5e, v5p and v6e, 6 on a tpu7x (libtpu 0.0.42 and 0.0.50).
    """
    starts = region_starts(bundles)
    distances = []
    for address, bundle in enumerate(bundles):
        if bundle.branch is None or starts.get(bundle.branch[1], 0) <= address:
            continue
        following = range(address + 1, min(address + 16, len(bundles)))
        distances += [next((later - address for later in following if bundles[later].ends), 0)]
    return max(distances, default=0)


def region_starts(bundles: list[Bundle]) -> dict[int, int]:
    """The address of the first bundle of each region."""
    starts: dict[int, int] = {}
    for address, bundle in enumerate(bundles):
        for region in bundle.starts:
            starts.setdefault(region, address)
    return starts
