"""Bounds of what requests hold: sizes, numbers and depths, the same for every API, runtime and line of a batch.

They stand in the types of fields, so that a fault names the field as its API does, and in functions for what is only
found when a request is read. The sum of all is bounded by the body's size and its number of values.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pipeline.gateway.errors import ApiError

MAX_BODY_BYTES = 4 * 2**20
# Each value becomes a Python object, which takes the interpreter's lock: 50,000 take about 50 ms. Numbers take less.
MAX_VALUES = 50_000
_NUMBERS_PER_VALUE = 8
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


def _check_words(given: Any) -> Any:
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list):
        return given
    if len(words) > MAX_WORDS:
        raise PydanticCustomError("too_many_words", f"has {len(words)} entries, of at most {MAX_WORDS}")
    lengths = [len(word) for word in words if isinstance(word, str)]
    if lengths and max(lengths) > MAX_WORD_CHARS:
        text = f"has an entry of {max(lengths)} characters, of at most {MAX_WORD_CHARS}"
        raise PydanticCustomError("too_long_word", text)
    if sum(lengths) > MAX_ALL_WORD_CHARS:
        text = f"has {sum(lengths)} characters in all, of at most {MAX_ALL_WORD_CHARS}"
        raise PydanticCustomError("too_long_words", text)
    return given


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


def check_json(
    text: bytes, where: str = "body", param: str | None = None, *, max_depth: int = MAX_DEPTH
) -> None:
    """Refuse JSON that would become too many Python objects, or is nested too deep; before it is parsed.

    Args:
        text: JSON, or what is to be.
        where: its place in the request.
        param: field of the request that holds it; None for the whole body.
        max_depth: lists and objects within each other.

    Raises:
        ApiError: 400.
    """
    few_brackets = text.count(b"[") + text.count(b"{") <= max_depth
    if few_brackets and len(text) <= MAX_VALUES:
        return
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    values = plain.count(b'"') // 2
    if values <= MAX_VALUES:
        outside = b'"'.join(plain.split(b'"')[::2])
        values += outside.count(b"[") + outside.count(b"{") + outside.count(b",") // _NUMBERS_PER_VALUE
    if values > MAX_VALUES:
        raise ApiError(
            400, f"{where}: has more than {MAX_VALUES} values: texts, numbers, lists and objects", param=param
        )
    if not few_brackets and _depth(outside) > max_depth:
        raise ApiError(400, f"{where}: is nested deeper than {max_depth} levels", param=param)


def read_json(text: str, where: str, param: str) -> Any:
    """Parse JSON that stands as text in a field.

    Raises:
        ApiError: 400, if it has too many values, or is nested too deep.
        ValueError: it is no JSON.
    """
    check_json(text.encode(errors="replace"), where, param)
    return json.loads(text)


def check_guide(kind: str, text: str, where: str, param: str) -> None:
    """Refuse a form of answers that is too large, or nested too deep.

    Args:
        kind: "json_schema", "regex" or "ebnf_grammar".
        text: the schema as JSON, the expression, or the grammar.
        where: its place in the request, such as response_format.json_schema.schema.
        param: field of the request that holds it.

    Raises:
        ApiError: 400.
    """
    size = len(text.encode(errors="replace"))
    if size > MAX_GUIDE_BYTES:
        raise ApiError(400, f"{where}: has {size} bytes, of at most {MAX_GUIDE_BYTES}", param=param)
    if sum(text.count(bracket) for bracket in "([{") <= MAX_GUIDE_DEPTH:
        return
    depth = _depth(_LITERALS[kind].sub("", text).encode(errors="replace"))
    if depth > MAX_GUIDE_DEPTH:
        raise ApiError(
            400, f"{where}: is nested {depth} levels deep, of at most {MAX_GUIDE_DEPTH}", param=param
        )


# Parts of a guide whose brackets nest nothing. Possessive, since a regular expression must not be what takes long.
_LITERALS = {
    "json_schema": re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL),
    "regex": re.compile(r"\\.|\[(?:[^\]\\]++|\\.)*+\]", re.DOTALL),
    "ebnf_grammar": re.compile(r'"(?:[^"\\\n]++|\\.)*+"|\[(?:[^\]\\\n]++|\\.)*+\]|\\.', re.DOTALL),
}
_STEPS = bytes(2 if byte in b"([{" else 0 for byte in range(256))
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"()[]{}")


def _depth(text: bytes) -> int:
    """Count the most brackets that are open at once in a text without literals.

    >>> _depth(b'{[], [[]]}')
    3
    """
    steps = text.translate(_STEPS, delete=_NO_BRACKETS)
    return max(accumulate(step - 1 for step in steps), default=0)
