"""Steps of a `docker build`, run in the image: python3 -m pipeline.machine.image_build prepare|check FOLDER

`prepare` writes what pip is to install for our models, and what it may not change. `check` ends the build if packages
no longer agree that did before, if a module that the models import does not load, or if Triton lacks a shared library.
There is no GPU then: imports that may fail for that alone are data (`contracts/data/images.yaml`).

The image's own Python runs this, in which Triton runs the models; pipeline is read out of its wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.contracts.images import FreedPin, freed_pins, image_facts
from pipeline.contracts.version_range import holds
from pipeline.errors import ServerError
from pipeline.machine.packages import version_of

CONSTRAINTS, REQUIREMENTS, _CONFLICTS = "constraints.txt", "requirements.txt", "conflicts.txt"
_TENSORRT_LLM = "tensorrt-llm"
_DEADLINE_S = 900.0


def pip_files(listed: str) -> dict[str, str]:
    """Make pip's constraints and requirements, by file name, from what `pip list --format=freeze` printed."""
    present = _versions(listed)
    freed = _freed(present)
    kept = [f"{name}=={version}" for name, version in present.items() if name not in freed]
    wanted = [*image_facts()["installs"], *(f"{pin.package}{pin.wants}" for pin in freed.values())]
    return {CONSTRAINTS: "\n".join([*kept, ""]), REQUIREMENTS: "\n".join([*wanted, ""])}


def _versions(listed: str) -> dict[str, str]:
    pairs = (line.partition("==") for line in listed.splitlines() if "==" in line)
    return {canonicalize_name(name): version.strip() for name, _, version in pairs}


def _freed(present: Mapping[str, str]) -> dict[str, FreedPin]:
    """Pins that are in the way, by package."""
    if _TENSORRT_LLM not in present:
        return {}
    pins = {canonicalize_name(pin.package): pin for pin in freed_pins(present[_TENSORRT_LLM])}
    return {
        name: pin
        for name, pin in pins.items()
        if name in present and Version(present[name]) < Version(pin.below)
    }


def new_conflicts(before: str, after: str) -> list[str]:
    """List what `pip check` finds that it did not find before: what NVIDIA left open stays so."""
    return sorted(set(_conflicts(after)) - set(_conflicts(before)))


def _conflicts(text: str) -> Iterable[str]:
    return (line.strip() for line in text.splitlines() if " has requirement " in line or " requires " in line)


def failed_import(entry: Mapping[str, Any], output: str) -> str | None:
    """Say why the output of an import ends a build; None where it may fail without a GPU, and failed for that."""
    lines = output.strip().splitlines()
    last = lines[-1].strip() if lines else "it ended without a word"
    missing = (fact["text"] for fact in image_facts()["without_gpu"])
    if entry.get("gpu") and any(text in output for text in missing):
        return None
    return f"{entry['module']}: {last}"


def missing_libraries(output: str) -> list[str]:
    """List the shared libraries that `ldd` did not find, but those of the driver."""
    of_driver = {fact["text"] for fact in image_facts()["without_gpu"]}
    return sorted(set(re.findall(r"(\S+) => not found", output)) - of_driver)


def _check(folder: Path) -> list[str]:
    """List everything that is wrong."""
    tensorrt_llm = version_of(_TENSORRT_LLM) or "0"
    wrong = new_conflicts(
        (folder / _CONFLICTS).read_text("utf-8"), _run(sys.executable, "-m", "pip", "check").stdout
    )
    for entry in image_facts()["imports"]:
        if not holds(tensorrt_llm, entry.get("since"), None):
            continue
        name = entry.get("name")
        code = f"from {entry['module']} import {name}" if name else f"import {entry['module']}"
        done = _run(sys.executable, "-c", code)
        if done.returncode:
            reason = failed_import(entry, done.stdout + done.stderr)
            if reason is not None:
                wrong.append(f"does not load: {reason}")
                continue
        print(f"{'loads' if not done.returncode else 'needs a GPU'}: {entry['module']}")
    for file in image_facts()["libraries"]:
        if not Path(file).is_file():
            wrong.append(f"is not there: {file}")
            continue
        wrong += [f"{file} lacks {library}" for library in missing_libraries(_run("ldd", file).stdout)]
    return wrong


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the image; pipeline's own modules are not on its path."""
    own = str(Path(__file__).parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != own]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )


def main(arguments: list[str]) -> int:
    """Run one step; `FOLDER` is the same for both."""
    step, folder = arguments[0], Path(arguments[1])
    if step == "check":
        wrong = _check(folder)
        for line in wrong:
            print(line, file=sys.stderr)
        return 1 if wrong else 0
    listed = _run(sys.executable, "-m", "pip", "list", "--format=freeze")
    if listed.returncode:
        raise ServerError(f"pip does not answer: {listed.stderr.strip()}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pip_files(listed.stdout).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / _CONFLICTS).write_text(_run(sys.executable, "-m", "pip", "check").stdout, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
