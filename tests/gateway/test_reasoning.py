"""Answers of models that reason, and calls of tools as each family writes them: through the gateway, in every API."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pipeline.client import ChatTemplate
from pipeline.client.testing import Received, Reply
from pipeline.gateway.api.prompts import read_messages
from pipeline.gateway.api.tools.dialects import ToolDialect, dialects
from pipeline.gateway.api.tools.history import reasoning_variables, template_messages
from pipeline.gateway.api.tools.prompt import ToolSectionTemplate, answer_format, dialect_of
from pipeline.gateway.errors import ApiError
from pipeline.models.chat_template import TemplateError
from tests.gateway.conftest import Running, Start
from tests.gateway.test_anthropic_messages import events as message_events
from tests.gateway.test_anthropic_messages import message
from tests.support.answers import write_call

TRACK: Any = {
    "type": "function",
    "function": {
        "name": "track",
        "description": "Find it.",
        "parameters": {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
}
BODY = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- if m.reasoning_content %}<R>{{ m.reasoning_content }}</R>{% endif %}
{%- for c in m.tool_calls or [] %} CALL {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}
{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}"""
ASK: Any = [{"role": "user", "content": "Where is 7?"}]
SPECIAL = ("<|im_end|>", "<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>",
           "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
           "<|tool_call_argument_begin|>", "[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>",
           "<|python_end|>")  # fmt: skip
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALLED = {"id": 7, "note": 'a "</b>" é'}


def template_of(dialect: ToolDialect | None) -> str:
    """A template by which the gateway knows a family."""
    marks = dialect.marks if dialect else ()
    if dialect and dialect.form == "channels":
        return "{# " + " ".join(marks) + " #}" + BODY.replace("reasoning_content", "thinking")
    return "{# " + " ".join((*marks, "</think>")) + " #}" + BODY


def written(dialect: ToolDialect) -> str:
    """An answer that thinks, says something, and calls."""
    call = write_call(dialect, "track", json.dumps(CALLED, ensure_ascii=False))
    if dialect.form == "channels":
        thought = "<|channel|>analysis<|message|>Seven it is.<|end|><|start|>assistant"
        return f"{thought}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{call}"
    return f"<think>\nSeven it is.\n</think>\n\nLet me see.\n{call}<|im_end|>"


def pieces(text: str) -> list[str]:
    return [text[at : at + 9] for at in range(0, len(text), 9)]


def start_of(borrow: Start, dialect: ToolDialect | None, reply: Any, **settings: Any) -> Running:
    return borrow(reply, template=template_of(dialect), special=SPECIAL, **settings)


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_every_family_through_openais_client(borrow: Start, dialect: ToolDialect) -> None:
    running = start_of(borrow, dialect, Reply(pieces(written(dialect))))
    client = running.same_client()
    asked: Any = {"model": "tiny", "messages": ASK, "tools": [TRACK]}
    choice = client.chat.completions.create(**asked).choices[0]
    whole: Any = choice.message
    assert (whole.reasoning_content, whole.content.rstrip()) == ("Seven it is.", "Let me see.")
    assert choice.finish_reason == "tool_calls"
    (call,) = whole.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("track", CALLED)
    # Everything that the family's parser needs comes, and nothing of it goes out.
    assert running.upstream.requests[-1].tensors.get("skip_special_tokens") in ([False], False)

    reasoning, text, arguments, usage = "", "", "", None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for streamed in chunk.choices:
            delta: Any = streamed.delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
            arguments += "".join(part.function.arguments for part in delta.tool_calls or ())
    assert (reasoning, text) == (whole.reasoning_content, whole.content)
    assert arguments == call.function.arguments
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_every_family_as_items_and_blocks(borrow: Start, dialect: ToolDialect) -> None:
    running = start_of(borrow, dialect, Reply(pieces(written(dialect))))
    own = {"type": "function", **TRACK["function"]}
    asked: Any = {"model": "tiny", "input": "Where is 7?", "tools": [own], "store": False}
    response = running.same_client().responses.create(**asked, include=["reasoning.encrypted_content"])
    thought, _, called = response.output
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert thought.content[0].text == "Seven it is."  # type: ignore[union-attr, index]
    assert json.loads(called.arguments) == CALLED  # type: ignore[union-attr]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    events = list(running.same_client().responses.create(**asked, stream=True))
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert (
        "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        == "Seven it is."
    )
    block: Any = {"name": "track", "input_schema": TRACK["function"]["parameters"]}
    answer = message(running, tools=[block])
    kinds = [part["type"] for part in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert answer["content"][0]["thinking"] == "Seven it is."
    assert answer["content"][2]["input"] == CALLED
    deltas = [event["delta"] for event in message_events(running, tools=[block]) if "delta" in event]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Seven it is."
    signatures = [delta["signature"] for delta in deltas if delta.get("type") == "signature_delta"]
    assert signatures == [answer["content"][0]["signature"]]
    # Sent back, in the form of each API, all of it reaches the template.
    running.upstream.begin(Reply(["There."]))
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "x"}  # type: ignore[union-attr]
    items = [item.to_dict() for item in response.output]
    # Codex keeps no more of reasoning than this.
    items[0].pop("content")
    running.same_client().responses.create(model="tiny", input=[*ASK, *items, result], store=False)
    message(running, messages=[*ASK, {"role": "assistant", "content": answer["content"]}], max_tokens=9)
    for request in running.upstream.requests[-2:]:
        assert "<R>Seven it is." in request.prompt
        assert "Let me see." in request.prompt
        assert "CALL" in request.prompt


def test_reasoning_that_the_template_opens_or_forbids(borrow: Start) -> None:
    opened = BODY + "{% if enable_thinking | default(true) %}<think>\n{% else %}<think></think>{% endif %}"
    running = borrow(Reply(["Hm", ".</thi", "nk>Yes."]), template=opened)
    client = running.same_client()

    def answer(**fields: Any) -> tuple[Any, Any]:
        made: Any = client.chat.completions.create(model="tiny", messages=ASK, **fields).choices[0].message
        return getattr(made, "reasoning_content", None), made.content

    assert answer() == ("Hm.", "Yes.")
    assert answer(extra_body={"include_reasoning": False}) == (None, "Yes.")
    for off in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    ):
        assert answer(extra_body=off) == (None, "Hm.</think>Yes.")
        assert running.upstream.requests[-1].prompt.endswith("<think></think>")
    # What is held to a form from its first token on does not reason.
    running.upstream.begin(Reply(['{"a": 1}']))
    assert answer(response_format={"type": "json_object"}) == (None, '{"a": 1}')
    # Reasoning that never ends is no text.
    running.upstream.begin(Reply(["Hm, ", "hm"]))
    assert answer(max_tokens=2) == ("Hm, hm", "")
    assert message(running, messages=ASK, max_tokens=2)["content"][0]["thinking"] == "Hm, hm"


@pytest.mark.parametrize(
    ("source", "effort", "thinking", "variables"),
    [
        ("{{ reasoning_effort }}", "high", None, {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", "minimal", None, {"reasoning_effort": "low"}),
        ("{% if reasoning_effort == 'max' %}{% endif %}", "max", None, {"reasoning_effort": "max"}),
        ("{{ enable_thinking }}", "none", None, {"enable_thinking": False}),
        ("{{ enable_thinking }} {{ thinking }}", None, True, {"enable_thinking": True, "thinking": True}),
        ("{{ messages }}", "high", True, {}),
    ],
)
def test_effort_and_switch_are_variables_of_the_template(
    source: str, effort: str | None, thinking: bool | None, variables: dict[str, Any]
) -> None:
    assert reasoning_variables(effort, thinking, ChatTemplate(source)) == variables


def test_fields_that_the_template_does_not_read_are_named(borrow: Start) -> None:
    raw = borrow(Reply(["Hi"])).same_client().chat.completions.with_raw_response.create(
        model="tiny", messages=ASK, reasoning_effort="low", extra_body={"thinking": {"type": "enabled"}}
    )  # fmt: skip
    assert raw.headers["x-pipeline-ignored-fields"] == "reasoning_effort, thinking"


def call_of(id: str, number: int) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "track", "arguments": {"id": number}}}


HISTORY: Any = [
    *ASK,
    {
        "role": "assistant",
        "content": "See:",
        "reasoning": "Hm.",
        "tool_calls": [call_of("a", 7), call_of("b", 8)],
    },
    {"role": "tool", "tool_call_id": "b", "content": "8!"},
    {"role": "tool", "tool_call_id": "a", "content": "7!"},
]


def history_for(name: str, source: str) -> Any:
    dialect = next((dialect for dialect in dialects() if dialect.name == name), None)
    return template_messages(HISTORY, ChatTemplate(source), dialect)


def test_reasoning_is_where_the_template_looks_for_it() -> None:
    assert history_for("", "{{ m.reasoning_content }}")[1]["reasoning_content"] == "Hm."
    assert not history_for("", "{{ m.content }}")[1].keys() & {"reasoning", "reasoning_content", "thinking"}


def test_calls_of_gpt_oss_are_one_in_each_message() -> None:
    """Its template writes the first call of a message, infers the name of a result, and takes no text with thinking."""
    messages = history_for("harmony", "{{ message.thinking }}")[1:]
    assert [message["role"] for message in messages] == ["assistant", "tool"] * 2
    assert [message.get("thinking") for message in messages] == ["Hm.\nSee:", None, None, None]
    assert [message["content"] for message in messages] == ["", "7!", "", "8!"]


def test_ids_are_those_that_the_model_was_trained_on() -> None:
    calls, *results = history_for("kimi-k2", "{{ m.reasoning_content }}")[1:]
    assert [call["id"] for call in calls["tool_calls"]] == ["functions.track:0", "functions.track:1"]
    # Results come in the order of the calls.
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("functions.track:0", "7!"),
        ("functions.track:1", "8!"),
    ]
    assert [call["id"] for call in history_for("mistral", "")[1]["tool_calls"]] == ["000000000", "000000001"]


def test_arguments_are_text_where_a_template_joins_them_to_one() -> None:
    body = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ BODY }}{% endfor %}{% endfor %}"
    for part, kind in (("'A' + c.function.arguments", str), ("c.function.arguments | tojson", dict),
                       ("c.function.arguments", str)):  # fmt: skip
        calls = history_for("deepseek-v3.1", body.replace("BODY", part))[1]["tool_calls"]
        assert isinstance(calls[0]["function"]["arguments"], kind)


def test_a_template_that_writes_calls_and_takes_no_tools_is_told_in_its_own_way() -> None:
    source = "<｜tool▁calls▁begin｜>{{ messages[0].content }}"
    template = ToolSectionTemplate(ChatTemplate(source))
    found = dialect_of(template)
    assert found is not None
    assert found.name == "deepseek-v3.1"
    prompt = template.render(ASK, tools=[TRACK])
    assert "### track\nDescription: Find it.\n\nParameters: {" in prompt
    assert "<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>" in prompt
    assert prompt.endswith("\n\nWhere is 7?")


def test_special_tokens_are_asked_for_only_where_the_family_needs_them() -> None:
    think = ChatTemplate("{# </think> #}")
    assert answer_format(think, frozenset({"<|im_end|>"})).special == frozenset()
    assert answer_format(think, frozenset({"<|im_end|>", "</think>"})).special == {"<|im_end|>", "</think>"}


def test_an_engine_without_the_input_is_parsed_by_what_it_writes(start: Start) -> None:
    from pipeline.client.testing import bls

    running = start(
        Reply(["Hm.</think>Yes."]),
        model=bls(upstream=True),
        template=BODY + "{# </think> #}<think>",
        special=SPECIAL,
    )
    with pytest.raises(openai.BadRequestError, match="skip_special_tokens"):
        running.client().chat.completions.create(
            model="tiny", messages=ASK, extra_body={"skip_special_tokens": False}
        )
    made: Any = running.client().chat.completions.create(model="tiny", messages=ASK).choices[0].message
    assert (made.reasoning_content, made.content) == ("Hm.", "Yes.")


def test_reasoning_may_hold_what_would_end_an_answer_after_its_call(borrow: Start) -> None:
    """With one call at most, only models that do not reason are told to stop at its end."""
    hermes = next(dialect for dialect in dialects() if dialect.name == "hermes")
    running = start_of(borrow, hermes, lambda _: Reply(["<think>a</tool_call>b</think>Hi"]))

    def stop_words(received: Received) -> Any:
        return received.tensors.get("stop_words")

    made: Any = running.same_client().chat.completions.create(
        model="tiny", messages=ASK, tools=[TRACK], parallel_tool_calls=False
    )
    assert made.choices[0].message.reasoning_content == "a</tool_call>b"
    assert stop_words(running.upstream.requests[-1]) is None


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_a_call_that_must_come_is_written_as_the_family_does(borrow: Start, dialect: ToolDialect) -> None:
    arguments = json.dumps(CALLED, ensure_ascii=False)
    whole = f'{{"name": "track", "arguments": {arguments}}}'
    running = start_of(borrow, dialect, Reply(pieces(arguments if dialect.begin else whole)))
    chosen: Any = {"type": "function", "function": {"name": "track"}}
    asked: Any = {"model": "tiny", "messages": ASK, "tools": [TRACK], "tool_choice": chosen}
    choice = running.same_client().chat.completions.create(**asked).choices[0]
    made: Any = choice.message
    ((name, packed),) = [(call.function.name, call.function.arguments) for call in made.tool_calls]
    assert (name, json.loads(packed), made.content) == ("track", CALLED, None)
    assert choice.finish_reason == "tool_calls"
    stream = running.same_client().chat.completions.create(**asked, stream=True)
    deltas: list[Any] = [chunk.choices[0].delta for chunk in stream]
    called = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert ([part.name for part in called if part.name], "".join(part.arguments for part in called)) == (
        ["track"],
        packed,
    )
    assert not any(delta.content for delta in deltas)
    request = running.upstream.requests[-1]
    guide = json.loads(request.tensors["guided_decoding_guide"][0])
    if dialect.begin:
        assert request.prompt.endswith(dialect.begin.replace("{name}", "track").replace("{index}", "0"))
        assert guide == TRACK["function"]["parameters"]
    else:
        assert guide["anyOf"][0]["properties"]["name"] == {"const": "track"}


def test_what_is_held_to_a_form_does_not_begin_within_reasoning(borrow: Start) -> None:
    running = borrow(Reply(['{"a": 1}']), template=BODY + "{# </think> #}<think>\n")
    form: Any = {"type": "json_object"}
    made = running.same_client().chat.completions.create(model="tiny", messages=ASK, response_format=form)
    assert made.choices[0].message.content == '{"a": 1}'
    assert running.upstream.requests[-1].prompt.endswith("<think></think>\n\n")
    harmony = next(dialect for dialect in dialects() if dialect.form == "channels")
    running = start_of(borrow, harmony, Reply(['{"a": 1}']))
    made = running.same_client().chat.completions.create(model="tiny", messages=ASK, response_format=form)
    assert made.choices[0].message.content == '{"a": 1}'
    assert running.upstream.requests[-1].prompt.endswith("<|channel|>final<|message|>")


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "type": JSON,
        "function": st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON}) | JSON,
    },
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "developer", "user", "assistant", "tool"))},
    optional={
        "content": st.text(max_size=4) | st.just([]) | JSON,
        "tool_calls": st.lists(CALLS | JSON, max_size=2) | JSON,
        "tool_call_id": JSON,
        "reasoning_content": JSON,
        "thinking": JSON,
        "name": JSON,
    },
)
template_from = cache(ChatTemplate)
# A template that writes arguments as they are, so that they become text.
PLAIN = (
    "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(MESSAGES, min_size=1, max_size=3))
def test_a_history_of_anything_is_read_or_refused(messages: list[dict[str, Any]]) -> None:
    """Only what was read reaches a template: calls of other roles, and ids that are no texts, fail nothing."""
    try:
        read = read_messages(messages)
    except ApiError:
        return
    for dialect in dialects():
        for source in (template_of(dialect), PLAIN):
            template = template_from(source)
            with suppress(TemplateError):
                template.render(template_messages(read, template, dialect))
