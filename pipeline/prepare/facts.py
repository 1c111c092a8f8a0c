"""The facts that planning rests on: all that is read from disk, asked of the Hub, or measured on this machine.

    facts = read_recipe_facts(recipe)                     # local: settings of the runtime, models, calibration set
    sources = resolve_sources(recipe, store)              # commits or hashes of checkpoints
    models = read_models(plan, store)                     # what the checkpoints that are here say
    machine = read_machine(plan, store, devices)          # GPUs, memory, and the disk of the store

What follows (`make_plan`, rules of preflight, memory, forecast, report) computes from these values and reads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.machine.host import read_disk, read_memory
from pipeline.machine.inventory import take
from pipeline.machine.network import HubFile, read_hub
from pipeline.machine.packages import pinned_version, version_of
from pipeline.models.adapter import read_adapter
from pipeline.models.folder import ADAPTER_CONFIG, CONFIG
from pipeline.plan.machine_facts import DiskFacts, MachineFacts
from pipeline.plan.model_facts import (
    ModelFacts,
    TokenizerFacts,
    offline_facts,
    read_model_facts,
)
from pipeline.plan.plan import DRAFT, TARGET, Plan, PlanFacts
from pipeline.plan.preflight import Finding, GeneratedConfig, findings
from pipeline.plan.preflight.context import DatasetFacts
from pipeline.progress import Progress
from pipeline.recipe import AdapterSource, Checkpoint, CpuRuntime, HubSource, LocalSource, Recipe
from pipeline.runtimes import Runtime, runtime_of
from pipeline.sources import ResolvedSource, find_fetched, resolve_checkpoint
from pipeline.sources.dataset import dataset_identity, read_definition
from pipeline.sources.selection import chosen_files
from pipeline.store import Json, Store

# A driver that no process holds open takes long to answer.
_MACHINE_DEADLINE_S = 60.0
# For an answer about access; a hub that is slower is taken to give it.
_ACCESS_DEADLINE_S = 3.0

# Distributions whose versions change what a stage makes. `build` is the runtime's own.
_PACKAGES = {
    "dataset": ("jinja2", "tokenizers"),
    "sensitivity": ("nvidia-modelopt", "torch", "transformers"),
    "calibrate": ("nvidia-modelopt", "torch", "transformers"),
    "evaluate": ("torch",),
}


# Of a recipe: local files only


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """A recipe, its models as far as they are known, and what its runtime will write."""

    recipe: Recipe
    models: Mapping[str, ModelFacts]  # role -> model
    emitted: GeneratedConfig

    def findings(self, machine: MachineFacts | None = None) -> tuple[Finding, ...]:
        """All findings of preflight about the recipe, and about `machine` if one is given. Pure."""
        return findings(self.recipe, self.models, machine, self.emitted)


def read_recipe_facts(recipe: Recipe) -> RecipeFacts:
    """Gather what can be known without network and store."""
    return RecipeFacts(recipe, offline_facts(recipe), read_settings(recipe))


def read_settings(recipe: Recipe) -> GeneratedConfig:
    """Have the runtime work out what it will write, and keep why it refuses to."""
    runtime, refusals = runtime_of(recipe), list[Fault]()
    build = {
        role: _worked_out(partial(runtime.build_settings, recipe, role), refusals)
        for role in recipe.checkpoints
    }
    package = _worked_out(partial(runtime.package_settings, recipe), refusals)
    # Target, draft and package are often refused for the same reason.
    once = tuple({str(fault): fault for fault in refusals}.values())
    return GeneratedConfig(
        {role: settings for role, settings in build.items() if settings}, package, once, _dataset(recipe)
    )


def _worked_out(settings: Callable[[], Mapping[str, Json]], refusals: list[Fault]) -> Mapping[str, Json]:
    try:
        return settings()
    except InvalidInput as error:
        refusals += error.faults
    except UserError as error:
        refusals.append(Fault(str(error)))
    return {}


def _dataset(recipe: Recipe) -> DatasetFacts | None:
    calibration = recipe.quantization.calibration
    if calibration is None:
        return None
    dataset = calibration.dataset
    try:
        if isinstance(dataset, LocalSource):
            return _dataset_file(dataset.path)
        return DatasetFacts(conversations=read_definition(dataset.name).text_column is None)
    except UserError as error:
        return DatasetFacts(str(error))


def _dataset_file(path: Path) -> DatasetFacts:
    """The first line shows which kind of rows a user's file holds."""
    if not path.is_file():
        return DatasetFacts("is a folder, not a file" if path.is_dir() else "there is no such file")
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):  # whoever reads all of it says what is wrong
        return DatasetFacts()
    return DatasetFacts(conversations=isinstance(first, dict) and "messages" in first)


def with_folder_problems(facts: RecipeFacts) -> RecipeFacts:
    """Add why a build would not take the local folders of a recipe."""
    checkpoints = facts.recipe.checkpoints
    models = {
        role: replace(model, problem=_problem(checkpoints[role])) for role, model in facts.models.items()
    }
    return replace(facts, models=models)


def _problem(checkpoint: Checkpoint) -> str:
    source = checkpoint.source
    if not isinstance(source, LocalSource):
        return ""
    try:
        chosen_files(source.path, allow_pickle=checkpoint.allow_pickle)
    except InvalidInput as error:
        return "; ".join(map(str, error.faults))
    except UserError as error:
        return str(error).removeprefix(f"{source}:").removeprefix(str(source)).strip()
    return ""


# Of a build: what its artifacts are made from


def resolve_sources(
    recipe: Recipe, store: Store, *, offline: bool = False, progress: Progress | None = None
) -> dict[str, ResolvedSource]:
    """Map roles to resolved checkpoints: local ones are hashed, and the Hub is asked what a branch is.

    Raises:
        SourceError: A checkpoint does not exist, or the Hub cannot be asked.
        InvalidInput: A local folder is not a checkpoint.
    """
    return {
        role: resolve_checkpoint(
            source, adapter=isinstance(source, AdapterSource), store=store, offline=offline, progress=progress
        )
        for role, source in recipe.sources.items()
    }


def read_plan_facts(
    recipe: Recipe, sources: Mapping[str, ResolvedSource], emitted: GeneratedConfig
) -> PlanFacts:
    """Gather what the keys of a build's artifacts depend on besides the recipe; its golden questions are read.

    Raises:
        InvalidInput: The golden questions have faults by now.
    """
    calibration = recipe.quantization.calibration
    golden = {} if recipe.golden is None else {"golden": recipe.golden.read().document}
    return PlanFacts(
        sources={role: source.identity for role, source in sources.items()},
        dataset={} if calibration is None else dataset_identity(calibration.dataset),
        tools=tool_versions(runtime_of(recipe)),
        build=emitted.build,
        package={**emitted.package, **golden},
    )


def tool_versions(runtime: Runtime) -> dict[str, dict[str, str]]:
    """List the versions of distributions as they enter the keys of artifacts.

    Of a distribution that is not installed it is the version that the extra pins: an artifact that another machine made
    with it is then found here, where nothing but its name is needed. "absent" stands where several versions would do.

    Returns:
        Stage -> distribution -> version.
    """
    wanted = {**_PACKAGES, "build": runtime.packages}
    return {stage: {name: _version(name) for name in names} for stage, names in wanted.items()}


def _version(distribution: str) -> str:
    """Without the local part (2.13.0+cpu), which says from which index a wheel came, and not what it computes on."""
    installed = version_of(distribution)
    if installed is None:
        return pinned_version(distribution) or "absent"
    return installed.partition("+")[0]


# Of checkpoints that are here


def read_models(plan: Plan, store: Store) -> dict[str, ModelFacts]:
    """Read the checkpoints of a plan that are in the store or in local folders; of others, what is known offline.

    Returns:
        Role -> facts.
    """
    known = offline_facts(plan.recipe)
    for role in known:
        folder = _folder(plan, store, role)
        if folder is None:
            continue
        stored_facts = read_model_facts(folder)
        facts = replace(
            stored_facts, sizes=known[role].sizes or stored_facts.sizes, adapters=known[role].adapters
        )
        # Only a draft's and its target's are compared, and to load one takes a while.
        known[role] = replace(facts, tokenizer=_tokenizer(folder)) if DRAFT in known else facts
    adapters = {name: _folder(plan, store, f"adapter.{name}") for name in plan.recipe.adapters}
    read = {name: read_adapter(folder) for name, folder in adapters.items() if folder is not None}
    known[TARGET] = replace(known[TARGET], adapters=read)
    return known


def _folder(plan: Plan, store: Store, role: str) -> Path | None:
    """Where the checkpoint is, if it is anywhere here."""
    artifact = store.find(plan[f"fetch.{role}"].key)
    if artifact is not None:
        return artifact.path
    source = plan.recipe.sources[role].source
    return source.path if isinstance(source, LocalSource) else None


@cache
def _tokenizer(folder: Path) -> TokenizerFacts | None:
    """Artifacts do not change, and a local checkpoint is read once a run."""
    return TokenizerFacts.read(folder)


# Of the Hub


def hub_files(recipe: Recipe) -> Iterator[HubFile]:
    """Yield the file without which a repository of the Hub is no checkpoint, or no adapter, of all that is fetched."""
    for source in recipe.sources.values():
        if isinstance(source.source, HubSource):
            name = ADAPTER_CONFIG if isinstance(source, AdapterSource) else CONFIG
            yield source.source.repo, source.revision, name


def read_access(recipe: Recipe, store: Store) -> MachineFacts | None:
    """Ask the Hub for the checkpoints and adapters that the store lacks, within a few seconds.

    Returns:
        Facts with nothing but the HTTP status of each repository; None: there is nothing to ask for.
    """
    missing = [file for file in hub_files(recipe) if find_fetched(HubSource(file[0]), file[1], store) is None]
    if not missing:
        return None
    return MachineFacts(hub=read_hub(missing, deadline_s=_ACCESS_DEADLINE_S).repositories)


# Of this machine


def read_machine(plan: Plan, store: Store, devices: tuple[int, ...]) -> MachineFacts:
    """GPUs (`devices`; all if empty), memory, and the disk of the store with what a plan has there already."""
    held_bytes = sum(
        artifact.manifest.total_bytes for step in plan if (artifact := store.find(step.key)) is not None
    )
    disk = read_disk(store.root)
    free = None if disk.problem else DiskFacts(disk.folder, disk.device, disk.free_bytes, held_bytes)
    return replace(_hardware(devices), store=free)


@cache
def _hardware(devices: tuple[int, ...]) -> MachineFacts:
    """Memory and GPUs, once a run. Where the driver cannot be asked, the builder itself will say so."""
    facts = take(only=("memory", "gpus"), deadline_s=_MACHINE_DEADLINE_S).facts(devices)
    return replace(facts, gpus=facts.gpus or None)


def serving_memory_bytes(recipe: Recipe) -> int | None:
    """Memory of this machine, where it is what serves the recipe (`cpu`); None for GPUs."""
    return read_memory().total_bytes if isinstance(recipe.runtime, CpuRuntime) else None
