"""What would serve: versions and modules of the Python that Triton's models run in, here or in an image.

The Python is asked by a process of its own, because it need not be the one that runs this. Nothing heavy is imported
in it: versions come from the metadata of distributions, modules are only looked for.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.triton.deployment import REPOSITORY

_OF_TRITON = "triton_python_backend_utils"  # Triton puts it on the path itself
_DEADLINE_S = 120
_QUESTION = """
import importlib.metadata as metadata, importlib.util, json, os, sys
def version(*names):
    for name in names:
        try: return metadata.version(name)
        except metadata.PackageNotFoundError: pass
def there(name):
    try: return importlib.util.find_spec(name) is not None
    except ImportError: return False
print(json.dumps({
    "tensorrt_llm": version("tensorrt-llm", "tensorrt_llm"),
    "tensorrt": version("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "release": os.environ.get("NVIDIA_TRITON_SERVER_VERSION"),
    "missing": [name for name in sys.argv[1:] if not there(name)],
}))
"""


@dataclass(frozen=True, slots=True)
class Software:
    """The answer."""

    tensorrt_llm: str | None
    tensorrt: str | None
    release: str | None  # of the Triton container, by its NVIDIA_TRITON_SERVER_VERSION: "26.07"
    missing: tuple[str, ...] = ()  # modules that the models import and that are not there
    programs: frozenset[str] | None = (
        None  # of those that were asked for, the ones that are there; None: unknown
    )
    own: bool = False  # whether it is that of this machine, whose limits then count, too


def software_here(programs: Sequence[str], modules: Sequence[str]) -> Software:
    """That of this machine, or of the container that this runs in.

    Raises:
        ServerError: its Python does not answer.
    """
    python = shutil.which("python3") or sys.executable
    there = frozenset(name for name in programs if shutil.which(name) is not None)
    return replace(_ask([python, "-c", _QUESTION, *modules]), programs=there, own=True)


def software_of_image(reference: str, modules: Sequence[str], docker: str = "docker") -> Software:
    """That of an image which this machine has: a container of it is run for some seconds, without a GPU or a network.

    Raises:
        ServerError: it cannot be run, or has no Python.
    """
    run = [docker, "run", "--rm", "--network", "none", "--entrypoint", "python3", reference]
    return _ask([*run, "-c", _QUESTION, *modules])


def _ask(command: list[str]) -> Software:
    name = " ".join(command[: command.index("-c")])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{name} does not answer: {error}") from None
    if done.returncode:
        raise ServerError(f"{name} does not answer: {done.stderr.strip()}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Software(**{**answer, "missing": tuple(answer["missing"])})


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
