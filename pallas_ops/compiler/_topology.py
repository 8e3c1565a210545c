"""The TPU compiler in libtpu, on a machine that has no TPU."""

import glob
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from .._hardware import known_generation


# libtpu reads all of these when it is loaded, once for the process.
_LOG_LEVELS = {"TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3"}

# Without a TPU, libtpu looks for a cloud machine's metadata and complains on standard error that
# there is none; these are the answers. On a real TPU machine they would be wrong ones.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


class CompilerUnavailableError(RuntimeError):
    """There is no libtpu here that can compile."""


def why_no_compiler() -> str | None:
    """Why there is no TPU compiler to ask here, as far as that shows without loading it."""
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        return (
            "The TPU compiler is in libtpu, which is not installed here. It comes with "
            "`pip install jax[tpu]` on Linux on x86-64."
        )
    return None


def _may_have_tpu() -> bool:
    """Whether this machine shows any sign of a TPU, asked without loading libtpu.

    A wrong "yes" costs a few lines on standard error, a wrong "no" could misconfigure a TPU: hence
    no list of known chips.
    """
    if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
        return True
    for path in map(pathlib.Path, glob.glob("/sys/bus/pci/devices/*")):
        try:
            vendor = (path / "vendor").read_text().strip()
            pci_class = (path / "class").read_text().strip()
        except OSError:
            continue
        # Google's virtual disks (class 01) and network cards (class 02) have its vendor id too.
        if vendor == "0x1ae0" and not pci_class.startswith(("0x01", "0x02")):
            return True
    return False


def quiet_libtpu() -> None:
    """Keeps libtpu silent in this process, if it is not loaded yet. What is set already stays.

    Where the machine may have a TPU, nothing is set but how much is logged.
    """
    for name, value in (_LOG_LEVELS if _may_have_tpu() else _LOG_LEVELS | _WITHOUT_TPU).items():
        os.environ.setdefault(name, value)


def worker_environment(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a process that compiles, and never runs anything on a TPU.

    libtpu reads its flags when it is loaded, and an unknown one ends the process: hence a process
    of its own. What the user set for libtpu stays in force; it may change what is compiled.

    **Arguments:**

    - `folder`: where libtpu writes its schedules.
    """
    own_flags = (
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=^final_bundles",
    )
    flags = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), *own_flags]).strip()
    return {
        **os.environ,
        **_LOG_LEVELS,
        **_WITHOUT_TPU,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # A program from a cache leaves no schedule behind.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "LIBTPU_INIT_ARGS": flags,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


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
