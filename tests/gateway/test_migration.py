"""Streams whose server is lost after they have begun go on where their client is, on another server or the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client.testing import Ending, FakeServer, Received, Reply, bls, llmapi
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http
from tests.support.waiting import wait_for

# Chunks of one answer, and how many tokens each has: text may wait for the tokens after it.
PIECES = ("one ", "two ", "", "three f", "our ", "five")
TOKENS = (1, 2, 1, 3, 1, 1)
WHOLE = "".join(PIECES)
MIGRATIONS = "pipeline_migrations_total"


@dataclass
class Engine:
    """Answers with pieces; each answer that has a number is lost after so many of its own chunks."""

    pieces: Sequence[str] = PIECES
    tokens: Sequence[int] = TOKENS
    lost_after: list[int] = field(default_factory=list)

    def __call__(self, received: Received) -> Reply:
        """The rest of the answer, after the tokens that the request says had come."""
        before = len(received.tensors.get("prior_output_ids", ()))
        first = next(at for at in range(len(self.tokens) + 1) if sum(self.tokens[:at]) == before)
        pieces, tokens = self.pieces[first:], self.tokens[first:]
        ids, ending = range(before, sum(self.tokens)), Ending.EMPTY
        if self.lost_after:
            count = self.lost_after.pop(0)
            pieces, tokens, ending = pieces[:count], tokens[:count], Ending.LOST
        log_probs = [-token / 8 for token in ids]
        return Reply(pieces, token_ids=ids, tokens_per_chunk=tokens, log_probs=log_probs, ending=ending)


def prior_of(received: Received) -> list[int]:
    return list(received.tensors.get("prior_output_ids", ()))


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40},
}


@dataclass
class Told:
    """What a client read of a stream: its text, its tokens, and how it ended."""

    text: str = ""
    tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)


def ask(url: str, path: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Told:
    body = {"model": "tiny", "temperature": 0, "stream": True, **BODIES[path], **fields}
    answer = http.post(f"{url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    told = Told()
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    for event in (json.loads(line) for line in lines if line != "[DONE]"):
        told.events.append(event)
        if event.get("error"):
            told.error = event["error"].get("code") or event["error"]["type"]
        for choice in event.get("choices", ()):
            told.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            told.finish = choice["finish_reason"] or told.finish
        kind = event.get("type")
        if kind == "response.output_text.delta":
            told.text += event["delta"]
        elif kind == "content_block_delta":
            told.text += event["delta"].get("text", "")
        elif kind == "response.completed":
            told.finish = "stop"
            assert event["response"]["output"][0]["content"][0]["text"] == told.text
        elif kind == "message_delta":
            told.finish = event["delta"]["stop_reason"]
        usage = event.get("usage") or (event.get("response") or {}).get("usage") or {}
        told.tokens = usage.get("completion_tokens", usage.get("output_tokens", told.tokens))
    return told


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def running(shared_start: Start, engine: Engine) -> Running:
    return shared_start(engine, places=8)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_goes_on_after_each_of_its_chunks(running: Running, engine: Engine, path: str) -> None:
    """Joined it is what one server says, its usage is that of one answer, and it ends as one does."""
    expected = ask(running.url, path)
    assert (expected.text, expected.tokens, expected.error) == (WHOLE, sum(TOKENS), None)
    for count in range(1, len(PIECES) + 1):
        before = running.metric(MIGRATIONS, outcome="resumed")
        engine.lost_after = [count]
        told = ask(running.url, path)
        assert (told.text, told.tokens, told.finish, told.error) == (
            WHOLE,
            sum(TOKENS),
            expected.finish,
            None,
        )
        first, second = running.upstream.requests[-2:]
        # A chunk without text waits for the one after it, at the client of the model.
        assert prior_of(first) == []
        assert prior_of(second) == list(range(sum(TOKENS[:count])))
        assert first.tensors["max_tokens"] == second.tensors["max_tokens"]
        wait_for(
            lambda was=before: running.metric(MIGRATIONS, outcome="resumed") == was + 1,
            "a count",
        )


@given(
    st.lists(st.tuples(st.text(max_size=4), st.integers(1, 3)), min_size=2, max_size=8),
    st.data(),
)
def test_any_answer_lost_anywhere_goes_on(
    running: Running, engine: Engine, chunks: list[tuple[str, int]], data: st.DataObject
) -> None:
    pieces = [f"{text}." for text, _ in chunks]
    engine.pieces, engine.tokens = pieces, [count for _, count in chunks]
    engine.lost_after = [data.draw(st.integers(0, len(pieces)))]
    try:
        # A digest of its own: what was lost twice would be refused.
        told = ask(running.url, "/v1/completions", prompt=data.draw(st.uuids()).hex)
        assert (told.text, told.tokens) == ("".join(pieces), sum(engine.tokens))
    finally:
        engine.pieces, engine.tokens, engine.lost_after = PIECES, TOKENS, []


def test_log_probs_are_told_once_for_each_token(running: Running, engine: Engine) -> None:
    def told() -> list[float]:
        events = ask(running.url, "/v1/completions", logprobs=0, prompt="with").events
        choices = [choice for event in events for choice in event["choices"]]
        return [
            value
            for choice in choices
            if choice["logprobs"]
            for value in choice["logprobs"]["token_logprobs"]
        ]

    expected = told()
    assert len(expected) == sum(TOKENS)
    engine.lost_after = [2]
    assert told() == expected


def test_each_of_several_choices_goes_on_by_itself(running: Running, engine: Engine) -> None:
    engine.lost_after = [2, 3]
    events = ask(running.url, "/v1/completions", n=2, prompt="both").events
    texts = ["", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [WHOLE, WHOLE]
    assert events[-1]["usage"]["completion_tokens"] == 2 * sum(TOKENS)


def test_a_call_of_a_tool_that_is_under_way_goes_on(start: Start) -> None:
    pieces = ("<tool_", 'call>{"name": "weather", "argu', 'ments": {"city": "Os', 'lo"}}</tool_call>', "")
    engine = Engine(pieces, (2,) * len(pieces))
    running = start(engine, tool_section=True)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for count in range(1, len(pieces)):
        engine.lost_after = [count]
        body = {"messages": [{"role": "user", "content": f"{count}"}]}
        events = ask(running.url, "/v1/chat/completions", tools=tools, **body).events
        calls = [
            call
            for event in events
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", ())
        ]
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        assert (calls[0]["function"]["name"], json.loads(arguments)) == ("weather", {"city": "Oslo"})


def test_the_cache_keeps_the_whole_answer_or_none(start: Start) -> None:
    engine = Engine(lost_after=[3])
    running = start(engine, cached=True)
    assert ask(running.url, "/v1/completions").text == WHOLE
    assert ask(running.url, "/v1/completions").text == WHOLE
    # The second one was stored; it has no token ids, which nobody asked for.
    assert len(running.upstream.requests) == 3
    again = ask(running.url, "/v1/completions")
    assert (again.text, again.tokens, len(running.upstream.requests)) == (WHOLE, sum(TOKENS), 3)


def test_equal_requests_at_the_same_time_go_on_each(start: Start) -> None:
    """They share one stream until it is lost."""
    engine = Engine(lost_after=[4])
    running = start(lambda received: replace(engine(received), delay_s=0.1), cached=True)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, running.url, "/v1/completions") for _ in range(3)]
        assert [answer.result().text for answer in asked] == [WHOLE] * 3


def test_the_llm_apis_model_repeats_the_text_so_far(start: Start) -> None:
    """What had come is a part of what its answer repeats, and does not go out twice."""

    def whole(received: Received) -> Reply:
        ids = received.tensors.get("prior_output_ids", ())
        before = next(at for at in range(len(TOKENS) + 1) if sum(TOKENS[:at]) == len(ids))
        if not ids:
            return Reply(PIECES[:3], token_ids=range(4), tokens_per_chunk=TOKENS[:3], ending=Ending.LOST)
        joined = "".join(PIECES[: before + 1])
        tokens = (sum(TOKENS[: before + 1]), *TOKENS[before + 1 :])
        return Reply((joined, *PIECES[before + 1 :]), token_ids=range(9), tokens_per_chunk=tokens)

    running = start(whole, model=llmapi("tensorrt_llm_bls"))
    told = ask(running.url, "/v1/completions")
    assert (told.text, told.error) == (WHOLE, None)


def lost(running: Running) -> str | None:
    return ask(running.url, "/v1/completions", prompt="lost").error


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"echo": True, "logprobs": 0},
    ],
)
def test_what_cannot_go_on_ends_and_says_how_much_came(start: Start, fields: dict[str, Any]) -> None:
    running = start(Engine(lost_after=[2]))
    told = ask(running.url, "/v1/completions", **fields)
    assert (told.error, told.events[-1]["error"]["completion_tokens"]) == ("upstream_lost", 3)
    assert len(running.upstream.requests) == 1
    wait_for(lambda: running.metric(MIGRATIONS, outcome="ended") == 1, "a count")


def test_packages_without_the_inputs_end_streams_as_before(start: Start) -> None:
    running = start(Engine(lost_after=[2]), model=bls(upstream=True))
    assert lost(running) == "upstream_lost"
    assert "return_output_ids" not in running.upstream.requests[0].tensors
    assert len(running.upstream.requests) == 1


def test_a_prompt_that_is_too_long_with_its_answer_ends_the_stream(start: Start) -> None:
    """As on TensorRT-LLM, which counts what had come among the prompt."""
    engine = Engine(lost_after=[2])

    def script(received: Received) -> Reply:
        if prior_of(received):
            too_long = "Prompt length (9) exceeds maximum input length (8)."
            return Reply([], ending=Ending.ERROR, error=too_long)
        return engine(received)

    running = start(script)
    told = ask(running.url, "/v1/completions")
    assert (told.error, told.events[-1]["error"]["completion_tokens"]) == ("upstream_lost", 3)


def test_a_stream_that_is_lost_again_ends_and_is_quarantined(start: Start) -> None:
    running = start(Engine(lost_after=[2, 2]))
    told = ask(running.url, "/v1/completions")
    assert (told.error, told.text) == ("request_quarantined", "one two three f")
    assert told.events[-1]["error"]["completion_tokens"] == 7
    body = {"model": "tiny", "temperature": 0, **BODIES["/v1/completions"], "stream_options": None}
    again = http.post(f"{running.url}/v1/completions", json=body, timeout=60)
    assert again.json()["error"]["code"] == "request_quarantined"
    running = start(Engine(lost_after=[2, 0]))
    told = ask(running.url, "/v1/completions")
    assert (told.error, told.text) == ("request_quarantined", "one two ")
    assert told.events[-1]["error"]["completion_tokens"] == 3


def test_a_server_that_does_not_come_back_ends_the_stream(start: Start) -> None:
    reply = Reply(PIECES, token_ids=range(9), tokens_per_chunk=TOKENS, ending=Ending.HANG)
    running = start(reply, max_wait_s=0.5)

    def has_begun() -> bool:
        generations = list(running.gateway.metrics._generations.values())
        return any(
            times.last_chunk is not None for generation in generations for times in generation.times.values()
        )

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, running.url, "/v1/completions")
        wait_for(has_begun, "the first chunk")
        running.upstream.stop()
        told = asked.result()
    assert told.error == "upstream_lost"
    assert WHOLE.startswith(told.text)


def test_another_server_goes_on_while_the_first_is_away(start: Start) -> None:
    engine = Engine()
    with FakeServer(engine) as second:
        running = start(engine, also=[second.url], spread="least-load")
        wait_for(
            lambda: [endpoint.ill for endpoint in running.served.client.endpoints] == [False, False],
            "readiness",
        )
        for number in range(6):
            engine.lost_after = [number % 4 + 1]
            assert ask(running.url, "/v1/completions", prompt=f"{number}").text == WHOLE
    assert any(prior_of(received) for received in (*second.requests, *running.upstream.requests))
