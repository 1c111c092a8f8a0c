"""Sizes and published weights of models that may not be here: by config.json and headers, local or on the Hub.

Known models need neither network nor disk (`contracts.models`). Of the Hub only config.json and the first kilobytes of
each safetensors file are asked for; no weights are downloaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import PydanticCustomError

from pipeline.contracts.models import known_model
from pipeline.contracts.support import architectures
from pipeline.errors import CheckpointError, Fault, InvalidInput, SourceError, UserError
from pipeline.extras import missing
from pipeline.models.architecture import FAMILIES
from pipeline.models.folder import CheckpointFolder
from pipeline.models.header import WeightTotals, read_totals
from pipeline.models.sizes import ModelSizes, class_of, config_faults, unknown_parts
from pipeline.plan.plan import TARGET
from pipeline.progress import Progress, Silent
from pipeline.reading import UnreadableFile, parse_json
from pipeline.recipe import Checkpoint, HubSource, Recipe
from pipeline.recipe.source import parse_source
from pipeline.sources import find_fetched, is_offline
from pipeline.store import Store

_CONFIG, _QUANTIZATION = "config.json", "hf_quant_config.json"
_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """Facts of config.json, hf_quant_config.json and the headers of a model's files."""

    sizes: ModelSizes | None  # None: config.json names something that is not known
    origin: str  # "known", a folder, or "hub"
    architecture: str  # the class that config.json names: "LlamaForCausalLM"; "": none
    totals: WeightTotals | None = None  # by the headers; None: they were not read
    unknown: str = ""  # what is not known, and what is


def probe_models(
    recipe: Recipe, store: Store, *, offline: bool = False, progress: Progress | None = None
) -> dict[str, ModelProbe]:
    """Read what can be known of a recipe's models without their weights.

    Known models need neither network nor disk. Others are read in their local folder, in the store, or on the Hub.

    Returns:
        Role -> model; offline, models may be left out.

    Raises:
        InvalidInput: A config.json cannot be read; with every fault of all of them.
        SourceError: The Hub does not give a model.
    """
    probes: dict[str, ModelProbe] = {}
    faults: list[Fault] = []
    for role, checkpoint in recipe.checkpoints.items():
        try:
            probe = _probe(checkpoint, store, offline or is_offline(), progress or Silent())
        except InvalidInput as error:
            faults += error.faults
            continue
        if probe is not None:
            probes[role] = probe
    if faults:
        raise InvalidInput(f"{recipe.name}: models that cannot be read", faults)
    return probes


def find_architecture(model: str, store: Store) -> tuple[str, str]:
    """Find the class that a model's config.json names, and the format that most of its weights are published in.

    Args:
        model: "hf:ORG/NAME", "local:FOLDER", or the class itself.

    Raises:
        UserError: It is neither, or names no class; the text says which classes are like it.
        SourceError: The Hub does not give it.
    """
    if ":" not in model:
        known = (*architectures(), *FAMILIES)
        if model in known or model.isidentifier():
            return model, "none"
        near = difflib.get_close_matches(model, known, n=3, cutoff=0.4) or ["LlamaForCausalLM"]
        raise UserError(
            f"{model}: write hf:ORG/NAME, local:FOLDER, or the class that config.json names, such as {', '.join(near)}"
        )
    limits = dict.fromkeys(("max_input_tokens", "max_output_tokens", "max_concurrency"), 1)
    try:
        source = parse_source(model)
        recipe = Recipe.model_validate({"name": "x", "model": {"source": str(source)}, "limits": limits})
        probe = probe_models(recipe, store).get(TARGET)
    except PydanticCustomError as error:
        raise UserError(f"{model}: {error.message()}; {(error.context or {}).get('fix', '')}") from None
    except InvalidInput as error:
        raise InvalidInput(model, error.faults) from None
    if probe is None or not probe.architecture:
        raise UserError(f"{model}: no class is known of it; name the one of its config.json")
    return probe.architecture, probe.sizes.stored if probe.sizes is not None else "none"


def _probe(checkpoint: Checkpoint, store: Store, offline: bool, progress: Progress) -> ModelProbe | None:
    source = checkpoint.source
    if not isinstance(source, HubSource):
        return _in_folder(source.path)
    known = known_model(source.repo)
    if known is not None:
        return ModelProbe(known, "known", known.architecture)
    fetched = find_fetched(source, checkpoint.revision, store)
    if fetched is not None:
        return _in_folder(fetched)
    return None if offline else _on_hub(source, checkpoint.revision, progress)


def _in_folder(folder: Path) -> ModelProbe:
    checkpoint = CheckpointFolder(folder)
    try:
        content = checkpoint.read(_CONFIG)
        beside = checkpoint.read(_QUANTIZATION) if _QUANTIZATION in checkpoint.names else None
    except UnreadableFile as error:
        raise InvalidInput(str(folder), [error.fault]) from error

    def start_of(name: str, size: int) -> bytes:
        with checkpoint.open(name) as stream:
            return stream.read(size)

    totals = _totals(_weights(checkpoint.names), start_of, str(folder))
    return replace(_read(content, beside, str(folder)), origin=str(folder), totals=totals)


def _on_hub(source: HubSource, revision: str | None, progress: Progress) -> ModelProbe:
    try:
        from pipeline.sources.hub import HubClient
    except ImportError as error:
        raise missing(f"{source}: the Hub", error, "hub") from error
    hub = HubClient.from_environment()
    commit = hub.commit_of(source.repo, revision, progress.say)

    def start_of(name: str, size: int) -> bytes:
        return hub.start_of(source.repo, commit, name, size, progress.say)

    config = start_of(_CONFIG, _CONFIG_BYTES)
    names = hub.files(source.repo, commit, progress.say)
    beside = start_of(_QUANTIZATION, _CONFIG_BYTES) if _QUANTIZATION in names else None
    probe = _read(config, beside, str(source))
    return replace(probe, totals=_totals(_weights(names), start_of, str(source)))


def _weights(names: Iterable[str]) -> list[str]:
    """The files that transformers reads; some repositories hold the same weights in another layout, too."""
    files = sorted(name for name in names if name.endswith(".safetensors"))
    return [name for name in files if name.startswith("model")] or files


def _totals(names: list[str], start_of: Callable[[str, int], bytes], where: str) -> WeightTotals | None:
    try:
        return read_totals(names, start_of) if names else None
    except CheckpointError as error:
        raise SourceError(f"{where}: {error}") from error


def _read(content: bytes, beside: bytes | None, where: str) -> ModelProbe:
    """Sizes and class by a config.json and the statement of the quantization beside it."""
    try:
        config = parse_json(content, f"{where}/{_CONFIG}")
        quantization = None if beside is None else parse_json(beside, f"{where}/{_QUANTIZATION}")
    except UnreadableFile as error:
        raise InvalidInput(where, [error.fault]) from error
    architecture = class_of(config)
    if architecture and (unknown := unknown_parts(config, quantization)):
        return ModelProbe(None, "hub", architecture, unknown="; ".join(map(str, unknown)))
    if faults := config_faults(config, quantization):
        raise InvalidInput(where, [replace(fault, where=f"{where}/{_CONFIG}") for fault in faults])
    return ModelProbe(ModelSizes.from_config(config, quantization), "hub", architecture)
