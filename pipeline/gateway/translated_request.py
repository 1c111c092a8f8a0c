"""What bodies of requests have in common that are answered as chats, in the form of another API.

What chats take besides OpenAI's fields, such as `top_k` or `seed`, is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr, model_validator

from pipeline.gateway.errors import ApiError
from pipeline.gateway.parsing import validate_request
from pipeline.gateway.response_format import StructuredOutputs
from pipeline.gateway.schema import ChatRequest, ModelRequest

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
