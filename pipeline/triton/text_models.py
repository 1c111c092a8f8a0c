"""The models around an engine: preprocessing, postprocessing, ensemble and tensorrt_llm_bls.

Pure: values in, configs out. They are the same in front of the C++ backend and in front of the cpu engine; tensors and
ensemble maps are those of the version of TensorRT-LLM that is asked for. Paths are relative to the model's folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pipeline.contracts.inflight_batcher import DataTypes, TensorSpec, ensemble_steps, tensors
from pipeline.models.token_ids import TokenIds
from pipeline.triton.config import dynamic_batching, model_config
from pipeline.triton.deployment import DRAFT_MODEL, TARGET_MODEL, TOKENIZER

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelDynamicBatching

# Parameters that our own sources of the models read besides upstream's.
OURS = frozenset(
    {"end_id", "pad_id", "stop_token_ids", "vocab_size", "tokenizer_dir", "add_special_tokens", "skip_special_tokens",
     "cancellation_check_period_ms", "exclude_input_in_output", "max_draft_tokens", "max_input_tokens",
     "max_output_tokens", "draft_acceptance_threshold", "draft_timeout_ms", "max_open_requests",
     "gather_context_logits", "tokens_per_block", "engine_takes_prior_output"}
)  # fmt: skip


# Asks for the outputs `kv_cache_*`. Upstream's until 0.18, then part of `return_perf_metrics`; clients still send it.
KV_CACHE_STATS = TensorSpec("return_kv_cache_reuse_stats", "TYPE_BOOL", (1,), optional=True)
# What `tensorrt_llm_bls` takes beyond upstream's: a prompt and stop words as token ids, how text is made of tokens,
# `stop`, which ends the request of the same id, as upstream's `tensorrt_llm` has it, and tokens of an answer that
# another server began.
TEXT_INPUTS = (
    TensorSpec("prompt_token_ids", "TYPE_INT32", (-1,), optional=True),
    TensorSpec("stop_token_ids", "TYPE_INT32", (-1,), optional=True),
    TensorSpec("include_stop_str_in_output", "TYPE_BOOL", (1,), optional=True),
    TensorSpec("skip_special_tokens", "TYPE_BOOL", (1,), optional=True),
    TensorSpec("logit_bias_token_ids", "TYPE_INT32", (-1,), optional=True),
    TensorSpec("logit_bias_values", "TYPE_FP32", (-1,), optional=True),
    TensorSpec("stop", "TYPE_BOOL", (1,), optional=True),
    TensorSpec("return_output_ids", "TYPE_BOOL", (1,), optional=True),
    TensorSpec("prior_output_ids", "TYPE_INT32", (-1,), optional=True),
)
# Tokens of each response, which `return_output_ids` asks for.
OUTPUT_IDS = TensorSpec("output_ids", "TYPE_INT32", (-1,))
# Upstream's names until 0.20, which clients still send: the entry model takes them beside the newer ones.
_OLDER_NAMES = {"min_tokens": "min_length", "seed": "random_seed"}
MIN_P = TensorSpec("min_p", "TYPE_FP32", (1,), optional=True)
# How many alternatives at each token of the prompt; and what then comes, [tokens, 1 + alternatives].
RETURN_PROMPT_LOG_PROBS = TensorSpec("return_prompt_log_probs", "TYPE_INT32", (1,), optional=True)
PROMPT_LOG_PROBS = (
    TensorSpec("prompt_log_probs", "TYPE_FP32", (-1, -1)),
    TensorSpec("prompt_log_probs_ids", "TYPE_INT32", (-1, -1)),
)
# How many tokens at the end of the prompt belong to the answer.
PRIOR_OUTPUT_LEN = TensorSpec("prior_output_len", "TYPE_INT32", (1,), optional=True)
# Name of the LoRA adapter that answers, of a package that has some.
LORA_NAME = TensorSpec("lora_name", "TYPE_STRING", (1,), optional=True)
# What our own engine takes beyond upstream's.
ENGINE_INPUTS = (KV_CACHE_STATS, MIN_P, RETURN_PROMPT_LOG_PROBS, PRIOR_OUTPUT_LEN)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of speculation by tensorrt_llm_bls. The engines behind it take more requests: rounds are calls, too."""

    max_draft_tokens: int | None = None  # in one round, also by default; None: as many as a request asks for
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Settings of the models around an engine."""

    version: str  # of TensorRT-LLM: whose tensors the models have
    max_concurrency: int
    max_queue_size: int = 0  # 0: no limit
    max_queue_delay_us: int = 0
    cancellation_check_period_ms: int = 20
    draft: DraftLimits | None = None  # None: there is no model `tensorrt_llm_draft`
    data_types: DataTypes | None = None  # None: upstream's usual ones
    own_engine: bool = False  # whether the engine's model has ENGINE_INPUTS
    context_logits: bool = False  # whether it returns the logits of whole prompts
    decoupled: bool = True  # an answer may come in many responses; else in one
    tokens_per_block: int = 32  # of the target's KV cache: clients count reused blocks in tokens
    adapters: bool = False  # whether requests may name a LoRA adapter

    @property
    def queue(self) -> ModelDynamicBatching:
        """Triton's queue in front of a model that batches."""
        return dynamic_batching(
            preferred_batch_size=self.max_concurrency,
            max_queue_delay_us=self.max_queue_delay_us,
            max_queue_size=self.max_queue_size,
        )


def older_inputs(inputs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The inputs that the entry model has beside these, under the names that they had before 0.20."""
    return tuple(
        replace(tensor, name=_OLDER_NAMES[tensor.name]) for tensor in inputs if tensor.name in _OLDER_NAMES
    )


def preprocessing(settings: TextSettings, ids: TokenIds) -> ModelConfig:
    """Text to token ids."""
    have = tensors("preprocessing", settings.version, settings.data_types)
    return model_config(
        "preprocessing",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,
        dynamic_batching=settings.queue,
        inputs=_optional(have.inputs),
        outputs=have.outputs,
        # upstream's source of the model does not load without the last key; empty means text only
        parameters=_tokenizer(ids) | {"add_special_tokens": "true", "multimodal_model_path": ""},
    )


def _optional(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """All as optional, so that `preprocessing` is called whatever is missing, and says what.

    Triton counts inputs only: where an optional one is given, it lets through a request that misses another. An
    ensemble then has no step that it can make, and ends the answer without a word.
    """
    return tuple(replace(tensor, optional=True) for tensor in inputs)


def postprocessing(settings: TextSettings) -> ModelConfig:
    """Token ids to text."""
    have = tensors("postprocessing", settings.version, settings.data_types)
    return model_config(
        "postprocessing",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # several reorder the pieces of a stream
        dynamic_batching=dynamic_batching(),
        inputs=have.inputs,
        outputs=have.outputs,
        parameters={"tokenizer_dir": TOKENIZER, "skip_special_tokens": "true"},
    )


def ensemble(settings: TextSettings) -> ModelConfig:
    """The three models in a row, by Triton itself."""
    have = tensors("ensemble", settings.version, settings.data_types)
    steps, stats = ensemble_steps(settings.version), KV_CACHE_STATS.name
    if settings.own_engine:
        steps = tuple(
            replace(step, input_map={**step.input_map, stats: stats}) if step.model == TARGET_MODEL else step
            for step in steps
        )
    return model_config(
        "ensemble",
        max_batch_size=settings.max_concurrency,
        inputs=_optional((*have.inputs, KV_CACHE_STATS) if settings.own_engine else have.inputs),
        outputs=have.outputs,
        steps=steps,
        parameters={"tokens_per_block": str(settings.tokens_per_block)},
    )


def tensorrt_llm_bls(settings: TextSettings, ids: TokenIds) -> ModelConfig:
    """The model that clients talk to: it streams text, whole characters and whole words."""
    have = tensors("tensorrt_llm_bls", settings.version, settings.data_types)
    parameters = {
        "accumulate_tokens": "false",
        "tensorrt_llm_model_name": TARGET_MODEL,
        "add_special_tokens": "true",
        "skip_special_tokens": "true",
        "cancellation_check_period_ms": str(settings.cancellation_check_period_ms),
        "tokens_per_block": str(settings.tokens_per_block),
    }
    if settings.draft is not None:
        parameters["tensorrt_llm_draft_model_name"] = DRAFT_MODEL
        limits = asdict(settings.draft).items()
        parameters |= {name: str(value) for name, value in limits if value is not None}
        if settings.max_queue_size:
            parameters["max_open_requests"] = str(settings.max_concurrency + settings.max_queue_size)
    inputs = (*have.inputs, *older_inputs(have.inputs), KV_CACHE_STATS, *TEXT_INPUTS)
    outputs = (*have.outputs, OUTPUT_IDS)
    if settings.own_engine:
        inputs = (*inputs, MIN_P, *((LORA_NAME,) if settings.adapters else ()))
        parameters["engine_takes_prior_output"] = "true"
    if settings.own_engine or settings.context_logits:
        inputs, outputs = (*inputs, RETURN_PROMPT_LOG_PROBS), (*outputs, *PROMPT_LOG_PROBS)
    if settings.context_logits:
        parameters["gather_context_logits"] = "true"
    return model_config(
        "tensorrt_llm_bls",
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # each serves any number of requests
        decoupled=settings.decoupled,
        inputs=inputs,
        outputs=outputs,
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
