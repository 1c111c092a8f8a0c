"""A Triton model repository on disk, for the `tensorrt` runtime.

    model_repository/
      preprocessing/        config.pbtxt, 1/{model.py, shared/, tokenizer/}
      tensorrt_llm/         config.pbtxt, 1/engine/{config.json, rank<N>.engine}, 1/xgrammar_tokenizer_info.json
      postprocessing/       config.pbtxt, 1/{model.py, shared/, tokenizer/}
      ensemble/             config.pbtxt, 1/
      tensorrt_llm_bls/     config.pbtxt, 1/{model.py, …, shared/, tokenizer/}
      tensorrt_llm_draft/   as tensorrt_llm, where the recipe has a draft
    deployment.json

The C++ backend needs absolute paths, so the package is for containers that see it at CONTAINER_ROOT. Engines are hard
links. What the engines can do, and whether the recipe asks for just that, was judged before (`runtimes.tensorrt`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.inflight_batcher import check
from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds, read_tokens, token_ids
from pipeline.progress import Progress
from pipeline.reading import MAX_TOKENIZER_BYTES, read_text
from pipeline.runtimes.tensorrt.triton_models import (
    BACKEND,
    XGRAMMAR_FILE,
    EngineModelSettings,
    TensorRTSettings,
    engine_models,
)
from pipeline.triton.config import parameters_of
from pipeline.triton.deployment import (
    DRAFT_MODEL,
    ENTRY,
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
    finish,
    link_files,
    require,
    verify,
    versions,
    write_model,
)
from pipeline.triton.text_models import OURS

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

_REGION_MIB = 64  # of a Python model: what its shared memory grows to before tensors are counted
_TOKEN_BYTES = 12  # of a token in flight: int32 into and out of a model, and its text
_BIAS_BYTES = 4  # of a token of the vocabulary: a row of biases of a request, float32


@dataclass(frozen=True, slots=True)
class EngineSources:
    """The folders that a repository is made from."""

    target: Path  # config.json, rank<N>.engine
    draft: Path | None
    tokenizer: Path


def package_engines(
    name: str,
    settings: TensorRTSettings,
    limits: DeploymentLimits,
    requirements: Requirements,
    vocab_size: int,
    sources: EngineSources,
    into: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Make `into/model_repository` and `into/deployment.json`; return the facts of them.

    `vocab_size`: of the target's engine, which wants embedding biases of just that width.

    Raises:
        StageError: A source lacks a file, a model would not load with its parameters, or what was written does not read
            back as it was meant.
    """
    engines = {TARGET_MODEL: (settings.target, sources.target)}
    if settings.draft is not None and sources.draft is not None:
        engines[DRAFT_MODEL] = (settings.draft, sources.draft)
    for engine, folder in engines.values():
        require(folder, "config.json", *(f"rank{rank}.engine" for rank in range(len(engine.gpus))))
    ids = token_ids(sources.tokenizer, vocab_size)
    configs = engine_models(settings, ids)
    _check_parameters(settings.version, configs)
    repository = into / REPOSITORY
    for config in configs:
        version = write_model(config, repository, sources.tokenizer)
        if config.name in engines:
            _link_engine(engines[config.name][1], version / "engine")
        if parameters_of(config).get("xgrammar_tokenizer_info_path"):
            info = xgrammar_tokenizer_info(sources.tokenizer, ids)
            (version / XGRAMMAR_FILE).write_text(info, encoding="utf-8")
    verify(repository, configs)
    weights = sum(path.stat().st_size for path in repository.glob("*/*/engine/**/*") if path.is_file())
    progress.say("Reading the engines once for the digest of the package")
    deployment = Deployment(
        name=name,
        runtime="tensorrt",
        entry_model=ENTRY,
        models=tuple(config.name for config in configs),
        limits=limits,
        tokenizer_dir=f"{REPOSITORY}/preprocessing/{TOKENIZER}",
        end_id=ids.end,
        pad_id=ids.pad,
        stop_token_ids=ids.stop,
        guided_decoding=settings.guided_decoding,
        digest=content_digest(repository),
        versions=versions(settings.version),
        requirements=requirements,
        launch=launch_spec(settings, limits, ids, weights),
    )
    return finish(deployment, into, progress)


def launch_spec(
    settings: TensorRTSettings, limits: DeploymentLimits, ids: TokenIds, weights_bytes: int
) -> LaunchSpec:
    """Start of the server.

    A draft makes two engines in one server, which upstream starts as an orchestrator (`--multi-model`); one engine on
    several GPUs is started a process a rank. Shared memory is what the Python models use: a region for each, and in it
    the tensors of every request in flight (tokens in and out, their text, and a row of embedding biases). What ranks
    need of it among themselves is added by the launcher.
    """
    engines: dict[str, EngineModelSettings] = {TARGET_MODEL: settings.target}
    if settings.draft is not None:
        engines[DRAFT_MODEL] = settings.draft
    world = len(settings.target.gpus)
    request_bytes = (
        _TOKEN_BYTES * (limits.max_input_tokens + limits.max_output_tokens) + _BIAS_BYTES * ids.vocab_size
    )
    return LaunchSpec(
        mode="orchestrator" if settings.draft is not None else "leader" if world > 1 else "single",
        world_size=world,
        engine_models=tuple(engines),
        gpu_device_ids={model: (engine.gpus,) for model, engine in engines.items()},
        shm_mib=3 * _REGION_MIB + math.ceil(limits.max_concurrency * request_bytes / 2**20),
        weights_gib=round(weights_bytes / 2**30, 3),
    )


def _check_parameters(version: str, configs: tuple[ModelConfig, ...]) -> None:
    faults: list[str] = []
    for config in configs:
        contract = TARGET_MODEL if config.backend == BACKEND else config.name
        ours = () if config.backend == BACKEND else OURS
        faults += check(version, contract, parameters_of(config), ours)
    if faults:
        raise StageError(
            f"TensorRT-LLM {version} would not load the models as they are meant: {'; '.join(faults)}"
        )


def _link_engine(source: Path, into: Path) -> None:
    """All that the builder left: plans, config.json, managed weights, the quantization of each layer."""
    names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
    link_files(source, into, names)


def xgrammar_tokenizer_info(tokenizer: Path, ids: TokenIds) -> str:
    """Text of xgrammar_tokenizer_info.json: what the C++ backend must know of a tokenizer for guided decoding.

        {"encoded_vocab": ["<unk>", …], "tokenizer_str": "{…tokenizer.json…}", "stop_token_ids": [2]}

    As upstream's examples/generate_xgrammar_tokenizer_info.py writes it (0.17 to 1.2), from tokenizer.json alone:
    without transformers, and without TensorRT-LLM. Two things differ. Every token that ends an answer is a stop token,
    not only the first: otherwise the others could never come. And a token has the place of its id even where ids have
    gaps.

    Args:
        tokenizer: Folder with tokenizer.json.
        ids: Special tokens.
    """
    text = read_text(tokenizer / "tokenizer.json", MAX_TOKENIZER_BYTES)
    by_id = {id: token for token, id in read_tokens(tokenizer / "tokenizer.json")}
    info = {
        "encoded_vocab": [by_id.get(id, "") for id in range(max(by_id) + 1)],
        "tokenizer_str": text,
        "stop_token_ids": [ids.end, *ids.stop],
    }
    return json.dumps(info, ensure_ascii=False)
