"""OpenAI's Responses API, as OpenAI's client sees it; its types, applied strictly, judge every object and event."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from pipeline.client.testing import Ending, Reply
from tests.gateway.conftest import Running, Start
from tests.gateway.test_gateway_requests import CALLING, HERMES

TRACK: Any = {
    "type": "function",
    "name": "track",
    "description": "Find a parcel.",
    "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
    "strict": False,
}
CALLED = '{"name": "track", "arguments": {"id": 7}}'


@cache
def event_type() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def judged(response: Response) -> Response:
    """A response that has been held to OpenAI's type strictly; its client takes any JSON."""
    return Response.model_validate(response.to_dict())


def create(running: Running, key: str = "none", **fields: Any) -> Any:
    asked = {"model": "tiny", "input": "Where is my parcel?", **fields}
    return judged(running.same_client(key).responses.create(**asked))


def events_of(running: Running, **fields: Any) -> list[Any]:
    """The events of a stream, each held to its type; sequence numbers count from 0."""
    asked = {"model": "tiny", "input": "Where is my parcel?", **fields}
    events = list(running.same_client().responses.create(**asked, stream=True))
    judged = [event_type().validate_python(event.to_dict()) for event in events]
    assert [event.sequence_number for event in judged] == list(range(len(judged)))
    return judged


def shape(events: list[Any]) -> list[str]:
    """Types of events, each of a run of equal ones once."""
    kinds = [event.type.removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]


TEXT = ["output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done"]  # fmt: skip
CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


def test_a_whole_response(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its ", "way"]))
    response = create(
        running, instructions="Be brief.", max_output_tokens=8, metadata={"of": "me"}, temperature=0.5, user="me",
        top_p=0.9, extra_body={"seed": 3, "top_k": 5, "stop": ["x"]},
    )  # fmt: skip
    assert (response.status, response.output_text) == ("completed", "On its way")
    assert (response.metadata, response.temperature, response.top_p) == ({"of": "me"}, 0.5, 0.9)
    assert (response.instructions, response.max_output_tokens, response.user) == ("Be brief.", 8, "me")
    assert response.usage is not None
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (8, 3, 11)
    (asked,) = running.upstream.requests
    assert asked.prompt == "system: Be brief.\nuser: Where is my parcel?\n"
    wanted = {"max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "seed": 3, "top_k": 5}
    assert {name: asked.tensors[name][0] for name in wanted} == pytest.approx(wanted)
    assert list(asked.tensors["stop_words"]) == ["x"]


def test_a_stream_has_all_events_in_order(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its ", "“way”\n"]))
    events = events_of(running)
    assert shape(events) == ["created", "in_progress", *TEXT, "completed"]
    assert [event.delta for event in events if event.type.endswith(".delta")] == ["On ", "its ", "“way”\n"]
    last = events[-1].response
    assert (last.output_text, last.usage.output_tokens) == ("On its “way”\n", 3)
    assert last.output[0].id == events[2].item.id
    whole = [event.response for event in (*events[:2], events[-1])]
    assert [response.status for response in whole] == ["in_progress", "in_progress", "completed"]
    assert len({response.id for response in whole}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_their_results(borrow: Start, stream: bool) -> None:
    """Text, a call in pieces, its result and the answer; by hand and by id the conversation comes to one prompt."""
    running = borrow([Reply(CALLING), Reply(["At the border."]), Reply(["At the border."])], template=HERMES)
    if stream:
        events = events_of(running, tools=[TRACK])
        assert shape(events) == ["created", "in_progress", *TEXT, *CALL, "completed"]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == {"id": 7}
        assert len(deltas) > 1
        response = events[-1].response
    else:
        response = create(running, tools=[TRACK])
    message, call = response.output
    assert (response.output_text, message.status, call.status) == ("One moment.", "completed", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "track", {"id": 7})
    assert (response.tools[0].name, response.tool_choice) == ("track", "auto")
    assert response.parallel_tool_calls is True
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "At the border."}
    given = [{"role": "user", "content": "Where is my parcel?"}, message.to_dict(), call.to_dict(), result]
    assert create(running, input=given, tools=[TRACK]).output_text == "At the border."
    assert create(running, input=[result], previous_response_id=response.id, tools=[TRACK]).output_text
    by_hand, by_id = running.upstream.requests[1:]
    assert by_hand.prompt == by_id.prompt
    assert 'user: Where is my parcel?assistant: One moment.<tool_call>{"name": "track"' in by_id.prompt
    assert "tool: At the border." in by_id.prompt


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "track"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "track"}]},
    ],
)
def test_a_call_that_must_come_is_guided(borrow: Start, choice: Any) -> None:
    several = choice == "required"
    running = borrow(Reply([CALLED if several else '{"id": 7}']), template=HERMES)
    response = create(running, tools=[TRACK, {**TRACK, "name": "find"}], tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    guide = json.loads(running.upstream.requests[0].tensors["guided_decoding_guide"][0])
    if several:
        assert [schema["properties"]["name"] for schema in guide["anyOf"]] == [
            {"const": "track"},
            {"const": "find"},
        ]
    else:
        assert guide == TRACK["parameters"]


class Parcel(BaseModel):
    id: int


def test_forms(borrow: Start) -> None:
    running = borrow(Reply(['{"id": 7}']))
    parsed = running.same_client().responses.parse(model="tiny", input="Which parcel?", text_format=Parcel)
    assert parsed.output_parsed == Parcel(id=7)
    with running.same_client().responses.stream(
        model="tiny", input="Which parcel?", text_format=Parcel
    ) as stream:
        assert stream.get_final_response().output_parsed == Parcel(id=7)
    create(running, text={"format": {"type": "json_object"}})
    kinds = [request.tensors["guided_decoding_guide_type"][0] for request in running.upstream.requests]
    assert kinds == ["json_schema", "json_schema", "json"]


def test_a_cut_off_answer_is_incomplete(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its "]))
    response = create(running, max_output_tokens=2)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert shape(events_of(running, max_output_tokens=2))[-1] == "incomplete"


def test_an_answer_without_text_has_an_empty_one(borrow: Start) -> None:
    events = events_of(borrow(Reply([""])))
    without_delta = [kind for kind in TEXT if "delta" not in kind]
    assert shape(events) == ["created", "in_progress", *without_delta, "completed"]
    assert events[-1].response.output_text == ""


def test_log_probabilities(borrow: Start) -> None:
    running = borrow(Reply(["a", "b"], log_probs=[-0.5, -0.25]))
    asked: Any = {"include": ["message.output_text.logprobs"]}
    (part,) = create(running, **asked).output[0].content
    assert [(log_prob.token, log_prob.logprob, bytes(log_prob.bytes)) for log_prob in part.logprobs] == [
        ("a", -0.5, b"a"),
        ("b", -0.25, b"b"),
    ]
    deltas = [event for event in events_of(running, **asked) if event.type == "response.output_text.delta"]
    assert [log_prob.logprob for delta in deltas for log_prob in delta.logprobs] == [-0.5, -0.25]


def test_a_stream_that_fails_says_so(borrow: Start) -> None:
    """The client raises, and who reads the events himself sees `error` and `response.failed`."""
    running = borrow(Reply(["a"], ending=Ending.ERROR, error="it broke"))
    with pytest.raises(openai.APIError, match="it broke"):
        list(running.same_client().responses.create(model="tiny", input="Hi", stream=True))
    with running.same_client().responses.with_streaming_response.create(
        model="tiny", input="Hi", stream=True
    ) as raw:
        lines = [line for line in raw.iter_lines() if line.startswith("data: ")]
    events = [event_type().validate_json(line.removeprefix("data: ")) for line in lines]
    assert shape(events)[-2:] == ["error", "failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "it broke" in events[-1].response.error.message
    assert events[-2].code == "upstream_error"


def test_a_conversation_that_is_too_long(borrow: Start) -> None:
    """The model takes 50 words: refused, or its oldest turns are left out, never the instructions."""
    running = borrow()
    turns = [{"role": "user", "content": f"{number} " + "word " * 9} for number in range(9)]
    with pytest.raises(openai.BadRequestError, match="at most 50 tokens") as refused:
        create(running, input=turns)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    create(running, input=turns, instructions="Be brief.", truncation="auto")
    prompt = running.upstream.requests[-1].prompt
    assert prompt.startswith("system: Be brief.\nuser: 5 word")
    assert [number for number in range(9) if f"user: {number} " in prompt] == [5, 6, 7, 8]
    with pytest.raises(openai.BadRequestError, match="at most 50 tokens"):
        create(running, input="word " * 60, truncation="auto")
    last = create(running, input="0")
    for number in range(1, 15):  # more than is read of the memory for one request, 10 kB here
        last = create(running, input=f"{number}", previous_response_id=last.id, truncation="auto")
    assert "user: 14\n" in running.upstream.requests[-1].prompt
    with pytest.raises(openai.BadRequestError, match="more than 4096 items or 10000 bytes"):
        create(running, previous_response_id=last.id)


def test_tokens_of_an_input_are_counted(refusing: Running) -> None:
    counted = refusing.same_client().responses.input_tokens.count(model="tiny", input="Where is it?")
    assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": 4}


def test_answers_come_from_the_cache(start: Start) -> None:
    running = start(cached=True)
    client = running.same_client()
    asked: Any = {"model": "tiny", "temperature": 0}
    first = client.responses.with_raw_response.create(**asked, input="Hi")
    again = client.responses.with_raw_response.create(**asked, input=[{"role": "user", "content": "Hi"}])
    chat = client.chat.completions.with_raw_response.create(
        **asked, messages=[{"role": "user", "content": "Hi"}]
    )
    assert [response.headers["x-cache"] for response in (first, again, chat)] == ["miss", "exact", "exact"]
    made = [response.parse() for response in (first, again)]
    assert made[0].output_text == made[1].output_text
    assert made[0].id != made[1].id
    assert shape(events_of(running, temperature=0, input="Hi"))[-1] == "completed"
    assert len(running.upstream.requests) == 1


CALLED_OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"background": True}, "background", "background is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt is not supported"),
        ({"input": []}, "input", "input: List should have at least 1 item"),
        ({"input": 7}, "input", "input: Input should be a valid string or Input should be a valid array"),
        ({"include": ["everything"]}, "include", "include.0"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' not found"),
        ({"tools": [{"name": "web_search"}, TRACK]}, "tools", 'tools.0: must be {"type": "function", "name": …}'),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.name: is missing"),
        ({"tools": [TRACK], "tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice: must be"),
        ({"tools": [TRACK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "tool_choice: must be"),
        ({"tools": [TRACK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["x"]}]}},
         "tool_choice", "tool_choice: must be none"),
        ({"tools": [{**TRACK, "parameters": {"type": "thing"}}], "tool_choice": "required"}, "tools",
         "tools.0.parameters.type: 'thing'"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}}, "text.format",
         "text.format.schema.type: 'thing'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema: is missing"),
        ({"input": [{"role": "robot", "content": "x"}, {"role": "user"}]}, "input", "input.0.role: .*input.1.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input",
         "input.0.content.0: this model takes text only"),
        ({"input": [{"type": "computer_call"}, {"type": ["x"]}]}, "input", "'computer_call' is not supported.*input.1"),
        ({"input": [CALLED_OUTPUT]}, "input", "No tool call found for function call output with call_id call_1"),
        ({"input": [{**CALLED_OUTPUT, "call_id": {}}, {**CALLED_OUTPUT, "output": [7]}]}, "input",
         "input.0.call_id: is missing.*input.1.output.0"),
        ({"input": [{"type": "function_call", "name": "", "arguments": {}}]}, "input",
         "input.0.call_id: is missing; input.0.name: is missing; input.0.arguments: is missing"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "no item 'msg_1' of yours is remembered"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(refusing: Running, fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        refusing.same_client().responses.create(model="tiny", input="Hi", extra_body=fields)
    assert refused.value.param == param


def test_what_no_response_needs_is_refused_by_name(borrow: Start) -> None:
    running = borrow()
    client = running.same_client()
    made = create(running, extra_body={"prompt": None})
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError, match="Response with id 'resp_1' not found"):
        client.responses.cancel("resp_1")
    with pytest.raises(openai.BadRequestError, match="not compacted by this server") as refused:
        client.responses.compact(model="tiny", input="Hi")
    assert refused.value.code == "compaction_not_supported"


def test_items_of_other_servers_are_taken(borrow: Start) -> None:
    """Reasoning is left out; a refusal is a text; of an item only what is known is kept."""
    running = borrow()
    made = create(
        running,
        input=[
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "unknown": [[[1]]]},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "developer", "content": "Be kind."},
        ],
    )
    assert running.upstream.requests[0].prompt == "user: Hi\nassistant: No.\nsystem: Be kind.\n"
    kept = running.same_client().responses.input_items.list(made.id).data
    assert [item.type for item in kept] == ["message"] * 3
