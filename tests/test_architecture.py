"""The rooms: a lower one never imports a higher one, and private JAX stays out."""

import ast
from pathlib import Path

import pytest

import pallas_ops


PACKAGE = Path(pallas_ops.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each room, and the rooms of the package that it may import.
ALLOWED = {
    "_hardware": set(),
    "_private": set(),
    "_whole": set(),
    "kernels": set(),
    "tiles": {"_hardware", "_private", "_whole", "compiler", "kernels"},
    "compiler": {"_hardware", "kernels"},
    "operators": {"_hardware", "kernels", "tiles"},
    "nn": {"operators", "tiles"},
    "commands": {
        "_hardware",
        "_whole",
        "compiler",
        "nn",
        "operators",
        "tiles",
        "kernels",
        "__init__",
    },
    "__init__": {"kernels", "nn", "operators", "tiles"},
    "__main__": {"commands"},
}


def _room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py") if parts else "__init__"


def _imports(module: Path):
    """The absolute dotted names that a module imports, relative ones resolved."""
    package = ("pallas_ops", *module.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = (*base, *(node.module.split(".") if node.module else ()))
            yield from (".".join((*source, alias.name)) for alias in node.names)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_lower_rooms(module):
    own = _room(module.relative_to(PACKAGE).parts)
    for name in _imports(module):
        parts = tuple(name.split("."))
        if parts[0] != "pallas_ops":
            continue
        inside = (PACKAGE / parts[1]).exists() or (PACKAGE / f"{parts[1]}.py").exists()
        other = parts[1] if len(parts) > 1 and inside else "__init__"
        assert other == own or other in ALLOWED[own], f"{own} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_private_jax(module):
    if module.name == "_private.py":  # the one place; `test_private.py` holds what it takes
        return
    assert not [name for name in _imports(module) if name.startswith(("jax._src", "jaxlib"))]
