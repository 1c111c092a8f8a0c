"""Whatever the gateway answers may be sent back as history: any text and any calls, whole or streamed, cut anywhere."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from pipeline.client.testing import Reply
from pipeline.gateway.api.tools.dialects import ToolDialect, dialects
from tests.gateway.conftest import Running, Start
from tests.support.answers import write_call

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
BODY = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %};
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""
TEXTS = ["", " ", "It rains.", "\n\n", "a < b", "{", '{"answer": 42}', "[1]", "<tool_call>", "“é”", "\\", "<think>",
         "</think>", "<|channel|>analysis<|message|>", "<|end|>"]  # fmt: skip
DEEP = '{"a": ' + "[" * 200
ARGUMENTS = [
    "{}",
    '{"city": "Pa}ris \\"1\\"", "days": [1, {"a": null}]}',
    "{city: Paris}",
    '{"a":' + "[" * 115,
    DEEP,
]
QUESTION = {"role": "user", "content": "And now?"}


@dataclass(frozen=True, slots=True)
class Scripted:
    """Pieces that a model writes, and whether its limit of tokens ends them."""

    pieces: Sequence[str]
    cut: bool

    @property
    def max_tokens(self) -> int:
        """The limit of a request that gets this answer; every piece is a token."""
        return len(self.pieces) if self.cut else len(self.pieces) + 1


@st.composite
def answers(draw: st.DrawFn, dialect: ToolDialect) -> Scripted:
    calls = st.builds(
        write_call, st.just(dialect), st.sampled_from(["get_weather", "other"]), st.sampled_from(ARGUMENTS)
    )
    whole = "".join(draw(st.lists(st.sampled_from(TEXTS) | calls, max_size=4)))
    cut = draw(st.booleans())
    text = whole[: draw(st.integers(0, len(whole)))] if cut else whole
    ends = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=6)) | {len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False) if text[a:b]]
    return Scripted(pieces or [""], cut)


class Asker:
    """A gateway whose model writes what it is told to."""

    def __init__(self, start: Start, dialect: ToolDialect) -> None:
        self.script = Scripted(["It rains."], cut=False)
        template = "{# " + " ".join((*dialect.marks, "</think>")) + " #}" + BODY
        self.running: Running = start(
            lambda _: Reply(self.script.pieces), template=template, max_body_bytes=100_000
        )
        served = self.running.served
        served.prompt_limit = replace(served.prompt_limit, max_tokens=10_000)

    def post(self, path: str, **fields: Any) -> str:
        """The body of an answer, which must be no refusal."""
        body = json.dumps({"model": "tiny", **fields}).encode()
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.running.url}{path}", body, kind)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(answer.read().decode())

    def events(self, path: str, **fields: Any) -> list[Any]:
        datas = [
            line[6:] for line in self.post(path, stream=True, **fields).splitlines() if line[:6] == "data: "
        ]
        return [json.loads(data) for data in datas if data != "[DONE]"]


def chat(asker: Asker, history: Sequence[Any], *, streams: bool) -> tuple[list[Any], list[Any]]:
    """An answer as clients of chats keep it, and the results of its calls."""
    asked = {
        "messages": [*history, QUESTION],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": asker.script.max_tokens,
    }
    if not streams:
        message = json.loads(asker.post("/v1/chat/completions", **asked))["choices"][0]["message"]
    else:
        message = {"role": "assistant", "content": None, "refusal": None}
        calls: dict[int, Any] = {}
        for event in asker.events("/v1/chat/completions", **asked):
            delta = event["choices"][0]["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(
                    part["index"], {**part, "function": {**part["function"], "arguments": ""}}
                )
                call["function"]["arguments"] += part["function"]["arguments"]
        message |= {"tool_calls": list(calls.values())} if calls else {}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
        for call in message.get("tool_calls", ())
    ]
    return [message], results


def response(asker: Asker, history: Sequence[Any], *, streams: bool) -> tuple[list[Any], list[Any]]:
    """The same of responses."""
    asked = {
        "input": [*history, QUESTION],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": asker.script.max_tokens,
        "store": False,
    }
    if not streams:
        output = json.loads(asker.post("/v1/responses", **asked))["output"]
    else:
        events = asker.events("/v1/responses", **asked)
        output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == output
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
        for item in output
        if item["type"] == "function_call"
    ]
    return output, results


def message(asker: Asker, history: Sequence[Any], *, streams: bool) -> tuple[list[Any], list[Any]]:
    """The same of messages."""
    asked = {
        "messages": [*history, QUESTION],
        "tools": [{"name": FUNCTION["name"], "input_schema": SCHEMA}],
        "max_tokens": asker.script.max_tokens,
    }
    if not streams:
        content = json.loads(asker.post("/v1/messages", **asked))["content"]
    else:
        content, packed = [], ""
        for event in asker.events("/v1/messages", **asked):
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
                packed = ""
            elif event["type"] == "content_block_delta":
                for key in ("text", "thinking"):
                    content[-1] |= (
                        {key: content[-1][key] + event["delta"][key]} if key in event["delta"] else {}
                    )
                packed += event["delta"].get("partial_json", "")
            elif event["type"] == "content_block_stop" and packed:
                content[-1]["input"] = partly_read(packed)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "Rain."}
        for block in content
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": content}], [
        {"role": "user", "content": results}
    ] if results else []


def partly_read(packed: str) -> Any:
    """Input of a tool as Anthropic's client reads it; it raises for what is no JSON, and keeps nothing."""
    try:
        return from_json(packed, allow_partial=True)
    except ValueError:
        return {}


@pytest.fixture(scope="module")
def askers(shared_start: Start) -> dict[str, Asker]:
    return {dialect.name: Asker(shared_start, dialect) for dialect in dialects()}


@pytest.mark.parametrize("ask", [chat, response, message])
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(dialect=st.sampled_from(dialects()), data=st.data())
def test_every_answer_is_valid_history(
    askers: dict[str, Asker], ask: Callable[..., Any], dialect: ToolDialect, data: st.DataObject
) -> None:
    asker = askers[dialect.name]
    asker.script = data.draw(answers(dialect))
    streams = data.draw(st.booleans())
    # Anthropic's clients make an object of what is streamed, and no body is nested deeper than 128 levels.
    assume(not (ask is message and streams and "[" * 116 in "".join(asker.script.pieces)))
    answer, results = ask(asker, [], streams=streams)
    if data.draw(st.booleans()):
        answer = answer + results
    ask(asker, [QUESTION, *answer], streams=False)


REFUSAL = "I will not."


@pytest.mark.parametrize(
    ("ask", "refused"),
    [
        (chat, {"role": "assistant", "content": None, "refusal": REFUSAL}),
        (chat, {"role": "assistant", "content": [{"type": "refusal", "refusal": REFUSAL}]}),
        (
            response,
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": REFUSAL}]},
        ),
        (response, {"role": "assistant", "content": [{"type": "refusal", "refusal": REFUSAL}]}),
        (message, {"role": "assistant", "content": [{"type": "text", "text": REFUSAL}]}),
    ],
)
def test_refusals_are_history(askers: dict[str, Asker], ask: Callable[..., Any], refused: Any) -> None:
    asker = askers["hermes"]
    ask(asker, [QUESTION, refused], streams=False)
    assert f"assistant: {REFUSAL};" in asker.running.upstream.requests[-1].prompt


@pytest.mark.parametrize(
    ("arguments", "read"), [('{"city": "Par', '{"city": "Par"}'), ("", "{}"), ("[7]", "{}")]
)
def test_arguments_are_told_as_far_as_they_came(askers: dict[str, Asker], arguments: str, read: str) -> None:
    asker = askers["hermes"]
    function = {"name": "get_weather", "arguments": arguments}
    call = {"type": "function_call", "call_id": "call_1", **function}
    called = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    for ask, item in ((chat, called), (response, call)):
        ask(asker, [QUESTION, item], streams=False)
        assert f"CALL get_weather {read};" in asker.running.upstream.requests[-1].prompt
