"""The sampling parameters of a request: their names, their bounds, and the tensors that carry them.

Every fault is found before anything is sent, and all of them are told at once. A parameter that the model has no tensor
for is refused, never dropped.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypedDict

from pipeline.client.errors import Refused


class Sampling(TypedDict, total=False):
    """How to answer. What is left out is the server's default; None is the same as left out."""

    max_tokens: int | None  # at most so many new tokens
    min_tokens: int | None  # no end token before so many
    temperature: float | None  # 0 is greedy
    top_k: int | None  # only the k likeliest tokens; 1 is greedy, 0 is all
    top_p: float | None  # only the likeliest tokens that together have this probability
    seed: int | None
    stop: str | Sequence[str] | None  # texts that end the answer
    bad_words: str | Sequence[str] | None  # texts that are never generated
    repetition_penalty: float | None  # 1 is none
    presence_penalty: float | None  # 0 is none
    frequency_penalty: float | None  # 0 is none
    length_penalty: float | None
    end_id: int | None  # token that ends the answer instead of the tokenizer's own; -1 is none
    num_draft_tokens: int | None  # to propose per step, where the model takes it; 0 is no speculation
    log_probs: bool | None  # return the log probability of each token
    top_log_probs: (
        int | None
    )  # and those of so many likeliest tokens; needs log_probs, and logits from the engine
    guide_type: str | None  # json, json_schema, regex or ebnf_grammar: the answer then has that form
    guide: str | None  # the schema, expression or grammar


Kind = Literal["int", "float", "words", "bool"]
Value = int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; `tensors` holds its name in each layout (backend models, their releases before 0.20, llmapi)."""

    name: str
    kind: Kind
    tensors: tuple[str, ...]
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False  # `low` itself is not allowed

    def read(self, value: object) -> Value:
        """The value as it is sent. ValueError tells what would be right."""
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise ValueError("must be True or False")
            return value
        if self.kind == "words":
            return _words(value)
        number = _number(value, whole=self.kind == "int")
        if not (self.low < number if self.above_low else self.low <= number) or number > self.high:
            raise ValueError(f"must be {self._bounds()}")
        return number

    def _bounds(self) -> str:
        low = "" if self.low == -math.inf else f"{'more than' if self.above_low else 'at least'} {self.low}"
        high = "" if self.high == math.inf else f"at most {self.high}"
        return " and ".join(part for part in (low, high) if part)


_INT32 = 2**31 - 1
_FLOAT32_LEAST, _FLOAT32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("max_tokens", "int", ("max_tokens", "sampling_param_max_tokens"), 1, _INT32),
        Parameter("min_tokens", "int", ("min_tokens", "min_length"), 0, _INT32),
        Parameter("temperature", "float", ("temperature", "sampling_param_temperature"), 0),
        Parameter("top_k", "int", ("top_k", "sampling_param_top_k"), 0, _INT32),
        Parameter("top_p", "float", ("top_p", "sampling_param_top_p"), 0, 1, above_low=True),
        Parameter("seed", "int", ("seed", "random_seed", "sampling_param_seed"), 0, 2**64 - 1),
        Parameter("stop", "words", ("stop_words", "sampling_param_stop")),
        Parameter("bad_words", "words", ("bad_words",)),
        Parameter("repetition_penalty", "float", ("repetition_penalty",), 0, above_low=True),
        Parameter("presence_penalty", "float", ("presence_penalty", "sampling_param_presence_penalty")),
        Parameter("frequency_penalty", "float", ("frequency_penalty", "sampling_param_frequency_penalty")),
        Parameter("length_penalty", "float", ("length_penalty",)),
        Parameter("end_id", "int", ("end_id",), -1, _INT32),
        Parameter("num_draft_tokens", "int", ("num_draft_tokens",), 0, _INT32),
        Parameter("log_probs", "bool", ("return_log_probs",)),
        Parameter("top_log_probs", "int", ("return_generation_logits",), 1, 20),
        Parameter("guide_type", "words", ("guided_decoding_guide_type",)),
        Parameter("guide", "words", ("guided_decoding_guide",)),
    )
}


# Parameters that change the distribution beside the temperature -> the values that do not.
_NEUTRAL: Mapping[str, Value | None] = {
    "min_tokens": 0, "bad_words": None, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "guide_type": None,
}  # fmt: skip


def read_sampling(given: Mapping[str, object]) -> dict[str, Value]:
    """Checked values by parameter name; what is None is left out.

    >>> read_sampling({"max_tokens": 8, "stop": "\\n", "seed": None})
    {'max_tokens': 8, 'stop': ('\\n',)}
    """
    values: dict[str, Value] = {}
    faults = []
    for name, value in given.items():
        parameter = PARAMETERS.get(name)
        if parameter is None:
            faults.append(f"unknown parameter {name!r}{_did_you_mean(name)}")
        elif value is not None:
            try:
                values[name] = parameter.read(value)
            except ValueError as error:
                faults.append(f"{name} = {value!r}: {error}")
    least, most = values.get("min_tokens", 0), values.get("max_tokens", _INT32)
    if isinstance(least, int) and isinstance(most, int) and least > most:
        faults.append(f"min_tokens = {least}: must be at most max_tokens = {most}")
    if values.get("top_log_probs"):
        faults += _unlike_logits(values)
    if faults:
        raise Refused("; ".join(faults))
    return values


def _unlike_logits(values: Mapping[str, Value]) -> list[str]:
    """What keeps the likeliest tokens from being told: see `pipeline.client.top_logprobs`."""
    faults = [] if values.get("log_probs") else ["top_log_probs: needs log_probs = True"]
    return faults + [
        f"top_log_probs: cannot be told with {name} = {values[name]!r}, which changes what a token is drawn from"
        for name, nothing in _NEUTRAL.items()
        if values.get(name, nothing) != nothing
    ]


def _did_you_mean(name: str) -> str:
    near = difflib.get_close_matches(name, PARAMETERS, n=1)
    return f" (did you mean {near[0]!r}?)" if near else f" (there are {', '.join(PARAMETERS)})"


def _words(value: object) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) and word for word in words):
        raise ValueError("must be a text or a list of texts, none of them empty")
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can encode") from None
    return tuple(words)


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
