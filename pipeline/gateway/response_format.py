"""Guided decoding: from `response_format` to what the engine takes, checked before anything is sent.

OpenAI's `json_object` and `json_schema`; `regex` and `ebnf` as TensorRT-LLM's own server (trtllm-serve 1.2) takes them.
A schema is validated against its meta-schema here. Which of its keywords can be enforced differs from one engine to the
other: the engine refuses the rest itself, before it begins.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema

from pipeline.client import Refused, Sampling
from pipeline.gateway.errors import ApiError
from pipeline.gateway.schema import ResponseFormat

_GUIDE = "guided_decoding_guide"  # the engine's refusals of a form begin with it
_SCHEMA = "response_format.json_schema.schema"
_MAX_FAULTS = 4  # of one schema
_NO_SCHEMAS = ("const", "default", "enum", "examples")  # keywords whose values are not schemas


def guided_sampling(form: ResponseFormat | None) -> Sampling:
    """Return the sampling parameters that make the engine enforce a form; none for plain text.

    Raises:
        ApiError: 400, if the form is incomplete, or its schema invalid.
    """
    match form:
        case None | ResponseFormat(type="text"):
            return {}
        case ResponseFormat(type="json_object"):
            return {"guide_type": "json"}
        case ResponseFormat(type="json_schema", json_schema=given) if given is not None:
            return {
                "guide_type": "json_schema",
                "guide": check_json_schema(given.schema_, _SCHEMA, "response_format"),
            }
        case ResponseFormat(type="regex", regex=given) if given:
            return {"guide_type": "regex", "guide": given}
        case ResponseFormat(type="ebnf", ebnf=given) if given:
            return {"guide_type": "ebnf_grammar", "guide": given}
    raise ApiError(400, f"response_format.{form.type}: is missing", param="response_format")


def check_json_schema(schema: Any, where: str, param: str) -> str:
    """Validate a JSON schema against its meta-schema.

    Args:
        schema: the schema.
        where: its place in the request, such as tools.0.function.parameters.
        param: field of the request that holds it.

    Returns:
        The schema as JSON.

    Raises:
        ApiError: 400, with the location of each fault.
    """
    text = json.dumps(schema, ensure_ascii=False)
    if faults := _faults(text):
        listed = "; ".join(f"{where}{path}: {fault}" for path, fault in faults)
        raise ApiError(400, f"{listed} (in a JSON schema)", param=param)
    return text


def unsupported_format(error: Refused, form: ResponseFormat | None) -> ApiError | None:
    """Map the refusal of an engine that cannot enforce a form to an API error.

    Args:
        error: of the engine.
        form: that the request asks for; None if it forces a call of a tool.

    Returns:
        The error, or None if the engine refuses something else.
    """
    text = str(error)
    if not text.startswith(_GUIDE):
        return None
    where, param = (_SCHEMA, "response_format") if form is not None else ("tools", "tools")
    if form is not None and form.type != "json_schema":
        where = f"response_format.{form.type}"
    return ApiError(400, f"{where}: {text.partition(': ')[2]}", param=param, code="unsupported_parameter")


@lru_cache(maxsize=256)
def _faults(text: str) -> tuple[tuple[str, str], ...]:
    """Path within the schema of each fault, and what is wrong there."""
    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        errors = list(islice(kind(kind.META_SCHEMA).iter_errors(schema), _MAX_FAULTS))
        if not errors and (loop := _circular_reference(schema)) is not None:
            return (("", f"the reference {loop!r} leads back to itself"),)
    except RecursionError:
        return (("", "is nested too deeply"),)
    return tuple(sorted((error.json_path[1:], _short(_describe(error))) for error in errors))


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
            parts += [(one, reference) for one in part["allOf"]]
        found = next((loop for loop in (follow(*one) for one in parts) if loop is not None), None)
        followed[id(part)] = False
        return found

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
