"""The folders of a package: which may import which, how many modules they hold, no circles."""

import ast
import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up: a folder imports only what stands before it. Modules of a package that are
# in no folder stand by themselves. The folders of a program within a package are counted within it.
FLOORS: dict[str, tuple[str, ...]] = {
    "aio": ("process",),
    "swap": (
        *("interruptions", "plan", "memory", "device.kernels", "device"),
        *("storage.drives", "storage", "snapshots", "cache", "gradients", "update"),
    ),
    "checkpoint": (
        *("format", "ranks", "directory.files", "directory", "tensors", "plan", "transfer"),
        *("known", "saving", "loading", "interop", "dcp", "bench"),
    ),
    "checkpoint.bench": ("conditions", "systems", "measure", "output"),
    "infinity": (
        *("parameters.offloaded", "parameters"),
        *("activations", "ranks", "tiling", "optim", "autograd"),
        *("values.initial", "values", "snapshots", "planning", "adamw"),
        *("commands", "integrations"),
    ),
}
MOST_FLOORS = 8
MOST_MODULES = 10
LARGER: dict[str, tuple[int, str]] = {
    "swap/plan": (11, "one decision in each: what lives where, and what moves when"),
    "aio": (11, "one line from errors to engine: no part that stands alone has over three modules"),
}


def name_of(module: Path) -> str:
    parts = module.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a source imports, wherever in it."""
    found: set[str] = set()
    names = frozenset(known)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names) or {node.module}
    return found & names


def files_of(package: str) -> Iterable[Path]:
    return ROOT.joinpath(*package.split(".")).rglob("*.py")


def graph_of(package: str) -> dict[str, set[str]]:
    modules = {name_of(path): path for path in sorted(files_of(package))}
    return {name: imports_of(path.read_text(), modules) - {name} for name, path in modules.items()}


def room_of(module: str, package: str) -> str:
    """The folder that a module is in; its own name if it is in none."""
    inside = module.removeprefix(f"{package}.")
    rooms = [room for room in FLOORS.get(package, ()) if f"{inside}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=inside)


def rooms_of(graph: Mapping[str, set[str]], package: str) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        room = room_of(module, package)
        rooms.setdefault(room, set()).update(room_of(name, package) for name in imported)
        rooms[room].discard(room)
    return rooms


def number_of_floors(graph: Mapping[str, set[str]]) -> int:
    """Raises CycleError."""
    floors: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floors[name] = 1 + max((floors[below] for below in graph.get(name, ())), default=0)
    return max(floors.values())


@pytest.mark.parametrize("package", FLOORS)
def test_no_modules_import_each_other(package: str) -> None:
    try:
        number_of_floors(graph_of(package))
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", FLOORS)
def test_folders_import_what_stands_below_them(package: str) -> None:
    order = FLOORS[package]
    rooms = rooms_of(graph_of(package), package)
    assert set(order) <= rooms.keys()
    wrong = {
        room: sorted(above)
        for room, imported in rooms.items()
        if room in order and (above := imported & set(order[order.index(room) + 1 :]))
    }
    assert wrong == {}
    rooms.pop(package, None)  # its face, which hands on what users call
    assert number_of_floors(rooms) <= MOST_FLOORS


def test_no_folder_holds_more_modules_than_one_finds_their_way_in() -> None:
    for package in FLOORS:
        for folder in {path.parent for path in files_of(package)}:
            name = folder.relative_to(ROOT).as_posix()
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            most, _ = LARGER.get(name, (MOST_MODULES, ""))
            assert len(modules) <= most, f"{name} has {len(modules)} modules"


def test_folders_say_what_lives_in_them() -> None:
    for package in FLOORS:
        for folder in {path.parent for path in files_of(package)}:
            face = folder / "__init__.py"
            assert face.is_file(), f"{folder} has no __init__.py"
            assert ast.get_docstring(ast.parse(face.read_text())), f"{face} has no docstring"


def test_no_files_of_c_include_each_other() -> None:
    sources = {path: path.read_text() for path in sorted(ROOT.glob("*/csrc/*.[ch]"))}
    graph = {
        str(path): {
            str(path.parent / included) for included in re.findall(r'#include "(.+)"', source)
        }
        for path, source in sources.items()
    }
    number_of_floors(graph)


def names_defined_in(source: str) -> set[str]:
    """Functions and objects of a C source that others may use: what begins a line of its own."""
    functions = re.findall(
        r"^(?!static|INLINE|typedef|#)\w[\w\s*]*?(\w+)\([^;{}]*\) \{$", source, re.MULTILINE
    )
    objects = re.findall(
        r"^(?!static|INLINE|typedef|extern|#)\w[\w ]*? \**(\w+)(?:\[.*\])? = ", source, re.MULTILINE
    )
    return {*functions, *objects}


def uses_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of these C sources use what which others define."""
    defined = {path: names_defined_in(source) for path, source in sources.items()}
    words = {path: {*re.findall(r"\w+", source)} for path, source in sources.items()}
    return {
        path: {other for other in sources if other != path and defined[other] & words[path]}
        for path in sources
    }


@pytest.mark.parametrize("package", ["aio", "swap"])
def test_no_files_of_c_use_each_other(package: str) -> None:
    sources = {path.name: path.read_text() for path in (ROOT / package / "csrc").glob("*.c")}
    uses = uses_of(sources)
    assert any(uses.values())
    try:
        number_of_floors(uses)
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_circles_and_floors_are_found() -> None:
    assert number_of_floors({"a": {"b"}, "b": {"c"}, "c": set()}) == 3
    with pytest.raises(CycleError):
        number_of_floors({"a": {"b"}, "b": {"a"}})
    assert imports_of("from swap.plan import layout", ["swap.plan", "swap.plan.layout"]) == {
        "swap.plan.layout"
    }
    assert room_of("infinity.values.initial.skeleton", "infinity") == "values.initial"
    assert room_of("infinity.model", "infinity") == "model"
    assert names_defined_in("static int a(void) {\n}\nstruct x *b(int c,\n    int d) {\n}\n") == {
        "b"
    }
    assert names_defined_in("int a(void);\nconst struct x ops = {\nstatic int c = 1;\n") == {"ops"}
    uses = uses_of({"a.c": "int a(void) {\n    b();", "b.c": "int b(void) {\n    a();", "c.c": ""})
    assert uses == {"a.c": {"b.c"}, "b.c": {"a.c"}, "c.c": set()}
