"""Declarations of tools in TypeScript, as Kimi K2.5 to K2.7 were trained to read them.

    // Find out where an order is.                  {"name": "track", "description": "Find out where an order is.",
    type track = (_: {                               "parameters": {"type": "object", "required": ["order"],
      order: string                                                 "properties": {"order": {"type": "string"}}}}
    }) => any;

Written against tool_declaration_ts.py of moonshotai/Kimi-K2.5 (thinking-machines-lab/tinker-cookbook has a copy,
tinker_cookbook/renderers/kimi_k2_5_tool_declaration_ts.py @9dfcc3a2cf44). Definitions are looked for at the root of a
tool's parameters alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
# Type of JSON schema -> keywords that stand in its comment.
_NUMBER, _CONSTRAINTS = (
    ("maximum", "minimum"),
    {
        "string": ("maxLength", "minLength", "pattern"),
        "array": ("maxItems", "minItems"),
    },
)
_CONSTRAINTS |= {"number": _NUMBER, "integer": _NUMBER}
# In lists of types.
_TYPES = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null", "object": "{}",
    "array": "Array<any>",
}  # fmt: skip
_OF_TYPE: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "number": (int, float), "integer": int, "boolean": bool,
}  # fmt: skip


def with_sorted_keys(value: Any) -> Any:
    """Return JSON with the keys of all objects in order."""
    if isinstance(value, Mapping):
        return {key: with_sorted_keys(value[key]) for key in sorted(value)}
    return [with_sorted_keys(item) for item in value] if isinstance(value, list) else value


def typescript_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Declare tools, as OpenAI writes them; None if there are none, or a schema has no such form."""
    functions = [tool.get("function") for tool in tools if tool.get("type") == "function"]
    try:
        declared = [_Declaration(function).text() for function in functions if function]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Whatever a client calls a schema.
        return None
    if not declared:
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(declared) + "\n}\n"


class _Declaration:
    """Declaration of one function."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._parameters: Mapping[str, Any] = function.get("parameters") or {}
        self._definitions: Mapping[str, Any] = self._parameters.get("$defs") or {}
        self._refers_to_root = False

    def text(self) -> str:
        interfaces, parameters = [], self._object(self._parameters, "")
        if self._refers_to_root:
            body = ",\n".join(self._fields(self._parameters, _INDENT))
            interfaces.append("interface parameters {" + (f"\n{body}\n" if body else "") + "}")
            parameters = "parameters"
        for name, schema in self._definitions.items():
            description = schema.get("description") or ""
            comment = f"{_comment(description, '')}\n" if description else ""
            interfaces.append(f"{comment}interface {name} {self._type(schema, '')}")
        description, name = self._function.get("description") or "", self._function.get("name", "function")
        lines = (
            "\n".join(interfaces),
            _comment(description, "") if description else "",
            f"type {name} = (_: {parameters}) => any;",
        )
        return "\n".join(filter(None, lines))

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        within, required = indent + _INDENT, schema.get("required", [])
        fields = self._fields(schema, within, lambda name: (name not in required, name))
        further = schema.get("additionalProperties")
        if further is not None:
            kind = (
                {True: "any", False: "never"}[further]
                if isinstance(further, bool)
                else self._type(further, within)
            )
            fields.append(f"{within}[k: string]: {kind}")
        body = ",\n".join(fields)
        return f"{{\n{body}\n{indent}}}" if fields else "{}"

    def _fields(self, schema: Mapping[str, Any], indent: str, order: Any = None) -> list[str]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        names = sorted(properties, key=order) if order else list(properties)
        return [self._field(name, properties[name], indent, optional=name not in required) for name in names]

    def _field(self, name: str, schema: Any, indent: str, *, optional: bool) -> str:
        comments, default = (
            _comments(schema, indent),
            schema.get("default") if isinstance(schema, Mapping) else None,
        )
        if default is not None:
            plain = isinstance(default, int | float)
            comments += (
                f"{indent}// Default: {repr(default) if plain else json.dumps(default, ensure_ascii=False)}\n"
            )
        return f"{comments}{indent}{name}{'?' if optional else ''}: {self._type(schema, indent)}"

    def _type(self, schema: Any, indent: str) -> str:
        kind = _kind(schema)
        if kind == "$ref":
            return self._reference(schema["$ref"])
        if kind == "anyOf":
            return " | ".join(self._type(branch, indent) for branch in schema["anyOf"])
        if kind == "enum":
            _check_enum(schema)
            return " | ".join(
                f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"]
            )
        if kind == "types":
            return " | ".join(_TYPES[kind] for kind in schema["type"])
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema.get("items") or True, indent)
        return "number" if kind == "integer" else kind

    def _array(self, items: Any, indent: str) -> str:
        within = indent + _INDENT
        if comments := _comments(items, within):
            return f"Array<\n{comments}{within}{self._type(items, within)}\n{indent}>"
        return f"Array<{self._type(items, indent)}>"

    def _reference(self, to: str) -> str:
        if to == "#":
            self._refers_to_root = True
            return "parameters"
        name = to.removeprefix("#/$defs/")
        if name == to or name not in self._definitions:
            raise ValueError(f"{to} is not defined")
        return name


def _kind(schema: Any) -> str:
    """The keyword that decides on the type of a schema, or the name of the type."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    for keyword in ("$ref", "anyOf", "enum"):
        if keyword in schema:
            return keyword
    if schema == {}:
        return "any"
    kind = schema["type"]
    return "types" if isinstance(kind, list) else str(kind)


def _comments(schema: Any, indent: str) -> str:
    """Lines with the description of a schema, and its constraints."""
    if isinstance(schema, bool):
        return ""
    description, keywords = schema.get("description") or "", _CONSTRAINTS.get(_kind(schema), ())
    constraints = ", ".join(f"{keyword}: {schema[keyword]}" for keyword in keywords if keyword in schema)
    lines = [_comment(description, indent)] if description else []
    return "".join(f"{line}\n" for line in (*lines, *([f"{indent}// {constraints}"] if constraints else [])))


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _check_enum(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if values are not of the type that a schema names beside them."""
    declared = schema.get("type")
    kinds = declared if isinstance(declared, list) else [declared]
    if len(kinds) > 2 or (len(kinds) == 2 and "null" not in kinds):
        raise ValueError("values of several types")
    kind = _OF_TYPE.get(next((kind for kind in kinds if kind != "null"), None) or "", object)
    if not all(value is None or isinstance(value, kind) for value in schema["enum"]):
        raise ValueError("a value of another type")
