"""What OpenAI's own client sees."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable

import openai
import pytest

from pipeline.client.testing import Ending, Reply
from tests.gateway.conftest import Running, Start

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]


def until(true: Callable[[], bool], within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_whole_answer(start: Start) -> None:
    running = start(Reply(["On ", "its ", "way"]))
    answer = running.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.content == "On its way"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert running.upstream.requests[0].prompt == "user: Where is my parcel?\n"


def test_a_stream_with_usage(start: Start) -> None:
    running = start(Reply(["On ", "its ", "“way”\n"]))
    stream = running.client().chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "On its “way”\n"
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1


def test_chunks_go_out_as_they_come(start: Start) -> None:
    running = start(Reply(["a", "b"], ending=Ending.HANG))
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    text = ""
    while text != "ab":  # and the answer never ends
        text += next(stream).choices[0].delta.content or ""
    stream.close()


def test_plain_completions(start: Start) -> None:
    running = start(Reply(["a", "b"]))
    client = running.client()
    assert client.completions.create(model="tiny", prompt="Once", max_tokens=8).choices[0].text == "ab"
    stream = client.completions.create(model="tiny", prompt="Once", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "ab"
    assert running.upstream.requests[0].prompt == "Once"


def test_sampling_parameters_arrive(start: Start) -> None:
    running = start()
    running.client().chat.completions.create(
        model="tiny", messages=QUESTION, max_completion_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=["x", "y"],
        presence_penalty=0.5, frequency_penalty=0.25, extra_body={"top_k": 5, "repetition_penalty": 1.5},
    )  # fmt: skip
    tensors = running.upstream.requests[0].tensors
    expected = {
        "max_tokens": [7], "temperature": [0.5], "seed": [3], "top_k": [5], "presence_penalty": [0.5],
        "frequency_penalty": [0.25], "repetition_penalty": [1.5], "stop_words": ["x", "y"],
    }  # fmt: skip
    assert {name: list(tensors[name]) for name in expected} == expected


def test_requests_without_a_seed_draw_different_ones(start: Start) -> None:
    running = start()
    for _ in range(2):
        running.client().chat.completions.create(model="tiny", messages=QUESTION)
    one, other = (request.tensors["seed"][0] for request in running.upstream.requests)
    assert one != other


def test_several_choices(start: Start) -> None:
    running = start(Reply(["a", "b"], delay_s=0.01))
    answer = running.client().chat.completions.create(model="tiny", messages=QUESTION, n=3, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["ab"] * 3
    assert len({request.tensors["seed"][0] for request in running.upstream.requests}) == 3
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "ab", 1: "ab"}


def test_log_probabilities(start: Start) -> None:
    running = start(Reply(["a", "b"], log_probs=[-0.5, -0.25]))
    answer = running.client().chat.completions.create(model="tiny", messages=QUESTION, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [(one.token, one.logprob) for one in answer.choices[0].logprobs.content or ()] == [
        ("a", -0.5),
        ("b", -0.25),
    ]


def test_tools_reach_the_template(start: Start) -> None:
    running = start()
    tool = {
        "type": "function",
        "function": {"name": "track", "parameters": {"type": "object", "properties": {}}},
    }
    running.client().chat.completions.create(model="tiny", messages=QUESTION, tools=[tool])
    assert '"name": "track"' in running.upstream.requests[0].prompt
    running.client().chat.completions.create(
        model="tiny", messages=QUESTION, tools=[tool], tool_choice="none"
    )
    assert "track" not in running.upstream.requests[1].prompt


def test_length_is_told(start: Start) -> None:
    running = start(Reply(["a", "b"]))
    answer = running.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


def test_a_repeated_question_is_answered_from_the_cache(start: Start) -> None:
    running = start(Reply(["a", "b"]), cached=True)
    client = running.client()
    answers = [
        client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0) for _ in range(2)
    ]
    assert [answer.choices[0].message.content for answer in answers] == ["ab", "ab"]
    assert len(running.upstream.requests) == 1
    streamed = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, stream=True)
    assert [chunk.choices[0].delta.content for chunk in streamed if chunk.choices[0].delta.content] == [
        "a",
        "b",
    ]
    client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, extra_body={"cache": False}
    )
    client.chat.completions.create(model="tiny", messages=QUESTION)  # sampled
    assert len(running.upstream.requests) == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "other"}, "does not exist; there are: tiny"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"logit_bias": {"100": 5}}, "logit_bias: token id 100 is out of vocabulary"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": "word " * 60}]},
            "prompts of at most 50 tokens; yours has 61",
        ),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(refusing: Running, fields: dict[str, object], said: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=said):
        refusing.client().chat.completions.create(**{"model": "tiny", "messages": QUESTION, **fields})  # type: ignore[call-overload]


def test_what_openai_ignores_is_ignored(start: Start) -> None:
    client = start().client()
    client.chat.completions.create(
        model="tiny", messages=QUESTION, user="u", metadata={"a": "b"}, store=False
    )


def test_a_failing_model_is_an_error_before_and_in_a_stream(start: Start) -> None:
    running = start(Reply(["a"], ending=Ending.ERROR, error="it broke"))
    with pytest.raises(openai.APIStatusError, match="it broke"):
        running.client().chat.completions.create(model="tiny", messages=QUESTION)
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)


def test_leaving_stops_the_model(start: Start) -> None:
    running = start(Reply(["a"] * 50, delay_s=0.2))
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    assert running.upstream.requests[0].cancelled.wait(5)
    with pytest.raises(openai.APITimeoutError):
        running.client().with_options(timeout=1).chat.completions.create(model="tiny", messages=QUESTION)
    until(lambda: len(running.upstream.requests) == 2)
    assert running.upstream.requests[1].cancelled.wait(5)
    until(lambda: running.served.queue.running == 0)


def test_too_many_are_turned_away_with_a_time_to_come_back(start: Start) -> None:
    running = start(Reply(["a"], first_delay_s=1), places=1, max_waiting=1)
    errors: list[openai.RateLimitError] = []

    def ask() -> None:
        try:
            running.client().chat.completions.create(model="tiny", messages=QUESTION)
        except openai.RateLimitError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in errors)
    assert len(running.upstream.requests) == 2


def test_models_health_and_the_page(start: Start) -> None:
    running = start()
    assert [model.id for model in running.client().models.list()] == ["tiny"]
    assert running.client().models.retrieve("tiny").id == "tiny"

    def get(path: str) -> str:
        with urllib.request.urlopen(running.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    assert get("/healthz") == "ok\n"
    served = {"deployment": "digest", "endpoints": [running.upstream.url], "replaced_requests": 0}
    assert json.loads(get("/readyz")) == {"ready": True, "faults": {}, "models": {"tiny": served}}
    assert "<title>pipeline</title>" in get("/")


def test_a_body_that_is_too_large(start: Start) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than 10000 bytes") as refused:
        start().client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 20_000}]
        )
    assert refused.value.status_code == 413


def test_a_model_that_cannot_be_reached(start: Start) -> None:
    running = start(max_wait_s=0.2)
    running.upstream.stop()
    with pytest.raises(openai.InternalServerError) as failed:
        running.client().chat.completions.create(model="tiny", messages=QUESTION)
    assert (failed.value.status_code, failed.value.code) == (503, "unavailable")
