"""What one request of Triton asks of the LLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.guide import GUIDE, TYPE, guide_of
from shared.refusal import Refused
from shared.tensors import read, read_texts

_SAMPLING = "sampling_param_"
_ONLY_IF_GIVEN = (
    "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed",
)  # fmt: skip
# Kind of a guide -> argument of GuidedDecodingParams that takes its text.
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_DEFAULTS = {"best_of": 1, "exclude_input_from_output": False, "return_perf_metrics": False}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read and checked."""

    prompt: str
    sampling: Mapping[str, Any]  # arguments of SamplingParams
    streaming: bool
    finish_reason: bool
    stop_reason: bool
    cumulative_logprob: bool
    guide: Mapping[str, Any] | None = None  # arguments of GuidedDecodingParams


def read_request(request: Any) -> Asked:
    """Read the tensors of a request.

    Raises:
        Refused: a tensor has another shape than it should, or is not text.
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
    return Asked(
        prompt=_prompt(request),
        sampling=sampling,
        streaming=bool(_scalar(request, "streaming")),
        finish_reason=bool(_scalar(request, "return_finish_reason")),
        stop_reason=bool(_scalar(request, "return_stop_reason")),
        cumulative_logprob=cumulative_logprob,
        guide=_guide(request),
    )


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
        raise Refused("text_input is missing")
    if array.ndim != 1 or array.size != 1:
        raise Refused(
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
        raise Refused(f"{name}: has shape {list(array.shape)}; must hold one value")
    return array.item()


def _value(given: Any, default: Any) -> Any:
    return default if given is None else given
