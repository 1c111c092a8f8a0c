"""An image of a registry, as the Docker of this machine has it: there or not, and by which digest."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from dataclasses import dataclass

from pipeline.errors import ServerError
from pipeline.progress import Progress

_INSPECT_DEADLINE_S = 60
_LAYER = re.compile(r"[0-9a-f]{12}: ")
_DONE = (": Pull complete", ": Already exists")


@dataclass(frozen=True, slots=True)
class Image:
    """What Docker says of an image."""

    name: str  # as it was asked for
    digest: str | None  # "nvcr.io/nvidia/tritonserver@sha256:…"; None for one that came from no registry

    @property
    def reference(self) -> str:
        """By digest where it is known: what is run is then what was looked at."""
        return self.digest or self.name


def find_image(name: str, docker: str = "docker") -> Image | None:
    """The image if this machine has it.

    Raises:
        ServerError: Docker does not answer.
    """
    try:
        done = subprocess.run(
            [docker, "image", "inspect", name],
            capture_output=True,
            text=True,
            timeout=_INSPECT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"docker does not answer: {error}") from None
    if done.returncode:
        if "No such image" in done.stderr or "no such image" in done.stderr:
            return None
        raise ServerError(f"docker does not answer: {done.stderr.strip()}")
    facts = json.loads(done.stdout)[0]
    repository = name.partition("@")[0]
    tag = repository.rpartition("/")[2].partition(":")[2]
    repository = repository.removesuffix(f":{tag}") if tag else repository
    digests = [digest for digest in facts.get("RepoDigests") or [] if digest.startswith(f"{repository}@")]
    return Image(name, digests[0] if digests else None)


def pull_image(name: str, progress: Progress, *, deadline_s: float, docker: str = "docker") -> Image:
    """The image, from its registry.

    Raises:
        ServerError: it cannot be had within the time; the text holds what Docker says.
    """
    progress.say(f"pulling {name} (10 to 20 GB), for at most {deadline_s / 60:.0f} minutes")
    try:
        pull = subprocess.Popen(
            [docker, "pull", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ServerError(f"docker does not answer: {error}") from None
    late = threading.Event()
    timer = threading.Timer(deadline_s, lambda: _end(pull, late))
    timer.start()
    try:
        with pull:
            said = _follow(pull, name, progress)
    except BaseException:
        pull.kill()
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise ServerError(f"{name} could not be pulled within {deadline_s:g} s")
    if pull.returncode:
        raise ServerError(f"{name} cannot be pulled: {' '.join(said[-3:])}")
    found = find_image(name, docker)
    if found is None:
        raise ServerError(f"{name} was pulled, but Docker does not have it")
    return found


def _follow(pull: subprocess.Popen[str], name: str, progress: Progress) -> list[str]:
    """Count the layers as they come; all that is said besides."""
    assert pull.stdout is not None, "it was started with a pipe"
    said = []
    with progress.task(f"pull {name}", unit="layers") as task:
        for line in map(str.strip, pull.stdout):
            if _LAYER.match(line) is None:
                said.append(line)
            elif line.endswith(_DONE):
                task.advance()
    return said


def _end(pull: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    pull.kill()
