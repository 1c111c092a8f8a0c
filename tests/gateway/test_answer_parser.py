"""Answers of families of models: what upstream's own tests read in them, whole and in whatever pieces they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import ChatTemplate
from pipeline.gateway.api.tools.dialects import AnswerFormat, ToolDialect, dialects, reasoning_of
from pipeline.gateway.api.tools.parser import AnswerParser
from pipeline.gateway.api.tools.parts import ArgumentsPart, CallPart, ReasoningPart, TextPart
from pipeline.resources import parse_yaml
from tests.support.answers import write_call

CASES: Sequence[Mapping[str, Any]] = parse_yaml(
    (Path(__file__).parent / "data/answers.yaml").read_text("utf-8")
)["cases"]
BY_NAME = {dialect.name: dialect for dialect in dialects()}
MARKS = {"think": "</think>", "kimi-k3": "<|close|>think<|sep|>", "gemma4": "<|channel>thought<channel|>"}
WEATHER = {"get_weather": {"location": "string", "unit": "string"}, "search_web": {"query": "string"}}


class Read(NamedTuple):
    """Parts of an answer as they were read; the arguments of each call are text."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]


def offered(tools: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as OpenAI writes them; a parameter of several types is an `anyOf`, as pydantic writes it."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"anyOf": [{"type": each} for each in kind]} if isinstance(kind, list) else {"type": kind}
                        for key, kind in parameters.items()
                    },
                },
            },
        }
        for name, parameters in tools.items()
    ]  # fmt: skip


def parser_of(case: Mapping[str, Any], special: frozenset[str] = frozenset()) -> AnswerParser:
    dialect = BY_NAME.get(case.get("dialect", ""))
    mark = None if dialect and dialect.form == "channels" else MARKS[case.get("thinks", "think")]
    reasoning = mark and reasoning_of(ChatTemplate(mark))
    tools = offered(case.get("tools", WEATHER)) if dialect else ()
    return AnswerParser(AnswerFormat(dialect, reasoning, special), tools, prompt=case.get("prompt", ""))


def read(parser: AnswerParser, pieces: Iterable[str], *, cut: bool = False) -> Read:
    parts = [*(part for piece in pieces for part in parser.feed(piece)), *parser.end(cut=cut)]
    calls = [part for part in parts if isinstance(part, CallPart)]
    arguments = [
        "".join(p.text for p in parts if isinstance(p, ArgumentsPart) and p.index == c.index) for c in calls
    ]
    return Read(
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
        "".join(part.text for part in parts if isinstance(part, TextPart)),
        [(call.name, packed) for call, packed in zip(calls, arguments, strict=True)],
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['source']}-{CASES.index(case)}")
def test_upstream_reads_the_same(case: Mapping[str, Any]) -> None:
    answer = case["answer"]
    found = read(parser_of(case), [answer])
    assert found.reasoning == case.get("reasoning", "")
    assert found.text.strip() == case.get("content", "").strip()
    expected = [pair for call in case.get("calls", ()) for pair in call.items()]
    assert [name for name, _ in found.calls] == [name for name, _ in expected]
    for (_, packed), (_, arguments) in zip(found.calls, expected, strict=True):
        if isinstance(arguments, str):
            assert packed.strip() == arguments
        else:
            assert json.loads(packed) == arguments
    # The parts are the same wherever the answer is cut in two, and character by character.
    assert read(parser_of(case), answer) == found
    for at in range(1, len(answer), 1 + len(answer) // 40):
        assert read(parser_of(case), (answer[:at], answer[at:])) == found, at


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['source']}-{CASES.index(case)}")
def test_a_cut_answer_is_the_beginning_of_the_whole_one(case: Mapping[str, Any]) -> None:
    answer = case["answer"]
    whole = read(parser_of(case), [answer])
    for size in range(0, len(answer), 1 + len(answer) // 40):
        part = read(parser_of(case), [answer[:size]], cut=True)
        names = [name for name, _ in part.calls]
        assert names == [name for name, _ in whole.calls[: len(names)]]
        # Arguments of all but the last are complete, and those of the last as far as they came.
        assert part.calls[:-1] == whole.calls[: len(part.calls)][:-1]
        if part.calls:
            assert whole.calls[len(part.calls) - 1][1].startswith(part.calls[-1][1])


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=get_weather>", "</function>", "\n", " ", "{", "}",
    '"', "[", "]", "(", ")", "'", "=", "<parameter=location>", "</parameter>", "<arg_key>", "location", "</arg_key>",
    "<arg_value>", "</arg_value>", "get_weather", "x", "é😀", "\\", "<|channel|>", "analysis", "<|message|>", "<|end|>",
    "<|call|>", "<|start|>", "assistant", " to=functions.get_weather", "final", "<｜tool▁calls▁begin｜>", "```json\n",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|python_start|>", "```",
    '{"name": "get_weather", "arguments": {', '{"arguments": {}, "name": "get_weather"}', "<invoke name=", ">",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="get_weather">', "</｜DSML｜invoke>", "<|im_end|>",
    "<|tool_call_begin|>functions.get_weather:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "</invoke>",
    "<minimax:tool_call>", "</minimax:tool_call>", '<parameter name="location">', "[ARGS]", "null",
    "</think", '"a": 1', "[TOOL_CALLS]", "<|open|>", "tools", "<|sep|>", "<|close|>", "think", "response",
    '<|open|>call tool="get_weather" index="1"<|sep|>',
    '<|open|>argument key="location" type="string"<|sep|>', "<|close|>call<|sep|>",
]  # fmt: skip
SPECIAL = frozenset({"<|im_end|>", "<|channel|>", "<|message|>", "<|tool_call_begin|>", "<|tool_call_end|>",
                     "<|open|>", "<|close|>", "<|sep|>"})  # fmt: skip


@given(
    st.sampled_from(dialects()),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30),
    st.sets(st.integers(0, 400), max_size=10),
    st.sampled_from(
        [
            "",
            "<think>\n",
            "<|open|>think<|sep|>",
            "<|start|>assistant",
            "<|start|>assistant<|channel|>final<|message|>So",
        ]
    ),
    st.sampled_from([frozenset[str](), SPECIAL]),
    st.booleans(),
    st.sampled_from([*MARKS]),
)
def test_whatever_a_model_writes_comes_out_the_same_in_any_pieces(
    dialect: ToolDialect,
    written: list[str],
    cuts: set[int],
    prompt: str,
    special: frozenset[str],
    cut: bool,
    thinks: str,
) -> None:
    case = {"dialect": dialect.name, "prompt": prompt, "thinks": thinks}
    answer = "".join(written)
    ends = [*sorted(cuts), len(answer)]
    pieces = [answer[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    whole = read(parser_of(case, special), [answer], cut=cut)
    assert read(parser_of(case, special), pieces, cut=cut) == whole
    assert read(parser_of(case, special), answer, cut=cut) == whole
    assert not any(token in whole.text + whole.reasoning for token in special)


@given(
    st.sampled_from([dialect for dialect in dialects() if dialect.form not in ("channels", "python")]),
    st.dictionaries(
        st.sampled_from(["location", "unit"]),
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
        | st.sampled_from(
            [
                "</parameter>",
                "a\n</parameter>\nb",
                "</arg_value>x",
                "</tool_call>",
                '{"a": "}"}',
                "  x  ",
                "\n\n",
                "<b>",
            ]
        ),
        min_size=1,
    ),
)
def test_arguments_are_what_the_model_was_told_to_write(dialect: ToolDialect, values: dict[str, str]) -> None:
    written = write_call(dialect, "get_weather", json.dumps(values))
    (call,) = read(parser_of({"dialect": dialect.name}), written).calls
    assert call[0] == "get_weather"
    assert json.loads(call[1]) == values


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_special_tokens_do_not_go_out(dialect: ToolDialect) -> None:
    special = frozenset({"<|im_end|>", "<s>"})
    answer = "<|im_end|>On<s> it.<|im_end|>"
    parser = AnswerParser(AnswerFormat(dialect, None, special), offered(WEATHER))
    assert read(parser, answer).text == "On it."


# Dialect, and an answer of a length.
LONG: Mapping[str, tuple[str, Callable[[int], str]]] = {
    "text": ("hermes", lambda size: "a < b " * size),
    "marks": ("kimi-k2", lambda size: "<|tool_calls_section_begin|>" * size),
    "white space": ("deepseek-v3", lambda size: " " * (6 * size) + "x"),
    "reasoning": ("glm4", lambda size: "<think>" + "a <b " * size),
    "headers": ("harmony", lambda size: "<|channel|>" * size),
    "messages": ("harmony", lambda size: "<|channel|>final<|message|>x<|end|>" * size),
    "keys in another order": ("hermes", lambda size: '<tool_call>{"arguments": {"a": "' + "b<c\\n" * size),
    "arguments": (
        "hermes",
        lambda size: '<tool_call>{"name": "get_weather", "arguments": {"a": "' + "b<c " * size,
    ),
    "a text": (
        "qwen3-coder",
        lambda size: "<function=get_weather><parameter=location>" + "b</parameter>\n" * size,
    ),
    "an object": (
        "glm4",
        lambda size: "<tool_call>search_web<arg_key>query</arg_key><arg_value>{" + "b</" * size,
    ),
    "Python": ("llama4", lambda size: "<|python_start|>[get_weather(location='" + "b(c" * size),
}


@pytest.mark.parametrize("kind", LONG)
def test_time_grows_with_the_length(kind: str) -> None:
    """An answer of eight times the length takes eight times as long, not sixty-four."""
    dialect, write = LONG[kind]

    def seconds(size: int) -> float:
        answer = write(size)
        began = time.process_time()
        read(parser_of({"dialect": dialect}), [answer[at : at + 8] for at in range(0, len(answer), 8)])
        return time.process_time() - began

    seconds(100)
    # The least of several, because other work on the machine only adds.
    short = min(seconds(2000) for _ in range(3))
    assert any(seconds(16000) < 24 * short + 0.01 for _ in range(5))
