"""What an answer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.client.stats import Cached, Stats
from pipeline.client.top_logprobs import TopLogProbs

# stop: an end token or a stop word; length: max_tokens were generated; unknown: the server does not tell
FinishReason = Literal["stop", "length", "unknown"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text, as soon as it is there. The texts of all chunks, joined, are the answer.

    The last chunk of an answer, and no other, has a `finish_reason`; its text is often empty.
    """

    text: str
    index: int  # 0, 1, 2, … within the answer
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] | None = None  # of this chunk, where the model returns them
    log_probs: tuple[float, ...] | None = None  # of this chunk's tokens, if asked for with `log_probs=True`
    cached: Cached | None = None  # where a response cache replays it
    top_log_probs: tuple[TopLogProbs, ...] | None = (
        None  # of each of its tokens, if asked for with `top_log_probs=`
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, as `generate` returns it."""

    text: str
    finish_reason: FinishReason
    stats: Stats
    request_id: str
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    top_log_probs: tuple[TopLogProbs, ...] | None = None
