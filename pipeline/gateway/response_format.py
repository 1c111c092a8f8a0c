"""The form that an answer must have, from `response_format` to what the engine takes; checked before anything is sent.

Of the forms that OpenAI has, `json_object` and `json_schema`; `regex` and `ebnf` are written as TensorRT-LLM's own
server (trtllm-serve, 1.2) takes them. A schema is held against its meta-schema here. What an engine cannot hold an
answer to differs from one to the other: each says so itself, before it begins.
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

_GUIDE = "guided_decoding_guide"  # with which the engine's refusals of a form begin
_SCHEMA = "response_format.json_schema.schema"
_TOLD = 4  # faults of one schema


def guide_of(form: ResponseFormat | None) -> Sampling:
    """What the engine has to keep to.

    Raises:
        ApiError: 400, if the form is none.
    """
    match form:
        case None | ResponseFormat(type="text"):
            return {}
        case ResponseFormat(type="json_object"):
            return {"guide_type": "json"}
        case ResponseFormat(type="json_schema", json_schema=given) if given is not None:
            return {"guide_type": "json_schema", "guide": checked(given.schema_, _SCHEMA, "response_format")}
        case ResponseFormat(type="regex", regex=given) if given:
            return {"guide_type": "regex", "guide": given}
        case ResponseFormat(type="ebnf", ebnf=given) if given:
            return {"guide_type": "ebnf_grammar", "guide": given}
    raise ApiError(400, f"response_format.{form.type}: is missing", param="response_format")


def checked(schema: Any, where: str, param: str) -> str:
    """A JSON schema as text.

    Raises:
        ApiError: 400, if it is none; each fault is told with its place.
    """
    text = json.dumps(schema, ensure_ascii=False)
    if faults := _faults(text):
        listed = "; ".join(f"{where}{path}: {fault}" for path, fault in faults)
        raise ApiError(400, f"{listed} (in a JSON schema)", param=param)
    return text


def refusal(error: Refused, form: ResponseFormat | None) -> ApiError | None:
    """What to tell of an engine that cannot hold an answer to a form; None if it refuses something else."""
    text = str(error)
    if not text.startswith(_GUIDE):
        return None
    where, param = (_SCHEMA, "response_format") if form is not None else ("tools", "tools")
    if form is not None and form.type != "json_schema":
        where = f"response_format.{form.type}"
    return ApiError(400, f"{where}: {text.partition(': ')[2]}", param=param, code="unsupported_parameter")


@lru_cache(maxsize=256)
def _faults(text: str) -> tuple[tuple[str, str], ...]:
    """Path within the schema, and what is wrong there."""
    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        errors = list(islice(kind(kind.META_SCHEMA).iter_errors(schema), _TOLD))
        if not errors and (loop := _loop(schema)) is not None:
            return (("", f"the reference {loop!r} leads back to itself"),)
    except RecursionError:
        return (("", "is nested too deeply"),)
    return tuple(sorted((error.json_path[1:], _short(_fault(error))) for error in errors))


_NO_SCHEMAS = ("const", "default", "enum", "examples")  # keywords whose content is none


def _loop(schema: Any) -> str | None:
    """A reference that leads back to itself by references and `allOf` alone; None if none does.

    Nothing can be held against such a schema, and engines differ in how they fail at it. A reference to a whole from
    one of its parts, as of a tree, is none.
    """
    followed: dict[int, bool] = {}  # id of a schema -> whether it is being followed

    def follow(part: Any, reference: str) -> str | None:
        if not isinstance(part, dict):
            return None
        if id(part) in followed:
            return reference if followed[id(part)] else None
        followed[id(part)] = True
        own = part.get("$ref")
        parts = [(_referred(schema, own), own)] if isinstance(own, str) else []
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


def _referred(schema: Any, reference: str) -> Any:
    """What a reference into the schema itself means, by RFC 6901; None if it is no such reference, or leads nowhere."""
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


def _fault(error: jsonschema.ValidationError) -> str:
    """In words that do not speak of the meta-schema's own alternatives."""
    return f"{error.instance!r} is nothing that may stand here" if error.context else str(error.message)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "…"
