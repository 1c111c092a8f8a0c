"""Facts about the models of a recipe, before or after they are here. Reads small files of local checkpoints.

Two tokenizers are told apart by their files, their special tokens, and the ids that they give to a set of texts, which
is data (`contracts/data/tokenizer_corpus.yaml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.contracts.models import known_model
from pipeline.errors import Fault, InvalidInput
from pipeline.models.adapter import Adapter, read_adapter
from pipeline.models.architecture import FAMILIES, Architecture
from pipeline.models.chat_template import template_sources
from pipeline.models.sizes import ModelSizes, class_of
from pipeline.plan.plan import TARGET
from pipeline.reading import MAX_TOKENIZER_BYTES, UnreadableFile, read_json, read_tokenizer, sha256_of
from pipeline.recipe import HubSource, LocalSource, Recipe
from pipeline.resources import parse_yaml

FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """One tokenizer, as far as it is compared with another."""

    files: Mapping[str, str]  # name -> SHA-256, of the files that decide ids
    special: Mapping[str, int]  # special token -> id
    ids: tuple[tuple[int, ...], ...] | None = (
        None  # of each text of the corpus; None: it cannot be loaded here
    )

    @classmethod
    def read(cls, folder: Path) -> TokenizerFacts | None:
        """Read the tokenizer of a checkpoint's folder.

        Returns:
            None if there is no tokenizer that can be read, which fetching explains.
        """
        try:
            files = {name: sha256_of(folder / name) for name in FILES if (folder / name).is_file()}
        except UnreadableFile:
            return None
        if not files:
            return None
        try:
            data = read_json(folder / "tokenizer.json", most=MAX_TOKENIZER_BYTES)
        except UnreadableFile:
            return cls(files, {})
        return cls(files, _special(data), _ids(folder / "tokenizer.json"))


@cache
def tokenizer_corpus() -> tuple[str, ...]:
    """Texts whose ids are compared."""
    file = resources.files("pipeline.contracts") / "data" / "tokenizer_corpus.yaml"
    return tuple(parse_yaml(file.read_text("utf-8"))["texts"])


def _special(data: Mapping[str, Any]) -> dict[str, int]:
    added = data.get("added_tokens")
    marked = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
    return {
        token["content"]: token["id"]
        for token in marked
        if token.get("special") and isinstance(token.get("content"), str) and "id" in token
    }


def _ids(file: Path) -> tuple[tuple[int, ...], ...] | None:
    try:
        loaded = read_tokenizer(file)
    except (ImportError, UnreadableFile):
        # Without the library, which is an extra, files and special tokens are compared.
        return None
    return tuple(tuple(loaded.encode(text, add_special_tokens=False).ids) for text in tokenizer_corpus())


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one model. None means not known, and rules that need it say nothing."""

    sizes: ModelSizes | None = None
    tokenizer: TokenizerFacts | None = None
    weight_bytes: int | None = None  # of the published weights, all files together
    architecture: str | None = None  # the class that config.json names: "LlamaForCausalLM"; "": it names none
    problem: str = ""  # why its folder is not a checkpoint
    config_faults: tuple[Fault, ...] = ()  # of config.json, if its class is one of ours
    has_tokenizer: bool | None = None  # tokenizer.json
    has_template: bool | None = None  # a chat template
    weight_faults: tuple[str, ...] = ()  # errors of the files of a checkpoint that is quantized already
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # LoRA adapters of the target that are here


def offline_facts(recipe: Recipe) -> dict[str, ModelFacts]:
    """Map roles to what can be known offline: sizes from the contracts, or from the files of a local checkpoint."""
    facts = {
        role: ModelFacts(known_model(checkpoint.source.repo))
        if isinstance(checkpoint.source, HubSource)
        else read_model_facts(checkpoint.source.path)
        for role, checkpoint in recipe.checkpoints.items()
    }
    return {**facts, TARGET: replace(facts[TARGET], adapters=local_adapters(recipe))}


def local_adapters(recipe: Recipe) -> dict[str, Adapter]:
    """Read the LoRA adapters of a recipe that lie in local folders."""
    return {
        name: read_adapter(adapter.source.path)
        for name, adapter in recipe.adapters.items()
        if isinstance(adapter.source, LocalSource)
    }


def offline_sizes(recipe: Recipe) -> dict[str, ModelSizes]:
    """Map roles to sizes, for the models whose sizes can be known offline."""
    return {role: facts.sizes for role, facts in offline_facts(recipe).items() if facts.sizes is not None}


def facts_from_sizes(sizes: Mapping[str, ModelSizes]) -> dict[str, ModelFacts]:
    """Make facts of which only the sizes are known, by role."""
    return {role: ModelFacts(known) for role, known in sizes.items()}


def read_model_facts(folder: Path) -> ModelFacts:
    """Read what the small files of a checkpoint's folder say.

    Returns:
        Facts without anything if config.json cannot be read, which fetching explains.
    """
    try:
        config = read_json(folder / "config.json")
        beside = folder / "hf_quant_config.json"
        quantization = read_json(beside) if beside.exists() else None
    except UnreadableFile:
        return ModelFacts()
    return ModelFacts(
        sizes=ModelSizes.from_config(config, quantization),
        architecture=class_of(config),
        config_faults=_faults(config),
        has_tokenizer=(folder / "tokenizer.json").is_file(),
        has_template=_has_template(folder),
        weight_faults=_weight_faults(folder),
    )


def _weight_faults(folder: Path) -> tuple[str, ...]:
    """Errors by headers and scales, once a run as long as no file changes: large checkpoints take seconds."""
    try:
        files = [
            (file, file.stat()) for end in ("json", "safetensors") for file in sorted(folder.glob(f"*.{end}"))
        ]
    except OSError:
        return ()
    return _judged(folder, tuple((str(file), info.st_size, info.st_mtime_ns) for file, info in files))


@cache
def _judged(folder: Path, _files: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    # Imported here: it takes numpy, which plans of models that are not here do without.
    from pipeline.models.folder import CheckpointFolder
    from pipeline.plan.lint import LocalFiles, lint_files

    try:
        findings = lint_files(LocalFiles(CheckpointFolder(folder)), quantized_only=True)
    except (InvalidInput, UnreadableFile):
        return ()  # fetching explains it
    return tuple(
        str(finding).removeprefix("error: ") for finding in findings or () if finding.severity == "error"
    )


def _has_template(folder: Path) -> bool | None:
    """Whether there is a template for plain conversations; None: a file that may hold it cannot be read."""
    try:
        return "default" in template_sources(folder)
    except UnreadableFile:
        return None


def _faults(config: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Why a model of a class that we read cannot be built."""
    if class_of(config) not in FAMILIES:
        return ()
    try:
        Architecture.from_config(config)
    except InvalidInput as error:
        return error.faults
    return ()
