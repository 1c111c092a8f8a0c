"""A Triton model repository for the `tensorrt` runtime: the configs of its models, and the folders on disk.

    model_repository/
      preprocessing/        config.pbtxt, 1/{model.py, shared/, tokenizer/}
      tensorrt_llm/         config.pbtxt, 1/engine/{config.json, rank<N>.engine}, 1/xgrammar_tokenizer_info.json
      postprocessing/       config.pbtxt, 1/{model.py, shared/, tokenizer/}
      ensemble/             config.pbtxt, 1/
      tensorrt_llm_bls/     config.pbtxt, 1/{model.py, …, shared/, tokenizer/}
      tensorrt_llm_draft/   as tensorrt_llm, where the recipe has a draft
    deployment.json

Names of models, tensors and parameters are upstream's `inflight_batcher_llm` of the version that built the engines.
Every value that is written is one that the backend reads (`contracts.inflight_batcher.check`); what has no value is
left out, because the backend would answer an empty one with its default and a warning.

Both engines are decoupled or neither, with a draft, too. Upstream wants neither where there is a draft, because its own
BLS calls them with `exec(decoupled=False)`; ours calls them over the server's gRPC stream, which takes any number of
responses. It streams from the target if its client streams and a request brings no draft tokens; the backend refuses
that of a model that is not decoupled, and then our BLS has refused it before.

The C++ backend needs absolute paths, so the package is for containers that see it at CONTAINER_ROOT. Engines are hard
links. What the engines can do, and whether the recipe asks for just that, was judged before (`triton_settings`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.contracts.inflight_batcher import DataTypes, check, parameters, tensors
from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds, read_tokens, token_ids
from pipeline.progress import Progress
from pipeline.reading import MAX_TOKENIZER_BYTES, read_text
from pipeline.runtimes.base import Engines
from pipeline.triton import text_models
from pipeline.triton.config import model_config, parameters_of
from pipeline.triton.deployment import (
    CONTAINER_ROOT,
    DRAFT_MODEL,
    ENTRY,
    REPOSITORY,
    TARGET_MODEL,
    TOKENIZER,
    VERSION,
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
from pipeline.triton.text_models import OURS, DraftLimits, TextSettings

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


BACKEND = "tensorrtllm"
XGRAMMAR_FILE = "xgrammar_tokenizer_info.json"  # beside the engine, where requests may be guided
ENGINE = f"{VERSION}/engine"  # relative to the model's folder: config.json and rank<N>.engine


@dataclass(frozen=True, slots=True)
class EngineModelSettings:
    """One engine, as its Triton model runs it."""

    gpus: tuple[int, ...]  # one a rank
    memory_fraction: float  # of what is free once it is loaded, for its KV cache
    max_kv_tokens: int | None = None  # the KV cache holds no more; None: no cap
    data_types: DataTypes = field(default_factory=DataTypes)
    tokens_per_block: int = 32  # of its KV cache


@dataclass(frozen=True, slots=True)
class TensorRTSettings:
    """Serving settings of a recipe and its engines."""

    version: str  # of TensorRT-LLM
    target: EngineModelSettings
    draft: EngineModelSettings | None
    max_concurrency: int
    kv_cache_reuse: bool
    chunked_context: bool
    policy: Literal["guaranteed_no_evict", "max_utilization"]
    host_memory_bytes: int = 0  # a rank, for pages of the KV cache that the GPU has no room for
    max_beam_width: int = 1
    cuda_graphs: bool = False
    guided_decoding: bool = False  # by the target; a draft never sees such a request
    max_queue_size: int = 0  # 0: no limit
    max_queue_delay_us: int = 0
    cancellation_check_period_ms: int = 20
    stats_check_period_ms: int = 500
    decoupled: bool = True  # an answer may come in many responses; else in one
    prompt_log_probs: bool = False  # the target returns the logits of prompts
    draft_limits: DraftLimits = field(default_factory=DraftLimits)  # of what tensorrt_llm_bls speculates

    @property
    def text(self) -> TextSettings:
        """Settings of the models around the engines."""
        return TextSettings(
            version=self.version,
            max_concurrency=self.max_concurrency,
            max_queue_size=self.max_queue_size,
            max_queue_delay_us=self.max_queue_delay_us,
            cancellation_check_period_ms=self.cancellation_check_period_ms,
            draft=None if self.draft is None else self.draft_limits,
            data_types=self.target.data_types,
            tokens_per_block=self.target.tokens_per_block,
            decoupled=self.decoupled,
            context_logits=self.prompt_log_probs,
        )


def engine_models(settings: TensorRTSettings, ids: TokenIds) -> tuple[ModelConfig, ...]:
    """The configs, in the order in which text passes the models; a draft comes last."""
    configs = (
        text_models.preprocessing(settings.text, ids),
        _engine(TARGET_MODEL, settings.target, settings),
        text_models.postprocessing(settings.text),
        text_models.ensemble(settings.text),
        text_models.tensorrt_llm_bls(settings.text, ids),
    )
    if settings.draft is None:
        return configs
    return (*configs, _engine(DRAFT_MODEL, settings.draft, settings))


def engine_path(model: str) -> str:
    """Path at which a container sees the engine of a model; the backend needs an absolute one."""
    return f"{CONTAINER_ROOT}/{REPOSITORY}/{model}/{ENGINE}"


def _engine(name: str, engine: EngineModelSettings, settings: TensorRTSettings) -> ModelConfig:
    have = tensors(TARGET_MODEL, settings.version, engine.data_types)
    return model_config(
        name,
        backend=BACKEND,
        max_batch_size=settings.max_concurrency,
        instances=1,  # one engine batches all requests
        decoupled=settings.decoupled,
        dynamic_batching=settings.text.queue,
        inputs=have.inputs,
        outputs=have.outputs,
        parameters=_parameters(name, engine, settings),
    )


def _parameters(name: str, engine: EngineModelSettings, settings: TensorRTSettings) -> dict[str, str]:
    """In upstream's order. `decoding_mode` is always left out: none of its values fits a draft and its target, and
    without it the backend chooses by beam width."""
    facts = parameters(TARGET_MODEL, settings.version)
    values: dict[str, str | None] = {
        "max_beam_width": str(settings.max_beam_width),
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine_path(name),
        "max_tokens_in_paged_kv_cache": None if engine.max_kv_tokens is None else str(engine.max_kv_tokens),
        "batch_scheduler_policy": settings.policy,
        "kv_cache_free_gpu_mem_fraction": _share(engine.memory_fraction),
        "kv_cache_host_memory_bytes": str(settings.host_memory_bytes) if settings.host_memory_bytes else None,
        "exclude_input_in_output": "false",  # our BLS asks for it itself; a draft and its target need the prompt back
        "cancellation_check_period_ms": str(settings.cancellation_check_period_ms),
        "stats_check_period_ms": str(settings.stats_check_period_ms),
        "enable_kv_cache_reuse": _flag(settings.kv_cache_reuse),
        "enable_chunked_context": _flag(settings.chunked_context),
        "gpu_device_ids": ",".join(map(str, engine.gpus)),
        "num_nodes": "1",
        "executor_worker_path": facts["executor_worker_path"].default,
        "cuda_graph_mode": _flag(settings.cuda_graphs),
    }
    if settings.guided_decoding and name == TARGET_MODEL:
        info = f"{CONTAINER_ROOT}/{REPOSITORY}/{name}/{VERSION}/{XGRAMMAR_FILE}"
        values |= {"guided_decoding_backend": "xgrammar", "xgrammar_tokenizer_info_path": info}
    written = {key: value for key, value in values.items() if value is not None}
    return written | {key: "" for key, fact in facts.items() if fact.needed == "key" and key not in written}


def _share(value: float) -> str:
    """Without an exponent, which the backend would read and people would not."""
    return f"{value:.6f}".rstrip("0")


def _flag(value: bool) -> str:
    return "true" if value else "false"


_REGION_MIB = 64  # of a Python model: what its shared memory grows to before tensors are counted
_TOKEN_BYTES = 12  # of a token in flight: int32 into and out of a model, and its text
_BIAS_BYTES = 4  # of a token of the vocabulary: a row of biases of a request, float32


def package_engines(
    name: str,
    settings: TensorRTSettings,
    limits: DeploymentLimits,
    requirements: Requirements,
    vocab_size: int,
    sources: Engines,
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
        own_parameters = () if config.backend == BACKEND else OURS
        faults += check(version, contract, parameters_of(config), own_parameters)
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
    """
    text = read_text(tokenizer / "tokenizer.json", MAX_TOKENIZER_BYTES)
    by_id = {id: token for token, id in read_tokens(tokenizer / "tokenizer.json")}
    info = {
        "encoded_vocab": [by_id.get(id, "") for id in range(max(by_id) + 1)],
        "tokenizer_str": text,
        "stop_token_ids": [ids.end, *ids.stop],
    }
    return json.dumps(info, ensure_ascii=False)
