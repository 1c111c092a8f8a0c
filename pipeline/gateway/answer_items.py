"""An answer cut into items: texts and calls of tools, one after the other, as the APIs of agents have them.

Chats have one text and a list of calls, which `pipeline.gateway.completions` makes of the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipeline.client import Chunk
from pipeline.gateway.completions import ChoiceBuilder
from pipeline.gateway.generation import Generation
from pipeline.gateway.log_probs import chat_log_probs
from pipeline.gateway.tools.parser import CallPart, TextPart


@dataclass(slots=True)
class AnswerItem:
    """A text, or a call of a tool.

    Attributes:
        index: counts the items of an answer from 0.
        call: its head, if it is a call.
        pieces: of the text, or of the call's arguments, as far as they came.
        log_probs: of each token of the text, as `chat_log_probs` writes them, if they are asked for.
    """

    index: int
    call: CallPart | None = None
    pieces: list[str] = field(default_factory=list)
    log_probs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of the call, as far as they came."""
        return "".join(self.pieces)


class ItemStep(NamedTuple):
    """An item begins, has a further piece, or ends.

    Attributes:
        kind: of the step.
        item: as it is after the step.
        text: of a piece.
        log_probs: of the tokens of the piece, if they are asked for.
    """

    kind: Literal["begin", "piece", "end"]
    item: AnswerItem
    text: str = ""
    log_probs: list[dict[str, Any]] = []  # noqa: RUF012 - never changed


class AnswerItems:
    """Cuts the answer of a generation with one choice into items, chunk by chunk."""

    def __init__(self, generation: Generation) -> None:
        """
        Args:
            generation: whose chunks are cut.
        """
        self.items: list[AnswerItem] = []
        self.finish_reason: str | None = None  # OpenAI's; None while the answer goes on
        self._generation, self._choice = generation, ChoiceBuilder(generation, 0)
        self._open: AnswerItem | None = None
        self._log_probs: list[dict[str, Any]] = []  # of tokens whose text is still to come

    def feed(self, chunk: Chunk) -> Iterator[ItemStep]:
        """Cut a chunk. With the last one all items end; an answer without any text or call has one empty text.

        Args:
            chunk: the next one.

        Yields:
            Each step. The items change as the iteration goes on.
        """
        if chunk.log_probs and self._generation.request.wants_log_probs:
            tokenizer = self._generation.model.tokenizer
            self._log_probs += chat_log_probs([chunk], tokenizer)["content"]
        for part in self._choice.parts([chunk]):
            if isinstance(part, TextPart):
                if self._open is None or self._open.call is not None:
                    yield from self._begin(None)
                yield self._piece(part.text)
            elif isinstance(part, CallPart):
                yield from self._begin(part)
            elif part.text:
                yield self._piece(part.text)
        if chunk.finish_reason is not None:
            self.finish_reason = self._choice.finish_reason(chunk)
            if not self.items:
                yield from self._begin(None)
            yield from self._end()

    def _begin(self, call: CallPart | None) -> Iterator[ItemStep]:
        yield from self._end()
        self._open = AnswerItem(len(self.items), call)
        self.items.append(self._open)
        yield ItemStep("begin", self._open)

    def _piece(self, text: str) -> ItemStep:
        assert self._open is not None
        self._open.pieces.append(text)
        log_probs: list[dict[str, Any]] = []
        # Tokens of calls are no part of a text.
        if self._log_probs:
            log_probs, self._log_probs = self._log_probs, []
        if self._open.call is not None:
            log_probs = []
        self._open.log_probs += log_probs
        return ItemStep("piece", self._open, text, log_probs)

    def _end(self) -> Iterator[ItemStep]:
        if self._open is not None:
            yield ItemStep("end", self._open)
            self._open = None
