"""Tokens of a prompt that the engine took from its KV cache, as each API tells them, streamed and not."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from pipeline.client.testing import Reply, bls
from tests.gateway.conftest import Running, Start

LONG = "word " * 39  # 40 tokens with the template
MESSAGES = [{"role": "user", "content": LONG}]


def reusing(blocks: int) -> Reply:
    """An answer whose prompt has more tokens than the gateway counts, as some templates make it."""
    return Reply(reused_blocks=blocks, input_tokens=1000)


def post(running: Running, path: str, **fields: Any) -> list[Any]:
    """JSON of the answer; of a stream, that of each event."""
    body = json.dumps({"model": "tiny", **fields}).encode()
    request = urllib.request.Request(f"{running.url}/v1/{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        text = answer.read().decode()
    if not fields.get("stream"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(running: Running, stream: bool, **fields: Any) -> tuple[int, int]:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    usage = post(running, "chat/completions", messages=MESSAGES, **options, **fields)[-1]["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def completion(running: Running, stream: bool, **fields: Any) -> tuple[int, int]:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    usage = post(running, "completions", **{"prompt": LONG, **options, **fields})[-1]["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def response(running: Running, stream: bool) -> tuple[int, int]:
    last = post(running, "responses", input=LONG, stream=stream)[-1]
    usage = (last["response"] if stream else last)["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def message(running: Running, stream: bool) -> tuple[int, int]:
    made = post(running, "messages", messages=MESSAGES, max_tokens=20, stream=stream)
    usage = next(event for event in reversed(made) if "usage" in event)["usage"]
    # Anthropic counts them apart from the others.
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


APIS = (chat, completion, response, message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", APIS)
def test_reused_blocks_are_told_in_tokens(borrow: Start, ask: Any, stream: bool) -> None:
    """Never more than the prompt: an engine counts a block that it reuses in part."""
    running = borrow([reusing(blocks) for blocks in (0, 1, 2)])
    for blocks in (0, 1, 2):
        prompt, cached = ask(running, stream)
        assert 32 < prompt < 64
        assert cached == min(32 * blocks, prompt)


def test_a_model_that_does_not_say_has_none(start: Start) -> None:
    running = start(reusing(1), model=bls(upstream=True))
    assert chat(running, False)[1] == 0


def test_of_several_choices_the_first_computed_the_prompt(borrow: Start) -> None:
    """Others find in the cache what it left; each prompt counts once."""
    running = borrow([reusing(blocks) for blocks in (0, 1, 1, 1, 1, 1, 1, 1)])
    assert [chat(running, False, n=3)[1] for _ in range(2)] == [0, 32]
    prompt, cached = completion(running, False, prompt=[LONG, LONG])
    assert (prompt > 64, cached) == (True, 64)


@pytest.mark.parametrize("ask", [chat, completion])
def test_an_answer_of_the_response_cache_computes_nothing(start: Start, ask: Any) -> None:
    running = start(reusing(1), cached=True)
    assert ask(running, False, temperature=0)[1] == 32
    prompt, cached = ask(running, False, temperature=0)
    assert cached == prompt
