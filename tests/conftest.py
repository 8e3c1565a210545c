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
import pytest
from jaxtyping import install_import_hook


atexit.register(shutil.rmtree, os.environ["PALLAS_OPS_CACHE_DIR"], ignore_errors=True)

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

with install_import_hook("pallas_ops", "beartype.beartype"):
    import pallas_ops  # noqa: F401

from . import workers  # noqa: E402  (it imports the package, after all of the above)


workers.share()


@pytest.fixture(autouse=True, scope="module")
def own_workers(request):
    """For a module that is marked so: its pools start and end workers of their own."""
    is_own = request.node.get_closest_marker("own_workers") is not None
    workers.own(is_own)
    yield
    workers.own(False)
