"""Run all steps of an acceptance check, failed ones before notwithstanding, and rewrite the report after each."""

from __future__ import annotations

import os
import platform
import shlex
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.bench.accept.answering import (
    answers,
    cancel,
    draft,
    gate,
    golden,
    stream,
    undrafted,
    upstream,
)
from pipeline.bench.accept.making import build, find, latency, load, memory, metrics, plan, serve, stop
from pipeline.bench.accept.report import AcceptanceCheck, AcceptanceReport, AcceptanceStep
from pipeline.bench.accept.settings import AcceptSettings
from pipeline.bench.accept.state import AcceptanceRun, Checks
from pipeline.client import ClientError
from pipeline.errors import Fault, InvalidInput, PipelineError
from pipeline.machine.inventory import Inventory, take
from pipeline.machine.packages import version_of
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.store import Store, human_bytes
from pipeline.triton.deployment import Deployment

_MACHINE_S = 60.0  # a driver that no process holds open takes long to answer
_PROBES = ("gpus", "memory", "processors", "triton", "software")
_PACKAGES = (
    "torch",
    "nvidia-modelopt",
    "transformers",
    "openvino",
    "nvidia-pytriton",
    "tritonclient",
    "tokenizers",
)
# Variables by which NVIDIA's containers tell what they are.
_CONTAINER = ("NVIDIA_TRITON_SERVER_VERSION", "TRITON_SERVER_VERSION", "NVIDIA_BUILD_ID", "CUDA_VERSION")


@dataclass(frozen=True, slots=True)
class AcceptanceStepPlan:
    """Function of a step, and whether it needs the server."""

    run: Callable[[AcceptanceRun], Checks]
    serving: bool = True

    @property
    def name(self) -> str:
        """Name as `--skip` takes it."""
        return self.run.__name__

    @property
    def title(self) -> str:
        """Purpose, in a sentence."""
        return (self.run.__doc__ or "").splitlines()[0].rstrip(".")


STEPS = (
    AcceptanceStepPlan(plan, serving=False),
    AcceptanceStepPlan(build, serving=False),
    AcceptanceStepPlan(serve, serving=False),
    *map(
        AcceptanceStepPlan,
        (stream, golden, upstream, draft, answers, cancel, latency, load, memory, metrics, stop),
    ),
    AcceptanceStepPlan(gate, serving=False),
    AcceptanceStepPlan(undrafted, serving=False),
)
SKIPPABLE = tuple(step.name for step in STEPS if step.name not in ("plan", "serve", "stop"))


def run_faults(recipe: Recipe, settings: AcceptSettings) -> Iterator[Fault]:
    """Yield steps that cannot be skipped, and lengths beyond the recipe's limits."""
    for name in settings.skip:
        if name not in SKIPPABLE:
            fix = f"there are {', '.join(SKIPPABLE)}"
            yield Fault("is not a step that can be skipped", key="--skip", value=name, fix=fix)
    for name, limit in (("prompt_tokens", "max_input_tokens"), ("output_tokens", "max_output_tokens")):
        length, most = getattr(settings.load, name), getattr(recipe.limits, limit)
        if length is not None and length > most:
            problem = f"is more than limits.{limit}, which is {most}"
            yield Fault(problem, where="--load", key=name, value=length)


def accept(
    recipe: Recipe,
    store: Store,
    settings: AcceptSettings,
    file: Path,
    *,
    progress: Progress,
    allowed: frozenset[str] = frozenset(),
) -> AcceptanceReport:
    """Build, serve and check a recipe on this machine, and write the report.

    Args:
        settings: Lengths, rounds, deadlines, steps that are left out or taken over.
        file: `accept-….json`; its twin for people ends in .md.

    Raises:
        InvalidInput: The earlier report cannot be read, or belongs to another recipe.
        OSError: The report cannot be written.
    """
    skip = settings.skip
    earlier = None if settings.resume is None else AcceptanceReport.read(settings.resume)
    if earlier is not None and earlier.recipe != recipe.name:
        raise InvalidInput("--resume", [Fault(f"is the report of {earlier.recipe}, not of {recipe.name}")])
    inventory = take(store.root, only=_PROBES, deadline_s=_MACHINE_S)
    command = ("pipeline", "accept", *recipe.argv, *(f"--skip={name}" for name in sorted(skip)))
    report = AcceptanceReport(
        recipe=recipe.name,
        command=shlex.join(command),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=recipe.model_dump(mode="json", exclude_defaults=True),
        machine=machine_facts(inventory),
        versions=versions(inventory),
        package="",
        steps=(),
    )
    report.write(file)
    with tempfile.TemporaryDirectory(prefix="pipeline-accept-") as logs:
        run = AcceptanceRun(recipe, store, settings, progress, Path(logs), allowed)
        try:
            for step in STEPS:
                made = _made(step, run, skip, earlier)
                report = replace(report, steps=(*report.steps, made))
                if run.package is not None and not report.package:
                    packaged = _package_versions(run.deployment)
                    report = replace(
                        report, package=run.deployment.digest, versions=report.versions | packaged
                    )
                report.write(file)
                _report(made, progress)
        finally:
            if run.served is not None:
                run.served.stop()
    report = replace(report, finished=True)
    report.write(file)
    return report


def _made(
    step: AcceptanceStepPlan, run: AcceptanceRun, skip: Collection[str], earlier: AcceptanceReport | None
) -> AcceptanceStep:
    """Run one step, or record why it is not run."""
    if step.name in skip and step.name != "build":
        return AcceptanceStep(
            step.name, step.title, (AcceptanceCheck(step.name, "skipped", note="by --skip"),)
        )
    if step.serving and (taken := _taken_over(step, run, earlier)) is not None:
        return taken
    if step.serving and run.served is None:
        note = "there is no server: see the step serve"
        return AcceptanceStep(step.name, step.title, (AcceptanceCheck(step.name, "skipped", note=note),))
    run.progress.say(f"{step.name}: {step.title}")
    run.figures = {}
    checks: list[AcceptanceCheck] = []
    log: list[str] = []
    began = time.monotonic()
    try:
        # A check that was made before something broke is kept.
        for check in (find if step.name in skip else step.run)(run):
            checks.append(check)
    except Exception as error:
        checks.append(AcceptanceCheck(step.name, "failed", "", type(error).__name__, note=_why(error)))
        if not isinstance(error, PipelineError | ClientError):
            log += traceback.format_exc().splitlines()[-12:]
    if any(check.outcome == "failed" for check in checks) and run.served is not None:
        log += run.served.log_tail()
    return AcceptanceStep(
        step.name,
        step.title,
        tuple(checks),
        round(time.monotonic() - began, 2),
        dict(run.figures),
        tuple(log),
    )


def _taken_over(
    step: AcceptanceStepPlan, run: AcceptanceRun, earlier: AcceptanceReport | None
) -> AcceptanceStep | None:
    """Take the step of an earlier report, if nothing of it has to be done again."""
    if earlier is None or run.package is None or run.deployment.digest != earlier.package:
        return None
    if step.name in ("draft", "answers", "stop"):
        # Later steps need the answers of these, and the server has to end.
        return None
    taken = next((finished for finished in earlier.steps if finished.name == step.name), None)
    if taken is None or taken.failed or taken.outcome == "skipped":
        return None
    return replace(taken, resumed=True)


def _why(error: BaseException) -> str:
    """Text of an error; of a group, that of its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _report(step: AcceptanceStep, progress: Progress) -> None:
    for check in step.checks:
        deviation = check.deviation_percent
        off = "" if deviation is None else f" ({deviation:+.1f} % off the plan)"
        expected = f", expected {check.expected}" if check.expected else ""
        note = f" — {check.note}" if check.note and check.outcome in ("failed", "skipped") else ""
        progress.say(f"  {check.outcome:<9} {check.name}: {check.measured}{expected}{off}{note}")


def machine_facts(inventory: Inventory) -> dict[str, Any]:
    """Describe the machine for a reader of the report, without anything that identifies it."""
    gpus = inventory.gpus.gpus if inventory.gpus is not None else ()
    named = [f"{gpu.name}, {gpu.memory_mib} MiB, compute capability {gpu.capability}" for gpu in gpus]
    inside = [f"{name}={value}" for name in _CONTAINER if (value := os.environ.get(name))]
    return {
        "GPUs": named or [inventory.gpus.problem if inventory.gpus is not None else "not known"],
        "driver": ", ".join(sorted({gpu.driver for gpu in gpus})) or "none",
        "CUDA of the driver": (inventory.gpus.cuda if inventory.gpus is not None else None) or "not known",
        "container": ", ".join(inside) or ("not NVIDIA's" if Path("/.dockerenv").exists() else "none"),
        "processor cores": inventory.processors.cores if inventory.processors is not None else "not known",
        "memory": human_bytes(inventory.memory.total_bytes) if inventory.memory is not None else "not known",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }


def _package_versions(deployment: Deployment) -> dict[str, str]:
    """Versions that the package was made with, and the image that serves it."""
    made = {f"{name} (package)": version for name, version in deployment.versions.items()}
    return made | ({} if deployment.requirements is None else {"image": deployment.requirements.image})


def versions(inventory: Inventory) -> dict[str, str]:
    """List versions of the software that is installed."""
    installed = {"pipeline": __version__, "Python": platform.python_version()}
    if inventory.software is not None and inventory.software.tensorrt_llm:
        installed["TensorRT-LLM"] = inventory.software.tensorrt_llm
    if inventory.software is not None and inventory.software.tensorrt:
        installed["TensorRT"] = inventory.software.tensorrt
    if inventory.triton is not None and inventory.triton.version:
        installed["Triton"] = inventory.triton.version
    return installed | {name: version for name in _PACKAGES if (version := version_of(name))}
