"""Tools in a prompt whose chat template takes none."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from pipeline.client import ChatTemplate
from pipeline.client.testing import Reply
from pipeline.gateway.api.tools.prompt import ToolSectionTemplate, dialect_of, with_tool_section
from pipeline.models.chat_template import TemplateError
from tests.gateway.conftest import Start

# As strict as templates are: a system message at most at the beginning, then user and assistant in turns.
STRICT = """{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
{{- m.role[0] }}({{ m.content }}){% endfor %}"""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "track",
        "description": "Find it.",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
        "strict": True,
    },
}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "track", "arguments": {"id": 7}}}
ASK: Any = {"role": "user", "content": "Where is it?"}
CALLED: Any = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
RESULT: Any = {"role": "tool", "tool_call_id": "c", "content": "At the border."}
WRITTEN = '<tool_call>\n{"name": "track", "arguments": {"id": 7}}\n</tool_call>'
TOLD = "<tool_response>\nAt the border.\n</tool_response>"


def test_the_section_stands_before_the_conversation() -> None:
    (user,) = with_tool_section([ASK], [TOOL])
    section, _, question = user["content"].rpartition("\n\n")
    assert question == "Where is it?"
    listed = section.partition("<tools>\n")[2].partition("\n</tools>")[0]
    function = TOOL["function"]
    assert json.loads(listed) == {key: function[key] for key in ("name", "description", "parameters")}
    system, same = with_tool_section([{"role": "system", "content": "Be brief."}, ASK], [TOOL])
    assert system["content"] == f"Be brief.\n\n{section}"
    assert same == ASK


def test_calls_and_results_are_turns_of_assistant_and_user() -> None:
    messages = [ASK, CALLED, RESULT, RESULT, ASK, {"role": "assistant", "content": "Far."}, ASK]
    before = json.dumps(messages)
    written = with_tool_section(messages, [])
    assert [message["role"] for message in written] == ["user", "assistant"] * 2 + ["user"]
    assert written[1]["content"] == f"{WRITTEN}\n{WRITTEN}"
    assert written[2]["content"] == f"{TOLD}\n{TOLD}\nWhere is it?"
    assert json.dumps(messages) == before


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_strict_template_takes_it(system: list[Any]) -> None:
    template = ToolSectionTemplate(ChatTemplate(STRICT))
    for messages in ([ASK], [ASK, CALLED, RESULT], [ASK, CALLED, RESULT, RESULT, ASK], [CALLED, RESULT]):
        if messages[0] is not CALLED:
            assert "<tools>" in template.render([*system, *messages], tools=[TOOL])
    assert template.render([*system, ASK]) == ChatTemplate(STRICT).render([*system, ASK])
    assert WRITTEN in template.render([*system, ASK, CALLED, RESULT])
    found = dialect_of(template)
    assert found is not None
    assert found.name == "hermes"


def test_a_request_is_told_of_tools_and_its_calls_are_read(borrow: Start) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    running = borrow(
        [Reply([f"{WRITTEN}\n{WRITTEN}"]), Reply(["Far."])], template=template, tool_section=True
    )
    ask: Any = {"model": "tiny", "messages": [ASK], "tools": [TOOL], "parallel_tool_calls": False}
    choice = running.client().chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or ()) == 1
    asked = running.upstream.requests[0]
    assert "<tools>" in asked.prompt
    assert asked.tensors["stop_words"] == ["</tool_call>"]
    ask["messages"] += [choice.message.to_dict(), {**RESULT, "tool_call_id": choice.message.tool_calls[0].id}]
    assert running.client().chat.completions.create(**ask).choices[0].message.content == "Far."
    assert TOLD in running.upstream.requests[1].prompt


def test_tools_that_are_not_allowed_are_left_out(borrow: Start) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    running = borrow(template="{{ messages[0].content }}", tool_section=True)

    def choice(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def ask(tool_choice: Any) -> None:
        running.client().chat.completions.create(
            model="tiny", messages=[ASK], tools=[TOOL, other], tool_choice=tool_choice
        )

    ask(choice("auto", "other"))
    ask(choice("required", "track"))
    tools = [TOOL, other, {"type": "function", "function": {"name": "third"}}]
    running.client().chat.completions.create(
        model="tiny", messages=[ASK], tools=tools, tool_choice=choice("required", "track", "third")
    )
    free, only, forced = running.upstream.requests
    assert only.prompt.endswith('{"name": "track", "arguments": ')
    assert json.loads(only.tensors["guided_decoding_guide"][0]) == TOOL["function"]["parameters"]
    assert '"name": "other"' in free.prompt
    assert '"name": "track"' not in free.prompt
    assert "guided_decoding_guide" not in free.tensors
    assert '"const": "track"' in forced.tensors["guided_decoding_guide"][0]
    assert '"const": "other"' not in forced.tensors["guided_decoding_guide"][0]
    for wrong in (choice("maybe", "track"), choice("auto"), choice("auto", "fourth")):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            ask(wrong)


def test_a_list_of_calls_is_guided(borrow: Start) -> None:
    calls = '[{"name":"track","arguments":{"id":7}},{"name":"track","arguments":{"id":8}}]'
    running = borrow(Reply(list(calls)), template="{{ messages[0].content }}", tool_section=True)
    answer = running.client().chat.completions.create(
        model="tiny", messages=[ASK], tools=[TOOL], tool_choice="required", parallel_tool_calls=True
    )
    found = [json.loads(call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]
    assert found == [{"id": 7}, {"id": 8}]
    assert not answer.choices[0].message.content
    guide = json.loads(running.upstream.requests[0].tensors["guided_decoding_guide"][0])
    assert (guide["type"], guide["minItems"]) == ("array", 1)


def test_a_tool_without_a_name_is_refused_by_the_template_too() -> None:
    """Where no request was checked before, as in /tokenize."""
    template = ToolSectionTemplate(ChatTemplate(STRICT))
    for wrong in ({}, {"function": None}, {"function": {"name": ""}}):
        with pytest.raises(TemplateError, match="each tool must be"):
            template.render([ASK], tools=[TOOL, wrong])
