"""Calls of tools: read out of answers as each family of models writes them, in whatever pieces they come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import ChatTemplate
from pipeline.gateway.api.tools.dialects import FORCED, FORCED_LIST, AnswerFormat, ToolDialect, dialects
from pipeline.gateway.api.tools.parser import AnswerParser
from pipeline.gateway.api.tools.parts import ArgumentsPart, CallPart, Part, TextPart
from pipeline.gateway.api.tools.prompt import dialect_of
from tests.support.answers import write_call

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "at": {"type": "object"},
                },
            },
        },
    }
    for name in ("get_weather", "track")
]
Read = tuple[str, list[tuple[str, object]]]  # text, and (name, arguments) of each call


def of(name: str) -> ToolDialect:
    return next(dialect for dialect in dialects() if dialect.name == name)


def parse(
    dialect: ToolDialect,
    pieces: Sequence[str],
    tools: Sequence[Mapping[str, Any]] = TOOLS,
    *,
    cut: bool = False,
) -> list[Part]:
    parser = AnswerParser(AnswerFormat(dialect), tools)
    return [*(part for piece in pieces for part in parser.feed(piece)), *parser.end(cut=cut)]


def read(dialect: ToolDialect, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = TOOLS) -> Read:
    parts = parse(dialect, pieces, tools)
    calls = [part for part in parts if isinstance(part, CallPart)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    arguments = [
        "".join(p.text for p in parts if isinstance(p, ArgumentsPart) and p.index == c.index) for c in calls
    ]
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return text, [(call.name, json.loads(packed)) for call, packed in zip(calls, arguments, strict=True)]


PARIS = ("get_weather", {"city": 'Pa}ris "1"', "days": 3})
TRACK = ("track", {})
OF_PARIS = '{"city": "Pa}ris \\"1\\"", "days": 3}'
ANSWERS = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {OF_PARIS}}}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "track", "arguments": {{}}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {OF_PARIS}, "name": "get_weather"}}</tool_call>',
        "Let me see.",
        [TRACK, PARIS],
    ),
    (
        "qwen3-coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nPa}ris "1"\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>",
        "",
        [PARIS],
    ),
    ("llama3", f'{{"name": "get_weather", "parameters": {OF_PARIS}}}', "", [PARIS]),
    (
        "llama3",
        '<|python_tag|>{"name": "track", "parameters": {}}; '
        f'{{"type": "function", "name": "get_weather", "parameters": {OF_PARIS}}}',
        "",
        [TRACK, PARIS],
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OF_PARIS}}}, {{"name": "track", "arguments": {{}}}}]',
        "",
        [PARIS, TRACK],
    ),
    ("mistral", f'[{{"name": "get_weather", "arguments": {OF_PARIS}}}]', "", [PARIS]),
    (
        "mistral-named",
        f"On it. [TOOL_CALLS]get_weather[CALL_ID]x12[ARGS]{OF_PARIS}[TOOL_CALLS]track[ARGS]{{}}",
        "On it.",
        [PARIS, TRACK],
    ),
    ("mistral-named", f"get_weather{OF_PARIS}", "", [PARIS]),
]
TEXTS = [
    "", " ", "Hello.\n", '{"answer": 42}', '{"name": "Bob", "arguments": {}}', "[1] See there.", "{", '{"name": 3}',
    "a < b and <tool> or <tool_c", "<tool_call>no JSON</tool_call> as text", "<tool_call>", "[TOOL", "f[ARGS]x",
    "[TOOL_CALLS] are what I cannot make", "get_weather is a function", '{"name": "get_weather"', "\n\n{oops",
    "<|python_tag|>print(1)", "<function=",
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "answer", "text", "calls"), ANSWERS)
@given(data=st.data())
def test_calls_are_read_whatever_the_pieces(
    dialect: str, answer: str, text: str, calls: list[tuple[str, object]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(of(dialect), pieces) == (text, calls)
    assert read(of(dialect), list(answer)) == (text, calls)


@pytest.mark.parametrize(("dialect", "answer", "text", "calls"), ANSWERS)
def test_the_beginning_of_a_call_is_no_text_where_the_answer_is_cut(
    dialect: str, answer: str, text: str, calls: list[tuple[str, object]]
) -> None:
    for size in range(len(answer)):
        parts = parse(of(dialect), list(answer[:size]), cut=True)
        left = "".join(part.text for part in parts if isinstance(part, TextPart))
        # One character of a mark might be text.
        assert text.startswith(left) or left[:-1].rstrip() == text, answer[:size]
        names = [part.name for part in parts if isinstance(part, CallPart)]
        assert names == [name for name, _ in calls[: len(names)]]


@pytest.mark.parametrize("dialect", [FORCED, FORCED_LIST], ids=lambda dialect: dialect.name)
def test_a_call_that_must_come_leaves_no_text(dialect: ToolDialect) -> None:
    called = '{"name": "track", "arguments": {"city": "Paris"}}'
    answer = f"[{called}]" if dialect is FORCED_LIST else called
    for size in range(1, len(answer)):
        assert not [part for part in parse(dialect, [answer[:size]], cut=True) if isinstance(part, TextPart)]


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "answer",
    ['{"type": "soup", "steps": ["boil', '{"name": "Bob", "arguments": {"a', "Hello <", "a\n\n", "Pari"],
)
def test_a_cut_answer_without_calls_stays_text(dialect: ToolDialect, answer: str) -> None:
    parts = parse(dialect, list(answer), cut=True)
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == answer


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_a_call_of_a_tool_that_was_not_offered_is_text(dialect: ToolDialect) -> None:
    answer = write_call(dialect, "other", '{"city": "Paris"}')
    text, calls = read(dialect, list(answer))
    assert calls == []
    # Of a message of a channel, the header is no text.
    assert text == ('{"city": "Paris"}' if dialect.form == "channels" else answer)


@given(
    st.sampled_from(dialects()),
    st.lists(st.sampled_from([*TEXTS, "\n", "the", '"', "}", "[", " 1"]) | st.text(max_size=4), max_size=8),
)
def test_what_is_no_call_stays_as_it_is(dialect: ToolDialect, pieces: list[str]) -> None:
    whole = "".join(pieces)
    text, calls = read(dialect, pieces)
    assert calls or text == whole or (dialect.form == "channels" and not whole.strip())
    assert read(dialect, [whole]) == (text, calls)


@pytest.mark.parametrize("text", TEXTS)
def test_each_of_these_is_no_call(text: str) -> None:
    for dialect in dialects():
        if text.strip() or dialect.form != "channels":
            assert read(dialect, list(text)) == (text, [])


def test_arguments_come_before_their_call_is_complete() -> None:
    parser = AnswerParser(AnswerFormat(of("hermes")), TOOLS)
    first = parser.feed('<tool_call>{"name": "track", "arguments": {"city": "Pa')
    assert [type(part) for part in first] == [CallPart, ArgumentsPart]
    assert parser.feed("ris") == [ArgumentsPart(0, "ris")]
    assert parser.feed('"}}</tool_call>') == [ArgumentsPart(0, '"}')]
    assert parser.end() == []


@pytest.mark.parametrize("parameters", [None, [], "x", {"properties": None}, {"properties": {"city": [1]}}])
def test_a_schema_of_any_form_is_read(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "track", "parameters": parameters}}
    call = "<tool_call><function=track><parameter=city>1</parameter></function></tool_call>"
    assert read(of("qwen3-coder"), [call], [tool]) == ("", [("track", {"city": "1"})])


def test_what_is_nested_too_deeply_is_text() -> None:
    deep = '{"arguments": ' + "[" * 100_000 + "]" * 100_000 + ', "name": "track"}'
    assert read(of("hermes"), [f"<tool_call>{deep}</tool_call>"]) == (f"<tool_call>{deep}</tool_call>", [])


def test_at_most_so_many_calls() -> None:
    parser = AnswerParser(AnswerFormat(of("mistral")), TOOLS, max_calls=1)
    parts = parser.feed(
        '[TOOL_CALLS][{"name": "track", "arguments": {}}, {"name": "track", "arguments": {}}]'
    )
    assert [part.index for part in [*parts, *parser.end()] if isinstance(part, CallPart)] == [0]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}<tool_call>{…}</tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=f><parameter=p></tool_call>{% endif %}", "qwen3-coder"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]f[ARGS]", "mistral-named"),
        ('{% if tools %}<|start_header_id|>{"name": function name, "parameters": …}{% endif %}', "llama3"),
        ("<tool_call></tool_call> without any", None),
        ("{{ tools | tojson }}", None),
    ],
)
def test_the_dialect_is_that_of_the_template(source: str, name: str | None) -> None:
    found = dialect_of(ChatTemplate(source))
    assert (found.name if found else None) == name
