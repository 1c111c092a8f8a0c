"""JSON schemas of users: held against their meta-schema, and searched for references that lead back to themselves.

It takes a millisecond for a few properties and seconds for thousands, so long ones are left to a process of their own
(`pipeline.gateway.text_processes`). Sizes are bounded in `pipeline.gateway.bounds`.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema

_MAX_FAULTS = 4  # of one schema
_NO_SCHEMAS = ("const", "default", "enum", "examples")  # keywords whose values are not schemas


def schema_faults(text: str) -> list[tuple[str, str]]:
    """Find the first faults of a schema that is given as JSON: path within it, and what is wrong there."""
    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        errors = list(islice(kind(kind.META_SCHEMA).iter_errors(schema), _MAX_FAULTS))
        if not errors and (loop := _circular_reference(schema)) is not None:
            return [("", f"the reference {loop!r} leads back to itself")]
    except RecursionError:
        return [("", "is nested too deeply")]
    return sorted((error.json_path[1:], _short(_describe(error))) for error in errors)


def _circular_reference(schema: Any) -> str | None:
    """Find a reference that leads back to itself by references and `allOf` alone; None if there is none.

    Nothing can be validated against such a schema, and engines differ in how they fail at it. A schema that refers to
    itself from one of its properties or items, as that of a tree, is none of this kind.
    """
    followed: dict[int, bool] = {}  # id of a schema -> whether it is being followed

    def follow(part: Any, reference: str) -> str | None:
        if not isinstance(part, dict):
            return None
        if id(part) in followed:
            return reference if followed[id(part)] else None
        followed[id(part)] = True
        own = part.get("$ref")
        parts = [(_resolve(schema, own), own)] if isinstance(own, str) else []
        if isinstance(part.get("allOf"), list):
            parts += [(member, reference) for member in part["allOf"]]
        loops = (follow(*followed_part) for followed_part in parts)
        loop = next((loop for loop in loops if loop is not None), None)
        followed[id(part)] = False
        return loop

    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            if (loop := follow(part, "")) is not None:
                return loop
            rest += [inner for name, inner in part.items() if name not in _NO_SCHEMAS]
        elif isinstance(part, list):
            rest += part
    return None


def _resolve(schema: Any, reference: str) -> Any:
    """Resolve a reference into the schema itself (RFC 6901); None if it is no such reference, or leads nowhere."""
    if not reference.startswith("#"):
        return None
    part = schema
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _describe(error: jsonschema.ValidationError) -> str:
    """Describe an error without the meta-schema's own alternatives."""
    return f"{error.instance!r} is nothing that may stand here" if error.context else str(error.message)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "…"
