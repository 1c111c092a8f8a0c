"""A Triton model repository on disk, for the `cpu` runtime.

    model_repository/
      preprocessing/      config.pbtxt, 1/{model.py, shared/, tokenizer/}
      tensorrt_llm/       config.pbtxt, 1/{model.py, …, shared/, engine/, target/, draft/}
      postprocessing/     config.pbtxt, 1/{model.py, shared/, tokenizer/}
      ensemble/           config.pbtxt, 1/
      tensorrt_llm_bls/   config.pbtxt, 1/{model.py, …, shared/, tokenizer/}
    deployment.json

Each model's folder holds all that it needs, and no path in it is absolute: the repository can be moved or copied.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import __version__, resources
from pipeline.errors import StageError
from pipeline.progress import Progress
from pipeline.triton.config import ModelConfig
from pipeline.triton.cpu_models import (
    CONTRACT,
    DRAFT,
    ENTRY,
    TARGET,
    TOKENIZER,
    VERSION,
    CpuSettings,
    cpu_models,
)
from pipeline.triton.deployment import REPOSITORY, Deployment, DeploymentLimits
from pipeline.triton.pbtxt import checked, parse
from pipeline.triton.token_ids import token_ids

# What travels with a model of the tokenizer's files: what encodes, and what makes prompts from messages.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_ENGINE_FILES = ("openvino_model.xml", "openvino_model.bin", "engine.json")
_WITH_TOKENIZER = ("preprocessing", "postprocessing", "tensorrt_llm_bls")


@dataclass(frozen=True, slots=True)
class CpuSources:
    """The folders that a repository is made from."""

    target: Path  # openvino_model.xml and .bin, engine.json
    draft: Path | None
    tokenizer: Path
    engine: Path  # the Python package of the engine


def package_cpu(
    name: str, settings: CpuSettings, sources: CpuSources, into: Path, progress: Progress
) -> dict[str, Any]:
    """Make `into/model_repository` and `into/deployment.json`; return the facts of them.

    Raises:
        StageError: a source lacks a file, or what was written does not read back as it was meant.
    """
    for folder in filter(None, (sources.target, sources.draft)):
        _require(folder, *_ENGINE_FILES)
    facts = json.loads((sources.target / "engine.json").read_text(encoding="utf-8"))
    ids = token_ids(sources.tokenizer, facts["vocab_size"])
    configs = cpu_models(settings, ids)
    repository = into / REPOSITORY
    for config in configs:
        _write_model(config, repository / config.name, sources)
    verify(repository, configs)
    digest = content_digest(repository)
    deployment = Deployment(
        name=name,
        runtime="cpu",
        entry_model=ENTRY,
        models=tuple(config.name for config in configs),
        limits=DeploymentLimits(
            max_input_tokens=settings.max_input_tokens,
            max_output_tokens=settings.max_output_tokens,
            max_concurrency=settings.max_concurrency,
            max_draft_tokens=settings.max_draft_tokens,
        ),
        tokenizer_dir=f"{REPOSITORY}/preprocessing/{TOKENIZER}",
        end_id=ids.end,
        pad_id=ids.pad,
        stop_token_ids=ids.stop,
        digest=digest,
        versions={"pipeline": __version__, "tensors": CONTRACT, **dict(_versions("openvino", "tokenizers"))},
    )
    deployment.save(into)
    files = [path for path in repository.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    progress.say(
        f"Triton model repository of {len(configs)} models, {len(files)} files, {size / 2**20:.1f} MiB"
    )
    return {
        "models": list(deployment.models),
        "entry_model": ENTRY,
        "files": len(files),
        "bytes": size,
        "digest": digest,
        "end_id": ids.end,
        "stop_token_ids": list(ids.stop),
    }


def verify(repository: Path, configs: Sequence[ModelConfig]) -> None:
    """Read everything back: each config as it was meant, each file that it names, each source that Python can read.

    Raises:
        StageError: something is missing or different.
    """
    for config in configs:
        folder = repository / config.name
        if parse((folder / "config.pbtxt").read_text(encoding="utf-8")) != config:
            raise StageError(f"{folder}/config.pbtxt does not say what was meant")
        for name, value in config.parameters.items():
            if name.endswith(("_path", "_dir")) and not (folder / value).is_dir():
                raise StageError(f"{config.name}: parameter {name} = {value}: no such folder")
        if config.backend == "python":
            for source in (folder / VERSION).rglob("*.py"):
                ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
            if not (folder / VERSION / "model.py").is_file():
                raise StageError(f"{config.name}: no {VERSION}/model.py")
    links = [path for path in repository.rglob("*") if path.is_symlink()]
    if links:
        raise StageError(f"{links[0]}: a repository that can be moved has no symbolic links")


def content_digest(*folders: Path) -> str:
    """SHA-256 (hex) over the relative names and contents of all files in the folders, byte-code left out."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _write_model(config: ModelConfig, folder: Path, sources: CpuSources) -> None:
    version = folder / VERSION
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(checked(config), encoding="utf-8")
    if config.backend != "python":
        (version / ".keep").touch()  # Triton wants the folder, and many tools do not copy an empty one
        return
    models = resources.folder("model_repo")
    _copy_sources(models / config.name / VERSION, version)
    _copy_sources(models / "shared", version / "shared")
    if config.name in _WITH_TOKENIZER:
        _copy_tokenizer(sources.tokenizer, folder / TOKENIZER)
    if config.name == "tensorrt_llm":
        _copy_sources(sources.engine, version / "engine")
        _link(sources.target, folder / TARGET)
        if sources.draft is not None and "cpu_draft_model_path" in config.parameters:
            _link(sources.draft, folder / DRAFT)


def _copy_sources(source: Path, into: Path) -> None:
    shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


def _copy_tokenizer(source: Path, into: Path) -> None:
    into.mkdir()
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, into / name)


def _link(source: Path, into: Path) -> None:
    """The engine's files, without a second copy of the weights where the file system allows."""
    into.mkdir()
    for name in _ENGINE_FILES:
        try:
            os.link(source / name, into / name)
        except OSError:  # another file system
            shutil.copyfile(source / name, into / name)


def _require(folder: Path, *names: str) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise StageError(f"{folder}: no {name}")


def _versions(*distributions: str) -> Iterator[tuple[str, str]]:
    for name in distributions:
        yield name, metadata.version(name)
