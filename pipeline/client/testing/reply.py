"""What a fake server answers, and what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc


class Ending(Enum):
    """How a scripted answer ends."""

    EMPTY = "a response without content marks the end, as the models of this project do"
    MARKED = "the last chunk carries the mark of the end"
    ERROR = "the model raises `error`"
    HANG = "nothing more comes, until the client leaves"
    LOST = "the server goes away: status UNAVAILABLE"
    UNMARKED = "the server closes the stream without a mark of the end"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Delays are seconds; bytes are for chunks that end within a character.

    >>> Reply(["Hel", "lo"], delay_s=0.02, draft_tokens=4, accepted_tokens=3)      # doctest: +SKIP
    """

    chunks: Sequence[str | bytes] = ("Hello", " world")
    first_delay_s: float = 0.0
    delay_s: float = 0.0  # before each further chunk
    ending: Ending = Ending.EMPTY
    error: str = "the model failed"
    code: grpc.StatusCode = grpc.StatusCode.INTERNAL  # for clients that ask for it (`triton_grpc_error`)
    tokens_per_chunk: int = 1
    log_probs: Sequence[float] | None = None  # one a token; sent if the request asks for them
    logits: Sequence[Sequence[float]] | None = None  # a row over the vocabulary for each token; as log_probs
    token_ids: Sequence[int] | None = None  # one a token; sent if the model has that output
    input_tokens: int = 5
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Received:
    """A request as the server saw it."""

    request_id: str
    prompt: str
    tensors: Mapping[str, list[Any]]  # every input, flat: {"max_tokens": [64], "stream": [True], …}
    headers: Mapping[str, str]
    cancelled: threading.Event = field(default_factory=threading.Event)  # the client left before the end
    finished: threading.Event = field(default_factory=threading.Event)  # everything in the script was sent
