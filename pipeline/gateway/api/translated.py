"""APIs of agents (Responses, Messages) as layers over chats.

A request becomes a `ChatRequest`; what chats take besides, such as `top_k` or `seed`, is taken as it is. The answer is
cut into items, reasoning, texts and calls of tools one after the other; chats have one text of each kind and a list of
calls, which `pipeline.gateway.api.chat` makes of the same parts.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import PrivateAttr, model_validator

from pipeline.client import Chunk
from pipeline.gateway.api.chat import ChoiceBuilder
from pipeline.gateway.api.choice import generate
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.api.log_probs import chat_log_probs
from pipeline.gateway.api.model_answer import ModelAnswer
from pipeline.gateway.api.parsing import validate_request
from pipeline.gateway.api.response_format import StructuredOutputs
from pipeline.gateway.api.schema import ChatRequest, ModelRequest
from pipeline.gateway.api.tools.parts import CallPart, ReasoningPart, TextPart
from pipeline.gateway.errors import ApiError

# Fields of chats that have another form in other APIs, or change the form of a chat's answer -> values that ask for
# nothing; all others are refused, so that no answer is another than was meant.
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
    def _without_nulls(cls, data: Any) -> Any:
        """Null is the default, as in the APIs themselves."""
        if not isinstance(data, dict):
            return data
        own = cls.model_fields.keys()
        return {name: value for name, value in data.items() if value is not None or name not in own}

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
        """Return the chat request with these fields, and those that were given as a chat has them.

        Raises:
            ApiError: 400, with what is wrong, in the words of chats; see `own_names`.
        """
        own = {"model": self.model, "structured_outputs": self.structured_outputs}
        return validate_request(ChatRequest, own | dict(self.chat_fields) | fields)

    @classmethod
    def own_words(cls, text: str) -> str:
        """Return a text about a chat with this API's names of its fields."""
        pattern = "|".join((r"(?<!\w)" if name[0].isalpha() else "") + re.escape(name) for name in cls.names)
        return re.sub(rf"({pattern})(?!\w)", lambda match: cls.names[match[0]], text)

    @classmethod
    @contextmanager
    def own_names(cls) -> Iterator[None]:
        """Let errors of chats that are raised in the block name the fields of this API."""
        try:
            yield
        except ApiError as error:
            error.message = cls.own_words(error.message)
            error.param = cls.names.get(error.param or "", error.param)
            raise


def chat_tools(
    tools: Iterable[Mapping[str, Any]] | None, types: Collection[str | None], parameters: str
) -> list[dict[str, Any]] | None:
    """Return tools as chats have them. Tools that do not run at the client are left to `resolve_tools`.

    Args:
        tools: tools of an API whose functions are no objects within them.
        types: types of the tools that the client runs.
        parameters: field that holds the JSON schema of a tool's parameters.
    """
    fields = {"name": "name", "description": "description", parameters: "parameters", "strict": "strict"}
    return [
        {
            "type": "function",
            "function": {name: tool[own] for own, name in fields.items() if tool.get(own) is not None},
        }
        if tool.get("type") in types
        else {"type": tool.get("type"), "name": tool.get("name")}
        for tool in tools or ()
    ] or None


@dataclass(slots=True)
class AnswerItem:
    """A text, reasoning, or a call of a tool, as far as it has come.

    Attributes:
        index: number among the items of the answer, from 0.
        call: head of the call; None for all other items.
        reasoning: whether it is reasoning.
        pieces: pieces of the text, or of the call's arguments.
        log_probs: log probability of each token of the text, as `chat_log_probs` writes it, if asked for.
    """

    index: int
    call: CallPart | None = None
    reasoning: bool = False
    pieces: list[str] = field(default_factory=list)
    log_probs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)


class ItemStep(NamedTuple):
    """Beginning, further piece or end of an item.

    Attributes:
        item: the item as it is after the step.
        text: text of a piece.
        log_probs: log probabilities of a piece's tokens, if they are asked for.
    """

    kind: Literal["begin", "piece", "end"]
    item: AnswerItem
    text: str = ""
    log_probs: list[dict[str, Any]] = []  # noqa: RUF012 - never changed


class ItemAnswer(ModelAnswer):
    """An answer with one choice, cut into items chunk by chunk; one without any text or call has one empty text.

    Attributes:
        items: items so far.
        finish_reason: OpenAI's; None while the answer goes on.
    """

    def __init__(self, request: TranslatedRequest, generation: Generation) -> None:
        super().__init__(generation)
        self.items: list[AnswerItem] = []
        self.finish_reason: str | None = None
        self._request, self._choice = request, ChoiceBuilder(generation, 0)
        self._open: AnswerItem | None = None
        self._log_probs: list[dict[str, Any]] = []  # of tokens whose text is still to come

    @abstractmethod
    def first_events(self) -> list[bytes]:
        """Encode the events before all items."""

    @abstractmethod
    def step_events(self, step: ItemStep) -> bytes:
        """Encode the events of a step."""

    @abstractmethod
    async def last_events(self) -> bytes:
        """Encode the events after all items."""

    @abstractmethod
    async def body(self) -> Mapping[str, Any] | bytes:
        """Return the whole answer, when it is complete."""

    async def whole(self) -> Mapping[str, Any] | bytes:
        with self._request.own_names():
            async with aclosing(generate(self.generation)) as pairs:
                async for _, chunk in pairs:
                    deque(self.steps(chunk), maxlen=0)
        return await self.body()

    async def events(self) -> AsyncGenerator[bytes, None]:
        events = self.first_events()
        with self._request.own_names():
            async with aclosing(generate(self.generation)) as pairs:
                async for _, chunk in pairs:
                    events += map(self.step_events, self.steps(chunk))
                    if events:
                        yield b"".join(events)
                        events.clear()
        yield await self.last_events()

    def chunk_event(self, chunk: Chunk) -> bytes:
        return b"".join(map(self.step_events, self.steps(chunk)))

    def item_ended(self, item: AnswerItem) -> None:
        """Note that an item is complete, before the events of its end."""

    def steps(self, chunk: Chunk) -> Iterator[ItemStep]:
        """Cut the next chunk. The items change as the iteration goes on; with the last chunk all of them end."""
        self.cached = self.cached or chunk.cached
        if chunk.log_probs and self.generation.request.wants_log_probs:
            self._log_probs += chat_log_probs([chunk], self.generation.model.tokenizer)["content"]
        for part in self._choice.parts([chunk]):
            if isinstance(part, TextPart | ReasoningPart):
                reasoning, now = isinstance(part, ReasoningPart), self._open
                if now is None or now.call is not None or now.reasoning is not reasoning:
                    yield from self._begin(reasoning=reasoning)
                yield self._piece(part.text)
            elif isinstance(part, CallPart):
                yield from self._begin(part)
            elif part.text:
                yield self._piece(part.text)
        if chunk.finish_reason is not None:
            self.finish_reason = self._choice.finish_reason(chunk)
            if not self.items:
                yield from self._begin()
            yield from self._end()

    def _begin(self, call: CallPart | None = None, *, reasoning: bool = False) -> Iterator[ItemStep]:
        yield from self._end()
        self._open = AnswerItem(len(self.items), call, reasoning)
        self.items.append(self._open)
        yield ItemStep("begin", self._open)

    def _piece(self, text: str) -> ItemStep:
        assert self._open is not None
        self._open.pieces.append(text)
        log_probs: list[dict[str, Any]] = []
        # Tokens of calls and reasoning are no part of a text.
        if self._log_probs:
            log_probs, self._log_probs = self._log_probs, []
        if self._open.call is not None or self._open.reasoning:
            log_probs = []
        self._open.log_probs += log_probs
        return ItemStep("piece", self._open, text, log_probs)

    def _end(self) -> Iterator[ItemStep]:
        if self._open is not None:
            self.item_ended(self._open)
            yield ItemStep("end", self._open)
            self._open = None
