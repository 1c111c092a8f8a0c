"""One request of Triton: its tensors as arguments of the LLM API, and the LLM's outputs as tensors of a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from shared.guide import GUIDE, TYPE, guide_of
from shared.refusal import RequestRefused
from shared.tensors import read, read_texts, response, texts

_SAMPLING = "sampling_param_"
_ONLY_IF_GIVEN = (
    "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed",
)  # fmt: skip
# Kind of a guide -> argument of GuidedDecodingParams that takes its text.
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_DEFAULTS = {"best_of": 1, "exclude_input_from_output": False, "return_perf_metrics": False}
# Output -> where the LLM API has it in `request_perf_metrics`.
_COUNTS = {
    "kv_cache_reused_block": ("kv_cache_metrics", "num_reused_blocks"),
    "kv_cache_missed_block": ("kv_cache_metrics", "num_missed_blocks"),
    "kv_cache_alloc_new_blocks": ("kv_cache_metrics", "num_new_allocated_blocks"),
    "kv_cache_alloc_total_blocks": ("kv_cache_metrics", "num_total_allocated_blocks"),
    "kv_cache_hit_rate": ("kv_cache_metrics", "kv_cache_hit_rate"),
    "acceptance_rate": ("speculative_decoding", "acceptance_rate"),
    "total_accepted_draft_tokens": ("speculative_decoding", "total_accepted_draft_tokens"),
    "total_draft_tokens": ("speculative_decoding", "total_draft_tokens"),
}
_TIMES = {
    "arrival_time_ns": "arrival_time",
    "first_scheduled_time_ns": "first_scheduled_time",
    "first_token_time_ns": "first_token_time",
    "last_token_time_ns": "last_token_time",
}


@dataclass(frozen=True, slots=True)
class LlmRequest:
    """One request, its tensors read and checked."""

    prompt: str
    sampling: Mapping[str, Any]  # arguments of SamplingParams
    streaming: bool
    finish_reason: bool  # wanted among the outputs, as are the next two
    stop_reason: bool
    cumulative_logprob: bool
    guide: Mapping[str, Any] | None = None  # arguments of GuidedDecodingParams


def read_request(request: Any) -> LlmRequest:
    """Read the tensors of a request.

    Raises:
        RequestRefused: a tensor has another shape than it should, or is not text.
    """
    cumulative_logprob = bool(_scalar(request, "return_cumulative_logprob"))
    sampling: dict[str, Any] = {
        name: _value(_scalar(request, _SAMPLING + name), default) for name, default in _DEFAULTS.items()
    }
    for name in _ONLY_IF_GIVEN:
        value = _scalar(request, _SAMPLING + name)
        if value is not None:
            sampling[name] = value
    stop = read_texts(request, f"{_SAMPLING}stop")
    if stop:
        sampling["stop"] = [text for row in stop for text in row]
    if cumulative_logprob:
        sampling["logprobs"] = 1  # without it the LLM does not add them up
    return LlmRequest(
        prompt=_prompt(request),
        sampling=sampling,
        streaming=bool(_scalar(request, "streaming")),
        finish_reason=bool(_scalar(request, "return_finish_reason")),
        stop_reason=bool(_scalar(request, "return_stop_reason")),
        cumulative_logprob=cumulative_logprob,
        guide=_guide(request),
    )


def make_response(output: Any, wanted: LlmRequest, types: Mapping[str, Any]) -> Any:
    """Make the response for one output of the LLM: the text so far, and the other outputs that the request wants.

    Args:
        output: The LLM API's `RequestOutput`.
        wanted: The request.
        types: The numpy type of each output that the model declares.
    """
    made = {"text_output": texts([one.text for one in output.outputs])}
    if wanted.finish_reason:
        made["finish_reason"] = texts([str(one.finish_reason) for one in output.outputs])
    if wanted.stop_reason:
        made["stop_reason"] = texts([str(one.stop_reason) for one in output.outputs])
    if wanted.cumulative_logprob:
        sums = [one.cumulative_logprob for one in output.outputs]
        if None not in sums:  # not counted yet
            made["cumulative_logprob"] = np.array(sums, types["cumulative_logprob"])
    metrics = getattr(output.outputs[0], "request_perf_metrics", None)
    if metrics is not None:
        made |= {name: np.array([value], types[name]) for name, value in _measured(metrics) if name in types}
    return response(**made)


def _measured(metrics: Any) -> Iterator[tuple[str, int | float]]:
    for name, (section, field) in _COUNTS.items():
        yield name, getattr(getattr(metrics, section), field)
    for name, field in _TIMES.items():
        yield name, _nanoseconds(getattr(metrics.timing_metrics, field))


def _nanoseconds(time: timedelta) -> int:
    return round(time / timedelta(microseconds=1)) * 1000


def _guide(request: Any) -> Mapping[str, Any] | None:
    guide = guide_of(_text(request, TYPE), _text(request, GUIDE))
    if guide is None:
        return None
    kind, text = guide
    return {"json_object": True} if kind == "json" else {_GUIDES[kind]: text}


def _text(request: Any, name: str) -> str | None:
    rows = read_texts(request, name)
    return rows[0][0] if rows else None


def _prompt(request: Any) -> str:
    array = read(request, "text_input")
    if array is None:
        raise RequestRefused("text_input is missing")
    if array.ndim != 1 or array.size != 1:
        raise RequestRefused(
            f"text_input: has shape {list(array.shape)}; this model takes one prompt, and no batches: [1]"
        )
    rows = read_texts(request, "text_input") or []
    return rows[0][0]


def _scalar(request: Any, name: str) -> Any:
    """The one value of an input; None if the request has none."""
    array = read(request, name)
    if array is None:
        return None
    if array.size != 1:
        raise RequestRefused(f"{name}: has shape {list(array.shape)}; must hold one value")
    return array.item()


def _value(given: Any, default: Any) -> Any:
    return default if given is None else given
