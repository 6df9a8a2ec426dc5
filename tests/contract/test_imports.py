"""Imports run one way: aio <- swap <- infinity and aio <- checkpoint <- infinity."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT: dict[str, frozenset[str]] = {
    "aio": frozenset(),
    "swap": frozenset({"aio"}),
    "checkpoint": frozenset({"aio"}),
    "infinity": frozenset({"aio", "swap", "checkpoint"}),
}


def forbidden_imports(package: str, source: str) -> list[str]:
    """The top-level names that `source`, a module of `package`, imports and must not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module.partition(".")[0])
    ours = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    closed = ours | {"tests", "tools", "examples"} | ({"torch"} if package == "aio" else set())
    return [name for name in names if name in closed]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_of_every_module_follow_the_direction(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules, f"there is no package {package} in {ROOT}"
    wrong = {
        str(module.relative_to(ROOT)): found
        for module in modules
        if (found := forbidden_imports(package, module.read_text()))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("aio", "def f():\n    import torch.nn", ["torch"]),
        ("swap", "from checkpoint.format.manifest import Manifest", ["checkpoint"]),
        ("checkpoint", "import aio, swap.plan as plan", ["swap"]),
        ("infinity", "import aio, swap, checkpoint, torch\nfrom . import swap", []),
    ],
)
def test_forbidden_imports_of_a_source_are_found(
    package: str, source: str, found: list[str]
) -> None:
    assert forbidden_imports(package, source) == found
