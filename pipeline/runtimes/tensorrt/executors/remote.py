"""Engines that another machine builds: the job that is handed on, the script for it, and taking what it built.

A person reads the script first, then runs it. It checks the GPU and the version of TensorRT-LLM, builds every engine
with trtllm-build of that machine or in the container that will serve, and leaves for each a folder:

    engine/           what trtllm-build wrote
    build.log         all that it said
    facts.txt         name=value: artifact, command, version, host, gpu, driver, image, image_digest, seconds
    SHA256SUMS        of all these, as sha256sum writes it; the last file to appear
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.machine.elsewhere import HandoverScript, adopt_commands, copy_result, require_result
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.executors.base import BuildJob, BuildLog, BuiltElsewhere
from pipeline.runtimes.tensorrt.executors.build_log import LogReader
from pipeline.runtimes.tensorrt.executors.builder import check_space
from pipeline.runtimes.tensorrt.executors.docker import CHECKPOINT, WORK
from pipeline.runtimes.tensorrt.executors.docker import ENGINE as ENGINE_MOUNT
from pipeline.store import files, human_bytes

ENGINE, LOG, FACTS, SUMS = "engine", "build.log", "facts.txt", "SHA256SUMS"
_TAIL = 20


@dataclass(frozen=True, slots=True)
class PrintExecutor:
    """See `Executor`: runs nothing here."""

    def check(self, version: str) -> None:
        """Any machine can print a script."""

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:  # noqa: ARG002
        raise BuiltElsewhere(job)


@dataclass(frozen=True, slots=True)
class AdoptExecutor:
    """See `Executor`: takes what was built elsewhere as if it had been built here."""

    folder: Path

    def check(self, version: str) -> None:
        """A folder is checked against its job."""

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        # The store makes an artifact in a folder of its name.
        facts = check_folder(self.folder, job.output.parent.name, job.version)
        expected, actual = shlex.join(job.shown), facts.get("command", "")
        if expected != actual:
            raise UserError(
                f"{self.folder} was built by another command\n  asked: {expected}\n  given: {actual}"
            )
        check_space(job)
        self._verify(progress)
        job.output.mkdir(exist_ok=True)
        copy_result(self.folder / ENGINE, (name for name, _ in files.walk(self.folder / ENGINE)), job.output)
        return self._log(job, facts)

    def _verify(self, progress: Progress) -> None:
        """Raises UserError: Files are missing, changed or unknown."""
        recorded = read_sums(self.folder / SUMS)
        present = dict(files.walk(self.folder))
        present.pop(SUMS)
        faults = [f"missing: {name}" for name in sorted(recorded.keys() - present.keys())]
        faults += [f"not in {SUMS}: {name}" for name in sorted(present.keys() - recorded.keys())]
        faults += [f"not a plain file: {name}" for name, info in present.items() if not files.is_plain(info)]
        both = sorted(recorded.keys() & {name for name, info in present.items() if files.is_plain(info)})
        total = sum(present[name].st_size for name in both)
        with progress.task(f"verify {self.folder}", total, "B") as task:
            hashes = files.sha256_all(self.folder, both, task.advance)
        faults += [f"changed: {name}" for name in both if hashes[name] != recorded[name]]
        if faults:
            raise UserError("\n  ".join([f"{self.folder}: damaged on its way; copy it again", *faults]))

    def _log(self, job: BuildJob, facts: dict[str, str]) -> BuildLog:
        reader = LogReader()
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            reader.feed(line)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return BuildLog(
            executor="adopted",
            command=job.shown,
            lines=tuple(line for line in lines if line.strip())[-_TAIL:],
            warnings=tuple(reader.warnings),
            seconds=float(facts.get("seconds", "0")),
            peak_memory_mib=reader.peak_memory_mib,
            host=facts.get("host", ""),
            image=facts.get("image") or None,
            image_digest=facts.get("image_digest") or None,
            gpu=facts.get("gpu") or None,
            driver=facts.get("driver") or None,
        )


def check_folder(folder: Path, artifact: str, version: str) -> dict[str, str]:
    """The facts of a folder that holds what is to become the artifact.

    Raises:
        UserError: It is no such folder, or one for another artifact.
    """
    missing = [name for name in (ENGINE, LOG, FACTS, SUMS) if not (folder / name).exists()]
    if missing:
        raise UserError(
            f"{folder}: no {', '.join(missing)}: not a folder that a script of --executor print filled, or the "
            "script did not come to its end"
        )
    facts = read_facts(folder)
    if facts.get("version") != version:
        raise UserError(
            f"{folder} was built with TensorRT-LLM {facts.get('version')}, runtime.version is {version}"
        )
    require_result(folder, facts.get("artifact"), artifact, "was built as")
    return facts


def read_facts(folder: Path) -> dict[str, str]:
    """Name -> value of facts.txt."""
    lines = (folder / FACTS).read_text(encoding="utf-8").splitlines()
    return dict(line.partition("=")[::2] for line in lines if "=" in line)


def read_sums(path: Path) -> dict[str, str]:
    """File -> SHA-256, from what `sha256sum` printed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line.strip())
    return {name.removeprefix("*").removeprefix("./"): digest for digest, name in pairs}


_PATHS = 5  # words of the command before the flags: the program and two flags with a path each


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine that another machine is to build."""

    step: str  # "build.target"
    artifact: str  # name of the artifact that it will be
    job: BuildJob

    @property
    def role(self) -> str:
        return self.step.partition(".")[2]

    @property
    def bytes(self) -> str:
        return human_bytes(files.tree_bytes(self.job.checkpoint))

    @property
    def shm_mib(self) -> int:
        return launch_facts(self.job.version).shm_mib(self.job.workers)

    @property
    def flags(self) -> list[str]:
        """One flag a line, with its value."""
        lines: list[list[str]] = []
        for word in self.job.shown[_PATHS:]:
            if word.startswith("--") or not lines:
                lines.append([])
            lines[-1].append(word)
        return [shlex.join(line) for line in lines]


def write_engine_script(
    path: Path, recipe: str, arguments: str, engines: Sequence[RemoteEngine]
) -> HandoverScript:
    """Write the script that builds engines.

    Args:
        path: File of the script.
        recipe: Name of the recipe.
        arguments: How recipe and store are called on the command line, quoted for a shell.
        engines: Engines of one recipe.
    """
    jobs = [engine.job for engine in engines]
    version = jobs[0].version
    roles = " and ".join(f"{engine.role} ({_ranks(engine.job.gpus)})" for engine in engines)
    folder = f"{recipe}-engines"
    results = ((engine.step, f"{folder}/{engine.role}", f"$OUT/{engine.role}") for engine in engines)
    names = tuple(engine.step for engine in engines)
    return HandoverScript(path, names, folder, adopt_commands(arguments, results)).write(
        __package__,
        "script.sh.j2",
        title=f"Engines of {recipe}: {roles}, built by trtllm-build of TensorRT-LLM {version}.",
        done="The engines are in $OUT.",
        engines=engines,
        gpu=jobs[0].gpu,
        sm=jobs[0].sm,
        version=version,
        image=jobs[0].image,
        workers=max(job.workers for job in jobs),
        container_options=launch_facts(version).container_options,
        checkpoint=CHECKPOINT,
        engine=ENGINE_MOUNT,
        work=WORK,
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
