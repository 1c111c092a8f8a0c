"""From the tensors of a Triton request to requests of the engine, one a row of the batch.

Inputs of `tensorrt_llm` that this engine cannot honour are refused by name. Some clients send the neutral value of
everything; that is let through, because it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import engine
import numpy as np
from shared.guide import GUIDE, TYPE, guide_of
from shared.prompt_log_probs import RETURN_PROMPT_LOG_PROBS, read_alternatives
from shared.refusal import RequestRefused
from shared.stop_words import Words, unpack
from shared.tensors import Array

Read = Callable[[str], Array | None]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Tokens that one request may have in this deployment."""

    max_input_tokens: int
    max_output_tokens: int
    max_draft_tokens: int
    adapters: tuple[str, ...] = ()  # LoRA adapters; the first has number 1


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Outputs that a request wants; for a batch, those of its first row."""

    streaming: bool  # each new token at once, or everything in the end
    prompt: bool  # the prompt in front of the answer (never when streaming)
    log_probs: bool
    performance: bool
    kv_cache: bool  # of what `performance` has, what concerns the KV cache
    num_input_tokens: bool
    num_output_tokens: bool
    prompt_log_probs: (
        int | None
    )  # alternatives at each token of the prompt; None: no log probabilities of the prompt


# Inputs that are read here; all others are in _NEUTRAL, _ABSENT and _ONE_TOKEN.
READ = frozenset(
    {
        "input_ids", "input_lengths", "request_output_len", "draft_input_ids", "draft_logits",
        "draft_acceptance_threshold", "return_generation_logits", "end_id", "pad_id",
        "stop_words_list", "bad_words_list", "embedding_bias", "temperature", "runtime_top_k", "runtime_top_p",
        "runtime_top_p_min", "runtime_top_p_decay", "runtime_top_p_reset_ids", "repetition_penalty", "min_tokens",
        "presence_penalty", "frequency_penalty", "seed", "return_log_probs", "return_perf_metrics",
        "return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output", "stop", "streaming",
        "guided_decoding_guide_type", "guided_decoding_guide", "return_kv_cache_reuse_stats",
        "min_p", RETURN_PROMPT_LOG_PROBS, "prior_output_len", "lora_task_id", "lora_name",
    }
)  # fmt: skip


def read_output_options(read: Read, *, exclude_input_in_output: bool) -> OutputOptions:
    """Outputs of the response; `exclude_input_in_output` is the default of the deployment."""

    def flag(name: str, default: bool = False) -> bool:
        array = read(name)
        return default if array is None or array.size == 0 else bool(array.reshape(-1)[0])

    streaming, alternatives = flag("streaming"), read(RETURN_PROMPT_LOG_PROBS)
    return OutputOptions(
        streaming=streaming,
        prompt=not streaming and not flag("exclude_input_in_output", exclude_input_in_output),
        log_probs=flag("return_log_probs"),
        performance=flag("return_perf_metrics"),
        kv_cache=flag("return_perf_metrics") or flag("return_kv_cache_reuse_stats"),
        num_input_tokens=flag("return_num_input_tokens"),
        num_output_tokens=flag("return_num_output_tokens"),
        prompt_log_probs=None if alternatives is None else read_alternatives(alternatives),
    )


def read_requests(read: Read, limits: RequestLimits, new_id: Callable[[], str]) -> list[engine.EngineRequest]:
    """The requests of a batch.

    Raises:
        RequestRefused: One of them cannot be honoured; the text names the input.
    """
    refuse(read)
    lengths = read("input_lengths")
    if lengths is None or lengths.size == 0:
        raise RequestRefused("input_lengths: is missing")
    rows = lengths.size
    try:
        return [_Row(read, row, rows).request(limits, new_id()) for row in range(rows)]
    except engine.InvalidRequest as error:
        raise RequestRefused(str(error)) from None


@dataclass(frozen=True, slots=True)
class _Row:
    read: Read
    row: int
    rows: int

    def request(self, limits: RequestLimits, id: str) -> engine.EngineRequest:
        prompt = self._prompt(limits)
        max_new_tokens = int(self._scalar("request_output_len", 0))
        if not 1 <= max_new_tokens <= limits.max_output_tokens:
            right = f"1 to {limits.max_output_tokens} tokens here"
            raise RequestRefused(f"request_output_len = {max_new_tokens}: must be {right}")
        end_id = self._scalar("end_id", -1)
        return engine.EngineRequest(
            id=id,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            end_id=None if end_id < 0 else int(end_id),
            min_new_tokens=int(self._scalar("min_tokens", 0)),
            sampling=self._sampling(),
            stop_words=self._words("stop_words_list"),
            bad_words=self._words("bad_words_list"),
            embedding_bias=self._bias(),
            draft_tokens=self._drafts(limits),
            draft_logits=self._draft_logits(),
            draft_threshold=self._draft_threshold(),
            log_probs=bool(self._scalar("return_log_probs", 0)),
            logits=bool(self._scalar("return_generation_logits", 0)),
            context_logits=self._array(RETURN_PROMPT_LOG_PROBS) is not None,
            speculate=self._vector("draft_input_ids") is None,
            guide=self._guide(),
            adapter=self._adapter(limits.adapters),
            prior_output_len=self._prior_output_len(),
        )

    def _prior_output_len(self) -> int:
        return int(self._scalar("prior_output_len", 0))

    def _prompt(self, limits: RequestLimits) -> tuple[int, ...]:
        ids, length = self._vector("input_ids"), int(self._scalar("input_lengths", 0))
        if ids is None or length < 1:
            raise RequestRefused("input_ids: the prompt has no tokens")
        if length > len(ids):
            raise RequestRefused(f"input_lengths = {length}: input_ids has {len(ids)} tokens only")
        if length - self._prior_output_len() > limits.max_input_tokens:
            raise RequestRefused(
                f"input_lengths = {length}: prompts may have {limits.max_input_tokens} tokens here"
            )
        return tuple(ids[:length].tolist())

    def _sampling(self) -> engine.SamplingParams:
        seed = self._array("seed")
        top_p = self._scalar("runtime_top_p", 0)
        return engine.SamplingParams(
            temperature=self._scalar("temperature", 1),
            top_k=int(self._scalar("runtime_top_k", 0)),
            top_p=max(0.0, top_p),  # at or below 0 it is not set, as upstream has it
            top_p_decay=self._scalar("runtime_top_p_decay", 1),
            top_p_min=self._scalar("runtime_top_p_min", 1e-6),
            top_p_reset_id=int(self._scalar("runtime_top_p_reset_ids", -1)),
            min_p=self._scalar("min_p", 0),
            repetition_penalty=self._scalar("repetition_penalty", 1),
            presence_penalty=self._scalar("presence_penalty", 0),
            frequency_penalty=self._scalar("frequency_penalty", 0),
            seed=None if seed is None else int(seed[0]),  # 64 bits, more than a float holds
        )

    def _words(self, name: str) -> Words:
        packed = self._array(name)
        if packed is None:
            return ()
        try:
            return unpack(packed)
        except ValueError as error:
            raise RequestRefused(f"{name}: {error}") from None

    def _bias(self) -> Any:
        bias = self._vector("embedding_bias")
        return None if bias is None or bias.size == 0 else bias.astype(np.float32)

    def _guide(self) -> engine.Guide | None:
        guide = guide_of(self._text(TYPE), self._text(GUIDE))
        return None if guide is None else engine.Guide(*guide)

    def _adapter(self, known: tuple[str, ...]) -> str:
        """The LoRA adapter, by its name or its number; empty for the base."""
        name, number = self._text("lora_name"), self._array("lora_task_id")
        if name is None and number is None:
            return ""
        given, value = ("lora_task_id", int(number[0])) if number is not None else ("lora_name", name)
        if not known:
            raise RequestRefused(f"{given}: {_NO_LORA}")
        if number is not None and 1 <= int(number[0]) <= len(known):
            numbered = known[int(number[0]) - 1]
            if name not in (None, numbered):
                raise RequestRefused(f"lora_name = {name}: lora_task_id {value} is {numbered}")
            return numbered
        if number is None and name in known:
            return str(name)
        there = ", ".join(f"{one} ({at})" for at, one in enumerate(known, start=1))
        raise RequestRefused(f"{given} = {str(value)[:64]}: is unknown; there are {there}")

    def _text(self, name: str) -> str | None:
        array = self._array(name)
        try:
            return None if array is None else array.reshape(-1)[0].decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestRefused(f"{name}: is not UTF-8 ({error.reason} at byte {error.start})") from None

    def _drafts(self, limits: RequestLimits) -> tuple[int, ...] | None:
        drafts = self._vector("draft_input_ids")
        if drafts is None or drafts.size == 0:
            return None
        if len(drafts) > limits.max_draft_tokens:
            raise RequestRefused(
                f"draft_input_ids: {len(drafts)} tokens; at most {limits.max_draft_tokens} here"
            )
        return tuple(drafts.tolist())

    def _draft_logits(self) -> Any:
        logits = self._array("draft_logits")
        if logits is None:
            return None
        if self._vector("draft_input_ids") is None:
            raise RequestRefused("draft_logits: there are no draft_input_ids that they belong to")
        return logits.astype(np.float32)

    def _draft_threshold(self) -> float | None:
        if self._array("draft_acceptance_threshold") is None:
            return None
        return self._scalar("draft_acceptance_threshold", 0)

    def _scalar(self, name: str, default: float) -> float:
        array = self._array(name)
        return default if array is None else float(array.reshape(-1)[0])

    def _vector(self, name: str) -> Array | None:
        array = self._array(name)
        return None if array is None else array.reshape(-1)

    def _array(self, name: str) -> Array | None:
        """This row of an input."""
        array = self.read(name)
        if array is None or array.size == 0:
            return None
        row: Array = array.reshape(self.rows, *(array.shape[1:] or (1,)))[self.row]  # scalars come as [rows]
        return row


# Input -> (values that ask for nothing, why another one cannot be honoured).
_NEUTRAL: dict[str, tuple[tuple[float, ...], str]] = {
    "beam_width": ((1,), "this engine decodes with one beam"),
    "num_return_sequences": (
        (1,),
        "this engine returns one answer; send the request again with another seed",
    ),
    "len_penalty": ((0, 1), "it acts on beams, and this engine has one"),
    "early_stopping": ((0,), "it acts on beams, and this engine has one"),
    "beam_search_diversity_rate": ((0,), "it acts on beams, and this engine has one"),
    "return_context_logits": ((0,), "this engine returns logits of generated tokens only"),
    "skip_cross_attn_blocks": ((0,), "this engine runs decoder-only models"),
}

_DECODER_ONLY = "this engine runs decoder-only models"
_TEXT_ONLY = "this engine runs text models"
_NO_LORA = "this engine has no LoRA adapters"
_LORA_FILES = "LoRA adapters are those of the package, which lora_name or lora_task_id names"
_RETENTION = "this engine frees its KV cache by last use alone"
_LOOKAHEAD = "this engine does not decode with lookahead"

# Inputs that may not be there at all, and why.
_ABSENT: dict[str, str] = {
    "encoder_input_features": _DECODER_ONLY,
    "encoder_output_lengths": _DECODER_ONLY,
    "cross_attention_mask": _DECODER_ONLY,
    "prompt_embedding_table": _TEXT_ONLY,
    "prompt_table_extra_ids": _TEXT_ONLY,
    "prompt_vocab_size": _TEXT_ONLY,
    "mrope_rotary_cos_sin": _TEXT_ONLY,
    "mrope_position_deltas": _TEXT_ONLY,
    "lora_weights": _LORA_FILES,
    "lora_config": _LORA_FILES,
    "context_phase_params": "this engine does not take over requests from another",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
}

# `preprocessing` always sends one pad token for a decoder, so only more than that asks for something.
_ONE_TOKEN = ("decoder_input_ids", "decoder_input_lengths")

REFUSED = frozenset(_NEUTRAL) | frozenset(_ABSENT) | frozenset(_ONE_TOKEN)


def refuse(read: Callable[[str], Array | None]) -> None:
    """Refuse a request that asks for what this engine cannot do; `read` gives an input by name.

    Raises:
        RequestRefused: With the name of the first such input.
    """
    for name, why in _ABSENT.items():
        if read(name) is not None:
            raise RequestRefused(f"{name}: {why}")
    for name, (neutral, why) in _NEUTRAL.items():
        array = read(name)
        others = (
            [] if array is None else [value for value in array.reshape(-1).tolist() if value not in neutral]
        )
        if others:
            raise RequestRefused(f"{name} = {_shown(others[0])}: {why}")
    decoder = read("decoder_input_ids")
    if decoder is not None and decoder.shape[-1] > 1:
        raise RequestRefused(f"decoder_input_ids: {_DECODER_ONLY}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
