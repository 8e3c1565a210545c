"""What holds for every test: no TPU, several CPU devices, strict rules, run-time type checks."""

import atexit
import os
import shutil
import tempfile


os.environ["JAX_PLATFORMS"] = "cpu"
# No test reads or writes the store of who runs it; what a test starts inherits this.
os.environ["PALLAS_OPS_CACHE_DIR"] = tempfile.mkdtemp(prefix="pallas-ops-tests-")
os.environ["PALLAS_OPS_TILES"] = ""

import jax
from jaxtyping import install_import_hook


atexit.register(shutil.rmtree, os.environ["PALLAS_OPS_CACHE_DIR"], ignore_errors=True)

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

with install_import_hook("pallas_ops", "beartype.beartype"):
    import pallas_ops  # noqa: F401
