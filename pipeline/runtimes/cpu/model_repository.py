"""A Triton model repository on disk, for the `cpu` runtime.

    model_repository/
      preprocessing/      config.pbtxt, 1/{model.py, shared/, tokenizer/}
      tensorrt_llm/       config.pbtxt, 1/{model.py, …, shared/, engine/, target/, draft/, tokenizer/}
      postprocessing/     config.pbtxt, 1/{model.py, shared/, tokenizer/}
      ensemble/           config.pbtxt, 1/
      tensorrt_llm_bls/   config.pbtxt, 1/{model.py, …, shared/, tokenizer/}
      tensorrt_llm_draft/ as tensorrt_llm, where tensorrt_llm_bls speculates
    deployment.json

Each model's folder holds all that it needs, and no path in it is absolute: the repository can be moved or copied.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.models.token_ids import token_ids
from pipeline.progress import Progress
from pipeline.runtimes.cpu.triton_models import CONTRACT, DRAFT, TARGET, CpuSettings, cpu_models
from pipeline.triton.deployment import (
    DRAFT_MODEL,
    ENTRY,
    REPOSITORY,
    TARGET_MODEL,
    TOKENIZER,
    Deployment,
    DeploymentLimits,
)
from pipeline.triton.repository import (
    content_digest,
    copy_sources,
    finish,
    link_files,
    require,
    verify,
    versions,
    write_model,
)

_ENGINE_FILES = ("openvino_model.xml", "openvino_model.bin", "engine.json")


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
        StageError: A source lacks a file, or what was written does not read back as it was meant.
    """
    for folder in filter(None, (sources.target, sources.draft)):
        require(folder, *_ENGINE_FILES)
    facts = json.loads((sources.target / "engine.json").read_text(encoding="utf-8"))
    ids = token_ids(sources.tokenizer, facts["vocab_size"])
    if sources.draft is not None:
        settings = replace(settings, draft_kv_share=_draft_kv_share(sources.target, sources.draft))
    configs = cpu_models(settings, ids)
    repository = into / REPOSITORY
    engines = {TARGET_MODEL: sources.target, DRAFT_MODEL: sources.draft}
    for config in configs:
        is_engine = config.name in engines
        version = write_model(
            config, repository, sources.tokenizer, sources=TARGET_MODEL if is_engine else None
        )
        if is_engine:
            copy_sources(sources.engine, version / "engine")
        if (engine := engines.get(config.name)) is not None:
            link_files(engine, repository / config.name / TARGET, _ENGINE_FILES)
        if sources.draft is not None and "cpu_draft_model_path" in config.parameters:
            link_files(sources.draft, repository / config.name / DRAFT, _ENGINE_FILES)
    verify(repository, configs)
    deployment = Deployment(
        name=name,
        runtime="cpu",
        entry_model=ENTRY,
        models=tuple(config.name for config in configs),
        limits=deployment_limits(settings),
        tokenizer_dir=f"{REPOSITORY}/preprocessing/{TOKENIZER}",
        end_id=ids.end,
        pad_id=ids.pad,
        stop_token_ids=ids.stop,
        digest=content_digest(repository),
        guided_decoding=settings.guided_decoding,
        versions=versions(CONTRACT, "openvino", "tokenizers", "llguidance"),
    )
    return finish(deployment, into, progress)


def deployment_limits(settings: CpuSettings) -> DeploymentLimits:
    """Limits of requests."""
    return DeploymentLimits(
        max_input_tokens=settings.max_input_tokens,
        max_output_tokens=settings.max_output_tokens,
        max_concurrency=settings.max_concurrency,
        max_draft_tokens=settings.max_draft_tokens,
    )


def _draft_kv_share(target: Path, draft: Path) -> float:
    """The draft's part of the bytes that a token takes in both KV caches."""

    def token_values(folder: Path) -> int:
        facts = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        return int(facts["layers"] * facts["kv_heads"] * facts["head_dim"])

    values = token_values(draft)
    return values / (values + token_values(target))
