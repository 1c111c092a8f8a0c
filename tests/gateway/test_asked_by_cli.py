"""`pipeline stream`, `chat` and `generate` before the gateway's OpenAI API, by its --url."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.main import cli
from pipeline.client.testing import Ending, Reply
from pipeline.errors import ServerError, UserError
from tests.gateway.conftest import Running, Start, keyed


def run(running: Running, verb: str, *words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli, [verb, "--url", f"{running.url}/v1", *words], input=typed)


def test_a_question_is_streamed_with_its_figures(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its ", "way."]))
    done = run(running, "stream", "Where is my parcel?", "--max-tokens", "7", "--system", "Be brief.")
    assert (done.exit_code, done.stdout) == (0, "On its way.\n")
    assert done.stderr.startswith("TTFT ")
    assert "3 tokens in " in done.stderr
    assert "ended by stop" in done.stderr
    (request,) = running.upstream.requests
    assert request.prompt == "system: Be brief.\nuser: Where is my parcel?\n"
    assert request.tensors["max_tokens"] == [7]


def test_chunks_and_figures_for_scripts_and_a_prompt_without_template(borrow: Start) -> None:
    running = borrow(Reply(["a", "b"]))
    done = run(running, "stream", "--raw", "once upon", "--json", "--model", "tiny")
    *chunks, end = map(json.loads, done.stdout.splitlines())
    assert [chunk["index"] for chunk in chunks] == list(range(len(chunks)))
    assert "".join(chunk["text"] for chunk in chunks) == "ab"
    assert chunks[-1]["finish_reason"] == "stop"
    assert end["request_id"].startswith("cmpl-")
    assert end["stats"]["output_tokens"] == 2
    assert running.upstream.requests[0].prompt == "once upon"


def test_turns_of_a_chat_and_several_questions(borrow: Start) -> None:
    running = borrow([Reply(["One."]), Reply(["Two."])])
    done = run(running, "chat", typed="first\nsecond\n")
    assert (done.exit_code, done.stdout) == (0, "One.\nTwo.\n")
    assert running.upstream.requests[1].prompt == "user: first\nassistant: One.\nuser: second\n"
    running = borrow(Reply(["yes"]))
    done = run(running, "generate", "a", "b", "--json", "-q")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["index"], row["text"], row["finish_reason"]) for row in rows] == [
        (0, "yes", "stop"),
        (1, "yes", "stop"),
    ]


def test_a_key_is_sent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(tenants=keyed("secret"))
    refused = run(running, "stream", "Hi")
    assert isinstance(refused.exception, UserError)
    assert "HTTP 401: No API key provided" in str(refused.exception)
    monkeypatch.setenv("PIPELINE_API_KEY", "secret")
    assert run(running, "stream", "Hi").stdout == "Hello world\n"


def test_refusals_name_what_was_typed(borrow: Start) -> None:
    running = borrow(strict=True)
    for words, said in (
        (("--max-tokens", "100000"), "--max-tokens"),
        (("--model", "other"), "The model `other` does not exist; there are: tiny"),
    ):
        refused = run(running, "stream", "Hi", *words)
        assert said in str(refused.exception)
        assert refused.exit_code == 1
    usage = run(running, "stream", "Hi", "--tenant", "a")
    assert "--tenant: no effect on an OpenAI API" in usage.output


def test_an_answer_that_breaks_off_keeps_what_came_and_fails(borrow: Start) -> None:
    running = borrow(Reply(["On ", "its"], ending=Ending.ERROR))
    done = run(running, "stream", "Hi")
    assert done.stdout == "On its\n"
    assert isinstance(done.exception, ServerError)
    assert "the model failed" in str(done.exception)


def test_nobody_is_there() -> None:
    done = CliRunner().invoke(cli, ["stream", "--url", "http://127.0.0.1:1/v1", "Hi"])
    assert "no answer from http://127.0.0.1:1/v1: " in str(done.exception)
    for wrong in ("http://", "http://a:b/v1"):
        done = CliRunner().invoke(cli, ["stream", "--url", wrong, "Hi"])
        assert "give http://host:port/v1" in str(done.exception)


@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_a_stream_that_is_cancelled_ends_on_the_server_too(borrow: Start, ends: str) -> None:
    from pipeline.client.errors import Cancelled
    from pipeline.client.openai_api import OpenAIClient
    from tests.support.waiting import wait_for

    running = borrow(Reply(["a"], ending=Ending.HANG))
    with OpenAIClient(running.url) as client, client.stream("Hi") as stream:
        chunks = iter(stream)
        assert next(chunks).text == "a"
        getattr(stream if ends == "cancel" else client, ends)()
        with pytest.raises(Cancelled):
            next(chunks)
    wait_for(lambda: running.upstream.requests[0].cancelled.is_set(), "the upstream saw the end")
