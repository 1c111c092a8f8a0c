"""Reading of parameters and their types from the schemas of tools, which clients may have written in any form."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

MAX_LITERAL = 100_000  # characters that are read as a Python literal
_MAX_PARTS = 256  # parts of a schema that are read for its types
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; an empty text is an empty object, and anything else is None."""
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def parameters_of(function: Any) -> Mapping[str, Any]:
    """Return the schema of a function's parameters, its own reference followed; an empty one if there is none."""
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if isinstance(schema, Mapping) and "properties" not in schema and "$ref" in schema:
        resolved = referred(schema["$ref"], schema)
        schema = {**schema, **resolved} if isinstance(resolved, Mapping) else schema
    return schema if isinstance(schema, Mapping) else {}


def parameter_schemas(function: Any) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters by name; none if a client wrote them in another form."""
    properties = parameters_of(function).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def referred(reference: Any, root: Any) -> Any:
    """Resolve a reference into a schema; None if it leads nowhere.

    >>> referred("#/$defs/day", {"$defs": {"day": {"type": "integer"}}})
    {'type': 'integer'}
    """
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        elif isinstance(part, Mapping):
            part = part.get(key)
        else:
            return None
    return part


def schema_types(schema: Any, root: Any = None) -> frozenset[str]:
    """Collect the types of a JSON schema, by its references into `root`, too; none if it names none.

    >>> sorted(schema_types({"anyOf": [{"type": "integer"}, {"const": None}]}))
    ['integer', 'null']
    """
    types, visited, left = set[str](), set[int](), [schema]
    while left and len(visited) < _MAX_PARTS:
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in visited:
            continue
        visited.add(id(part))
        kinds = part.get("type")
        if kinds is None:
            values = part.get("enum", [part["const"]] if "const" in part else ())
            kinds = (
                [_JSON_TYPES.get(type(value), "null") for value in values] if isinstance(values, list) else ()
            )
        kinds = [kinds] if isinstance(kinds, str) else kinds
        types.update(kind for kind in kinds if isinstance(kind, str)) if isinstance(
            kinds, list | tuple
        ) else None
        for kind in ("anyOf", "oneOf", "allOf"):
            parts = part.get(kind)
            left += parts if isinstance(parts, list) else ()
        left.append(referred(part.get("$ref"), root))
    return frozenset(types)


def tool_by_arguments(arguments: str, tools: Mapping[str, Any]) -> str | None:
    """Tell a tool by the keys of its arguments, in JSON, as SGLang does where a call has no name.

    It is the only tool, or the first whose parameters have most of the keys, and no fewer than they lack; else None.

    >>> tool_by_arguments('{"city": "Oslo"}', {"a": {}, "b": {"parameters": {"properties": {"city": {}}}}})
    'b'
    """
    if len(tools) == 1:
        return next(iter(tools))
    keys = (read_object(arguments) or {}).keys()
    known = {name: parameter_schemas(function).keys() for name, function in tools.items()}
    scores = {name: len(keys & has) - len(keys - has) for name, has in known.items() if has and keys}
    best = max(scores, key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] >= 0 else None


def typed_value(text: str, types: frozenset[str]) -> str:
    """Convert a parameter's text to JSON: parsed where its schema allows the value, else as a string."""
    if "string" in types and not (text == "null" and "null" in types):
        return json.dumps(text, ensure_ascii=False)
    for read in (json.loads, ast.literal_eval):
        if len(text) <= MAX_LITERAL or read is json.loads:
            try:
                return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    return json.dumps(text, ensure_ascii=False)
