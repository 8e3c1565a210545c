"""The TPU compiler in libtpu, on a machine that has no TPU."""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import make_single_device_sharding

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


def libtpu_version() -> str | None:
    """The version of libtpu that is installed; `None` where there is none, or it has no number."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def wanted_libtpu() -> str | None:
    """The version of libtpu that this jax is published for, such as `"0.0.50.*"`, as it says."""
    try:
        requirements = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (re.match(r"libtpu *== *([\d.]+(?:\.\*)?) *;", one) for one in requirements)
    return next((one.group(1) for one in found if one), None)


def libtpu_mismatch() -> str | None:
    """What is installed beside what this jax is published for; `None` where they fit.

    It is no error by itself: jax is often published days before its libtpu, and works with the one
    before, or with most of it.
    """
    installed, wanted = libtpu_version(), wanted_libtpu()
    if installed is None or wanted is None:
        return None
    if f"{installed}.".startswith(f"{wanted.removesuffix('.*')}."):
        return None
    return (
        f"jax {jax.__version__} is published for libtpu {wanted}, and {installed} is installed: "
        f"`pip install 'libtpu=={wanted}'` or another jax may help"
    )


def why_no_compiler() -> str | None:
    """Why there is no TPU compiler to ask here, as far as that shows without loading it."""
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        wanted = wanted_libtpu()
        version = "" if wanted is None else f" This jax {jax.__version__} wants libtpu {wanted}."
        return (
            f"The TPU compiler is in libtpu, which is not installed here. It comes with "
            f"`pip install 'jax[tpu]'` on Linux on x86-64.{version}"
        )
    return None


def why_not_understood(error: BaseException) -> str | None:
    """Why this libtpu takes no kernel of this jax, where that is the error."""
    text = str(error)
    if "deserialize the Mosaic module" not in text or "version" not in text:
        return None
    mismatch = libtpu_mismatch() or f"jax {jax.__version__}, libtpu {libtpu_version()}"
    return f"This libtpu does not read the kernels of this jax: {mismatch}."


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
        mismatch = libtpu_mismatch()
        raise CompilerUnavailableError(
            why_no_compiler()
            or f"The TPU compiler does not start here ({type(error).__name__}: {error})."
            + (f" Note that {mismatch}." if mismatch else "")
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

    What the compiler raises on a TPU, for blocks that do not fit VMEM or that Mosaic refuses;
    [`pallas_ops.compiler.CompilerUnavailableError`][] where libtpu is missing, or does not read the
    kernels of this jax.
    """
    sharding = make_single_device_sharding(compile_only_device(device))

    def abstract(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    lowered = jax.jit(function, **jit_options).lower(*jax.tree.map(abstract, args))
    try:
        return lowered.compile()
    except Exception as error:
        reason = why_not_understood(error)
        if reason is None:
            raise
        raise CompilerUnavailableError(reason) from error
