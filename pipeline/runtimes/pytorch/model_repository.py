"""A Triton model repository on disk, for the `pytorch` runtime.

    model_repository/
      tensorrt_llm/   config.pbtxt, 1/{model.py, …, shared/, model.yaml, checkpoint/, draft/, tokenizer/}
    deployment.json

Checkpoints are hard links. model.yaml names them relative to its own folder, so that the repository can be moved; the
model makes the paths absolute. The tokenizer's files are for clients, which make prompts from messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.contracts import llm_args
from pipeline.errors import StageError
from pipeline.models.token_ids import token_ids
from pipeline.progress import Progress
from pipeline.runtimes.pytorch.triton_models import LlmapiSettings, llmapi_model, model_yaml
from pipeline.triton.deployment import (
    REPOSITORY,
    TARGET_MODEL,
    TOKENIZER,
    Deployment,
    DeploymentLimits,
    LaunchSpec,
    Requirements,
)
from pipeline.triton.repository import (
    content_digest,
    copy_tokenizer,
    finish,
    link_files,
    require,
    verify,
    versions,
    write_model,
)

SOURCES = "llmapi"  # the folder in model_repo
CHECKPOINT, DRAFT, ARGUMENTS = "checkpoint", "draft", "model.yaml"
_DRAFT_KEYS = ("speculative_model", "speculative_model_dir")
_REGION_MIB = 64  # shared memory of an instance: texts in and out


@dataclass(frozen=True, slots=True)
class LlmapiSources:
    """The folders that a repository is made from."""

    checkpoint: Path  # unified Hugging Face checkpoint, with the tokenizer's files
    draft: Path | None
    tokenizer: Path


def package_llmapi(
    name: str,
    settings: LlmapiSettings,
    arguments: Mapping[str, Any],
    limits: DeploymentLimits,
    requirements: Requirements,
    sources: LlmapiSources,
    into: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Make `into/model_repository` and `into/deployment.json`; return the facts of them.

    Raises:
        StageError: A source lacks a file, TensorRT-LLM would refuse the arguments, or what was written does not read
            back as it was meant.
    """
    for folder in filter(None, (sources.checkpoint, sources.draft)):
        require(folder, "config.json")
    require(sources.checkpoint, "tokenizer.json")
    vocab_size = json.loads((sources.checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = token_ids(sources.tokenizer, vocab_size)
    config = llmapi_model(settings)
    repository = into / REPOSITORY
    version = write_model(config, repository, sources.tokenizer, sources=SOURCES)
    _link_all(sources.checkpoint, version / CHECKPOINT)
    if sources.draft is not None:
        _link_all(sources.draft, version / DRAFT)
    copy_tokenizer(sources.tokenizer, repository / TARGET_MODEL / TOKENIZER)
    meant = model_yaml(settings, arguments)
    (version / ARGUMENTS).write_text(_yaml(settings.version, meant), encoding="utf-8")
    verify(repository, [config])
    _verify_arguments(settings.version, meant, version)
    progress.say("Reading the checkpoint once for the digest of the package")
    deployment = Deployment(
        name=name,
        runtime="pytorch",
        entry_model=TARGET_MODEL,
        models=(TARGET_MODEL,),
        limits=limits,
        tokenizer_dir=f"{REPOSITORY}/{TARGET_MODEL}/{TOKENIZER}",
        end_id=ids.end,
        pad_id=ids.pad,
        stop_token_ids=ids.stop,
        guided_decoding=settings.guided_decoding,
        digest=content_digest(repository),
        versions=versions(settings.version),
        requirements=requirements,
        launch=launch_spec(settings, _weights_bytes(version)),
    )
    return finish(deployment, into, progress)


def launch_spec(settings: LlmapiSettings, weights_bytes: int) -> LaunchSpec:
    """Start of the server: one that spreads the model itself, or one a rank below the LLM API's wrapper."""
    return LaunchSpec(
        mode="llmapi",
        world_size=settings.ranks,
        engine_models=(TARGET_MODEL,),
        gpu_device_ids={TARGET_MODEL: settings.gpus},
        shm_mib=_REGION_MIB * settings.instances,
        weights_gib=round(weights_bytes * settings.instances / 2**30, 3),
    )


def _yaml(version: str, content: Mapping[str, Any]) -> str:
    head = (
        f"# Arguments of TensorRT-LLM {version}'s LLM API (PyTorch backend), and `triton_config` of the Triton model.\n"
        "# Paths begin at this file's folder.\n"
    )
    return head + yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)


def _verify_arguments(version: str, meant: Mapping[str, Any], folder: Path) -> None:
    path = folder / ARGUMENTS
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    if read != meant:
        raise StageError(f"{path} does not say what was meant")
    arguments = {key: value for key, value in read.items() if key != "triton_config"}
    faults = [str(fault) for fault in llm_args.check(version, arguments)]
    speculation = arguments.get("speculative_config") or {}
    for named in (arguments["model"], *(speculation[key] for key in _DRAFT_KEYS if key in speculation)):
        if not (folder / named).is_dir():
            faults.append(f"{named}: no such folder beside {ARGUMENTS}")
    if faults:
        raise StageError(f"{path}: {'; '.join(faults)}")


def _link_all(source: Path, into: Path) -> None:
    names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
    link_files(source, into, names)


def _weights_bytes(version: Path) -> int:
    folders = (version / CHECKPOINT, version / DRAFT)
    return sum(
        path.stat().st_size for folder in folders for path in folder.rglob("*.safetensors") if path.is_file()
    )
