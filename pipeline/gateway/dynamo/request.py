"""Requests of Dynamo's frontend as sampling parameters of the client, and chunks of the client as Dynamo's.

Written against ai-dynamo 1.6.1: `GenerateRequest` and `GenerateChunk` in dynamo/common/backend/engine.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from pipeline.client import Chunk, Refused, Sampling, Stats
from pipeline.triton.deployment import Deployment

# Fields that both sides call by one name.
_SAME = {
    "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "length_penalty", "max_tokens", "min_tokens", "ignore_eos",
}  # fmt: skip
_STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
# The frontend looks for stop texts itself, and cancels the request.
_FRONTENDS = {
    "stop", "include_stop_str_in_output", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids",
}  # fmt: skip
# Values that ask for nothing.
_NEUTRAL: Mapping[str, Any] = {"n": 1, "best_of": 1, "use_beam_search": False}


def read_request(request: Mapping[str, Any], deployment: Deployment) -> Sampling:
    """Translate a request's sampling options, stop conditions and output options.

    Raises:
        Refused: the request asks for what this worker cannot do; the message has all of it.
    """
    options, conditions, output = (
        request.get(name) or {} for name in ("sampling_options", "stop_conditions", "output_options")
    )
    # Defaults of OpenAI's API, as the gateway has them.
    sampling: dict[str, Any] = {
        "max_tokens": deployment.limits.max_output_tokens, "temperature": 1.0, "token_ids": True,
    }  # fmt: skip
    faults = [name for name in ("multi_modal_data", "prefill_result", "encoder_result") if request.get(name)]
    for name, value in (*options.items(), *conditions.items(), *output.items()):
        if value is None or name in _FRONTENDS or value == _NEUTRAL.get(name):
            continue
        if name in _SAME:
            sampling[name] = value
        elif name not in (*_STOP_IDS, "guided_decoding", "logprobs"):
            faults.append(f"{name} = {value!r}")
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if sampling.get("top_p") == 0:
        del sampling["top_p"]
        sampling["temperature"] = 0.0
    ends = {deployment.end_id, *deployment.stop_token_ids}
    stops = {id for name in _STOP_IDS for id in conditions.get(name) or ()} - ends
    if stops:
        sampling["stop_token_ids"] = sorted(stops)
    if (count := output.get("logprobs")) is not None:
        sampling |= {"log_probs": True, "top_log_probs": count or None}
    if guide := {
        name: value for name, value in (options.get("guided_decoding") or {}).items() if value is not None
    }:
        form = _guide(guide)
        if form is None:
            faults.append(f"guided_decoding = {guide!r}")
        elif not deployment.guided_decoding:
            faults.append("guided_decoding: this deployment has no guided decoding")
        else:
            sampling |= form
    if faults:
        raise Refused(f"not supported by this worker: {'; '.join(faults)}")
    return cast(Sampling, sampling)


def _guide(guide: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the client's parameters for one form of an answer; None for what it does not have."""
    match dict(guide):
        case {"json": schema, **others} if not others:
            return {
                "guide_type": "json_schema",
                "guide": schema if isinstance(schema, str) else json.dumps(schema),
            }
        case {"regex": pattern, **others} if not others:
            return {"guide_type": "regex", "guide": pattern}
        case {"choice": choices, **others} if not others:
            return {"guide_type": "regex", "guide": "|".join(f"({re.escape(choice)})" for choice in choices)}
        case {"grammar": grammar, **others} if not others:
            return {"guide_type": "ebnf_grammar", "guide": grammar}
    return None


def write_chunk(chunk: Chunk, stats: Stats, prompt_tokens: int) -> dict[str, Any]:
    """Translate a chunk of an answer.

    Args:
        stats: statistics of the stream, complete with its last chunk.
        prompt_tokens: number of tokens of the request.
    """
    written: dict[str, Any] = {"index": 0, "token_ids": list(chunk.token_ids or ())}
    if chunk.log_probs:
        written["log_probs"] = list(chunk.log_probs)
    if chunk.top_log_probs:
        written["top_logprobs"] = [
            [
                {"rank": rank, "token_id": id, "token": None, "logprob": log_prob}
                for rank, (id, log_prob) in enumerate(position, start=1)
            ]
            for position in chunk.top_log_probs
        ]
    if chunk.finish_reason is not None:
        # Models of others do not say why they end.
        written["finish_reason"] = "length" if chunk.finish_reason == "length" else "stop"
        completion = stats.output_tokens or 0
        written["completion_usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens or 0},
        }
    return written
