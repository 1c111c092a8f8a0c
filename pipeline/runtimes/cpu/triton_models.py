"""The models of a `cpu` repository, from the values that a recipe and a tokenizer give.

Pure: values in, configs out. Tensors and ensemble maps are those of TensorRT-LLM 1.2.1, so that a client cannot tell
the difference; only `tensorrt_llm` is another backend. Parameters that begin with `cpu_` are our own, the others mean
what they mean upstream. Paths are relative to the model's folder.

A draft is the engine's own business, or a model of its own, `tensorrt_llm_draft`, as with `tensorrt`; then
`tensorrt_llm_bls` runs both in turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.contracts.inflight_batcher import tensors
from pipeline.models.token_ids import TokenIds
from pipeline.triton import text_models
from pipeline.triton.config import model_config
from pipeline.triton.deployment import DRAFT_MODEL, TARGET_MODEL, TOKENIZER, VERSION
from pipeline.triton.text_models import ENGINE_INPUTS, PROMPT_LOG_PROBS, DraftLimits, TextSettings

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

CONTRACT = "1.2.1"  # version of TensorRT-LLM whose tensors the models have
TARGET, DRAFT = f"{VERSION}/target", f"{VERSION}/draft"
TOKENS_PER_BLOCK = 32  # of the KV cache that OpenVINO's PagedAttention keeps on a CPU
_DRAFT_THREADS = 4  # the draft's engine gets one thread in so many


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """Serving settings of a recipe."""

    max_input_tokens: int
    max_output_tokens: int
    max_concurrency: int
    max_batch_tokens: int | None = None  # in one step; None: the engine's own choice
    max_draft_tokens: int = 0  # proposed in one round; 0: there is no draft model
    speculation: Literal["engine", "bls"] = "engine"  # who runs draft and target in turns
    kv_cache_mib: int | None = None  # of all models; None: what the limits need
    draft_kv_share: float = 0.5  # of kv_cache_mib, where the draft has an engine of its own
    kv_cache_reuse: bool = True
    threads: int | None = None  # None: one a core
    precision: Literal["f32", "bf16"] = "f32"
    guided_decoding: bool = False  # answers that have a form, for requests that ask for one
    max_queue_size: int = 0  # 0: no limit
    max_queue_delay_us: int = 0
    cancellation_check_period_ms: int = 20
    stats_check_period_ms: int = 500
    decoupled: bool = True  # an answer may come in many responses; else in one

    @property
    def two_engines(self) -> bool:
        """Whether the draft is a model of its own."""
        return self.speculation == "bls" and self.max_draft_tokens > 0

    @property
    def text(self) -> TextSettings:
        """Settings of the models around the engine."""
        limits = DraftLimits(self.max_draft_tokens, self.max_input_tokens, self.max_output_tokens)
        return TextSettings(
            version=CONTRACT,
            max_concurrency=self.max_concurrency,
            max_queue_size=self.max_queue_size,
            max_queue_delay_us=self.max_queue_delay_us,
            cancellation_check_period_ms=self.cancellation_check_period_ms,
            draft=limits if self.two_engines else None,
            own_engine=True,
            tokens_per_block=TOKENS_PER_BLOCK,
            decoupled=self.decoupled,
        )


def cpu_models(settings: CpuSettings, ids: TokenIds) -> tuple[ModelConfig, ...]:
    """The configs, in the order in which text passes the models; a draft comes last."""
    configs = (
        text_models.preprocessing(settings.text, ids),
        _engine(TARGET_MODEL, settings, ids),
        text_models.postprocessing(settings.text),
        text_models.ensemble(settings.text),
        text_models.tensorrt_llm_bls(settings.text, ids),
    )
    return (*configs, _engine(DRAFT_MODEL, settings, ids)) if settings.two_engines else configs


def _engine(name: str, settings: CpuSettings, ids: TokenIds) -> ModelConfig:
    have = tensors(TARGET_MODEL, CONTRACT)
    is_draft, rounds = name == DRAFT_MODEL, settings.two_engines
    longest_input = settings.max_input_tokens + (settings.max_output_tokens - 1 if rounds else 0)
    parameters = {
        "gpt_model_path": TARGET,
        "exclude_input_in_output": "false",
        "enable_kv_cache_reuse": _flag(settings.kv_cache_reuse),
        "cancellation_check_period_ms": str(settings.cancellation_check_period_ms),
        "stats_check_period_ms": str(settings.stats_check_period_ms),
        "cpu_max_input_tokens": str(longest_input),  # a round sends the answer so far, too
        "cpu_max_output_tokens": str(settings.max_output_tokens),
        "cpu_max_sequence_tokens": str(settings.max_input_tokens + settings.max_output_tokens),
        "cpu_max_concurrency": str(settings.max_concurrency),
        "cpu_precision": settings.precision,
    }
    if settings.max_draft_tokens:
        parameters["cpu_max_draft_tokens"] = "0" if is_draft else str(settings.max_draft_tokens)
        if not rounds:
            parameters["cpu_draft_model_path"] = DRAFT
    if settings.guided_decoding and not is_draft:  # a draft of its own never sees such a request
        parameters |= {
            "guided_decoding_backend": "llguidance",
            "tokenizer_dir": TOKENIZER,
            "end_id": str(ids.end),
        }
    optional = {
        "cpu_max_batch_tokens": settings.max_batch_tokens,
        "cpu_kv_cache_mib": _kv_cache_mib(settings, is_draft),
        "cpu_threads": _threads(settings, is_draft),
    }
    parameters |= {name: str(value) for name, value in optional.items() if value is not None}
    return model_config(
        name,
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # one engine batches all requests
        decoupled=settings.decoupled,
        dynamic_batching=settings.text.queue,
        inputs=(*have.inputs, *ENGINE_INPUTS),
        outputs=(*have.outputs, *PROMPT_LOG_PROBS),
        parameters=parameters,
    )


def _kv_cache_mib(settings: CpuSettings, is_draft: bool) -> int | None:
    if settings.kv_cache_mib is None or not settings.two_engines:
        return settings.kv_cache_mib
    draft = max(1, round(settings.kv_cache_mib * settings.draft_kv_share))
    return draft if is_draft else max(1, settings.kv_cache_mib - draft)


def _threads(settings: CpuSettings, is_draft: bool) -> int | None:
    """One request keeps one engine busy at a time, many keep both: together they have the threads that one would."""
    if settings.threads is None or not settings.two_engines:
        return settings.threads
    draft = max(1, settings.threads // _DRAFT_THREADS)
    return draft if is_draft else max(1, settings.threads - draft)


def _flag(value: bool) -> str:
    return "true" if value else "false"
