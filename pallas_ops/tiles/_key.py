"""What a stored tile is an answer to."""

import functools
import importlib.metadata
from typing import Any

import jax

from ..kernels import KERNEL_VERSION
from ._problem import TileProblem


def m_class(m: int) -> int:
    """The class of sizes that one stored tile serves: the next power of two from 8 up.

    Batch sizes vary from run to run, the features of a model do not: k and n are never rounded.
    """
    return max(8, 1 << (m - 1).bit_length())


@functools.cache  # it is looked for on disk
def _libtpu_version() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, Any]:
    """The versions that could change which tile is best: of JAX, libtpu, and our kernel."""
    return {"jax": jax.__version__, "libtpu": _libtpu_version(), "kernel": KERNEL_VERSION}


def problem_key(problem: TileProblem) -> dict[str, Any]:
    """All of a problem that a tile may depend on, as JSON has it; m as its class."""
    matmul = problem.matmul
    leading = zip(matmul.lhs_shape[:-2], matmul.rhs_shape[:-2], matmul.sum_leading, strict=True)
    return {
        "operator": problem.operator,
        "implementation": problem.implementation,
        "device": problem.device,
        "batch": [[lhs, rhs, summed] for lhs, rhs, summed in leading],
        "m": m_class(problem.m),
        "k": problem.k,
        "n": problem.n,
        "layout": problem.layout,
        "lhs_dtype": problem.lhs_dtype.name,
        "rhs_dtype": problem.rhs_dtype.name,
        "out_dtype": problem.out_dtype.name,
        "precision": problem.precision,
        "epilogue": problem.epilogue,
    }
