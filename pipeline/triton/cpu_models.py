"""The five models of a `cpu` repository, from the values that a recipe and a tokenizer give.

Pure: values in, configs out. Tensors and ensemble maps are those of TensorRT-LLM 1.2.1, so that a client cannot tell
the difference; only `tensorrt_llm` is another backend. Parameters that begin with `cpu_` are our own, the others mean
what they mean upstream. Paths are relative to the model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.contracts.inflight_batcher import ensemble_steps, tensors
from pipeline.triton.config import DynamicBatching, ModelConfig

CONTRACT = "1.2.1"  # version of TensorRT-LLM whose tensors the models have
VERSION = "1"  # folder of a model's files
ENTRY = "tensorrt_llm_bls"  # the model that clients talk to
TOKENIZER, TARGET, DRAFT = f"{VERSION}/tokenizer", f"{VERSION}/target", f"{VERSION}/draft"


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


@dataclass(frozen=True, slots=True)
class TokenIds:
    """What the tokenizer and the model agree on."""

    end: int  # ends an answer
    pad: int  # fills short rows of a batch
    stop: tuple[int, ...]  # further tokens that end an answer
    vocab_size: int  # of the model: tokens that it can write


def cpu_models(settings: CpuSettings, ids: TokenIds) -> tuple[ModelConfig, ...]:
    """The configs, in the order in which text passes the models."""
    return (
        _preprocessing(settings, ids),
        _tensorrt_llm(settings),
        _postprocessing(settings),
        _ensemble(settings),
        _tensorrt_llm_bls(settings, ids),
    )


def _preprocessing(settings: CpuSettings, ids: TokenIds) -> ModelConfig:
    have = tensors("preprocessing", CONTRACT)
    return ModelConfig(
        name="preprocessing",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,
        dynamic_batching=_queue(settings),
        inputs=have.inputs,
        outputs=have.outputs,
        parameters=_tokenizer(ids) | {"add_special_tokens": "true"},
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
        name="tensorrt_llm",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # one engine batches all requests
        decoupled=True,
        dynamic_batching=_queue(settings),
        inputs=have.inputs,
        outputs=have.outputs,
        parameters=parameters,
    )


def _postprocessing(settings: CpuSettings) -> ModelConfig:
    have = tensors("postprocessing", CONTRACT)
    return ModelConfig(
        name="postprocessing",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # several reorder the pieces of a stream
        dynamic_batching=DynamicBatching(),
        inputs=have.inputs,
        outputs=have.outputs,
        parameters={"tokenizer_dir": TOKENIZER, "skip_special_tokens": "true"},
    )


def _ensemble(settings: CpuSettings) -> ModelConfig:
    have = tensors("ensemble", CONTRACT)
    return ModelConfig(
        name="ensemble",
        max_batch_size=settings.max_concurrency,
        inputs=have.inputs,
        outputs=have.outputs,
        steps=ensemble_steps(CONTRACT),
    )


def _tensorrt_llm_bls(settings: CpuSettings, ids: TokenIds) -> ModelConfig:
    have = tensors("tensorrt_llm_bls", CONTRACT)
    parameters = {
        "accumulate_tokens": "false",
        "tensorrt_llm_model_name": "tensorrt_llm",
        "add_special_tokens": "true",
        "skip_special_tokens": "true",
        "cancellation_check_period_ms": str(settings.cancellation_check_period_ms),
    }
    return ModelConfig(
        name="tensorrt_llm_bls",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # each serves any number of requests
        decoupled=True,
        inputs=have.inputs,
        outputs=have.outputs,
        parameters=parameters | _tokenizer(ids),
    )


def _tokenizer(ids: TokenIds) -> dict[str, str]:
    return {
        "tokenizer_dir": TOKENIZER,
        "end_id": str(ids.end),
        "pad_id": str(ids.pad),
        "stop_token_ids": ",".join(map(str, ids.stop)),
        "vocab_size": str(ids.vocab_size),
    }


def _queue(settings: CpuSettings) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_size=(settings.max_concurrency,),
        max_queue_delay_us=settings.max_queue_delay_us,
        max_queue_size=settings.max_queue_size,
    )


def _flag(value: bool) -> str:
    return "true" if value else "false"
