"""Folding leading axes into the matrices, wherever that moves no data.

`jax.vmap(layer)` over a batch of rows is one product with more rows, and its weight gradient one
product with a longer contracted axis. The four roles of a leading axis are those of
[`pallas_ops.MatmulProblem`][].
"""

import dataclasses
import functools

from ..kernels import MatmulProblem


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


@functools.lru_cache(maxsize=1024)
def fold(problem: MatmulProblem) -> MatmulProblem:
    """The same product with as few leading axes as reshapes of operands and results can reach.

    A leading axis that an array of the epilogue has, an operand has too.
    """
    lhs_shape, rhs_shape, *column_shapes = problem.operand_shapes
    transpose_lhs, transpose_rhs = problem.transpose_lhs, problem.transpose_rhs
    axes: list[_Axis] = []
    for position, (lhs, rhs, summed) in enumerate(
        zip(lhs_shape[:-2], rhs_shape[:-2], problem.sum_leading, strict=True)
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
    shapes = [
        (*(axis.lhs for axis in axes), lhs_rows, lhs_columns),
        (*(axis.rhs for axis in axes), rhs_rows, rhs_columns),
    ]
    shapes += [
        (*(axis.columns[number] for axis in axes), 1, n) for number, n in enumerate(out_columns)
    ]
    return problem.with_shapes(shapes, tuple(axis.summed for axis in axes))
