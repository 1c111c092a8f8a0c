"""The house: which room may import which. Arrows point one way, and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "pipeline"
ROOMS = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}

# A room may import rooms of the floors below its own, and no other of its own floor. What lies in no room is ground.
FLOORS = (
    {"cli"},
    {"doctor", "bench"},
    {"frontend", "deploy"},
    {"stages", "serving", "gateway"},
    {"prepare"},
    {"runtimes", "cache"},
    {"machine", "triton", "client"},
    {"plan"},
    {"contracts", "sources"},
    {"models", "recipe", "store"},
)
# What goes into the environment of an application or a gateway imports nothing of the build side.
LIGHT = {"client", "cache", "gateway"}
BUILD = {
    "store", "sources", "plan", "machine", "runtimes", "prepare", "stages", "serving", "deploy", "bench", "doctor",
    "frontend", "cli",
}  # fmt: skip


def test_arrows_point_one_way() -> None:
    floors = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        here = place.parts[0]
        if here == "_data":
            continue
        for room in imports(path):
            if here not in floors or (room != here and floors[room] <= floors[here]):
                wrong.append(f"{place} may not import pipeline.{room}")
    assert wrong == []


def test_what_applications_install_needs_nothing_of_the_build_side() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} may not import pipeline.{room}"
        for light in sorted(LIGHT)
        for path in sorted((PACKAGE / light).rglob("*.py"))
        for room in imports(path)
        if room in BUILD
    ]
    assert wrong == []


def imports(path: Path) -> Iterator[str]:
    """The rooms that a file imports."""
    for node in import_statements(path):
        of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names = [f"{of}{alias.name}" for alias in node.names]
        found = {name.split(".")[1] for name in names if name.startswith("pipeline.")}
        yield from sorted(found & ROOMS)


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a file, wherever they stand in it, without relative ones."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return tuple(node for node in imports if isinstance(node, ast.Import) or not node.level)


def test_no_files_import_each_other_in_circles() -> None:
    """Neither within a room nor across rooms, also where only annotations need the import (TYPE_CHECKING)."""
    files = modules()
    graph = {module: imported_modules(path, files.keys()) for module, path in files.items()}
    left = set(graph)
    # Files that import nothing of what is left are in no circle; neither are those that nothing left imports.
    while ends := {name for name in left if not graph[name] & left}:
        left -= ends
    while ends := {name for name in left if not any(name in graph[other] for other in left)}:
        left -= ends
    assert sorted(left) == []


def modules() -> dict[str, Path]:
    """Modules of the package by their full names."""
    files = (path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)
    names = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in files}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in names.items()}


def imported_modules(path: Path, known: Set[str]) -> set[str]:
    """Known modules that a file imports, anywhere in it."""
    imported = set[str]()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= (names & known) or {node.module}
    return imported & known


HEAVY = ("torch", "modelopt", "transformers", "openvino", "huggingface_hub", "pytriton", "safetensors")


LIGHT_MODULES = (
    "client",
    "recipe",
    "plan.plan",
    "doctor",
    "cli.main",
    "cli.recipes",
    "cli.build",
    "cli.stream",
)


def test_light_modules_start_without_heavy_packages() -> None:
    loaded = f"[name for name in {HEAVY!r} if name in sys.modules]"
    code = "import sys\n" + "".join(
        f"import pipeline.{module}; print({module!r}, *{loaded})\n" for module in LIGHT_MODULES
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert tuple(done.stdout.split()) == LIGHT_MODULES


def test_no_two_files_of_tests_have_one_name() -> None:
    """Their folders are no packages: pytest imports a file by its name alone, and refuses the second of one name."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
