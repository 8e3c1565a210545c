"""The TPU compiler in libtpu, on a machine that has no TPU."""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from .._hardware import known_generation


# libtpu reads these when it is loaded, once for the process. Without them it looks for a cloud
# machine's metadata and complains on standard error that there is none.
_QUIET_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


class CompilerUnavailableError(RuntimeError):
    """There is no libtpu here that can compile."""


def quiet_libtpu() -> None:
    """Keeps libtpu silent in this process, if it is not loaded yet. What is set already stays."""
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_only_device(device: str) -> jax.Device:
    """A device that can be compiled for, and not run on.

    **Arguments:**

    - `device`: a generation such as `"v5e"`, or a device kind such as `"TPU v5 lite"`.

    **Raises:**

    `ValueError` for an unknown one; [`pallas_ops.compiler.CompilerUnavailableError`][] where
    libtpu is missing (it comes with `jax[tpu]`, for Linux on x86-64) or does not start.
    """
    generation = known_generation(device)
    quiet_libtpu()
    try:
        topology = topologies.get_topology_desc(topology_name=generation.topology, platform="tpu")
    except Exception as error:
        raise CompilerUnavailableError(
            f"The TPU compiler is not available here ({type(error).__name__}: {error}). It comes "
            f"with `pip install jax[tpu]` on Linux on x86-64."
        ) from error
    return topology.devices[0]


def compile_for_tpu(
    function: Callable, *args: Any, device: str = "v5e", **jit_options: Any
) -> jax.stages.Compiled:
    """Compiles a function for a TPU with the compiler in libtpu; no TPU is needed.

    **Arguments:**

    - `function`: a function of arrays.
    - `*args`: its arguments: PyTrees of arrays or of `jax.ShapeDtypeStruct`; only shapes and dtypes
        are read.
    - `device`: the TPU, as in `compile_only_device`.
    - `**jit_options`: passed to `jax.jit`.

    **Returns:**

    The compiled program: its `memory_analysis()` and `as_text()` can be read; it cannot be run.

    **Raises:**

    What the compiler raises on a TPU, for blocks that do not fit VMEM or that Mosaic refuses.
    """
    sharding = SingleDeviceSharding(compile_only_device(device))

    def abstract(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.jit(function, **jit_options).lower(*jax.tree.map(abstract, args)).compile()
