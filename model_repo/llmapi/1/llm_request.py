"""One request of Triton: its tensors as arguments of the LLM API, and the LLM's outputs as tensors of a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from llm_settings import LlmSettings
from shared.guide import GUIDE, TYPE, guide_of
from shared.prompt_log_probs import PromptLogProbTable, read_alternatives
from shared.refusal import RequestRefused
from shared.tensors import Array, read, read_texts, response, texts

_SAMPLING = "sampling_param_"
_ONLY_IF_GIVEN = (
    "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed",
    "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_LISTS = ("stop", "bad", "stop_token_ids")
_IGNORABLE = {"presence_penalty": 0, "frequency_penalty": 0}  # -> their values without effect
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

    prompt: str | list[int]
    sampling: Mapping[str, Any]  # arguments of SamplingParams; `embedding_bias` [vocabulary] as an array
    streaming: bool
    finish_reason: bool  # wanted among the outputs, as are the next two
    stop_reason: bool
    cumulative_logprob: bool
    guide: Mapping[str, Any] | None = None  # arguments of GuidedDecodingParams
    alternatives: int | None = None  # at each token of the prompt; None: no log probabilities of the prompt
    output_ids: bool = False  # wanted among the outputs
    prior: tuple[int, ...] = ()  # tokens of the answer that came before, from another server


def read_request(request: Any, settings: LlmSettings) -> LlmRequest:
    """Read the tensors of a request.

    Raises:
        RequestRefused: A tensor has another shape than it should, or is not text; or the release would ignore it.
    """
    cumulative_logprob = bool(_scalar(request, "return_cumulative_logprob"))
    sampling: dict[str, Any] = {
        name: _value(_scalar(request, _SAMPLING + name), default) for name, default in _DEFAULTS.items()
    }
    for name in _ONLY_IF_GIVEN:
        value = _scalar(request, _SAMPLING + name)
        if value is not None:
            sampling[name] = value
    for name in settings.ignored_sampling:
        if sampling.get(name, _IGNORABLE[name]) != _IGNORABLE[name]:
            raise RequestRefused(
                f"{_SAMPLING}{name} = {sampling[name]:g}: the LLM API of this release ignores it"
            )
    for name in _LISTS:
        values = _values(request, _SAMPLING + name)
        if values:
            sampling[name] = values
    bias = _bias(request, settings.vocab_size)
    if bias is not None:
        sampling["embedding_bias"] = bias
    alternatives = read(request, f"{_SAMPLING}prompt_logprobs")
    if alternatives is not None:
        # Its own prompt_logprobs leave out tokens of the prompt that are not among the most probable ones.
        sampling["return_context_logits"] = True
    if cumulative_logprob:
        sampling["logprobs"] = 1  # without it the LLM does not add them up
    # Each response of a stream may be replaced by the next one; log probabilities of the prompt come in one.
    streaming = bool(_scalar(request, "streaming")) and alternatives is None
    return LlmRequest(
        prompt=_prompt(request),
        sampling=sampling,
        streaming=streaming,
        finish_reason=bool(_scalar(request, "return_finish_reason")),
        stop_reason=bool(_scalar(request, "return_stop_reason")),
        cumulative_logprob=cumulative_logprob,
        guide=_guide(request),
        output_ids=bool(_scalar(request, "return_output_ids")),
        prior=_prior(request, settings, streaming=streaming),
        alternatives=None if alternatives is None else read_alternatives(alternatives),
    )


def make_response(output: Any, wanted: LlmRequest, types: Mapping[str, Any]) -> Any:
    """Make the response for one output of the LLM: the text so far, and the other outputs that the request wants.

    Args:
        output: The LLM API's `RequestOutput`.
        wanted: The request.
        types: The numpy type of each output that the model declares.
    """
    made = {"text_output": texts([one.text for one in output.outputs])}
    if wanted.output_ids:
        made["output_ids"] = np.array(output.outputs[0].token_ids, np.int32)
    if wanted.alternatives is not None and output.finished:
        made |= _prompt_log_probs(output, wanted.alternatives)
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


def _prompt_log_probs(output: Any, alternatives: int) -> dict[str, Array]:
    """Compute them from the logits [tokens, vocabulary] of the prompt.

    Raises:
        RuntimeError: The LLM has not computed all of them.
    """
    table = PromptLogProbTable(output.prompt_token_ids, alternatives)
    logits = output.context_logits
    if logits is not None:
        table.read(logits.reshape(-1, logits.shape[-1]).float().cpu().numpy())
    if not table.complete:
        raise RuntimeError("the LLM has not computed the whole prompt: kv_cache.reuse must be false")
    return {name: array[0] for name, array in table.tensors().items()}


def _bias(request: Any, vocab_size: int | None) -> Array | None:
    """Values added to the logits, [vocabulary]."""
    ids = _values(request, f"{_SAMPLING}logit_bias_token_ids")
    values = _values(request, f"{_SAMPLING}logit_bias_values")
    if not ids and not values:
        return None
    if vocab_size is None or len(ids) != len(values) or not 0 <= min(ids) <= max(ids) < vocab_size:
        right = (
            f"numbers for token ids from 0 to {vocab_size - 1}"
            if vocab_size
            else "of a checkpoint in this package"
        )
        raise RequestRefused(f"{_SAMPLING}logit_bias_token_ids: must be {right}")
    bias = np.zeros(vocab_size, np.float32)
    np.add.at(bias, ids, values)
    return bias


def _values(request: Any, name: str) -> list[Any]:
    """The values of an input of one dimension; none if the request has none."""
    array = read(request, name)
    if array is None:
        return []
    rows = read_texts(request, name) if array.dtype == np.object_ else [array.reshape(-1).tolist()]
    return [value for row in rows or [] for value in row]


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


def _prior(request: Any, settings: LlmSettings, *, streaming: bool) -> tuple[int, ...]:
    prior = tuple(_values(request, "prior_output_ids"))
    if prior and not streaming:
        raise RequestRefused(
            "prior_output_ids: needs streaming = true, and no log probabilities of the prompt"
        )
    if prior and _guide(request) is not None:
        raise RequestRefused("prior_output_ids: an answer that has a form cannot go on")
    if prior and settings.vocab_size and not 0 <= min(prior) <= max(prior) < settings.vocab_size:
        raise RequestRefused(f"prior_output_ids: must be token ids from 0 to {settings.vocab_size - 1}")
    return prior


def _prompt(request: Any) -> str | list[int]:
    array = read(request, "text_input")
    if array is None:
        raise RequestRefused("text_input is missing")
    if array.ndim != 1 or array.size != 1:
        raise RequestRefused(
            f"text_input: has shape {list(array.shape)}; this model takes one prompt, and no batches: [1]"
        )
    (text,) = _values(request, "text_input")
    ids = _values(request, "prompt_token_ids")
    if ids and text:
        raise RequestRefused("prompt_token_ids: are in place of text_input, which must be empty beside them")
    return ids or str(text)


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
