"""Inputs and outputs of the engine: requests with sampling parameters and guides, outputs, metrics.

Parameters mean what they mean to TensorRT-LLM's C++ executor, against which this was written (release 1.2):

* `end_id` ends generation and is *not* part of the output tokens; a matched stop word ends it and *is*.
* A request is greedy if `temperature` is 0, or `top_k` is 1, or neither `top_k` nor `top_p` is set.
* Penalties look at the prompt and at what was generated. Stop and bad words match across that border, too.

Three things differ, on purpose. `min_new_tokens` also holds back stop words, not only `end_id`. `top_p` keeps
the smallest set of tokens whose mass reaches it, renormalised, as TensorRT-LLM's PyTorch sampler does;
the older CUDA kernel lowers the weight of the last token of that set. `min_p`, which Triton's C++ backend has no
input for, is that of the PyTorch sampler; a request that sets it alone is not greedy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

Words = tuple[tuple[int, ...], ...]  # each word one or more token ids
# Within these, no logit leaves the range of float32, whatever else is asked of it.
_LEAST, _MOST = 1e-10, 1e10


class FinishReason(StrEnum):
    """Why an answer ended."""

    END_ID = "end_id"
    STOP_WORDS = "stop_words"
    GUIDE = "guide"  # the answer has all of the form that it was to have, and nothing may follow
    LENGTH = "length"
    CANCELLED = "cancelled"
    REFUSED = (
        "refused"  # it cannot go on as the request wants it, for a reason that only the answer has shown
    )
    ERROR = "error"


class InvalidRequest(ValueError):
    """The request can never run as it is; the message names the parameter and the limit."""


class EngineStopped(RuntimeError):
    """The engine was closed, or its thread died; the message says which."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. 0 for `top_k`, `top_p` or `min_p` means "not set".

    `top_p` falls by `top_p_decay` with each token, not below `top_p_min`, and is restored by `top_p_reset_id`.
    With `seed`, the same request gives the same tokens whatever runs beside it, with a draft model or without;
    `seed=None` draws a fresh one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    repetition_penalty: float = 1.0  # divides (or, below zero, multiplies) the logit of every token seen
    presence_penalty: float = 0.0  # subtracted once from the logit of every token seen
    frequency_penalty: float = 0.0  # subtracted as often as the token was seen
    seed: int | None = None
    min_p: float = 0.0  # tokens less probable than this share of the most probable one are out

    def __post_init__(self) -> None:
        temperature, repetition = self.temperature, self.repetition_penalty
        steep = temperature == 0 or _LEAST <= temperature <= _MOST
        _check("temperature", temperature, steep, f"0, or {_LEAST:g} to {_MOST:g}")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (not set) or more")
        _check("top_p", self.top_p, 0 <= self.top_p <= 1, "0 (not set) to 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (not set) to 1")
        _check("top_p_decay", self.top_p_decay, 0 < self.top_p_decay <= 1, "above 0, at most 1")
        _check("top_p_min", self.top_p_min, 0 < self.top_p_min <= 1, "above 0, at most 1")
        _check("repetition_penalty", repetition, _LEAST <= repetition <= _MOST, f"{_LEAST:g} to {_MOST:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, abs(value) <= _MOST, f"{-_MOST:g} to {_MOST:g}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        unset = self.top_k == 0 and self.top_p == 0 and self.min_p == 0
        return self.temperature == 0 or self.top_k == 1 or unset

    @property
    def penalized(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def next_top_p(self, top_p: float, token: int) -> float:
        """Compute what `top_p` becomes after `token`; 0 stays "not set".

        Returns:
            The lower value, or the request's own `top_p` where the token is `top_p_reset_id`.
        """
        if not self.top_p:
            return 0.0
        return self.top_p if token == self.top_p_reset_id else max(top_p * self.top_p_decay, self.top_p_min)


GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Guide:
    """Form that an answer must have; it takes precedence over bad words and a minimum length."""

    kind: GuideKind
    text: str = ""  # the schema, expression, grammar or tag; for `json`, which is any object, there is none


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. `id` must differ from that of every request in flight."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    end_id: int | None
    min_new_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_words: Words = ()
    bad_words: Words = ()
    embedding_bias: npt.NDArray[np.float32] | None = None  # [vocab_size], added to the logits
    draft_tokens: tuple[int, ...] | None = (
        None  # a guess at the first tokens of the answer; verified in one step
    )
    draft_logits: npt.NDArray[np.float32] | None = (
        None  # [draft_tokens, vocab_size] that those were drawn from
    )
    draft_threshold: float | None = (
        None  # see `sampler.accept_or_resample`; None: a random number for each token
    )
    log_probs: bool = False
    logits: bool = False  # those of each token, as the model gave them; -inf for what the form does not allow
    context_logits: bool = False  # those after each token of the prompt but the last; no part of it is reused
    speculate: bool = True  # False: without the engine's draft model
    guide: Guide | None = None
    adapter: str = ""  # name of the LoRA adapter of the target; empty: the base
    # So many tokens at the end of the prompt belong to the answer: another engine made them, and this one goes on as if
    # it had. Limits, seeds and penalties count them; outputs do not repeat them.
    prior_output_len: int = 0

    def __post_init__(self) -> None:
        _check("prompt", len(self.prompt), len(self.prompt) > 0, "at least one token")
        _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens > 0, "1 or more")
        _check("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "0 or more")
        prior, room = self.prior_output_len, min(len(self.prompt), self.max_new_tokens)
        _check("prior_output_len", prior, 0 <= prior < room, f"0 to {room - 1}")
        if prior and (self.guide is not None or self.context_logits or self.draft_tokens):
            right = "0 with a guide, draft_tokens or logits of the prompt"
            raise InvalidRequest(f"prior_output_len = {prior}: must be {right}")
        for name, words in (("stop_words", self.stop_words), ("bad_words", self.bad_words)):
            _check(name, words, all(words), "words of at least one token")
        bias = self.embedding_bias
        if bias is not None and not (
            ((abs(bias) <= _MOST) | np.isneginf(bias)).all() and np.isfinite(bias).any()
        ):
            right = f"numbers from {-_MOST:g} to {_MOST:g}, or -inf for some, but not all, of the tokens"
            raise InvalidRequest(f"embedding_bias: must be {right}")
        drafts, logits = len(self.draft_tokens or ()), self.draft_logits
        if logits is not None:
            _check(
                "draft_logits",
                logits.shape,
                len(logits) == drafts,
                f"a row for each of {drafts} draft_tokens",
            )


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Cost of a finished request. Times are `time.monotonic_ns()`, 0 if that moment never came."""

    num_input_tokens: int
    num_output_tokens: int
    draft_tokens_total: int
    draft_tokens_accepted: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    kv_blocks_total: int
    kv_blocks_new: int
    kv_blocks_reused: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Tokens that one step added to a request. The last one has `finish` and `metrics`, and may have no tokens.

    `log_probs` has one number a token if the request asked for them, else none: the logarithm of the token's share
    of the distribution after bias, temperature, penalties, guide and banned words, before `min_p`, `top_k` and
    `top_p`. So has `logits` one row a token, as the model gave it, and -inf for what the form does not allow.

    Outputs with `context_logits` alone come before the first token, one a step: the logits after the next tokens of the
    prompt. They are valid only while the sink is called, because the next step writes over them.
    """

    request_id: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0  # of all tokens so far
    finish: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    logits: npt.NDArray[np.float32] | None = None  # [tokens, vocab_size]
    context_logits: npt.NDArray[np.float32] | None = None  # [tokens of the prompt, vocab_size]


def _check(name: str, value: object, holds: bool, right: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} = {value!r}: must be {right}")
