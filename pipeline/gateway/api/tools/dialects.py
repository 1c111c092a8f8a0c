"""How families of models write tool calls: data (dialects.yaml), and a parser for each of three forms of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

_KEYS = ("name", "type", "arguments", "parameters", "id", "function")
_FIRST_KEY = re.compile(r'\{\s*"(\w+)"')
_MAY_BE_FIRST_KEY = re.compile(r'\{\s*("\w*)?$')
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAMED = re.compile(r"[\w.-]+(\[[\w\]-]*)*\s*$")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class ToolDialect(BaseModel):
    """One entry of dialects.yaml, which explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    marks: tuple[str, ...]
    open: str | None = None
    close: str | None = None
    form: Literal["json", "xml", "named"]
    bare: str | None = None
    source: str


# Of an answer that guided decoding forces to be one call and nothing else, or a list of calls.
FORCED = ToolDialect(
    name="forced", marks=(), form="json", bare="{", source="pipeline.gateway.api.tools.choice"
)
FORCED_LIST = FORCED.model_copy(update={"name": "forced-list", "bare": "["})


@cache
def dialects() -> Sequence[ToolDialect]:
    """Load all dialects, specific ones before general ones."""
    text = (resources.files("pipeline.gateway.api.tools") / "dialects.yaml").read_text("utf-8")
    return tuple(ToolDialect(name=name, **fields) for name, fields in yaml.safe_load(text).items())


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call at the beginning of a text, or the head of one whose arguments are still to come."""

    name: str
    used: int  # characters of the call, or of its head
    arguments: str | None = None  # JSON, if the call is complete
    closing: bool = False  # whether an object around the arguments has to be closed, too


class Incomplete:
    """More text is needed to tell whether a call begins."""


def parse_call(
    form: Literal["json", "xml", "named"], text: str, tools: Mapping[str, Any]
) -> ParsedCall | Incomplete | None:
    """Parse the call with which a text begins.

    Args:
        form: form in which calls are written.
        text: text of an answer, from where a call may begin.
        tools: name -> function of the request. The form xml needs the types of its parameters.

    Returns:
        The call, `Incomplete`, or None if the text begins with no call.
    """
    if not text:
        return Incomplete()
    if form == "json":
        return _parse_json(text)
    return _parse_xml(text, tools) if form == "xml" else _parse_named(text)


def _parse_json(text: str) -> ParsedCall | Incomplete | None:
    if not text.startswith("{"):
        return None
    if head := _HEAD.match(text):
        return ParsedCall(head[1], head.end(), closing=True)
    key = _FIRST_KEY.match(text)
    if key is None:
        return Incomplete() if _MAY_BE_FIRST_KEY.match(text) else None
    end = JsonObjectScanner().end(text) if key[1] in _KEYS else 0
    if end is None:
        return Incomplete()
    return _parse_object(text[:end]) if end else None


def _parse_object(text: str) -> ParsedCall | None:
    """A complete object, its keys in any order; also as OpenAI writes it, {"type", "function": {…}}."""
    if (call := _read_object(text)) is None:
        return None
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    # Some models write the arguments as OpenAI does, as text.
    if isinstance(arguments, str) and (arguments := _read_object(arguments)) is None:
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, len(text), json.dumps(arguments, ensure_ascii=False))


def _read_object(text: str) -> dict[str, Any] | None:
    """An object in JSON; nothing is the empty one, and anything else is None."""
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _parse_named(text: str) -> ParsedCall | Incomplete | None:
    if head := _NAMED.match(text):
        return ParsedCall(head[1], head.end())
    return Incomplete() if _MAY_BE_NAMED.match(text) else None


def _parse_xml(text: str, tools: Mapping[str, Any]) -> ParsedCall | Incomplete | None:
    if not text.startswith("<function="):
        return Incomplete() if "<function=".startswith(text) else None
    call = _FUNCTION.match(text)
    if call is None:
        return Incomplete()
    name = call[1].strip()
    schemas = _members(_members(tools.get(name), "parameters"), "properties")
    arguments = {
        key.strip(): _typed(value, schemas.get(key.strip())) for key, value in _PARAMETER.findall(call[2])
    }
    return ParsedCall(name, call.end(), json.dumps(arguments, ensure_ascii=False))


def _members(schema: Any, key: str) -> Mapping[str, Any]:
    """The object under a key of a JSON schema, which a client may have written in any form."""
    members = schema.get(key) if isinstance(schema, Mapping) else None
    return members if isinstance(members, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """Read the text of a parameter as JSON, unless its schema has no type or says that it is a string."""
    if not isinstance(schema, dict) or schema.get("type") in (None, "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class JsonObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces, from its first brace on."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """Scan the next piece.

        Returns:
            How many of its characters belong to the object, or None if all do and the object goes on.

        >>> scanner = JsonObjectScanner()
        >>> scanner.end('{"a": "}'), scanner.end('"} rest')
        (None, 2)
        """
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None
