"""From what the LLM puts out to the tensors of a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
from llm_request import Asked
from shared.tensors import response, texts

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


def answer(output: Any, asked: Asked, types: Mapping[str, Any]) -> Any:
    """The response for one output of the LLM: the text so far, and what else was asked for.

    `types`: numpy type of each output that the model has.
    """
    made = {"text_output": texts([one.text for one in output.outputs])}
    if asked.finish_reason:
        made["finish_reason"] = texts([str(one.finish_reason) for one in output.outputs])
    if asked.stop_reason:
        made["stop_reason"] = texts([str(one.stop_reason) for one in output.outputs])
    if asked.cumulative_logprob:
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
