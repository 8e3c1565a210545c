"""Folding leading axes into the matrices, wherever that moves no data.

`jax.vmap(layer)` over a batch of rows is one product with more rows, and its weight gradient one
product with a longer contracted axis. The four roles of a leading axis are those of
[`pallas_ops.MatmulProblem`][].
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class _Axis:
    lhs: int
    rhs: int
    summed: bool
    columns: tuple[int, ...]

    @property
    def role(self) -> tuple[bool, bool, bool]:
        return (self.lhs != 1, self.rhs != 1, self.summed)

    @property
    def in_columns(self) -> tuple[bool, ...]:
        return tuple(size != 1 for size in self.columns)


_LHS_ONLY = (True, False, False)
_RHS_ONLY = (False, True, False)
_SUMMED = (True, True, True)


@dataclasses.dataclass(frozen=True)
class Folded:
    """The operands' shapes after folding, and which of the leading axes left are summed."""

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    sum_leading: tuple[bool, ...]
    column_shapes: tuple[tuple[int, ...], ...] = ()


def fold(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    sum_leading: Sequence[bool],
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    column_shapes: Sequence[Sequence[int]] = (),
) -> Folded:
    """Shapes with as few leading axes as a reshape alone can reach, of both operands and result.

    **Arguments:**

    - `lhs_shape`, `rhs_shape`: of one rank; each leading axis of one size in both, or 1 in one.
    - `sum_leading`: whether each leading axis is summed over.
    - `transpose_lhs`, `transpose_rhs`: the layout of the matrices.
    - `column_shapes`: of arrays `(*leading, 1, n)` with an entry for each column of the result. A
        leading axis that one of them has, an operand has too.
    """
    axes: list[_Axis] = []
    for position, (lhs, rhs, summed) in enumerate(
        zip(lhs_shape[:-2], rhs_shape[:-2], sum_leading, strict=True)
    ):
        columns = tuple(shape[position] for shape in column_shapes)
        axis = _Axis(lhs, rhs, summed, columns)
        if lhs == rhs == 1:
            continue
        before = axes[-1] if axes else None
        if before is not None and (before.role, before.in_columns) == (axis.role, axis.in_columns):
            columns = tuple(a * b for a, b in zip(before.columns, columns, strict=True))
            axes[-1] = _Axis(before.lhs * lhs, before.rhs * rhs, summed, columns)
        else:
            axes.append(axis)
    lhs_rows, lhs_columns = lhs_shape[-2:]
    rhs_rows, rhs_columns = rhs_shape[-2:]
    out_columns = [shape[-1] for shape in column_shapes]
    while axes:
        last = axes[-1]
        if last.role == _LHS_ONLY and not transpose_lhs and not any(last.in_columns):
            lhs_rows *= last.lhs  # more rows of m
        elif last.role == _SUMMED and transpose_lhs and not transpose_rhs:
            lhs_rows *= last.lhs  # a longer k
            rhs_rows *= last.rhs
        elif (
            last.role == _RHS_ONLY
            and transpose_rhs
            and not transpose_lhs
            and lhs_rows == 1
            and all(last.in_columns)
        ):
            rhs_rows *= last.rhs  # more columns of n, and with a single row no interleaving
            out_columns = [a * b for a, b in zip(out_columns, last.columns, strict=True)]
        else:
            break
        axes.pop()
    return Folded(
        lhs_shape=(*(axis.lhs for axis in axes), lhs_rows, lhs_columns),
        rhs_shape=(*(axis.rhs for axis in axes), rhs_rows, rhs_columns),
        sum_leading=tuple(axis.summed for axis in axes),
        column_shapes=tuple(
            (*(axis.columns[number] for axis in axes), 1, n) for number, n in enumerate(out_columns)
        ),
    )
