"""What OpenAI's own client sees."""

from __future__ import annotations

import json
import threading
import urllib.request

import openai
import pytest

from pipeline.client.testing import Ending, Received, Reply
from tests.gateway.conftest import Running, Start
from tests.support.waiting import wait_for

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]


def test_a_whole_answer(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its ", "way"]))
    answer = running.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.content == "On its way"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert running.upstream.requests[0].prompt == "user: Where is my parcel?\n"
    cut = running.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"


def test_a_stream_with_usage(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its ", "“way”\n"]))
    stream = running.client().chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "On its “way”\n"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1


def test_plain_completions(borrow: Start) -> None:
    running = borrow(Reply(["a", "b"]))
    client = running.client()
    assert client.completions.create(model="tiny", prompt="Once", max_tokens=8).choices[0].text == "ab"
    stream = client.completions.create(model="tiny", prompt="Once", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "ab"
    assert running.upstream.requests[0].prompt == "Once"


def test_sampling_parameters_arrive(borrow: Start) -> None:
    running = borrow()
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


def test_requests_without_a_seed_draw_different_ones(borrow: Start) -> None:
    running = borrow()
    for _ in range(2):
        running.client().chat.completions.create(model="tiny", messages=QUESTION)
    first_seed, other = (request.tensors["seed"][0] for request in running.upstream.requests)
    assert first_seed != other


def test_several_choices(borrow: Start) -> None:
    running = borrow(Reply(["a", "b"]))
    answer = running.client().chat.completions.create(model="tiny", messages=QUESTION, n=3, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["ab"] * 3
    assert len({request.tensors["seed"][0] for request in running.upstream.requests}) == 3
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "ab", 1: "ab"}


def test_a_repeated_question_is_answered_from_the_cache(start: Start) -> None:
    running = start(Reply(["a", "b"]), cached=True)
    client = running.client()
    answers = [
        client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0) for _ in range(2)
    ]
    assert [answer.choices[0].message.content for answer in answers] == ["ab", "ab"]
    assert len(running.upstream.requests) == 1
    streamed = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "ab"
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
        ({"stop": 4}, "stop: Input should be a valid string or Input should be a valid (?:list|array)"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(refusing: Running, fields: dict[str, object], said: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=said):
        refusing.client().chat.completions.create(**{"model": "tiny", "messages": QUESTION, **fields})  # type: ignore[call-overload]


def test_an_unknown_url_is_answered_with_a_near_one(refusing: Running) -> None:
    client = refusing.client()
    for path, said in (
        ("/chat/completion", "did you mean /v1/chat/completions"),
        ("/completions", "this path takes POST"),
    ):
        with pytest.raises(openai.NotFoundError, match=said):
            client.get(path, cast_to=object)


def test_a_failing_model_is_an_error_before_and_in_a_stream(borrow: Start) -> None:
    running = borrow(Reply(["a"], ending=Ending.ERROR, error="it broke"))
    with pytest.raises(openai.APIStatusError, match="it broke"):
        running.client().chat.completions.create(model="tiny", messages=QUESTION)
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)


def test_leaving_stops_the_model(borrow: Start) -> None:
    running = borrow(Reply(["a"], ending=Ending.HANG))
    stream = running.client().chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    assert running.upstream.requests[0].cancelled.wait(5)
    with pytest.raises(openai.APITimeoutError):
        running.client().with_options(timeout=0.3).chat.completions.create(model="tiny", messages=QUESTION)
    wait_for(lambda: len(running.upstream.requests) == 2, "the second request")
    assert running.upstream.requests[1].cancelled.wait(5)
    wait_for(lambda: running.served.queue.running == 0, "a free slot")


def test_too_many_are_turned_away_with_a_time_to_come_back(borrow: Start) -> None:
    released = threading.Event()

    def answer(_: Received) -> Reply:
        released.wait(30)
        return Reply(["a"])

    running = borrow(answer, places=1, max_waiting=1)
    errors: list[openai.RateLimitError] = []

    def ask() -> None:
        try:
            running.client().chat.completions.create(model="tiny", messages=QUESTION)
        except openai.RateLimitError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(errors) == 2, "two refusals")
    released.set()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in errors)
    assert len(running.upstream.requests) == 2


def test_models_health_and_the_page(borrow: Start) -> None:
    running = borrow()
    assert [model.id for model in running.client().models.list()] == ["tiny"]
    assert running.client().models.retrieve("tiny").id == "tiny"

    def get(path: str) -> str:
        with urllib.request.urlopen(running.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    assert get("/healthz") == "ok\n"
    served = {"deployment": "digest", "endpoints": [running.upstream.url], "replaced_requests": 0}
    assert json.loads(get("/readyz")) == {"ready": True, "faults": {}, "models": {"tiny": served}}
    assert "<title>pipeline</title>" in get("/")


def test_a_body_that_is_too_large(borrow: Start) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than 10000 bytes") as refused:
        borrow().client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 20_000}]
        )
    assert refused.value.status_code == 413


def test_a_model_that_cannot_be_reached(start: Start) -> None:
    running = start(max_wait_s=0.2)
    running.upstream.stop()
    with pytest.raises(openai.InternalServerError) as failed:
        running.client().chat.completions.create(model="tiny", messages=QUESTION)
    assert (failed.value.status_code, failed.value.code) == (503, "unavailable")
