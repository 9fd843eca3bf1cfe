"""Imports go down only, and nothing below the runtime loads MPI or a GPU library."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicoll

#: Rooms from the ground up; those of one floor do not see each other.
FLOORS = (
    ("_version", "errors"),
    ("schedule",),
    ("algorithms",),
    ("selection",),
    ("simulation",),
    ("kernels",),
    ("runtime",),
    ("collectives",),
    ("comm",),
    ("arrays", "parallel", "torch"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

#: Who may import what at module level, so that it is loaded with the module.
LOADERS = {
    "mpi4py": {"arrays", "cli", "collectives", "comm", "parallel", "runtime"},
    "cupy": set[str](),
    "torch": {"torch"},
}


def source() -> Path:
    spec = importlib.util.find_spec("mpicoll.errors")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


MODULES = sorted(source().rglob("*.py"))
NAMES = [path.relative_to(source()).as_posix() for path in MODULES]


def room(path: Path) -> str:
    return path.relative_to(source()).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports, wherever it does: "mpicoll.schedule.ir.Span"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded(tree: ast.Module) -> Iterator[str]:
    """Yield what is imported when the module is, that is, not in a function or for types."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        nodes += ast.iter_child_nodes(node)


def parsed(name: str) -> ast.Module:
    return ast.parse((source() / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_down(name: str) -> None:
    here = room(source() / name)
    assert here in FLOOR, f"{here} has no place in FLOORS"
    for imported in imports(parsed(name)):
        package, _, rest = imported.partition(".")
        if package != "mpicoll":
            continue
        there = rest.split(".")[0]
        there = there if there in FLOOR else "__init__"  # a public name of the package
        assert there == here or FLOOR[there] < FLOOR[here], f"{name} imports {imported}"


@pytest.mark.parametrize("name", NAMES)
def test_who_loads_mpi_and_gpu_libraries(name: str) -> None:
    for imported in loaded(parsed(name)):
        package = imported.split(".")[0]
        assert room(source() / name) in LOADERS.get(package, {room(source() / name)}), (
            f"{name} loads {imported}"
        )


def test_dir_lists_what_is_for_users() -> None:
    names = [name for name in dir(mpicoll) if not name.startswith("__")]
    assert set(mpicoll.__all__) <= {*names, "__version__"}
    for name in set(names) - set(mpicoll.__all__):
        assert f"mpicoll.{name}" in sys.modules
        assert not name.startswith("_")


@pytest.mark.parametrize("package", ["schedule", "algorithms"])
def test_building_and_proving_load_no_mpi(package: str) -> None:
    modules = [
        "mpicoll." + path.relative_to(source()).with_suffix("").as_posix().replace("/", ".")
        for path in sorted((source() / package).glob("*.py"))
        if path.stem != "__init__"
    ]
    program = f"""
import importlib, sys
for module in {["mpicoll", *modules]!r}:
    importlib.import_module(module)
print(*sorted({{"cupy", "mpi4py", "torch"}} & {{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
