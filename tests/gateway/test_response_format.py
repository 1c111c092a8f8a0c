"""`response_format`: what reaches the engine, and what is told of forms that are none before it is asked."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import jsonschema
import openai
import pytest

from pipeline.client.testing import Ending, Reply
from tests.gateway.conftest import Running, Start

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]
UNHELD = "guided_decoding_guide: cannot be held to as json_schema: Unimplemented keys: uniqueItems"
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


# "d" stands for itself; and what is no schema does not matter
CIRCLE = {"b/c": {"$ref": "#/$defs/d"}, "d": {"allOf": [{"$ref": "#/$defs/b~1c"}, {"const": {"$ref": "#"}}]}}
# a whole within its parts, and one part twice: a tree
TREE = {
    "type": "object",
    "properties": {
        "left": {"$ref": "#"},
        "right": {"allOf": [{"$ref": "#"}]},
        "other": {"$ref": "#/$defs/a"},
    },
    "$defs": {
        "a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]},
        "b": {"enum": [{"$ref": "#/$defs/a"}]},
    },
}


def schema_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


def refused(client: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=QUESTION, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("form", "kind", "guide"),
    [
        ({"type": "json_object"}, "json", None),
        ({"type": "regex", "regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"type": "ebnf", "ebnf": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
    ],
)
def test_other_forms_reach_the_engine_under_its_names(
    borrow: Start, form: Any, kind: str, guide: str | None
) -> None:
    running = borrow(Reply(["{}"]))
    running.client().chat.completions.create(model="tiny", messages=QUESTION, response_format=form)
    running.client().completions.create(model="tiny", prompt="Hi", extra_body={"response_format": form})
    for request in running.upstream.requests:
        assert request.tensors["guided_decoding_guide_type"] == [kind]
        assert request.tensors.get("guided_decoding_guide") == (None if guide is None else [guide])


def test_schemas_of_trees_reach_the_engine(borrow: Start) -> None:
    running = borrow(Reply(["{}"]))
    running.client().chat.completions.create(
        model="tiny", messages=QUESTION, response_format=schema_form(TREE)
    )
    assert json.loads(running.upstream.requests[0].tensors["guided_decoding_guide"][0]) == TREE


def test_plain_text_asks_for_nothing(borrow: Start) -> None:
    running = borrow()
    running.client().chat.completions.create(
        model="tiny", messages=QUESTION, response_format={"type": "text"}
    )
    assert "guided_decoding_guide_type" not in running.upstream.requests[0].tensors


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (
            schema_form({"type": "strnig"}),
            "response_format.json_schema.schema.type: 'strnig' is not allowed here",
        ),
        (
            schema_form({"properties": {"a": {"type": "array", "minItems": "x"}, "b": {"required": "c"}}}),
            "response_format.json_schema.schema.properties.a.minItems: 'x' is not of type 'integer'; "
            "response_format.json_schema.schema.properties.b.required: 'c' is not of type 'array'",
        ),
        (schema_form({"$ref": "#"}), "json_schema.schema: the reference '#' leads back to itself"),
        (
            schema_form({"properties": {"a": {"allOf": [{"$ref": "#/$defs/b~1c"}]}}, "$defs": CIRCLE}),
            "json_schema.schema: the reference '#/$defs/d' leads back to itself",
        ),
        (
            schema_form(reduce(lambda inner, _: {"not": inner}, range(80), {})),
            "json_schema.schema: is nested 81 levels deep, of at most 64",
        ),
        ({"type": "json_schema"}, "response_format.json_schema: is missing"),
        ({"type": "regex"}, "response_format.regex: is missing"),
        ({"type": "ebnf", "regex": "a"}, "response_format.ebnf: is missing"),
    ],
)
def test_what_is_no_form_is_told_by_its_place(refusing: Running, form: Any, said: str) -> None:
    error = refused(refusing.same_client(), response_format=form)
    assert (error.param, said in error.message) == ("response_format", True), error.message


def test_an_engine_that_cannot_hold_to_a_schema_is_told_as_the_fault_of_the_field(borrow: Start) -> None:
    running = borrow(Reply([], ending=Ending.ERROR, error=UNHELD))
    for stream in (False, True):
        error = refused(running.client(), response_format=schema_form({"uniqueItems": True}), stream=stream)
        assert error.param == "response_format"
        assert "response_format.json_schema.schema: cannot be held to" in error.message


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "go", "parameters": parameters}}


def test_the_parameters_of_a_tool_that_must_be_called_are_a_schema(refusing: Running) -> None:
    broken = tool({"type": "object", "properties": {"to": {"type": 3}}})
    error = refused(refusing.client(), tools=[tool(POINT), broken], tool_choice="required")
    assert (error.param, "tools.1.function.parameters.properties.to.type: 3 is not" in error.message) == (
        "tools",
        True,
    )


def test_references_within_the_parameters_of_a_tool_still_hold(borrow: Start) -> None:
    """As pydantic writes nested models: in `$defs` at the root."""
    nested = {"type": "object", "properties": {"to": {"$ref": "#/$defs/P"}}, "$defs": {"P": POINT}}
    running = borrow(Reply(["{}"]))
    running.client().chat.completions.create(
        model="tiny", messages=QUESTION, tools=[tool({}), tool(nested)], tool_choice="required"
    )
    guide = running.upstream.requests[0].tensors["guided_decoding_guide"][0]
    matcher = pytest.importorskip("llguidance").LLMatcher
    assert matcher.validate_grammar(matcher.grammar_from_json_schema(guide)) == ""
    schema = json.loads(guide)
    jsonschema.validate({"name": "go", "arguments": {"to": {"x": 1}}}, {**schema["anyOf"][1], **schema})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"name": "go", "arguments": {"to": {"x": "1"}}}, {"anyOf": [False, schema["anyOf"][1]]}
        )


def test_a_deployment_without_guided_decoding_refuses(start: Start) -> None:
    running = start()
    running.served.guided_decoding = False
    error = refused(running.client(), response_format={"type": "json_object"})
    assert "this deployment has no guided decoding" in error.message
    assert not running.upstream.requests
