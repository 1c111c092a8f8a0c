"""The sampling parameters of a request: one table of their names, bounds, and the tensors that carry them.

`client.request` builds messages by it, and the server for tests declares its inputs by it.

Every mistake is found before anything is sent, and one error lists all of them. A parameter that the model has no
tensor for is refused, never dropped.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, TypedDict

from pipeline.client.answer import PartialAnswer
from pipeline.client.errors import Refused


class Sampling(TypedDict, total=False):
    """Sampling parameters of a request. One that is left out, or None, has the server's default.

    Attributes:
        max_tokens: at most so many new tokens, 1 or more.
        min_tokens: no end token before so many new tokens.
        temperature: 0 is greedy.
        top_k: sample from the k most probable tokens; 1 is greedy, 0 is all.
        top_p: sample from the most probable tokens that together have this probability, more than 0 and at most 1.
        seed: seed of the random numbers, 0 to 2**64 - 1. Equal requests get equal answers; with a draft model only if
            it drafts in equal rounds.
        stop: texts that end the answer.
        bad_words: texts that are never generated.
        repetition_penalty: more than 0; 1 has no effect.
        presence_penalty: 0 has no effect.
        frequency_penalty: 0 has no effect.
        length_penalty: for beam search.
        min_p: drop tokens less probable than this share of the most probable token, 0 to 1; 0 has no effect.
        ignore_eos: go on after the tokenizer's end tokens, until `max_tokens` or a stop. Not beside `end_id`.
        stop_token_ids: tokens that end the answer.
        include_stop_str_in_output: keep the stop text, or the stop token's text, that ended the answer.
        skip_special_tokens: False also returns the text of special tokens.
        logit_bias: added to the logits, by token id.
        end_id: token that ends the answer instead of the tokenizer's own; -1 is none.
        num_draft_tokens: tokens to propose per step of speculative decoding, if the model takes it; 0 is none.
        log_probs: return the log probability of each token.
        top_log_probs: also return those of so many most probable tokens at each position, 1 to 20. Needs `log_probs`,
            and an engine that returns logits.
        prompt_log_probs: return the log probability of each token of the prompt, and of so many most probable tokens at
            each of its positions, 0 to 20.
        token_ids: return the ids of the answer's tokens with each chunk.
        priority: 0 to 1; among waiting requests, higher priorities are scheduled first. 0.5 by default.
        guide_type: form of the answer (guided decoding): json, json_schema, regex, ebnf_grammar, or on cpu and pytorch
            structural_tag.
        guide: the schema, regular expression, grammar or tag.
        adapter: name of the LoRA adapter of the deployment that answers; by default the base.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    bad_words: str | Sequence[str] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    length_penalty: float | None
    min_p: float | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    logit_bias: Mapping[int, float] | None
    end_id: int | None
    num_draft_tokens: int | None
    log_probs: bool | None
    top_log_probs: int | None
    prompt_log_probs: int | None
    token_ids: bool | None
    priority: float | None
    guide_type: str | None
    guide: str | None
    adapter: str | None


class RequestOptions(Sampling, total=False):
    """Arguments of a client's `stream` and `generate` beside the prompt: the sampling parameters, and these.

    Attributes:
        request_id: id in the server's log and in errors; random by default.
        tools: functions that the model may call, as OpenAI's API describes them; they need chat messages.
        affinity: requests with the same text go to the same server while its load allows; by default what the prompt
            begins with, which all turns of a conversation have in common.
        prior: part of the answer that came before its server was lost. The answer goes on after it: chunks are new
            ones; text, token ids and counts are those of the whole answer.
    """

    request_id: str | None
    tools: Sequence[Mapping[str, Any]]
    affinity: str | None
    prior: PartialAnswer | None


SamplingValue = int | float | bool | tuple[str, ...] | tuple[int, ...] | dict[int, float]


Kind = Literal["int", "float", "words", "bool", "ids", "bias"]
Layout = Literal["backend", "llmapi"]
# Datatype of each kind's tensor; * has any number of elements.
_DATATYPES: Mapping[Kind, str] = {
    "int": "INT32", "float": "FP32", "words": "STRING*", "bool": "BOOL", "ids": "INT32*", "bias": "INT32*",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """One sampling parameter: the tensor that carries it in each layout of an entry model, and its values.

    Attributes:
        kind: type of its values; "words" is a text or several, "ids" are token ids, "bias" numbers by token id.
        backend: input of the TensorRT-LLM backend's models; None if they have none.
        llmapi: input of the `llmapi` model; None if it has none.
        own: layouts in which only the models of this project have the input, not upstream's.
        datatype: datatype of the tensor; by default that of the kind.
        low: least value.
        high: greatest value.
        above_low: `low` itself is not allowed.
        neutral: value without effect; None: there is none.
    """

    kind: Kind
    backend: str | None
    llmapi: str | None = None
    own: tuple[Layout, ...] = ()
    datatype: str = ""
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    neutral: SamplingValue | None = None
    tensors: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(filter(None, (self.backend, self.llmapi))))
        object.__setattr__(self, "datatype", self.datatype or _DATATYPES[self.kind])

    def read(self, value: object) -> SamplingValue:
        """Return the value as it is sent. Raises ValueError that says what would be right."""
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise ValueError("must be True or False")
            return value
        if self.kind == "words":
            return _words(value)
        if self.kind == "ids":
            return read_token_ids(value)
        if self.kind == "bias":
            return _bias(value)
        number = _number(value, whole=self.kind == "int")
        if not (self.low < number if self.above_low else self.low <= number) or number > self.high:
            raise ValueError(f"must be {self._bounds()}")
        return number

    def inputs(self, layout: Layout) -> Mapping[str, str]:
        """Return the inputs of an entry model that carry the parameter, with their datatypes; * has any length."""
        name = self.backend if layout == "backend" else self.llmapi
        if name is None:
            return {}
        if name == LOG_PROBS_INPUT:
            return {name: "INT32"}
        return {name: self.datatype} | ({bias_values(name): "FP32*"} if self.kind == "bias" else {})

    def _bounds(self) -> str:
        low = "" if self.low == -math.inf else f"{'more than' if self.above_low else 'at least'} {self.low}"
        high = "" if self.high == math.inf else f"at most {self.high}"
        return " and ".join(part for part in (low, high) if part)


_INT32 = 2**31 - 1
_MOST_LOG_PROBS = 20
# Number of most probable tokens at each position, 0 for none: of the `llmapi` model, in place of two inputs.
LOG_PROBS_INPUT = "sampling_param_logprobs"
_FLOAT32_LEAST, _FLOAT32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_BOTH: tuple[Layout, ...] = ("backend", "llmapi")
_P = SamplingParameter
PARAMETERS: Mapping[str, SamplingParameter] = {
    "max_tokens": _P("int", "max_tokens", "sampling_param_max_tokens", low=1, high=_INT32),
    "min_tokens": _P("int", "min_tokens", "sampling_param_min_tokens", own=("llmapi",), low=0, high=_INT32, neutral=0),
    "temperature": _P("float", "temperature", "sampling_param_temperature", low=0),
    "top_k": _P("int", "top_k", "sampling_param_top_k", low=0, high=_INT32, neutral=0),
    "top_p": _P("float", "top_p", "sampling_param_top_p", low=0, high=1, above_low=True, neutral=1.0),
    "min_p": _P("float", "min_p", "sampling_param_min_p", own=_BOTH, low=0, high=1, neutral=0.0),
    "seed": _P("int", "seed", "sampling_param_seed", datatype="UINT64", low=0, high=2**64 - 1),
    "stop": _P("words", "stop_words", "sampling_param_stop", neutral=()),
    "stop_token_ids": _P("ids", "stop_token_ids", "sampling_param_stop_token_ids", own=_BOTH, neutral=()),
    "include_stop_str_in_output": _P("bool", "include_stop_str_in_output",
        "sampling_param_include_stop_str_in_output", own=_BOTH, neutral=False),
    "skip_special_tokens": _P("bool", "skip_special_tokens", "sampling_param_skip_special_tokens", own=_BOTH,
        neutral=True),
    # Backend models have no such input: an `end_id` of -1 says the same.
    "ignore_eos": _P("bool", None, "sampling_param_ignore_eos", own=_BOTH, neutral=False),
    "logit_bias": _P("bias", "logit_bias_token_ids", "sampling_param_logit_bias_token_ids", own=_BOTH, neutral={}),
    "bad_words": _P("words", "bad_words", "sampling_param_bad", own=("llmapi",), neutral=()),
    "repetition_penalty": _P("float", "repetition_penalty", "sampling_param_repetition_penalty", own=("llmapi",),
        low=0, above_low=True, neutral=1.0),
    "presence_penalty": _P("float", "presence_penalty", "sampling_param_presence_penalty", neutral=0.0),
    "frequency_penalty": _P("float", "frequency_penalty", "sampling_param_frequency_penalty", neutral=0.0),
    "length_penalty": _P("float", "length_penalty", neutral=1.0),
    "end_id": _P("int", "end_id", low=-1, high=_INT32),
    "num_draft_tokens": _P("int", "num_draft_tokens", low=0, high=_INT32),
    "log_probs": _P("bool", "return_log_probs", LOG_PROBS_INPUT, own=("llmapi",), neutral=False),
    "top_log_probs": _P("int", "return_generation_logits", LOG_PROBS_INPUT, own=("llmapi",), datatype="BOOL",
        low=1, high=_MOST_LOG_PROBS),
    "prompt_log_probs": _P("int", "return_prompt_log_probs", "sampling_param_prompt_logprobs", own=_BOTH,
        low=0, high=_MOST_LOG_PROBS),
    "token_ids": _P("bool", "return_output_ids", "return_output_ids", own=_BOTH, neutral=False),
    "priority": _P("float", None, "priority", own=("llmapi",), low=0, high=1, neutral=0.5),
    "guide_type": _P("words", "guided_decoding_guide_type", datatype="STRING"),
    "guide": _P("words", "guided_decoding_guide", datatype="STRING"),
    # Upstream's model takes a name together with a number and a path; ours knows those of the deployment.
    "adapter": _P("words", "lora_name", "lora_name", own=_BOTH, datatype="STRING"),
}  # fmt: skip


def bias_values(token_ids: str) -> str:
    """Return the input for the numbers of a logit bias, beside that of its token ids."""
    return f"{token_ids.removesuffix('token_ids')}values"


# Parameters that change what a token is drawn from, in ways that the logits do not tell.
_RESHAPING = ("min_tokens", "bad_words", "repetition_penalty", "presence_penalty", "frequency_penalty")


def is_neutral(name: str, value: object) -> bool:
    """Whether a parameter of that name has no effect with this value.

    >>> is_neutral("top_p", 1), is_neutral("skip_special_tokens", False)
    (True, False)
    """
    parameter = PARAMETERS.get(name)
    return parameter is not None and parameter.neutral is not None and parameter.neutral == value


def read_sampling(sampling: Mapping[str, object]) -> dict[str, SamplingValue]:
    """Check sampling parameters and return them without those that are None.

    Raises:
        Refused: a parameter is unknown, or its value is wrong; lists all of them.

    >>> read_sampling({"max_tokens": 8, "stop": "\\n", "seed": None})
    {'max_tokens': 8, 'stop': ('\\n',)}
    """
    values: dict[str, SamplingValue] = {}
    faults = []
    for name, value in sampling.items():
        parameter = PARAMETERS.get(name)
        if parameter is None:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PARAMETERS)}"
            faults.append(f"unknown parameter {name!r} ({hint})")
        elif value is not None:
            try:
                values[name] = parameter.read(value)
            except ValueError as error:
                faults.append(f"{name} = {value!r}: {error}")
    least, most = values.get("min_tokens", 0), values.get("max_tokens", _INT32)
    if isinstance(least, int) and isinstance(most, int) and least > most:
        faults.append(f"min_tokens = {least}: must be at most max_tokens = {most}")
    if values.get("ignore_eos") and "end_id" in values:
        faults.append(f"ignore_eos: cannot be beside end_id = {values['end_id']}")
    if values.get("top_log_probs"):
        faults += _top_log_probs_faults(values)
    if faults:
        raise Refused("; ".join(faults))
    return values


def _top_log_probs_faults(values: Mapping[str, SamplingValue]) -> list[str]:
    """Why top log probs cannot be computed from the logits; see `TopLogProbsRequest`."""
    faults = [] if values.get("log_probs") else ["top_log_probs: needs log_probs = True"]
    return faults + [
        f"top_log_probs: cannot be told with {name} = {values[name]!r}, which changes what a token is drawn from"
        for name in _RESHAPING
        if name in values and not is_neutral(name, values[name])
    ]


def _words(value: object) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) and word for word in words):
        raise ValueError("must be a text or a list of texts, none of them empty")
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can encode") from None
    return tuple(words)


def read_token_ids(value: object) -> tuple[int, ...]:
    """Return token ids as a tuple. Raises ValueError that says what would be right."""
    right = f"must be a list of token ids, whole numbers from 0 to {_INT32}"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(right)
    # One pass in C for what a prompt of many thousand tokens nearly always is.
    whole = all(type(token) is int for token in value) or all(
        isinstance(token, Integral) and not isinstance(token, bool) for token in value
    )
    if not whole or (value and not 0 <= min(value) <= max(value) <= _INT32):
        raise ValueError(right)
    return tuple(map(int, value))


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError("must be numbers by token id, such as {15: -100}")
    ids = read_token_ids(tuple(value))
    return dict(zip(ids, (float(_number(bias, whole=False)) for bias in value.values()), strict=True))


def _number(value: object, *, whole: bool) -> int | float:
    if whole:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError("must be a whole number")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    number = float(value)
    if number and not _FLOAT32_LEAST <= abs(number) <= _FLOAT32_MOST:
        raise ValueError(f"must be within float32: of a size from {_FLOAT32_LEAST:g} to {_FLOAT32_MOST:g}")
    return number
