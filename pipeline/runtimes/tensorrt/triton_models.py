"""The models of a `tensorrt` repository: TensorRT-LLM's C++ backend, and our models around it.

Pure: values in, configs out. Names of models, tensors and parameters are upstream's `inflight_batcher_llm` of the
version that built the engines. Every value that is written is one that the backend reads (`inflight_batcher.
check`); what has no value is left out, because the backend would answer an empty one with its default and a warning.

Both engines are decoupled or neither, with a draft, too. Upstream wants neither where there is a draft, because its own
BLS calls them with `exec(decoupled=False)`; ours calls them over the server's gRPC stream, which takes any number of
responses. It streams from the target if its client streams and a request brings no draft tokens; the backend refuses
that of a model that is not decoupled, and then our BLS has refused it before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pipeline.contracts.inflight_batcher import DataTypes, parameters, tensors
from pipeline.models.token_ids import TokenIds
from pipeline.triton import text_models
from pipeline.triton.config import model_config
from pipeline.triton.deployment import CONTAINER_ROOT, DRAFT_MODEL, REPOSITORY, TARGET_MODEL, VERSION
from pipeline.triton.text_models import DraftLimits, TextSettings

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
