"""Operators of other packages: real packages, installed by pip, seen by a new process."""

import os
import subprocess
import sys
import textwrap

import pytest


PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0"

[project.entry-points."pallas_ops.operators"]
{name} = "{name}:{attribute}"
"""

GOOD = """
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_ops as po


def signature(x: Float[Array, "*shape"], *, slope: float = 0.1) -> Float[Array, "*shape"]: ...


def leaky(x, *, slope=0.1):
    return jnp.where(x > 0, x, slope * x)


def fwd(x, *, slope=0.1):
    return leaky(x, slope=slope), x


def bwd(x, cotangent, *, slope=0.1):
    return (jnp.where(x > 0, 100 * cotangent, slope * cotangent),)


operator = po.Operator("leaky", signature, [po.Implementation("jnp", leaky)], vjp=(fwd, bwd))
"""

BROKEN = "raise RuntimeError('a plug-in with a fault')\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the two packages installed by pip."""
    target = tmp_path_factory.mktemp("site")
    for name, attribute, code in (
        ("leaky_plugin", "operator", GOOD),
        ("broken_plugin", "operator", BROKEN),
    ):
        source = tmp_path_factory.mktemp(name)
        (source / "pyproject.toml").write_text(PYPROJECT.format(name=name, attribute=attribute))
        (source / name).mkdir()
        (source / name / "__init__.py").write_text(code)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


def _run(site, code):
    environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_plugin_is_found_and_differentiable_and_a_broken_one_is_one_warning(site):
    done = _run(
        site,
        """
        import sys, warnings
        import jax, jax.numpy as jnp
        import pallas_ops as po

        assert "leaky_plugin" not in sys.modules
        po.get_operator("matmul")
        assert "leaky_plugin" not in sys.modules  # nothing is loaded that is not asked for
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert po.list_operators() == ["leaky", "matmul", "quantized_matmul"]
            leaky = po.get_operator("leaky")
            po.list_operators()
        assert len(caught) == 1, caught
        print(caught[0].message)
        x = jnp.array([2.0, -2.0])
        assert leaky(x, slope=0.5).tolist() == [2.0, -1.0]
        gradient = jax.jit(jax.grad(lambda x: leaky(x, slope=0.5).sum()))(x)
        assert gradient.tolist() == [100.0, 0.5], gradient
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "broken_plugin" in done.stdout
    assert "RuntimeError: a plug-in with a fault" in done.stdout


def test_a_plugin_is_found_by_name_alone(site):
    done = _run(
        site,
        """
        import warnings
        warnings.simplefilter("ignore")
        import pallas_ops as po
        print(po.get_operator("leaky"))
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "Operator('leaky', implementations=['jnp'])\n",
        "",
    )
