"""An environment with the core of the project alone, or with some extras, without an installation.

A folder links the distributions that pyproject.toml asks for, and those that they ask for in turn, from this
environment; Python without its own site-packages (-S) sees nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from pipeline import resources


class Environment:
    """Where commands run as after `pip install .[extras]`."""

    def __init__(self, folder: Path, *extras: str) -> None:
        checkout = resources.checkout()
        assert checkout is not None, "tests run from a checkout"
        project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
        wanted = [
            *project["dependencies"],
            *(requirement for name in extras for requirement in project["optional-dependencies"][name]),
        ]
        folder.mkdir(parents=True)
        for distribution in _closure(map(Requirement, wanted)):
            _link(distribution, folder)
        self._path = os.pathsep.join([str(folder), str(checkout)])

    def python(self, *arguments: str) -> list[str]:
        """The interpreter with its arguments."""
        return [sys.executable, "-S", *arguments]

    def variables(self, **more: str) -> dict[str, str]:
        """Its environment variables."""
        return os.environ | {"PYTHONPATH": self._path} | more

    def pipeline(
        self, *words: str, store: Path, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of ours to its end."""
        return subprocess.run(
            self.python("-m", "pipeline.cli.main", *words),
            env=self.variables(PIPELINE_STORE=str(store)),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def pipelines(
        self, commands: Sequence[Sequence[str]], *, store: Path
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run commands of ours one after the other in one process."""
        done = subprocess.run(
            self.python("-c", _ONE_BY_ONE),
            input=json.dumps(commands),
            env=self.variables(PIPELINE_STORE=str(store)),
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        return [
            subprocess.CompletedProcess(words, *ended)
            for words, ended in zip(commands, json.loads(done.stdout), strict=True)
        ]


_ONE_BY_ONE = """
import contextlib, io, json, sys, traceback
from pipeline.cli.main import main
ended = []
for words in json.load(sys.stdin):
    sys.argv = ["pipeline", *words]
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ends:
            code = ends.code or 0
        except BaseException:
            traceback.print_exc()
    ended.append((code, out.getvalue(), err.getvalue()))
json.dump(ended, sys.stdout)
"""


def _closure(wanted: Iterable[Requirement]) -> list[metadata.Distribution]:
    """The distributions of some requirements, and of theirs."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        if requirement.name in found:
            continue
        try:
            found[requirement.name] = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        for line in found[requirement.name].requires or ():
            inner = Requirement(line)
            extras = ("", *requirement.extras)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": requirement}) for requirement in extras
            ):
                waiting.append(inner)
    return list(found.values())


def _link(distribution: metadata.Distribution, folder: Path) -> None:
    """Its top folders and files; what several distributions share (nvidia/) is linked once."""
    for top in {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith("..")}:
        source, target = Path(str(distribution.locate_file(top))), folder / top
        if top != "__pycache__" and source.exists() and not target.exists():
            target.symlink_to(source)
