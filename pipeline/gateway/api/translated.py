"""APIs of agents (Responses, Messages) as layers over chats.

A request becomes a `ChatRequest`; what chats take besides, such as `top_k` or `seed`, is taken as it is. The answer is
cut into items, texts and calls of tools one after the other; chats have one text and a list of calls, which
`pipeline.gateway.api.chat` makes of the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import PrivateAttr, model_validator

from pipeline.client import Chunk
from pipeline.gateway.api.chat import ChoiceBuilder
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.api.log_probs import chat_log_probs
from pipeline.gateway.api.parsing import validate_request
from pipeline.gateway.api.response_format import StructuredOutputs
from pipeline.gateway.api.schema import ChatRequest, ModelRequest
from pipeline.gateway.api.tools.parser import CallPart, TextPart
from pipeline.gateway.errors import ApiError

# Fields of chats that have another form in other APIs, or change the form of a chat's answer -> values that ask for
# nothing; all others are refused, so that no answer is another one than was meant.
OF_CHATS_ALONE: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1), "echo": (None, False), "logprobs": (None, False), "max_completion_tokens": (None,),
    "max_tokens": (None,), "messages": (None,), "n": (None, 1), "prompt_logprobs": (None,), "response_format": (None,),
    "stream_options": (None,), "tool_choice": (None,), "tools": (None,), "top_logprobs": (None, 0),
}  # fmt: skip


class TranslatedRequest(ModelRequest):
    """Body of a request that becomes a `ChatRequest`."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = OF_CHATS_ALONE

    # What messages of errors of chats name -> what it is called in this API. The more specific come first.
    names: ClassVar[Mapping[str, str]] = {}

    structured_outputs: StructuredOutputs | None = None
    _chat_fields: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Null is the default, as in the APIs themselves."""
        if not isinstance(given, dict):
            return given
        own = cls.model_fields.keys()
        return {name: value for name, value in given.items() if value is not None or name not in own}

    @model_validator(mode="after")
    def _take_chat_fields(self) -> Self:
        extra = self.model_extra or {}
        of_chats = (
            ChatRequest.model_fields.keys() - self.__class__.model_fields.keys() - OF_CHATS_ALONE.keys()
        )
        self._chat_fields = {name: extra.pop(name) for name in of_chats & extra.keys()}
        return self

    @property
    def chat_fields(self) -> Mapping[str, Any]:
        """Fields of chats, as they were given, that are no fields of the body itself."""
        return self._chat_fields

    def to_chat(self, **fields: Any) -> ChatRequest:
        """Return the chat request that this one comes to.

        Args:
            **fields: of the chat, besides those that were given as a chat has them.

        Raises:
            ApiError: 400, with what is wrong, in the words of chats; see `own_names`.
        """
        given = {
            "model": self.model,
            "structured_outputs": self.structured_outputs,
            **self.chat_fields,
            **fields,
        }
        return validate_request(ChatRequest, given)

    @classmethod
    @contextmanager
    def own_names(cls) -> Iterator[None]:
        """Let errors of chats that are raised in the block name the fields of this API."""
        try:
            yield
        except ApiError as error:
            pattern = "|".join(
                (r"(?<!\w)" if name[0].isalpha() else "") + re.escape(name) for name in cls.names
            )
            error.message = re.sub(rf"({pattern})(?!\w)", lambda found: cls.names[found[0]], error.message)
            error.param = cls.names.get(error.param or "", error.param)
            raise


def unsupported(param: str, text: str) -> ApiError:
    """Return the answer to a request that asks for what this server does not have."""
    return ApiError(400, text, param=param, code="unsupported_parameter")


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


class StopSequenceCutter:
    """Cuts the stop sequence off an answer that was generated with `include_stop_str_in_output`, chunk by chunk.

    Attributes:
        found: the sequence that ended the answer; None if none did.
    """

    def __init__(self, sequences: Sequence[str], *, keeps: bool = False) -> None:
        """
        Args:
            sequences: stop sequences of the request.
            keeps: whether the sequence stays in the text.
        """
        self.found: str | None = None
        self._sequences, self._keeps = [one for one in sequences if one], keeps
        self._waiting = ""  # what may be a stop sequence

    def cut(self, chunk: Chunk) -> Chunk:
        """Return the next chunk with the text that is certain to be no stop sequence."""
        if not self._sequences:
            return chunk
        text, self._waiting = self._waiting + chunk.text, ""
        if chunk.finish_reason is None:
            kept = len(text) - max(_overlap(text, sequence) for sequence in self._sequences)
            text, self._waiting = text[:kept], text[kept:]
        elif chunk.finish_reason != "length":
            # Of several, the one that begins first ended the answer.
            self.found = max(filter(text.endswith, self._sequences), key=len, default=None)
            if self.found is not None and not self._keeps:
                text = text.removesuffix(self.found)
        return replace(chunk, text=text)


def _overlap(text: str, sequence: str) -> int:
    """Length of the longest end of a text with which a stop sequence begins, or that is one.

    >>> _overlap("so ST", "STOP"), _overlap("so STOP", "STOP")
    (2, 4)
    """
    sizes = range(min(len(sequence), len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(sequence[:size])), 0)
