"""Whether an answer is speculated with a draft model, and how far ahead.

By default every answer is that can be, as far ahead as it pays; `num_draft_tokens` of a request says how far, and 0
turns it off. An answer that cannot be speculated comes from the target alone; it is refused only if its request asks
for draft tokens by name.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_client import EngineClient
from shared.prompt_log_probs import RETURN_PROMPT_LOG_PROBS
from shared.prompts import Prompts
from shared.refusal import RequestRefused
from shared.tensors import read, read_flag

_ONE = {"beam_width": "one beam", "num_return_sequences": "one answer"}
_LOGITS = ("return_context_logits", "return_generation_logits")
# Inputs whose effect depends on where a call begins, and each round is a call of its own.
_ROUNDS = (
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "prompt_embedding_table",
    "prompt_table_extra_id",
)
_OFF = "set num_draft_tokens to 0, or leave it out"


@dataclass(slots=True)
class TargetBehaviour:
    """Knowledge of the target's engine, from its answers."""

    goes_on: bool = False  # without draft tokens it makes more than one token a call, as newer releases do


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The draft model beside the target, and what the deployment says about it."""

    draft: EngineClient
    health: DraftHealth
    logits: npt.DTypeLike = np.float32  # of `draft_logits`
    max_draft_tokens: int | None = None  # that the target checks in one round, and the default; None: unknown
    max_input_tokens: int | None = None  # of a prompt; the engines take longer ones, because rounds send them
    max_output_tokens: int | None = None
    acceptance_threshold: float | None = None  # with `use_draft_logits`; None: a random number for each token
    timeout_s: float = 10.0  # of a call of the draft
    behaviour: TargetBehaviour = field(default_factory=TargetBehaviour)

    def draft_tokens(self, request: Any, prompts: Prompts, *, prior_output_len: int = 0) -> int | None:
        """Tokens to propose in a round, 0 for the target alone; None where one call serves the request, not rounds.

        `prior_output_len`: tokens at the end of the prompt that belong to the answer.

        Raises:
            RequestRefused: Draft tokens are asked for, and something that does not go with them; or a limit is passed.
        """
        tensor = read(request, "num_draft_tokens")
        asked = None if tensor is None or tensor.size == 0 else int(tensor.flat[0])
        obstacle = next(_obstacles(request, len(prompts.input_ids)), None)
        if obstacle is not None:
            if asked:
                raise RequestRefused(obstacle)
            return None
        self._check(request, int(prompts.input_lengths[0, 0]) - prior_output_len)
        wanted = (self.max_draft_tokens or 0) if asked is None else asked
        if wanted <= 0 or not self.health.is_up():
            return 0
        return wanted if self.max_draft_tokens is None else min(wanted, self.max_draft_tokens)

    def _check(self, request: Any, length: int) -> None:
        tensor = read(request, "max_tokens")
        wanted = 0 if tensor is None else int(tensor.flat[0])
        if self.max_input_tokens is not None and length > self.max_input_tokens:
            raise RequestRefused(f"text_input: {length} tokens; at most {self.max_input_tokens} here")
        if self.max_output_tokens is not None and wanted > self.max_output_tokens:
            raise RequestRefused(f"max_tokens = {wanted}: must be 1 to {self.max_output_tokens} tokens here")


def _obstacles(request: Any, rows: int) -> Iterator[str]:
    if rows != 1:
        yield f"num_draft_tokens: speculation is for one prompt at a time, and there are {rows}; {_OFF}"
    for name, most in _ONE.items():
        array = read(request, name)
        if array is not None and (array > 1).any():
            yield f"{name} = {array.max()}: speculation is for {most}; {_OFF}"
    for name in _LOGITS:
        if read_flag(request, name):
            yield f"{name} = true: speculation returns no logits; {_OFF}"
    if read(request, RETURN_PROMPT_LOG_PROBS) is not None:
        yield f"{RETURN_PROMPT_LOG_PROBS}: speculation returns no logits; {_OFF}"
    for name in _ROUNDS:
        if read(request, name) is not None:
            yield f"{name}: would begin anew with each round of speculation; {_OFF}"


_PAUSE_S = 5.0  # after the draft could not be reached
_MOST_REASONS = 100  # that are remembered as said


class DraftHealth:
    """Keeps requests from a draft that cannot be reached, and logs each reason once. Safe to use from any thread.

    A failure of the draft is never a failure of a request.

    >>> health = DraftHealth(print)
    >>> health.failed(ValueError("row 1 is too long"))
    the draft model failed, the target goes on alone: row 1 is too long
    >>> health.failed(ValueError("row 2 is too long"))
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._down_until_s = 0.0
        self._lock = threading.Lock()

    def is_up(self) -> bool:
        """Whether the draft is worth a call."""
        return time.monotonic() >= self._down_until_s

    def failed(self, error: Exception) -> None:
        """A call of the draft failed, and its request goes on without it."""
        text = " ".join(str(error).split()) or type(error).__name__
        reason = re.sub(r"\d+", "0", text)  # numbers differ between requests
        with self._lock:
            if isinstance(error, ConnectionError):
                self._down_until_s = time.monotonic() + _PAUSE_S
            known = reason in self._said or len(self._said) >= _MOST_REASONS
            self._said.add(reason)
        if not known:
            self._say(f"the draft model failed, the target goes on alone: {text}")
