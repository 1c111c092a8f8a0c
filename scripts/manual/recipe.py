"""The reference of recipes, from their JSON schema (`pipeline recipes schema`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.recipe.catalog import schema_text

Schema = Mapping[str, Any]


def page() -> str:
    """Markdown: one table a section of a recipe, in the order in which recipes are written."""
    root = json.loads(schema_text())
    definitions = root["$defs"]
    lines = [
        "# Recipe",
        "",
        "Every key of a recipe with its type, its default and its bounds, from the JSON schema that",
        "`pipeline recipes schema` prints (give it to your editor). Keys that are not listed are refused.",
        "Rules that span several keys are on the page [Rules](rules.md).",
        "",
        "## The whole recipe",
        "",
        *_table(root, "", definitions),
    ]
    for path, name in _sections(root, definitions, ""):
        section = definitions[name]
        lines += ["", f"## `{path}` {{#{name.lower()}}}", "", section.get("description", ""), ""]
        lines += _table(section, path, definitions)
    return "\n".join(lines) + "\n"


def _sections(schema: Schema, definitions: Schema, prefix: str) -> Iterator[tuple[str, str]]:
    """Each section below a schema: the key that it stands at, and the name of its definition."""
    for key, value in schema["properties"].items():
        for name in _references(value):
            # Any JSON value, for one, is no section.
            if "properties" not in definitions[name]:
                continue
            variant = _kind(definitions[name])
            path = f"{prefix}{key}" + (f" (kind: {variant})" if variant else "")
            yield path, name
            yield from _sections(definitions[name], definitions, f"{prefix}{key}.")


def _kind(definition: Schema) -> str:
    """The value of `kind` or `method` that tells one member of a union from the others."""
    for key in ("kind", "method"):
        constant = definition["properties"].get(key, {}).get("const")
        if constant:
            return str(constant)
    return ""


def _references(value: Any) -> list[str]:
    """Names of definitions that a property refers to, in order."""
    if isinstance(value, Mapping):
        own = [value["$ref"].rpartition("/")[2]] if "$ref" in value else []
        parts = (part for key, part in value.items() if key not in ("discriminator", "default", "examples"))
        return list(dict.fromkeys([*own, *(name for part in parts for name in _references(part))]))
    if isinstance(value, list):
        return list(dict.fromkeys(name for part in value for name in _references(part)))
    return []


def _table(schema: Schema, path: str, definitions: Schema) -> list[str]:
    required = schema.get("required", [])
    lines = ["| key | type | default | what it is |", "| --- | --- | --- | --- |"]
    for key, value in schema["properties"].items():
        given = value.get("default", None)
        default = "**required**" if key in required and "const" not in value else _default(given, value)
        if path and _kind({"properties": {key: value}}):
            default = f"`{value['const']}`"
        examples = ", ".join(f"`{value}`" for value in value.get("examples", ()))
        text = value.get("description", "") + (f" Examples: {examples}." if examples else "")
        lines.append(f"| `{key}` | {_type(value, definitions)} | {default} | {_cell(text)} |")
    return lines


def _default(given: Any, value: Schema) -> str:
    if given is None:
        return "–"
    if _references(value):
        return "see there"
    return f"`{_cell(json.dumps(given, ensure_ascii=False))}`"


def _type(value: Schema, definitions: Schema) -> str:
    if "$ref" in value:
        name = _references(value)[0]
        return f"[{_kind(definitions[name]) or 'section'}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in value:
            kinds = [_type(part, definitions) for part in value[key] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in value:
        return " \\| ".join(f"`{value}`" for value in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}), definitions)}"
    return str(value.get("type", "any")) + _bounds(value)


def _bounds(value: Schema) -> str:
    said = []
    for key, sign in (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
    ):
        if key in value:
            said.append(f"{sign} {value[key]:,}" if isinstance(value[key], int) else f"{sign} {value[key]}")
    return f", {', '.join(said)}" if said else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
