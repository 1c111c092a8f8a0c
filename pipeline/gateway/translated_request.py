"""What bodies of requests have in common that are answered as chats, in the form of another API.

Each API says which of its fields are ignored, because they only mean something to its vendor's own service, and which
are refused by name. What chats take besides OpenAI's fields, such as `top_k` or `seed`, is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from pipeline.gateway.bounds import MAX_FAULTS, MAX_SHOWN
from pipeline.gateway.errors import ApiError
from pipeline.gateway.parsing import validate_request
from pipeline.gateway.schema import ChatRequest, ModelRequest

# Fields of chats that have another form elsewhere, or that change the form of a chat's answer.
_OF_CHATS_ALONE = {
    "best_of", "echo", "logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n", "prompt_logprobs",
    "response_format", "stream_options", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip


class TranslatedRequest(ModelRequest):
    """Body of a request that becomes a `ChatRequest`."""

    # Field -> values that ask for nothing; all others are refused.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[Set[str]] = frozenset()
    # What messages of errors of chats name -> what it is called in this API. The more specific come first.
    names: ClassVar[Mapping[str, str]] = {}

    # Fields of chats, as they were given; no field of the body itself.
    chat_fields: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, nothing in cls.unsupported.items():
            if name in given and given[name] not in nothing:
                raise unsupported(name, f"{name} is not supported by this server")
        own = cls.model_fields.keys() - {"chat_fields"}
        of_chats = ChatRequest.model_fields.keys() - own - _OF_CHATS_ALONE
        if unknown := sorted(given.keys() - own - of_chats - cls.unsupported.keys() - cls.ignored):
            listed = ", ".join(name[:MAX_SHOWN] for name in unknown[:MAX_FAULTS])
            raise ApiError(
                400, f"Unrecognized request argument supplied: {listed}", param=unknown[0][:MAX_SHOWN]
            )
        kept = {name: value for name, value in given.items() if name in own and value is not None}
        return {**kept, "chat_fields": {name: given[name] for name in of_chats & given.keys()}}

    def to_chat(self, **fields: Any) -> ChatRequest:
        """Return the chat request that this one comes to.

        Args:
            **fields: of the chat, besides those that were given as a chat has them.

        Raises:
            ApiError: 400, with what is wrong, in the words of chats; see `own_names`.
        """
        return validate_request(ChatRequest, {"model": self.model, **self.chat_fields, **fields})

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
