"""The three ways of writing one call. Each looks at the text where a call should begin."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.gateway.tools.scanning import ObjectScan

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


@dataclass(frozen=True, slots=True)
class Found:
    """A call; `used` characters tell it, up to the arguments if those are still to come."""

    name: str
    used: int
    arguments: str | None = None  # JSON, if the call is complete
    closing: bool = False  # an object around the arguments has to be closed, too


class NotYet:
    """More text has to tell."""


def find(form: Literal["json", "xml", "named"], text: str, tools: Mapping[str, Any]) -> Found | NotYet | None:
    """The call with which `text` begins; None if it begins with none."""
    if not text:
        return NotYet()
    if form == "json":
        return _json(text)
    return _xml(text, tools) if form == "xml" else _named(text)


def _json(text: str) -> Found | NotYet | None:
    if not text.startswith("{"):
        return None
    if head := _HEAD.match(text):
        return Found(head[1], head.end(), closing=True)
    key = _FIRST_KEY.match(text)
    if key is None:
        return NotYet() if _MAY_BE_FIRST_KEY.match(text) else None
    end = ObjectScan().end(text) if key[1] in _KEYS else 0
    if end is None:
        return NotYet()
    return _whole(text[:end]) if end else None


def _whole(text: str) -> Found | None:
    """A complete object, its keys in whatever order; also as OpenAI writes it, {"type", "function": {…}}."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    packed = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Found(name, len(text), packed)


def _named(text: str) -> Found | NotYet | None:
    if head := _NAMED.match(text):
        return Found(head[1], head.end())
    return NotYet() if _MAY_BE_NAMED.match(text) else None


def _xml(text: str, tools: Mapping[str, Any]) -> Found | NotYet | None:
    if not text.startswith("<function="):
        return NotYet() if "<function=".startswith(text) else None
    call = _FUNCTION.match(text)
    if call is None:
        return NotYet()
    name = call[1].strip()
    types = tools.get(name, {}).get("parameters", {}).get("properties", {})
    arguments = {
        key.strip(): _value(value, types.get(key.strip())) for key, value in _PARAMETER.findall(call[2])
    }
    return Found(name, call.end(), json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: Any) -> Any:
    """Text has no types: it is read as JSON unless the tool's schema says that it is a text."""
    if not isinstance(schema, dict) or schema.get("type") in (None, "string"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
