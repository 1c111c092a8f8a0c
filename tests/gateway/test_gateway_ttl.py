"""`ttl_s`: how long one request's answer may be served again."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pipeline.client.testing import Reply
from tests.gateway.conftest import Running, Start
from tests.support.waiting import wait_for

QUESTION = [{"role": "user", "content": "Name a colour."}]
RECIPES = 86_400  # the cache's own


def ask(running: Running, **fields: Any) -> str:
    answer = running.client().chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, extra_body=fields
    )
    return str(answer.choices[0].message.content)


def test_an_answer_is_served_again_as_long_as_its_request_said(start: Start) -> None:
    running = start([Reply(["red"]), Reply(["blue"])], cached=True)
    assert ask(running, ttl_s=0.05) == "red"
    wait_for(lambda: ask(running, ttl_s=RECIPES) == "blue", "the end of its time")
    assert [ask(running), ask(running, ttl_s=1)] == ["blue"] * 2
    assert len(running.upstream.requests) == 2


@pytest.mark.parametrize(
    ("ttl_s", "said"), [(RECIPES + 1, "at most 86400 s"), (0, "greater than 0"), ("long", "a valid number")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_longer_than_the_recipe_allows(start: Start, ttl_s: Any, said: str, stream: bool) -> None:
    running = start(cached=True)
    client, more = running.client(), {"ttl_s": ttl_s}
    with pytest.raises(openai.BadRequestError, match=f"ttl_s: .*{said}") as chat:
        client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream, extra_body=more)
    with pytest.raises(openai.BadRequestError, match=f"ttl_s: .*{said}") as plain:
        client.completions.create(model="tiny", prompt="Hi", stream=stream, extra_body=more)
    assert (chat.value.param, plain.value.param) == ("ttl_s", "ttl_s")
    assert not running.upstream.requests


def test_where_there_is_no_cache_any_time_is_kept_to(start: Start) -> None:
    assert ask(start(), ttl_s=10 * RECIPES) == "Hello world"
