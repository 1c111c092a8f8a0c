"""Answers that go on after each of their chunks, as if the server had been lost there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.client import Answer, Chunk, Client, PartialAnswer


@dataclass(frozen=True)
class Streamed:
    """One answer: its chunks, and the whole."""

    chunks: list[Chunk]
    answer: Answer

    def partial(self, count: int) -> PartialAnswer:
        """What had come with so many chunks."""
        came = self.chunks[:count]
        ids = [token for chunk in came for token in chunk.token_ids or ()]
        return PartialAnswer(tuple(ids), "".join(chunk.text for chunk in came))


def ask(client: Client, prompt: Any, prior: PartialAnswer | None = None, **sampling: Any) -> Streamed:
    """Stream an answer with its token ids; of one that goes on, the new chunks and the whole answer."""
    with client.stream(prompt, prior=prior, token_ids=True, **sampling) as stream:
        chunks = list(stream)
        return Streamed(chunks, stream.answer())


def continued(
    client: Client, prompt: Any, whole: Streamed, **sampling: Any
) -> Iterator[tuple[PartialAnswer, Streamed]]:
    """Go on after each chunk but the last, which says that the answer is complete: what had come, what came then."""
    for count in range(1, len(whole.chunks)):
        prior = whole.partial(count)
        if prior.token_ids:
            yield prior, ask(client, prompt, prior, **sampling)
