"""`quiet_libtpu`: what it sets without a TPU, and what it must leave alone with one."""

import os

import pytest

from pallas_ops.compiler import _topology, quiet_libtpu


_NAMES = {*_topology._LOG_LEVELS, *_topology._WITHOUT_TPU}


@pytest.fixture
def environment(monkeypatch):
    for name in _NAMES:
        # Set first, so that the fixture knows to take it away again afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def _machine(monkeypatch, tmp_path, *, devices=(), pci=()):
    """Lets the search look at a machine of files."""
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for device in devices:
        (tmp_path / device).touch()
    for index, (vendor, pci_class) in enumerate(pci):
        folder = tmp_path / f"sys/bus/pci/devices/0000:00:0{index}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(pci_class + "\n")
    real_glob = _topology.glob.glob
    monkeypatch.setattr(_topology.glob, "glob", lambda pattern: real_glob(f"{tmp_path}{pattern}"))


@pytest.mark.parametrize(
    "machine",
    [
        {},
        {"devices": ["dev/vfio/vfio", "dev/accel"]},
        # A Google cloud machine's own disk and network card, and somebody else's accelerator.
        {"pci": [("0x1ae0", "0x010802"), ("0x1ae0", "0x020000"), ("0x10de", "0x120000")]},
    ],
)
def test_without_a_tpu(machine, environment, tmp_path):
    _machine(environment, tmp_path, **machine)
    environment.setenv("TPU_ACCELERATOR_TYPE", "the user's own")
    quiet_libtpu()
    assert set(os.environ) >= _NAMES
    assert os.environ["TPU_ACCELERATOR_TYPE"] == "the user's own"


@pytest.mark.parametrize(
    "machine",
    [
        {"devices": ["dev/accel0"]},
        {"devices": ["dev/vfio/vfio", "dev/vfio/0"]},
        {"pci": [("0x8086", "0x060000"), ("0x1ae0", "0x120000")]},
    ],
)
def test_with_a_tpu(machine, environment, tmp_path):
    _machine(environment, tmp_path, **machine)
    quiet_libtpu()
    assert {name for name in _NAMES if name in os.environ} == set(_topology._LOG_LEVELS)
