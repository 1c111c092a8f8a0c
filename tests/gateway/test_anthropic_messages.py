"""Anthropic's Messages API over HTTP. What Anthropic's own client makes of it: tests/clients/anthropic_python."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from itertools import groupby
from typing import Any

import pytest

from pipeline.client.testing import Ending, Reply
from tests.gateway.conftest import Running, Start, keyed
from tests.gateway.test_gateway_requests import CALLING, HERMES
from tests.support.http_clients import http

TRACK = {
    "name": "track",
    "description": "Find a parcel.",
    "input_schema": {"type": "object", "properties": {"id": {"type": "integer"}}},
}
QUESTION = [{"role": "user", "content": "Where is my parcel?"}]


def post(running: Running, fields: dict[str, Any], path: str = "", **headers: str) -> tuple[int, str]:
    """Status and body of the answer to a request."""
    body = json.dumps({"model": "tiny", "max_tokens": 20, "messages": QUESTION, **fields}).encode()
    url, kind = f"{running.url}/v1/messages{path}", {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, kind | headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def message(running: Running, **fields: Any) -> Any:
    status, body = post(running, fields)
    assert status == 200, body
    return json.loads(body)


def events(running: Running, **fields: Any) -> list[Any]:
    """The events of a stream, whose names are their types."""
    status, body = post(running, {"stream": True, **fields})
    assert status == 200, body
    named = [event.split("\n") for event in body.strip().split("\n\n")]
    read = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [event["type"] for event in read] == [name.removeprefix("event: ") for name, _ in named]
    return read


def test_a_whole_message(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its ", "way"]))
    made = message(
        running, system=[{"type": "text", "text": "Be brief."}], stop_sequences=["x"], temperature=0.5, top_k=5,
        metadata={"user_id": "me"}, thinking={"type": "disabled"},
    )  # fmt: skip
    assert made["content"] == [{"type": "text", "text": "On its way", "citations": None}]
    assert (made["type"], made["role"], made["stop_reason"]) == ("message", "assistant", "end_turn")
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"]) == (8, 3)
    (asked,) = running.upstream.requests
    assert asked.prompt == "system: Be brief.\nuser: Where is my parcel?\n"
    assert [list(asked.tensors[name]) for name in ("max_tokens", "top_k", "stop_words")] == [[20], [5], ["x"]]
    assert message(running, max_tokens=3)["stop_reason"] == "max_tokens"


def test_a_stream_with_a_tool(borrow: Start) -> None:
    running = borrow([Reply(CALLING), Reply(CALLING), Reply(["At the border."])], template=HERMES)
    streamed = events(running, tools=[TRACK])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in groupby(event["type"] for event in streamed)] == [
        "message_start", "ping", *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "One moment."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"id": 7}
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"
    whole = message(running, tools=[TRACK])
    used = whole["content"][1]
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "track", {"id": 7})
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": [{"type": "text", "text": "Oslo"}]}
    answered = [{"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
    last = message(running, messages=QUESTION + answered, tools=[TRACK])
    assert last["content"][0]["text"] == "At the border."
    called = '<tool_call>{"name": "track", "arguments": {"id": 7}}</tool_call>'
    assert f"assistant: One moment.{called}tool: Oslo" in running.upstream.requests[-1].prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "track"}])
def test_a_tool_that_must_be_used(borrow: Start, choice: dict[str, Any]) -> None:
    running = borrow(Reply(['{"id": 7}']), template=HERMES)
    made = message(running, tools=[TRACK], tool_choice=choice)
    assert [(block["type"], block["input"]) for block in made["content"]] == [("tool_use", {"id": 7})]
    assert list(running.upstream.requests[0].tensors["guided_decoding_guide_type"]) == ["json_schema"]


@pytest.mark.parametrize(
    "pieces", [["On its", " wa", "yEND", " OF"], ["On its way", "END OF"], ["On its way", "E", "ND", " OF"]]
)
def test_the_stop_sequence_that_ended_an_answer_is_named(borrow: Start, pieces: list[str]) -> None:
    running = borrow(Reply(pieces))
    made = events(running, stop_sequences=["x", " OF", "END OF"])
    deltas = [event["delta"] for event in made if event["type"] == "content_block_delta"]
    text, end = "".join(delta.get("text", "") for delta in deltas), made[-2]["delta"]
    assert (text, end["stop_reason"], end["stop_sequence"]) == ("On its way", "stop_sequence", "END OF")
    assert list(running.upstream.requests[0].tensors["include_stop_str_in_output"]) == [True]


def test_what_only_looks_like_a_stop_sequence_is_text(borrow: Start) -> None:
    running = borrow(Reply(["a", "E", "N", "a", "E"]))
    for fields, reason in (({}, "end_turn"), ({"max_tokens": 5}, "max_tokens")):
        made = message(running, stop_sequences=["END"], **fields)
        assert made["content"][0]["text"] == "aENaE"
        assert (made["stop_reason"], made["stop_sequence"]) == (reason, None)


def test_documents_that_are_text(borrow: Start) -> None:
    running = borrow(Reply(["Two."]), template=HERMES)
    texts = {
        "type": "content",
        "content": [{"type": "text", "text": "Tea: 2"}, {"type": "text", "text": "Milk: 1"}],
    }
    document = {
        "type": "document", "title": "Prices", "context": "Of today.", "citations": {"enabled": False},
        "cache_control": {"type": "ephemeral"},
        "source": {"type": "text", "media_type": "text/plain", "data": "Tea: 2"},
    }  # fmt: skip
    question = {"role": "user", "content": [document, {"type": "text", "text": "Tea?"}]}
    message(running, messages=[question])
    assert "user: Prices\nOf today.\nTea: 2\n\nTea?" in running.upstream.requests[-1].prompt
    used = {"type": "tool_use", "id": "a", "name": "track", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document", "source": texts}]}
    answered = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    message(running, messages=[*QUESTION, *answered])
    assert "tool: Tea: 2\nMilk: 1" in running.upstream.requests[-1].prompt


def test_every_answer_has_the_id_of_its_request(refusing: Running) -> None:
    for path, body in (
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": QUESTION}),
        ("/v1/messages", {}),
    ):
        answer = http.post(f"{refusing.url}{path}", json=body, headers={"x-request-id": "mine"})
        assert answer.headers["request-id"] == "mine"
    assert answer.json()["request_id"] == "mine"


def test_models_are_listed_as_anthropics(borrow: Start) -> None:
    running = borrow(aliases=("small", "smaller"))

    def get(path: str) -> Any:
        headers = {"anthropic-version": "2023-06-01"}
        return http.get(f"{running.url}/v1/models{path}", headers=headers).json()

    listed = get("")
    assert [item["id"] for item in listed["data"]] == ["tiny", "small", "smaller"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "smaller")
    listed_model = listed["data"][1]
    assert (listed_model["type"], listed_model["display_name"], listed_model["created_at"]) == (
        "model",
        "tiny",
        "1970-01-01T00:00:01Z",
    )
    assert (listed_model["max_input_tokens"], listed_model["max_tokens"]) == (50, 40)
    assert get("/small") == listed_model
    pages = {
        "?limit=2": (["tiny", "small"], True), "?limit=2&after_id=small": (["smaller"], False),
        "?limit=1&before_id=smaller": (["small"], True), "?before_id=small": (["tiny"], False),
    }  # fmt: skip
    for query, (ids, more) in pages.items():
        found = get(query)
        assert ([item["id"] for item in found["data"]], found["has_more"]) == (ids, more)
    for path in ("/other", "?after_id=other", "?limit=0"):
        assert get(path)["type"] == "error"
    assert http.get(f"{running.url}/v1/models").json()["object"] == "list"


def test_a_stream_that_fails_ends_with_an_error(borrow: Start) -> None:
    last = events(borrow(Reply(["a"], ending=Ending.ERROR, error="it broke")))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "it broke" in last["error"]["message"]


def test_tokens_are_counted(refusing: Running) -> None:
    assert post(refusing, {}, "/count_tokens") == (200, '{"input_tokens":5}')


def test_the_key_of_anthropics_clients(start: Start) -> None:
    running = start(tenants=keyed("sk-ann"))
    assert post(running, {}, **{"x-api-key": "sk-ann"})[0] == 200
    for headers in ({}, {"x-api-key": "sk-bob"}, {"x-api-key": ""}):
        status, body = post(running, {}, **headers)
        assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
DOCUMENT = {"type": "document", "source": IMAGE["source"], "title": 7, "citations": {"enabled": True}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"n": 2}, "n is not supported"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type: 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]},
         "content.0.citations: are not supported.*content.0.title: must be a text; .*content.0.source: this model"),
        ({"messages": [{"role": "assistant", "content": [DOCUMENT]}]}, "'document' is not supported here"),
        ({"messages": [{"role": "robot"}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
         "messages.0.role: .*messages.1.content.0.tool_use_id: there is no tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": []}]}]},
         "messages.0.content.0: must be"),
        ({"tools": [{"type": 7, "name": "bash"}]}, 'tools.0: must be {"name": …, "input_schema": {…}}'),
        ({"tools": [{"description": "x"}]}, "tools.0.name: is missing"),
        ({"tools": [TRACK], "tool_choice": {"type": ["x"]}}, "tool_choice.type: must be auto, any, tool or none"),
        ({"tools": [{**TRACK, "input_schema": {"type": "thing"}}], "tool_choice": {"type": "any"}},
         "tools.0.input_schema.type: 'thing'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}},
         "output_config.format.schema.type: 'thing'"),
        ({"messages": [{"role": "user", "content": "word " * 60}]}, "^prompt is too long: 61 tokens > 50 maximum$"),
        ({"model": "other"}, "The model `other` does not exist"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(refusing: Running, fields: dict[str, Any], said: str) -> None:
    status, body = post(refusing, fields)
    error = json.loads(body)
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    assert (error["type"], error["error"]["type"]) == ("error", kinds[status])
    assert re.search(said, error["error"]["message"])
