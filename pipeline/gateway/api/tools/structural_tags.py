"""Structural tags: grammars with which an engine leaves text free, and holds each call of a tool to its schema.

The tag is that of xgrammar, of which TensorRT-LLM has 0.1.25 to 0.1.32; the engine of `cpu` takes the same. Its formats
are built from `guided` of dialects.yaml:

    text OPENS CALL text OPENS CALL …              most families; their marks around all calls are text
    text OPENS CALL SEPARATOR CALL … CLOSES        a list in JSON
    CALL, or text that cannot be taken for one     where nothing stands before a call

Parameters in elements of their own come in the order of the schema. Their texts are free but for `enum` and `const`:
a limit of their length, or a regular expression, could not be told apart from the end of the element.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipeline.gateway.api.bounds import MAX_GUIDE_BYTES
from pipeline.gateway.api.tools.dialects import GuidedCalls, ToolDialect
from pipeline.gateway.api.tools.schemas import parameter_schemas, parameters_of, referred, schema_types

Format = dict[str, Any]  # as `xgrammar.structural_tag` has them

_FIELD = re.compile(r"(\{(?:name|br|sp|index|key|string|type|value|arguments|parameters)\})")
# A line break that models and their templates may leave out.
_BREAK: Format = {"type": "regex", "pattern": r"\n?"}
_HOLE: Format = {}  # for what a template is filled with
_FIELDS: Mapping[str, Format] = {
    "{br}": _BREAK, "{type}": {"type": "regex", "pattern": "[a-z]+"},
    "{sp}": {"type": "regex", "pattern": " ?"}, "{index}": {"type": "regex", "pattern": "[0-9]+"},
    "{arguments}": _HOLE, "{parameters}": _HOLE, "{value}": _HOLE,
}  # fmt: skip
# Answers that are no call in JSON.
_NO_BRACE: Format = {"type": "regex", "pattern": r"([^{\s][\s\S]*)?"}
_COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "$ref")


def structural_tag(
    dialect: ToolDialect,
    functions: Sequence[Mapping[str, Any]],
    strict: Collection[str],
    *,
    must: bool = False,
    single_call: bool = False,
) -> str:
    """Write the structural tag of a request's tools as JSON.

    Args:
        dialect: Dialect of the model; it has `guided`.
        functions: Functions that may be called.
        strict: Names of the functions whose arguments follow their schemas; those of others are free.
        must: Whether the answer has to begin with a call.
        single_call: Whether the answer ends with its first call.
    """
    guided = dialect.guided
    assert guided is not None, "asked by can_guide"
    calls = [_call(guided, function, function["name"] in strict) for function in functions]
    made = (
        _either(calls if must else [*calls, _NO_BRACE])
        if guided.start
        else _triggered(dialect, guided, calls, must, single_call)
    )
    return json.dumps({"type": "structural_tag", "format": made}, ensure_ascii=False)


def _triggered(
    dialect: ToolDialect, guided: GuidedCalls, calls: Sequence[Format], must: bool, single_call: bool
) -> Format:
    trigger = dialect.head[0] or next(iter(dialect.opens), guided.opens or "")
    content = _either([*map(_text, () if must else guided.others), *calls])
    if guided.separator is not None:
        content = {
            "type": "tags_with_separator",
            "tags": [_tag("", call, "") for call in calls],
            "separator": guided.separator,
            "at_least_one": True,
            "stop_after_first": single_call,
        }
    made = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [_tag(guided.opens or trigger, content, guided.closes or "")],
        "at_least_one": must,
        # Text after a list could go on with it. A message of a channel that is no call does not end the answer.
        "stop_after_first": (single_call and (must or not guided.others)) or guided.separator is not None,
    }
    if not must or not dialect.head[0]:
        return made
    return {"type": "sequence", "elements": [_text(dialect.opens[0]), _BREAK, made]}


def can_guide(dialect: ToolDialect | None, function: Mapping[str, Any]) -> bool:
    """Whether guided decoding can hold calls of a function to its schema in this dialect."""
    if dialect is None or dialect.guided is None:
        return False
    root = parameters_of(function)
    if dialect.form != "xml":
        return True
    # A parameter with references is written with all that it may refer to.
    referring = sum('"$ref"' in json.dumps(schema) for schema in parameter_schemas(function).values())
    return not any(key in root for key in _COMBINED) and referring * len(json.dumps(root)) < MAX_GUIDE_BYTES


def _call(guided: GuidedCalls, function: Mapping[str, Any], strict: bool) -> Format:
    parts = _parts(guided.call, {"{name}": function["name"]})
    if guided.parameter is None:
        schema = (function.get("parameters") if strict else None) or {"type": "object"}
        return _filled(parts, [{"type": "json_schema", "json_schema": schema}])
    return _filled(parts, list(_parameters(guided.parameter, function))) if strict else _with_text(parts)


def _parameters(template: str, function: Mapping[str, Any]) -> Iterator[Format]:
    root, schemas = parameters_of(function), parameter_schemas(function)
    moved = with_moved_references(root, "#/$defs/tool")
    required = root.get("required")
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    for name in dict.fromkeys([*schemas, *required]):
        schema = schemas.get(name, {})
        types = schema_types(schema, root)
        text = not types or "string" in types
        texts = {"{key}": name, "{string}": str(text).lower()} | ({"{type}": "string"} if text else {})
        parts = _parts(template, texts)
        if not text:
            refers = '"$ref"' in json.dumps(schema)
            whole = {**moved["properties"][name], "$defs": {"tool": moved}} if refers else schema
            made = _filled(parts, [{"type": "json_schema", "json_schema": whole}])
        elif (values := _values(schema, root)) is not None:
            made = _filled(parts, [_either([_text(value) for value in values])])
        else:
            made = _with_text(parts)
        yield made if name in required else _either([made, _BREAK])


def _values(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Return the only values of a parameter, if they are texts; None if others are allowed."""
    resolved = referred(schema["$ref"], root) if isinstance(schema, Mapping) and "$ref" in schema else schema
    if not isinstance(resolved, Mapping):
        return None
    values = [resolved["const"]] if "const" in resolved else resolved.get("enum")
    texts = isinstance(values, list) and values and all(isinstance(value, str) and value for value in values)
    return values if texts else None


def with_moved_references(schema: Any, to: str) -> Any:
    """Move a schema into a larger one, to the JSON pointer `to`: its references into itself are rewritten."""
    if isinstance(schema, list):
        return [with_moved_references(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: with_moved_references(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _parts(template: str, texts: Mapping[str, str]) -> list[str | Format]:
    """Split a template into its texts, and the formats between them."""
    parts: list[str | Format] = []
    for part in filter(None, _FIELD.split(template)):
        known = texts.get(part) or _FIELDS.get(part, part)
        if isinstance(known, str) and parts and isinstance(parts[-1], str):
            parts[-1] += known
        else:
            parts.append(known)
    return parts


def _filled(parts: Sequence[str | Format], content: Sequence[Format]) -> Format:
    elements = [
        content if part is _HOLE else [_text(part) if isinstance(part, str) else part] for part in parts
    ]
    return {"type": "sequence", "elements": [element for part in elements for element in part]}


def _with_text(parts: list[str | Format]) -> Format:
    """Allow any text in the hole, line breaks included, up to the next fixed text."""
    at = next(index for index, part in enumerate(parts) if part is _HOLE)
    texts = [index for index, part in enumerate(parts) if isinstance(part, str)]
    first, last = max(index for index in texts if index < at), min(index for index in texts if index > at)
    tag = _tag(str(parts[first]), {"type": "any_text"}, str(parts[last]))
    return _filled([*parts[:first], tag, *parts[last + 1 :]], ())


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _either(elements: Sequence[Format]) -> Format:
    return {"type": "or", "elements": list(elements)} if len(elements) > 1 else elements[0]
