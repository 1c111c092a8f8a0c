"""What would serve: versions and modules of the Python that Triton's models run in, here or in an image.

The Python is asked by a process of its own, because it need not be the one that runs this. Nothing heavy is imported
in it: versions come from the metadata of distributions, modules are only looked for.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.errors import ServerError
from pipeline.machine.probe import ask
from pipeline.plan.machine_facts import SoftwareFacts

_DEADLINE_S = 120.0
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

    def facts(self) -> SoftwareFacts:
        """As rules look at it."""
        return SoftwareFacts(self.tensorrt_llm, self.tensorrt, self.release, self.missing, self.programs)


def software_here(
    programs: Sequence[str] = (), modules: Sequence[str] = (), deadline_s: float = _DEADLINE_S
) -> Software:
    """That of this machine, or of the container that this runs in.

    Raises:
        ServerError: its Python does not answer.
    """
    python = shutil.which("python3") or sys.executable
    there = frozenset(name for name in programs if shutil.which(name) is not None)
    return replace(_answer([python], modules, deadline_s), programs=there, own=True)


def software_of_image(
    reference: str, modules: Sequence[str], docker: str = "docker", deadline_s: float = _DEADLINE_S
) -> Software:
    """That of an image which this machine has: a container of it is run for some seconds, without a GPU or a network.

    Raises:
        ServerError: it cannot be run, or has no Python.
    """
    run = [docker, "run", "--rm", "--network", "none", "--entrypoint", "python3", reference]
    return _answer(run, modules, deadline_s)


def _answer(python: list[str], modules: Sequence[str], deadline_s: float) -> Software:
    said = ask([*python, "-c", _QUESTION, *modules], deadline_s)
    if said.problem:
        raise ServerError(f"{' '.join(python)} does not answer: {said.problem}")
    answer = json.loads(said.lines[-1])
    return Software(**{**answer, "missing": tuple(answer["missing"])})
