"""The shell script that builds engines on another machine: read by a person first, then run.

It checks the GPU and the version of TensorRT-LLM, builds every engine with trtllm-build of that machine or in the
container that will serve, and leaves for each the folder that `elsewhere.Adopted` takes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from pipeline.contracts.launching import launching
from pipeline.runtimes.tensorrt.executors.docker import CHECKPOINT, ENGINE, WORK
from pipeline.runtimes.tensorrt.executors.job import BuildJob
from pipeline.store import files, human_bytes

_PATHS = 5  # words of the command before the flags: the program and two flags with a path each


@dataclass(frozen=True, slots=True)
class Handover:
    """An engine that another machine is to build."""

    step: str  # "build.target"
    artifact: str  # name of the artifact that it will be
    job: BuildJob

    @property
    def role(self) -> str:
        return self.step.partition(".")[2]

    @property
    def variable(self) -> str:
        return f"{self.role.upper()}_CHECKPOINT"

    @property
    def checkpoint(self) -> str:
        return shlex.quote(str(self.job.checkpoint))

    @property
    def bytes(self) -> str:
        return human_bytes(files.tree_bytes(self.job.checkpoint))

    @property
    def shown(self) -> str:
        return shlex.quote(shlex.join(self.job.shown))

    @property
    def shm_mib(self) -> int:
        return launching(self.job.version).shm_mib(self.job.workers)

    @property
    def flags(self) -> list[str]:
        """One flag a line, with its value."""
        lines: list[list[str]] = []
        for word in self.job.shown[_PATHS:]:
            if word.startswith("--") or not lines:
                lines.append([])
            lines[-1].append(word)
        return [shlex.join(line) for line in lines]


def render(recipe: str, words: str, engines: Sequence[Handover]) -> str:
    """The script. `recipe`: its name; `words`: how the recipe is called on the command line, quoted for a shell."""
    import jinja2

    jobs = [engine.job for engine in engines]
    version = jobs[0].version
    environment = jinja2.Environment(
        variable_start_string="@(",  # shells and Docker use braces of their own
        variable_end_string=")@",
        comment_start_string="@#",
        comment_end_string="#@",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = resources.files(__package__) / "script.sh.j2"
    roles = " and ".join(f"{engine.role} ({_ranks(engine.job.gpus)})" for engine in engines)
    return environment.from_string(template.read_text("utf-8")).render(
        title=f"Engines of {recipe}: {roles}, built by trtllm-build of TensorRT-LLM {version}.",
        recipe=recipe,
        words=words,
        quoted_words=shlex.quote(words),
        engines=engines,
        folder=folder_name(recipe),
        gpu=jobs[0].gpu,
        sm=jobs[0].sm,
        version=version,
        image=jobs[0].image,
        workers=max(job.workers for job in jobs),
        container_options=shlex.join(launching(version).container_options),
        checkpoint=CHECKPOINT,
        engine=ENGINE,
        work=WORK,
    )


def folder_name(recipe: str) -> str:
    """Of the folder in which the script leaves one folder for each engine."""
    return f"{recipe}-engines"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
