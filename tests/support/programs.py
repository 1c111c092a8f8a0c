"""Foreign programs, each in an environment of its own, which its pinned requirements make.

    python -m tests.support.programs lock NAME...     pin what the requirements of tests/clients/NAME bring with them

The folder of a program holds its requirements (requirements.txt, or package.json with package-lock.json for npm) and
the scripts that use it; .python-version names the Python that it needs, if that of the tests will not do. An
environment lies outside of the repository, is named by the digest of its requirements, and is made once. Nothing of the
environment that runs the tests leaks into it, neither modules nor variables nor a home.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests" / "clients"
ENVIRONMENTS = Path.home() / ".cache" / "pipeline" / "clients"
WITHOUT_DEPENDENCIES = "# without dependencies"  # begins a requirements.txt that names all that is needed
PINNED = "# pinned by `python -m tests.support.programs lock`; all above this line is asked for by name"
_INSTALL_TIMEOUT_S = 1500
_TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
_REQUIREMENTS = ("requirements.txt", "package.json", "package-lock.json")


class ProgramFailed(AssertionError):
    """A program ended with an error, or printed no JSON; the text has all that it printed."""


class Unavailable(Exception):
    """What a program needs cannot be had here; the text says why."""


def scripts(stem: str) -> list[Path]:
    """Return the scripts of a name, such as chat, of all programs that have one."""
    return sorted(path for suffix in ("py", "mjs") for path in CLIENTS.glob(f"*/{stem}.{suffix}"))


@dataclass(frozen=True, slots=True)
class Program:
    """A foreign program, installed.

    Attributes:
        folder: its requirements and the scripts that use it.
        environment: the virtual environment, or the folder of node_modules.
        variables: of the environment of all that is run.
    """

    folder: Path
    environment: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def install(cls, name: str, variables: Mapping[str, str] | None = None) -> Self:
        """Install the program of the folder tests/clients/`name`, unless it is installed already.

        Args:
            name: of the folder.
            variables: of the environment of all that is run, besides PATH and HOME.

        Raises:
            ProgramFailed: pip or npm failed.
            Unavailable: the Python that it needs is not here.
        """
        folder = CLIENTS / name
        return cls(folder, _environment_of(folder), dict(variables or {}))

    def script(self, name: str, *arguments: object, timeout_s: float = 300, **variables: str) -> Any:
        """Run a script of the program's folder.

        Args:
            name: of the file, such as chat.py or chat.mjs.
            *arguments: of its command line.
            timeout_s: seconds that it may take.
            **variables: of its environment, besides those of the program.

        Returns:
            What it printed: the JSON value on the last line of its standard output.
        """
        with _scripts(self) as folder:
            interpreter = ["node"] if name.endswith(".mjs") else [self.command("python"), "-I"]
            done = self.call([*interpreter, folder / name, *arguments], timeout_s=timeout_s, **variables)
        try:
            return json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            raise ProgramFailed(f"{name} printed no JSON:\n{done.stdout}\n{done.stderr}") from None

    def file(self, name: str) -> Path:
        """Fetch a file that is in no package, unless it was fetched before: files.json names its address and digest.

        Where the address cannot be reached, a file with that digest may be put at the path that the error names.

        Args:
            name: of the file.

        Raises:
            Unavailable: it cannot be fetched.
            ProgramFailed: what lies at the address is not what was pinned.
        """
        pinned = json.loads((self.folder / "files.json").read_text("utf-8"))[name]
        path = ENVIRONMENTS / "files" / str(pinned["sha256"])[:16] / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            try:
                with urllib.request.urlopen(pinned["url"], timeout=30) as answer:
                    data = answer.read()
            except urllib.error.URLError as error:
                raise Unavailable(
                    f"{name} cannot be fetched ({error.reason}), and {path} is not there"
                ) from None
        if (found := hashlib.sha256(data).hexdigest()) != pinned["sha256"]:
            raise ProgramFailed(f"{path} has the digest {found}, and files.json says {pinned['sha256']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def command(self, name: str) -> Path:
        """Return the path of a command that the environment has, such as lm_eval."""
        folder = "bin" if (self.environment / "bin").is_dir() else "node_modules/.bin"
        return self.environment / folder / name

    def call(
        self, command: Sequence[object], *, timeout_s: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with an empty home, and nothing on its standard input.

        Args:
            command: program and arguments.
            timeout_s: seconds that it may take.
            **variables: of its environment, besides those of the program.

        Raises:
            ProgramFailed: its exit code is not 0.
        """
        with tempfile.TemporaryDirectory(prefix="pipeline-client-") as home:
            done = subprocess.run(
                list(map(str, command)), cwd=home, env=_clean(home) | dict(self.variables) | variables,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False,
            )  # fmt: skip
        if done.returncode:
            words = " ".join(map(str, command))
            raise ProgramFailed(f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done


def _clean(home: str) -> dict[str, str]:
    return {"HOME": home, "LANG": "C.UTF-8", "PATH": os.environ["PATH"]}


@contextmanager
def _scripts(program: Program) -> Iterator[Path]:
    """The folder from which scripts are run: node looks for modules beside the file that imports them."""
    if not (program.environment / "node_modules").is_dir():
        yield program.folder
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-client-") as folder:
        for script in program.folder.glob("*.mjs"):
            shutil.copy(script, folder)
        (Path(folder) / "node_modules").symlink_to(program.environment / "node_modules")
        yield Path(folder)


def _environment_of(folder: Path) -> Path:
    """Make the environment of a program; one process at a time does."""
    files = [folder / name for name in _REQUIREMENTS if (folder / name).is_file()]
    assert files, f"{folder} has no {' or '.join(_REQUIREMENTS[:2])}"
    python = _python_of(folder)
    digest = hashlib.sha256(_run(python, "-c", "import sys; print(sys.version, end='')").encode())
    for file in files:
        digest.update(file.read_bytes())
    environment = ENVIRONMENTS / f"{folder.name}-{digest.hexdigest()[:16]}"
    complete = environment / "complete"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / f"{environment.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(environment, ignore_errors=True)
            print(f"installing {folder.name} into {environment}", file=sys.stderr, flush=True)
            _install(files, environment, python)
            complete.touch()
    return environment


def _python_of(folder: Path) -> Path:
    """The Python that makes the environment of a program."""
    try:
        version = (folder / ".python-version").read_text("utf-8").strip()
    except FileNotFoundError:
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        with suppress(ProgramFailed, FileNotFoundError):
            return Path(_run(candidate, "-c", "import ensurepip, sys, venv; print(sys.executable, end='')"))
    raise Unavailable(f"{folder.name} needs Python {version} with the venv module, which is not here")


def _install(files: Sequence[Path], environment: Path, python: Path) -> None:
    if files[0].name == "requirements.txt":
        _pip_install(python, environment, files[0])
        return
    environment.mkdir()
    for file in files:
        shutil.copy(file, environment)
    # What the lock says; `npm ci` refuses the lock of a program with optional packages that the registry does not have.
    _run("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", environment)


def _pip_install(python: Path, environment: Path, requirements: Path) -> Path:
    """Make a virtual environment with some requirements. Returns its Python."""
    _run(python, "-m", "venv", environment)
    own = environment / "bin" / "python"
    install = (own, "-m", "pip", "install", "--quiet")
    if torch := re.search(r"^torch==\S+", requirements.read_text("utf-8"), re.MULTILINE):
        # The CPU build, where its index can be reached: the default build brings gigabytes of CUDA libraries.
        index: tuple[str, ...] = ("--index-url", _TORCH_CPU_INDEX)
        try:
            urllib.request.urlopen(f"{_TORCH_CPU_INDEX}/torch/", timeout=5).close()
        except OSError:
            index = ()
        _run(*install, torch[0], *index)
    alone = requirements.read_text("utf-8").startswith(WITHOUT_DEPENDENCIES)
    _run(*install, *(["--no-deps"] if alone else []), "--requirement", requirements)
    return own


def _run(*command: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True,
        timeout=_INSTALL_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ProgramFailed(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def lock(folder: Path) -> None:
    """Write the exact versions of all that a program's requirements bring with them."""
    if (folder / "package.json").is_file():
        _run("npm", "install", "--package-lock-only", "--ignore-scripts", "--prefix", folder)
        return
    file = folder / "requirements.txt"
    named = file.read_text("utf-8").partition(PINNED)[0].rstrip() + "\n"
    with tempfile.TemporaryDirectory(prefix="pipeline-client-") as work:
        wanted = Path(work) / "requirements.txt"
        wanted.write_text(named, "utf-8")
        python = _pip_install(_python_of(folder), Path(work) / "venv", wanted)
        frozen = _run(python, "-m", "pip", "freeze", "--exclude", "pip", "--exclude", "setuptools")
    asked = {_name(line) for line in named.splitlines() if line and not line.startswith(("#", "-"))}
    brought = [line for line in frozen.splitlines() if _name(line) not in asked]
    file.write_text("\n".join([named.rstrip(), PINNED, *brought, ""]), "utf-8")


def _name(requirement: str) -> str:
    name = requirement.partition("==")[0].partition("[")[0].partition("@")[0]
    return name.strip().lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    assert sys.argv[1] == "lock", __doc__
    for name in sys.argv[2:]:
        lock(CLIENTS / name)
