"""What tests of tiles share: problems in one line, a timer that counts, a new process."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp

import pallas_ops as po


ROOT = pathlib.Path(po.__file__).parents[1]


def matmul_problem(m, k, n, dtype="float32", rhs=None, out=None, layout="NN", **fields):
    transpose_lhs, transpose_rhs = layout[0] == "T", layout[1] == "T"
    return po.MatmulProblem(
        lhs_shape=(k, m) if transpose_lhs else (m, k),
        rhs_shape=(n, k) if transpose_rhs else (k, n),
        lhs_dtype=jnp.dtype(dtype),
        rhs_dtype=jnp.dtype(rhs or dtype),
        out_dtype=jnp.dtype(out or dtype),
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        **fields,
    )


def tile_problem(
    m, k, n, *args, device=None, implementation="interpret", can_be_timed=True, **fields
):
    """A problem of this machine, where the interpreter can be timed."""
    return po.tiles.TileProblem(
        matmul_problem(m, k, n, *args, **fields),
        device=device,
        implementation=implementation,
        can_be_timed=can_be_timed,
    )


def small_blocks_first(problem, tile):
    """The smallest block of k is the fastest: never the tile of `StaticResolver`."""
    return tile.block_k * 1e-6


class RecordingTimer:
    """A timer without a clock, that remembers what it was asked; equal to itself alone."""

    def __init__(self, seconds=small_blocks_first):
        self.seconds = seconds
        self.calls = []

    def __call__(self, problem, tile, run, hopeless_seconds):
        self.calls.append((problem, tile))
        return self.seconds(problem, tile)

    @property
    def sweeps(self):
        """The problems that were swept, one for each sweep: no tile comes twice in one."""
        swept, seen = [], set()
        for problem, tile in self.calls:
            if not swept or problem != swept[-1] or tile in seen:
                swept.append(problem)
                seen = set()
            seen.add(tile)
        return swept


def run_python(code, *args, **environment):
    """Runs code in a new process that sees this package and nothing on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
