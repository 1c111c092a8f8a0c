"""One request of Triton: its tensors as arguments of the LLM API."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llm_settings import LlmSettings
from shared.guide import GUIDE, TYPE, guide_of
from shared.prompt_log_probs import MOST_ALTERNATIVES
from shared.refusal import RequestRefused
from shared.tensors import Array, read, read_texts

_SAMPLING = "sampling_param_"
_ONLY_IF_GIVEN = (
    "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed",
    "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_LISTS = ("stop", "bad", "stop_token_ids")
_IGNORABLE = {"presence_penalty": 0, "frequency_penalty": 0}  # -> their values without effect
# Kind of a guide -> argument of GuidedDecodingParams that takes its text.
_GUIDES = {
    "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip
_DEFAULTS = {"best_of": 1, "exclude_input_from_output": False, "return_perf_metrics": False}
# Input -> argument of LoRARequest. The first three come together.
_LORA = {
    "lora_id": "lora_int_id", "lora_name": "lora_name", "lora_path": "lora_path",
    "lora_ckpt_source": "lora_ckpt_source",
}  # fmt: skip
_LORA_SOURCES = ("hf", "nemo")


@dataclass(frozen=True, slots=True)
class LlmRequest:
    """One request, its tensors read and checked."""

    prompt: str | list[int]
    sampling: Mapping[str, Any]  # arguments of SamplingParams; `embedding_bias` [vocabulary] as an array
    streaming: bool
    finish_reason: bool  # wanted among the outputs, as are the next two
    stop_reason: bool
    cumulative_logprob: bool
    call: Mapping[str, Any] = field(default_factory=dict)  # further arguments of generate_async
    guide: Mapping[str, Any] | None = None  # arguments of GuidedDecodingParams
    lora: Mapping[str, Any] | None = None  # arguments of LoRARequest
    alternatives: int | None = None  # at each token of the prompt; None: no log probabilities of the prompt
    log_probs: int | None = (
        None  # alternatives at each token of the answer; None: no log probabilities of tokens
    )
    output_ids: bool = False  # wanted among the outputs
    prior: tuple[int, ...] = ()  # tokens of the answer that came before, from another server


def read_request(request: Any, settings: LlmSettings) -> LlmRequest:
    """Read the tensors of a request.

    Raises:
        RequestRefused: A tensor has another shape than it should, or is not text; or the release would ignore it, or
            the model has no such thing.
    """
    if read(request, "image_url") is not None:
        raise RequestRefused("image_url: this model takes text alone")
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
        # Clients of upstream send "" for no word.
        values = [value for value in _values(request, _SAMPLING + name) if value != ""]
        if values:
            sampling[name] = values
    bias = _bias(request, settings.vocab_size)
    if bias is not None:
        sampling["embedding_bias"] = bias
    alternatives = _alternatives(request, "prompt_logprobs")
    if alternatives is not None:
        # Its own prompt_logprobs leave out tokens of the prompt that are not among the most probable ones.
        sampling["return_context_logits"] = True
    log_probs = _alternatives(request, "logprobs")
    if log_probs is not None:
        sampling["logprobs"] = log_probs
    elif cumulative_logprob:
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
        call=_call(request),
        guide=_guide(request),
        lora=_lora(request, settings),
        output_ids=bool(_scalar(request, "return_output_ids")),
        prior=_prior(request, settings, streaming=streaming),
        alternatives=alternatives,
        log_probs=log_probs,
    )


def _alternatives(request: Any, name: str) -> int | None:
    """How many of the most probable tokens are wanted at each position; None where nothing is."""
    count = _scalar(request, _SAMPLING + name)
    if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
        raise RequestRefused(f"{_SAMPLING}{name} = {count}: must be 0 to {MOST_ALTERNATIVES}")
    return None if count is None else int(count)


def _call(request: Any) -> Mapping[str, Any]:
    priority = _scalar(request, "priority")
    if priority is not None and not 0 <= priority <= 1:
        raise RequestRefused(f"priority = {priority:g}: must be 0 to 1")
    return {} if priority is None else {"priority": priority}


def _lora(request: Any, settings: LlmSettings) -> Mapping[str, Any] | None:
    """The adapter that answers, read by the LLM from a folder of this machine when it is first asked for.

    Where the package has adapters, there are no others: a name or a number chooses one.
    """
    given = {}
    for name in _LORA:
        value = _scalar(request, name) if name == "lora_id" else _text(request, name)
        if value is not None:
            given[name] = value
    if not given:
        return None
    if settings.adapters:
        return _packaged_lora(given, settings.adapters)
    if not settings.has_lora:
        raise RequestRefused(f"{next(iter(given))}: model.yaml has neither enable_lora nor lora_config")
    if missing := [name for name in list(_LORA)[:3] if name not in given]:
        raise RequestRefused(f"{', '.join(missing)}: missing beside {', '.join(given)}")
    if not os.path.exists(given["lora_path"]):
        raise RequestRefused(f"lora_path = {given['lora_path']}: is not on the server")
    if given.get("lora_ckpt_source", "hf") not in _LORA_SOURCES:
        raise RequestRefused(
            f"lora_ckpt_source = {given['lora_ckpt_source']}: must be {' or '.join(_LORA_SOURCES)}"
        )
    return {_LORA[name]: value for name, value in given.items()}


def _packaged_lora(given: Mapping[str, Any], paths: Sequence[str]) -> Mapping[str, Any]:
    known = {os.path.basename(path): (number, path) for number, path in enumerate(paths, start=1)}
    if strange := [name for name in ("lora_path", "lora_ckpt_source") if name in given]:
        raise RequestRefused(
            f"{strange[0]}: LoRA adapters are those of the package, which lora_name or lora_id names"
        )
    name, number = given.get("lora_name"), given.get("lora_id")
    for one, (at, path) in known.items():
        if name in (None, one) and number in (None, at):
            return {"lora_name": one, "lora_int_id": at, "lora_path": path}
    said = f"lora_name = {name[:64]}" if name is not None else f"lora_id = {number}"
    there = ", ".join(f"{one} ({at})" for one, (at, _) in known.items())
    raise RequestRefused(f"{said}: is unknown; there are {there}")


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
