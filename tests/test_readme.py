"""README and docs say nothing in Python that does not run as it stands.

The blocks of a page are one program. A block with a title is a file of a package, which is
installed for that program: put on its path, with the metadata that an installer writes.
"""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest


_ROOT = pathlib.Path(__file__).parent.parent
_BLOCK = re.compile(r'^```(python|toml)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_PAGES = [
    path
    for path in (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
    if "```python" in path.read_text()
]


def _install(pyproject: str, folder: pathlib.Path) -> None:
    project = tomllib.loads(pyproject)["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    program = []
    for language, title, code in _BLOCK.findall(page.read_text()):
        if title == "pyproject.toml":
            _install(code, tmp_path)
        elif title:
            path = tmp_path / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        elif language == "python":
            program.append(code)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(program)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_readme_has_the_two_commands():
    commands = re.findall(r"^```sh\n(.*?)^```$", (_ROOT / "README.md").read_text(), re.M | re.S)
    assert [command.strip().count("\n") for command in commands] == [0, 0]
    assert commands[0].strip().endswith("pallas-ops demo")
    assert commands[1].strip().endswith("pytest")
