"""What the Python models of a package import, and so what Triton's Python must have."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from pipeline.triton.deployment import REPOSITORY

_OF_TRITON = "triton_python_backend_utils"  # Triton puts it on the path itself


def modules_of(package: Path) -> tuple[str, ...]:
    """What the Python models of a package import that neither they nor Python bring along."""
    found: set[str] = set()
    for version in (package / REPOSITORY).glob("*/1"):
        sources = list(version.rglob("*.py"))
        own = {source.stem for source in sources} | {source.parent.name for source in sources}
        for source in sources:
            found |= _imports(source) - own
    return tuple(sorted(found - sys.stdlib_module_names - {_OF_TRITON}))


def _imports(source: Path) -> set[str]:
    """First names of the modules that a file imports when it is loaded or later."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"), filename=str(source))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
