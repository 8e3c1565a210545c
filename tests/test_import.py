"""Importing the package is free of side effects, in a new process and without any settings."""

import os
import subprocess
import sys


def _run(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_prints_nothing_and_starts_no_backend():
    # JAX refuses to change the number of CPU devices once a backend runs.
    done = _run(
        "import pallas_ops, jax; jax.config.update('jax_num_cpu_devices', 3); "
        "jax.config.update('jax_platforms', 'cpu'); assert len(jax.devices()) == 3"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_number_of_cpu_devices_tells_whether_a_backend_runs():
    done = _run(
        "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices(); "
        "jax.config.update('jax_num_cpu_devices', 3)"
    )
    assert done.returncode != 0


def test_import_loads_no_plugin_and_nothing_for_the_command_line():
    done = _run(
        "import sys, pallas_ops; "
        "from importlib.metadata import EntryPoint; "
        "heavy = {'beartype', 'click', 'rich', 'optax', 'sklearn', 'matplotlib'}; "
        "heavy &= set(sys.modules); "
        "assert not heavy, heavy"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_module_uses_what_is_deprecated():
    """With jax 0.12.1, `jax.sharding.SingleDeviceSharding` was."""
    done = _run(
        "import importlib, os, pkgutil; os.environ['JAX_PLATFORMS'] = 'cpu'; import pallas_ops; "
        "found = pkgutil.walk_packages(pallas_ops.__path__, 'pallas_ops.'); "
        "[importlib.import_module(one.name) for one in found if '__main__' not in one.name]"
    )
    assert (done.returncode, done.stderr) == (0, "")
