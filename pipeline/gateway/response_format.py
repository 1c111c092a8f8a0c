"""Forms of answers (guided decoding): from the fields of a request to what the engine takes, checked before it is sent.

OpenAI's `response_format` with `json_object` and `json_schema`; its `json`, `regex` and `ebnf` as TensorRT-LLM's own
server (trtllm-serve 1.2) takes them; `guided_json|regex|choice|grammar` as vLLM had them until 0.11, and
`structured_outputs`, which took their place. A schema is validated against its meta-schema here. Which of its keywords
can be enforced differs from one engine to the other: the engine refuses the rest itself, before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal
from urllib.parse import unquote

import jsonschema
from pydantic import BaseModel, ConfigDict, Field

from pipeline.client import Refused, Sampling
from pipeline.gateway.bounds import Choices, check_guide, read_json
from pipeline.gateway.errors import ApiError

_GUIDE = "guided_decoding_guide"  # the engine's refusals of a form begin with it
_MAX_FAULTS = 4  # of one schema
_NO_SCHEMAS = ("const", "default", "enum", "examples")  # keywords whose values are not schemas


class JsonSchema(BaseModel):
    """A JSON schema that an answer must match."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Form of an answer. OpenAI has text, json_object and json_schema; trtllm-serve 1.2 also json, regex and ebnf."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    type: Literal["text", "json", "json_object", "json_schema", "regex", "ebnf"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    regex: str | None = None
    ebnf: str | None = None


class StructuredOutputs(BaseModel):
    """Form of an answer, as vLLM takes it since 0.11."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have.

    Attributes:
        kind: "json", "json_schema", "regex" or "ebnf_grammar", as TensorRT-LLM names them.
        guide: the schema, expression or grammar; None for "json".
        place: of the form in the request, such as response_format.json_schema.schema.
    """

    kind: str
    guide: str | None
    place: str

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters that make the engine enforce the form."""
        return (
            {"guide_type": self.kind}
            if self.guide is None
            else {"guide_type": self.kind, "guide": self.guide}
        )

    def unsupported(self, error: Refused) -> ApiError | None:
        """Map the refusal of an engine that cannot enforce the form to an API error; None if it refuses something else.

        Args:
            error: of the engine.
        """
        text = str(error)
        if not text.startswith(_GUIDE):
            return None
        reason, param = text.partition(": ")[2], self.place.partition(".")[0]
        return ApiError(400, f"{self.place}: {reason}", param=param, code="unsupported_parameter")


class FormFields(BaseModel):
    """The fields of a request that say which form its answer must have. At most one of them may."""

    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def form_fields(self) -> list[str]:
        """Names of the fields that ask for a form."""
        names = list(FormFields.model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        text = self.response_format is not None and self.response_format.type == "text"
        return [name for name in given if not (name == "response_format" and text)]

    @property
    def has_schema(self) -> bool:
        """Whether the form is a JSON schema: checking one takes longer than its size suggests."""
        given, other = self.response_format, self.structured_outputs
        return (
            self.guided_json is not None
            or (given is not None and (given.json_schema is not None or given.schema_ is not None))
            or (other is not None and other.json_ is not None)
        )

    def form(self) -> AnswerForm | None:
        """Return the form that the answer must have, with its schema checked; None for plain text.

        Raises:
            ApiError: 400, if the form is incomplete or too large, its schema invalid, or there are several.
        """
        form = self._form()
        if form is not None and form.guide is not None:
            check_guide(form.kind, form.guide, form.place, form.place.partition(".")[0])
        return form

    def _form(self) -> AnswerForm | None:
        names = self.form_fields
        if not names:
            return None
        if len(names) > 1:
            text = f"{' and '.join(names)}: an answer can be held to one form only"
            raise ApiError(400, text, param=names[1])
        if names == ["response_format"] and self.response_format is not None:
            return _of_response_format(self.response_format)
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(by_alias=True)
            return _of_parts({f"structured_outputs.{name}": value for name, value in given.items()})
        return _of_parts({names[0]: getattr(self, names[0])})


def _of_response_format(given: ResponseFormat) -> AnswerForm:
    at = "response_format"
    match given.type:
        case "json_object":
            return AnswerForm("json", None, f"{at}.json_object")
        case "json_schema" if given.json_schema is not None:
            return _schema_form(given.json_schema.schema_, f"{at}.json_schema.schema")
        case "json" if given.schema_ is not None:
            return _schema_form(given.schema_, f"{at}.schema")
        case "regex" if given.regex:
            return AnswerForm("regex", given.regex, f"{at}.regex")
        case "ebnf" if given.ebnf:
            return AnswerForm("ebnf_grammar", given.ebnf, f"{at}.ebnf")
    missing = "schema" if given.type == "json" else given.type
    raise ApiError(400, f"{at}.{missing}: is missing", param=at)


def _of_parts(parts: Mapping[str, Any]) -> AnswerForm:
    """The form of vLLM's fields, given by their places in the request."""
    given = [(place, value) for place, value in parts.items() if value not in (None, "", False)]
    param = next(iter(parts)).partition(".")[0]
    if len(given) != 1:
        raise ApiError(400, f"{param}: must name one form; it names {len(given)}", param=param)
    place, value = given[0]
    match place.removeprefix("guided_").removeprefix("structured_outputs."):
        case "json":
            return _schema_form(_read_schema(value, place), place)
        case "json_object":
            return AnswerForm("json", None, place)
        case "choice":
            return AnswerForm("ebnf_grammar", _choice_grammar(value), place)
        case "grammar":
            return AnswerForm("ebnf_grammar", value, place)
    return AnswerForm("regex", value, place)


def _read_schema(given: str | dict[str, Any], place: str) -> Any:
    """A schema that may come as JSON text."""
    try:
        schema = read_json(given, place, place.partition(".")[0]) if isinstance(given, str) else given
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        text = f"{place}: must be a JSON schema, as an object or as text"
        raise ApiError(400, text, param=place.partition(".")[0])
    return schema


def _schema_form(schema: Any, place: str) -> AnswerForm:
    return AnswerForm("json_schema", check_json_schema(schema, place, place.partition(".")[0]), place)


def _choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of which the texts are exactly these.

    >>> _choice_grammar(["yes", 'a "no"'])
    'root ::= "yes" | "a \\\\"no\\\\""'
    """
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def check_json_schema(schema: Any, where: str, param: str) -> str:
    """Validate a JSON schema against its meta-schema, and its bounds.

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
    check_guide("json_schema", text, where, param)
    if faults := _faults(text):
        listed = "; ".join(f"{where}{path}: {fault}" for path, fault in faults)
        raise ApiError(400, f"{listed} (in a JSON schema)", param=param)
    return text


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
