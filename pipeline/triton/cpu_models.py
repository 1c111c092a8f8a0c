"""The five models of a `cpu` repository, from the values that a recipe and a tokenizer give.

Pure: values in, configs out. Tensors and ensemble maps are those of TensorRT-LLM 1.2.1, so that a client cannot tell
the difference; only `tensorrt_llm` is another backend. Parameters that begin with `cpu_` are our own, the others mean
what they mean upstream. Paths are relative to the model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.contracts.inflight_batcher import tensors
from pipeline.triton import text_models
from pipeline.triton.config import ModelConfig
from pipeline.triton.layout import TARGET_MODEL, VERSION
from pipeline.triton.text_models import TextSettings
from pipeline.triton.token_ids import TokenIds

CONTRACT = "1.2.1"  # version of TensorRT-LLM whose tensors the models have
TARGET, DRAFT = f"{VERSION}/target", f"{VERSION}/draft"


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """What a recipe says about serving."""

    max_input_tokens: int
    max_output_tokens: int
    max_concurrency: int
    max_batch_tokens: int | None = None  # in one step; None: the engine's own choice
    max_draft_tokens: int = 0  # proposed in one round; 0: there is no draft model
    kv_cache_mib: int | None = None  # None: what the limits need
    kv_cache_reuse: bool = True
    threads: int | None = None  # None: one a core
    precision: Literal["f32", "bf16"] = "f32"
    max_queue_size: int = 0  # 0: no limit
    max_queue_delay_us: int = 0
    cancellation_check_period_ms: int = 20
    stats_check_period_ms: int = 500

    @property
    def text(self) -> TextSettings:
        """What the models around the engine are made from."""
        return TextSettings(
            version=CONTRACT,
            max_concurrency=self.max_concurrency,
            max_queue_size=self.max_queue_size,
            max_queue_delay_us=self.max_queue_delay_us,
            cancellation_check_period_ms=self.cancellation_check_period_ms,
        )


def cpu_models(settings: CpuSettings, ids: TokenIds) -> tuple[ModelConfig, ...]:
    """The configs, in the order in which text passes the models."""
    return (
        text_models.preprocessing(settings.text, ids),
        _tensorrt_llm(settings),
        text_models.postprocessing(settings.text),
        text_models.ensemble(settings.text),
        text_models.tensorrt_llm_bls(settings.text, ids),
    )


def _tensorrt_llm(settings: CpuSettings) -> ModelConfig:
    have = tensors("tensorrt_llm", CONTRACT)
    parameters = {
        "gpt_model_path": TARGET,
        "exclude_input_in_output": "false",
        "enable_kv_cache_reuse": _flag(settings.kv_cache_reuse),
        "cancellation_check_period_ms": str(settings.cancellation_check_period_ms),
        "stats_check_period_ms": str(settings.stats_check_period_ms),
        "cpu_max_input_tokens": str(settings.max_input_tokens),
        "cpu_max_output_tokens": str(settings.max_output_tokens),
        "cpu_max_concurrency": str(settings.max_concurrency),
        "cpu_precision": settings.precision,
    }
    if settings.max_draft_tokens:
        parameters |= {"cpu_draft_model_path": DRAFT, "cpu_max_draft_tokens": str(settings.max_draft_tokens)}
    optional = {
        "cpu_max_batch_tokens": settings.max_batch_tokens,
        "cpu_kv_cache_mib": settings.kv_cache_mib,
        "cpu_threads": settings.threads,
    }
    parameters |= {name: str(value) for name, value in optional.items() if value is not None}
    return ModelConfig(
        name=TARGET_MODEL,
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # one engine batches all requests
        decoupled=True,
        dynamic_batching=settings.text.queue,
        inputs=have.inputs,
        outputs=have.outputs,
        parameters=parameters,
    )


def _flag(value: bool) -> str:
    return "true" if value else "false"
