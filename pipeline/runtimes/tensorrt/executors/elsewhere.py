"""Jobs for another machine, and the way back: `Printed` hands a job on, `Adopted` takes its result.

What comes back is the folder that the printed script (`script`) fills for one engine:

    engine/           what trtllm-build wrote
    build.log         all that it said
    facts.txt         name=value: artifact, command, version, host, gpu, driver, image, image_digest, seconds
    SHA256SUMS        of all these, as sha256sum writes it; the last file to appear
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.build_log import LogReader
from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.reading import open_file
from pipeline.runtimes.base import BuiltElsewhere
from pipeline.runtimes.tensorrt.executors.base import BuildLog
from pipeline.runtimes.tensorrt.executors.builder import check_space
from pipeline.runtimes.tensorrt.executors.job import BuildJob
from pipeline.store import files

ENGINE, LOG, FACTS, SUMS = "engine", "build.log", "facts.txt", "SHA256SUMS"
_TAIL = 20


@dataclass(frozen=True, slots=True)
class Printed:
    """See `Executor`: runs nothing here."""

    def check(self, version: str) -> None:
        """Any machine can print a script."""

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:  # noqa: ARG002
        raise BuiltElsewhere(job)


@dataclass(frozen=True, slots=True)
class Adopted:
    """See `Executor`: takes what was built elsewhere as if it had been built here."""

    folder: Path

    def check(self, version: str) -> None:
        """A folder is checked against its job."""

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        # The store makes an artifact in a folder of its name.
        facts = check_folder(self.folder, job.output.parent.name, job.version)
        asked, given = shlex.join(job.shown), facts.get("command", "")
        if asked != given:
            raise UserError(f"{self.folder} was built by another command\n  asked: {asked}\n  given: {given}")
        check_space(job)
        self._verify(progress)
        job.output.mkdir(exist_ok=True)
        for name, _ in files.walk(self.folder / ENGINE):
            target = job.output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_file(self.folder / ENGINE / name, follow=False) as source:
                # Never a link: the folder stays its owner's.
                if not files.clone(source, target):
                    files.copy(source, target)
        return self._log(job, facts)

    def _verify(self, progress: Progress) -> None:
        """Raises UserError: files are missing, changed or unknown."""
        recorded = read_sums(self.folder / SUMS)
        found = dict(files.walk(self.folder))
        found.pop(SUMS)
        faults = [f"missing: {name}" for name in sorted(recorded.keys() - found.keys())]
        faults += [f"not in {SUMS}: {name}" for name in sorted(found.keys() - recorded.keys())]
        faults += [f"not a plain file: {name}" for name, info in found.items() if not files.is_plain(info)]
        both = sorted(recorded.keys() & {name for name, info in found.items() if files.is_plain(info)})
        total = sum(found[name].st_size for name in both)
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
        UserError: it is no such folder, or one for something else.
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
    if facts.get("artifact") != artifact:
        raise UserError(
            f"{folder} was built as {facts.get('artifact')}, what is missing is {artifact}: it is of another step, or "
            "the recipe, a checkpoint or the tools have changed since; then print the script again"
        )
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
