"""What is read out of the compiler's refusals; in the words of libtpu 0.0.50.1."""

import importlib.metadata

import jax
import jax.numpy as jnp
import pytest

from pallas_ops.compiler import (
    _topology as topology,
    _worker as worker,
    compile_for_tpu,
    CompilerUnavailableError,
)

from .tools import job


# `pallas-ops predict 8192 8192 8192 --device tpu7x --tile 2048,2048,2048`
OF_ALL_VMEM = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space vmem. Used 75.93M of 63.94M vmem. Exceeded vmem capacity by 11.99M.

Program vmem requirement 75.93M:
    scoped           75.93M

  Largest program allocations in vmem:

  1. Size: 16.00M
     Operator: op_name="jit(product)/pallas_ops_matmul_nt/pallas_call"
     Shape: f32[2048,2048]{1,0:T(8,128)}
     Unpadded size: 16.00M
     Tag: scratch operand
"""


def test_a_refusal_for_all_of_vmem():
    assert worker.one_line(RuntimeError(OF_ALL_VMEM)) == (
        "Ran out of memory in memory space vmem. Used 75.93M of 63.94M vmem"
    )
    assert worker.vmem_of_error(OF_ALL_VMEM) == round(75.93 * 2**20)


def test_a_refusal_for_another_memory():
    text = "Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm."
    assert worker.vmem_of_error(text) is None
    assert worker.one_line(RuntimeError(text)) == f"RuntimeError: {text}"


def test_a_long_refusal_is_cut_between_words():
    words = [f"word{number}" for number in range(100)]
    line = worker.one_line(RuntimeError(" ".join(words)))
    kept = line.removeprefix("RuntimeError: ").removesuffix(" ...").split(" ")
    assert line.endswith(" ...")
    assert kept == words[: len(kept)]
    assert 30 < len(kept) < 60


# jax 0.12.1 with libtpu 0.0.50.1, in front of pages of context.
OLDER_LIBTPU = (
    "INTERNAL: Failed to deserialize the Mosaic module: INTERNAL: Unsupported version: expected "
    '<= 18 but got 20 at location: loc(unknown) The MLIR operation involved: "builtin.module"()'
)


def _versions(monkeypatch, wanted, installed):
    """As if this jax were published for one libtpu, and another one were installed."""
    requirements = ["numpy>=2", f'libtpu=={wanted}; extra == "tpu"', 'requests; extra == "tpu"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)

    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("wanted", "installed", "fit"),
    [
        ("0.0.53.*", "0.0.53", True),
        ("0.0.53.*", "0.0.53.1", True),
        ("0.0.53.*", "0.0.52", False),
        ("0.0.5.*", "0.0.53", False),
        ("0.0.53.*", None, True),
        ("0.0.53", "0.0.53", True),
    ],
)
def test_whether_a_libtpu_fits_its_jax(monkeypatch, wanted, installed, fit):
    _versions(monkeypatch, wanted, installed)
    said = topology.libtpu_mismatch()
    assert (said is None) == fit
    if said is not None:
        assert f"jax {jax.__version__} is published for libtpu {wanted}, and {installed} is" in said


def test_what_this_jax_is_published_for_is_known():
    """Its metadata still says so in the words that are looked for."""
    assert topology.wanted_libtpu().startswith("0.0.")


def test_a_libtpu_that_does_not_read_this_jax_is_no_compiler(monkeypatch, tmp_path):
    _versions(monkeypatch, "0.0.53.*", "0.0.50.1")

    def refuse(*_, **__):
        raise RuntimeError(OLDER_LIBTPU)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    verdict = worker.answer(job(256, 256, 256, (256, 256, 256)), tmp_path)
    assert verdict.unavailable
    assert not verdict.compiles
    assert verdict.error.startswith("This libtpu does not read the kernels of this jax")
    assert "published for libtpu 0.0.53.*, and 0.0.50.1 is installed" in verdict.error
    with pytest.raises(CompilerUnavailableError, match=r"and 0\.0\.50\.1 is installed"):
        compile_for_tpu(lambda x: x + 1, jnp.ones(8))


def test_an_error_of_the_compilers_own_tells_of_versions_that_do_not_fit(monkeypatch):
    _versions(monkeypatch, "0.0.53.*", "0.0.52")
    assert "(note that jax" in worker.refusal(RuntimeError("INTERNAL: Unsupported comparison: une"))
    assert worker.refusal(RuntimeError(OF_ALL_VMEM)) == worker.one_line(RuntimeError(OF_ALL_VMEM))
    _versions(monkeypatch, "0.0.53.*", "0.0.53")
    assert "note that" not in worker.refusal(RuntimeError("INTERNAL: Unsupported"))
