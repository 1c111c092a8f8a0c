"""The house: which folder may import which. Arrows point one way, and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pipeline"

# Each floor may import the floors below it, and itself; nothing points back up.
FLOORS = (
    {"cli"},
    {"stages", "deploy", "gateway", "bench"},
    {"runtimes", "triton", "machine", "client", "cache"},
    {"planning"},
    {"recipe", "contracts", "store", "checkpoint"},
    {"errors", "extras", "private_files", "progress", "reading", "resources"},
)
# What applications install must not pull in the build side.
LIGHT = {"client", "cache"}


def floor_of(folder: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if folder in names)


def imports(path: Path) -> Iterator[str]:
    """The folders of the package that a file imports, relative imports resolved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(PACKAGE.parent).parts[:-1])
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" if module == "pipeline" else module for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("pipeline."))


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE and "_data" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0]
    for folder in imports(path):
        if folder == "__version__" or folder == here:
            continue
        assert floor_of(folder) > floor_of(here) or (floor_of(folder) == floor_of(here) and here != "cli"), (
            f"{path.relative_to(PACKAGE)} may not import pipeline.{folder}"
        )
        if here in LIGHT:
            assert folder in {*LIGHT, "extras", "private_files", "reading"}, (
                f"the light client may not import pipeline.{folder}"
            )


HEAVY = ("torch", "modelopt", "transformers", "openvino", "huggingface_hub", "pytriton", "safetensors")


@pytest.mark.parametrize(
    "module",
    [
        "cli.main",
        "cli.recipes",
        "deploy.doctor",
        "cli.build",
        "cli.stream",
        "recipe",
        "planning.plan",
        "client",
    ],
)
def test_light_modules_start_without_heavy_packages(module: str) -> None:
    code = f"import sys, pipeline.{module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
