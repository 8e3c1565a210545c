"""What holds for every test: no TPU, several CPU devices, strict rules, run-time type checks."""

import os


os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jaxtyping import install_import_hook


jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

with install_import_hook("pallas_ops", "beartype.beartype"):
    import pallas_ops  # noqa: F401
