"""The TPU generations by name: what JAX's hardware table is asked, and what it does not hold."""

import dataclasses

from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """One generation of TPU.

    **Arguments:**

    - `name`: its short name, such as `"v5e"`.
    - `device_kinds`: what `jax.Device.device_kind` says there.
    - `chip_version`: its name in JAX's hardware table.
    - `topology`: the smallest topology that libtpu compiles for without such a TPU.
    - `scoped_vmem_limit_bytes`: the compiler's default limit on the VMEM of one kernel, in bytes,
        as its errors state it (libtpu 0.0.42 and 0.0.50).
    - `is_calibrated`: whether the time model was compared with timings measured on one.
    """

    name: str
    device_kinds: tuple[str, ...]
    chip_version: pltpu.ChipVersion
    topology: str
    scoped_vmem_limit_bytes: int
    is_calibrated: bool = False

    @property
    def info(self) -> pltpu.TpuInfo:
        """JAX's own facts about one TensorCore of this generation."""
        return pltpu.get_tpu_info_for_chip(self.chip_version, 1)


_MIB = 1024 * 1024

GENERATIONS = {
    generation.name: generation
    for generation in (
        TpuGeneration("v4", ("TPU v4",), pltpu.ChipVersion.TPU_V4, "v4:2x2x1", 16 * _MIB),
        TpuGeneration(
            "v5e", ("TPU v5 lite", "TPU v5e"), pltpu.ChipVersion.TPU_V5E, "v5e:2x2", 16 * _MIB, True
        ),
        TpuGeneration(
            "v5p", ("TPU v5", "TPU v5p"), pltpu.ChipVersion.TPU_V5P, "v5p:2x2x1", 16 * _MIB
        ),
        TpuGeneration(
            "v6e", ("TPU v6 lite", "TPU v6e"), pltpu.ChipVersion.TPU_V6E, "v6e:2x2", 32 * _MIB
        ),
        TpuGeneration("tpu7x", ("TPU7x",), pltpu.ChipVersion.TPU_7X, "tpu7x:2x2x1", 32 * _MIB),
    )
}


def find_generation(device: str | None) -> TpuGeneration | None:
    """The generation with this name or device kind; `None` for one that is not known here."""
    for generation in GENERATIONS.values():
        if device == generation.name or device in generation.device_kinds:
            return generation
    return None


def known_generation(device: str) -> TpuGeneration:
    """The generation with this name or device kind.

    **Raises:**

    `ValueError` for any other, naming those that are known.
    """
    generation = find_generation(device)
    if generation is None:
        names = ", ".join(
            f"{known.name!r} ({known.device_kinds[0]!r})" for known in GENERATIONS.values()
        )
        raise ValueError(f"Unknown TPU {device!r}. Known are, by name (and device kind): {names}.")
    return generation
