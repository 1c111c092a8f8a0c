"""Bounds of requests: sizes, numbers and depths, the same for every API, runtime and line of a batch.

They stand in the types of fields, so that a fault names the field as its API does, and in functions of `parsing` for
what is only found when a request is read. The sum of all is bounded by the body's size and its number of values.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_BODY_BYTES = 4 * 2**20
# Each value becomes a Python object, which takes the interpreter's lock: 50,000 take about 50 ms. Numbers take less.
MAX_VALUES = 50_000
MAX_DEPTH = 128  # lists and objects within each other
MAX_FAULTS = 16  # in one message
MAX_SHOWN = 64  # characters of a name that a message repeats

MAX_MESSAGES = 4096  # of a conversation; items, where an API has those
MAX_TOOLS = 1024
MAX_PROMPTS = 256
MAX_DOCUMENTS = 1024
MAX_REFERRED = 1024  # stored responses whose items a request refers to

# Words that end an answer or must not stand in it: engines tokenize each in several forms.
MAX_WORDS = 64
MAX_WORD_CHARS = 1024
MAX_ALL_WORD_CHARS = 16_384  # in one field

# Schemas, expressions, grammars and choices, as the engine gets them; and the parameters of each tool.
MAX_GUIDE_BYTES = 64 * 1024
MAX_GUIDE_DEPTH = 64
MAX_CHOICES = 1024

_Word = Annotated[str, Field(max_length=MAX_WORD_CHARS)]


def _check_words(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list):
        return value
    if len(words) > MAX_WORDS:
        raise PydanticCustomError("too_many_words", f"has {len(words)} entries, of at most {MAX_WORDS}")
    lengths = [len(word) for word in words if isinstance(word, str)]
    if lengths and max(lengths) > MAX_WORD_CHARS:
        text = f"has an entry of {max(lengths)} characters, of at most {MAX_WORD_CHARS}"
        raise PydanticCustomError("too_long_word", text)
    if sum(lengths) > MAX_ALL_WORD_CHARS:
        text = f"has {sum(lengths)} characters in all, of at most {MAX_ALL_WORD_CHARS}"
        raise PydanticCustomError("too_long_words", text)
    return value


Words = Annotated[list[_Word], Field(max_length=MAX_WORDS), BeforeValidator(_check_words)]
WordOrWords = Annotated[
    _Word | Annotated[list[_Word], Field(max_length=MAX_WORDS)], BeforeValidator(_check_words)
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_WORDS)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]

# Names, ids and keys that are compared, looked up or given back.
Label = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]

Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]
Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
