"""Forms of answers (guided decoding): from the fields of a request to what the engine takes, checked before it is sent.

OpenAI's `response_format` with `json_object` and `json_schema`; its `json`, `regex` and `ebnf` as TensorRT-LLM's own
server (trtllm-serve 1.2) takes them; `guided_json|regex|choice|grammar` as vLLM had them until 0.11, and
`structured_outputs`, which took their place. A schema is validated against its meta-schema here. Which of its keywords
can be enforced differs from one engine to the other: the engine refuses the rest itself, before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.client import Refused, Sampling
from pipeline.gateway.api.bounds import Choices
from pipeline.gateway.api.parsing import OpenModel, check_guide, read_json, unsupported
from pipeline.gateway.errors import ApiError
from pipeline.gateway.text_processes import OVER_BUDGET, OverBudget

_GUIDE = "guided_decoding_guide"  # the engine's refusals of a form begin with it


class JsonSchema(OpenModel):
    """A JSON schema that an answer must match."""

    model_config = ConfigDict(populate_by_name=True)
    idle: ClassVar = frozenset({"description"})

    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenModel):
    """Form of an answer. OpenAI has text, json_object and json_schema; trtllm-serve 1.2 also json, regex and ebnf."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json", "json_object", "json_schema", "regex", "ebnf"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    regex: str | None = None
    ebnf: str | None = None


class StructuredOutputs(OpenModel):
    """Form of an answer, as vLLM takes it since 0.11."""

    model_config = ConfigDict(populate_by_name=True)
    refused: ClassVar = {
        "disable_additional_properties": (None, False),
        "disable_any_whitespace": (None, False),
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
    }
    idle: ClassVar = frozenset({"disable_fallback"})

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


# Finds the faults of a schema that is given as JSON: path within it, and what is wrong there.
SchemaFaults = Callable[[str], Sequence[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have.

    Attributes:
        kind: "json", "json_schema", "regex" or "ebnf_grammar", as TensorRT-LLM names them, or "structural_tag".
        guide: the schema, expression, grammar or tag; None for "json".
        place: place of the form in the request, such as response_format.json_schema.schema.
    """

    kind: str
    guide: str | None
    place: str

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters that make the engine enforce the form."""
        return {"guide_type": self.kind, "guide": self.guide}

    def unsupported(self, error: Refused) -> ApiError | None:
        """Map an engine's refusal to enforce the form to an API error; None if it refuses something else."""
        text = str(error)
        if not text.startswith(_GUIDE):
            return None
        return unsupported(self.place.partition(".")[0], f"{self.place}: {text.partition(': ')[2]}")


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
        names = [name for name in FormFields.model_fields if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            names.remove("response_format")
        return names

    def form(self, schema_faults: SchemaFaults) -> AnswerForm | None:
        """Return the form that the answer must have, with its schema checked; None for plain text.

        Raises:
            ApiError: 400, if the form is incomplete or too large, its schema invalid, or there are several.
        """
        form = self._form()
        if form is not None and form.guide is not None:
            param = form.place.partition(".")[0]
            check_guide(form.kind, form.guide, form.place, param)
            if form.kind == "json_schema":
                check_json_schema(form.guide, form.place, param, schema_faults)
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
            outputs = self.structured_outputs.model_dump(by_alias=True)
            return _of_parts({f"structured_outputs.{name}": value for name, value in outputs.items()})
        return _of_parts({names[0]: getattr(self, names[0])})


def _of_response_format(form: ResponseFormat) -> AnswerForm:
    at = "response_format"
    match form.type:
        case "json_object":
            return AnswerForm("json", None, f"{at}.json_object")
        case "json_schema" if form.json_schema is not None:
            return _schema_form(form.json_schema.schema_, f"{at}.json_schema.schema")
        case "json" if form.schema_ is not None:
            return _schema_form(form.schema_, f"{at}.schema")
        case "regex" if form.regex:
            return AnswerForm("regex", form.regex, f"{at}.regex")
        case "ebnf" if form.ebnf:
            return AnswerForm("ebnf_grammar", form.ebnf, f"{at}.ebnf")
    missing = "schema" if form.type == "json" else form.type
    raise ApiError(400, f"{at}.{missing}: is missing", param=at)


def _of_parts(parts: Mapping[str, Any]) -> AnswerForm:
    """The form of vLLM's fields, given by their places in the request."""
    forms = [(place, value) for place, value in parts.items() if value not in (None, "", False)]
    param = next(iter(parts)).partition(".")[0]
    if len(forms) != 1:
        raise ApiError(400, f"{param}: must name one form; it names {len(forms)}", param=param)
    place, value = forms[0]
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


def _read_schema(schema_or_text: str | dict[str, Any], place: str) -> Any:
    """A schema that may come as JSON text."""
    try:
        schema = (
            read_json(schema_or_text, place, place.partition(".")[0])
            if isinstance(schema_or_text, str)
            else schema_or_text
        )
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        text = f"{place}: must be a JSON schema, as an object or as text"
        raise ApiError(400, text, param=place.partition(".")[0])
    return schema


def _schema_form(schema: Any, place: str) -> AnswerForm:
    return AnswerForm("json_schema", json.dumps(schema, ensure_ascii=False), place)


def _choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of which the texts are exactly these.

    >>> _choice_grammar(["yes", 'a "no"'])
    'root ::= "yes" | "a \\\\"no\\\\""'
    """
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def check_json_schema(schema: str, where: str, param: str, schema_faults: SchemaFaults) -> None:
    """Hold a JSON schema against its meta-schema.

    Args:
        schema: the schema as JSON.
        where: place of the schema in the request, such as tools.0.function.parameters.
        param: field of the request that holds the schema.
        schema_faults: finds its faults.

    Raises:
        ApiError: 400, with the location of each fault.
    """
    try:
        faults = schema_faults(schema)
    except OverBudget as error:
        raise ApiError(400, f"{where}: {error}", param=param, code=OVER_BUDGET) from error
    if faults:
        listed = "; ".join(f"{where}{path}: {fault}" for path, fault in faults)
        raise ApiError(400, f"{listed} (in a JSON schema)", param=param)
