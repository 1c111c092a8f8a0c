"""LoRA adapters at the gateway: chosen by `model: base:adapter`, listed, and never answered from another's cache."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client.errors import ClientError
from pipeline.client.openai_api import OpenAIClient
from pipeline.client.testing import Received, Reply
from tests.gateway.conftest import Running, Start
from tests.support.cache_asking import Fine, Letters
from tests.support.http_clients import http
from tests.support.waiting import wait_for

ADAPTERS = ("tone", "sql")
NAMES = ("tiny", "tiny:tone", "tiny:sql")


def by_adapter(received: Received) -> Reply:
    """An answer that says which adapter gave it."""
    return Reply([received.tensors.get("lora_name", ["base"])[0]])


@pytest.fixture
def running(start: Start) -> Running:
    started = start(by_adapter)
    started.served.adapters = ADAPTERS
    return started


def ask(running: Running, model: str, text: str = "Where is my parcel?", **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return running.client().chat.completions.create(model=model, messages=messages, temperature=0, **more)


def test_a_name_behind_a_colon_chooses_the_adapter(running: Running) -> None:
    for name, said in zip(NAMES, ("base", *ADAPTERS), strict=True):
        answer = ask(running, name)
        assert (answer.choices[0].message.content, answer.model) == (said, name)
        chunks = list(ask(running, name, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
        assert {chunk.model for chunk in chunks} == {name}
        text = running.client().completions.create(model=name, prompt="Hi", temperature=0)
        assert (text.choices[0].text, text.model) == (said, name)
        response = running.client().responses.create(model=name, input="Hi", temperature=0)
        assert (response.output_text, response.model) == (said, name)


def test_log_and_metrics_tell_the_adapter(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pipeline.gateway"):
        ask(running, "tiny:sql")
        ask(running, "tiny")
        with pytest.raises(openai.BadRequestError):
            ask(running, "tiny:sql", logit_bias={"999999": 1})
    wait_for(lambda: running.metric("pipeline_requests_total", status="400") == 1, "the count")
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [line["adapter"] for line in lines] == ["sql", None, "sql"]
    for name in ("pipeline_requests_total", "pipeline_choices_total", "pipeline_generation_tokens_total",
                 "pipeline_prompt_tokens_total", "pipeline_time_to_first_token_seconds_count",
                 "pipeline_request_duration_seconds_count"):  # fmt: skip
        of_adapter, all_of = running.metric(name, adapter="sql"), running.metric(name, model="tiny")
        assert 0 < of_adapter < all_of, name
    assert running.metric("pipeline_requests_total", adapter="sql", status="400") == 1


def test_adapters_are_listed_with_their_base(running: Running) -> None:
    listed = http.get(f"{running.url}/v1/models").json()["data"]
    assert [(item["id"], item["root"], item["parent"]) for item in listed] == [
        ("tiny", "tiny", None),
        ("tiny:tone", "tiny", "tiny"),
        ("tiny:sql", "tiny", "tiny"),
    ]
    shown = http.get(f"{running.url}/v1/models/tiny:sql").json()
    assert shown["id"] == "tiny:sql"
    anthropic = http.get(f"{running.url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [item["id"] for item in anthropic["data"]] == list(NAMES)


def test_our_client_of_a_gateway_takes_the_parameter_of_the_others(running: Running) -> None:
    with OpenAIClient(running.url) as client:
        assert client.generate("Hi").text == "base"
        assert client.generate("Hi", adapter="sql").text == "sql"
        with pytest.raises(ClientError, match="tiny:poem"):
            client.generate("Hi", adapter="poem")


@pytest.mark.parametrize(
    "name", ["tiny:poem", "tiny:", ":tone", "tone", "tiny:tone:sql", "other:tone", "tiny:TONE"]
)
def test_other_names_are_not_found(running: Running, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(running, name)
    assert f"The model `{name}` does not exist; there are: {', '.join(NAMES)}" in caught.value.message
    assert not running.upstream.requests


def test_an_alias_has_the_adapters_too(running: Running) -> None:
    running.served.aliases = ("gpt:4",)
    assert ask(running, "gpt:4").choices[0].message.content == "base"
    answer = ask(running, "gpt:4:sql")
    assert (answer.choices[0].message.content, answer.model) == ("sql", "tiny:sql")


def test_no_adapter_is_answered_from_the_cache_of_another(running: Running, tmp_path: Path) -> None:
    """By the very words and by near ones, in every order, with the answers of all the others stored before."""
    backend = SqliteBackend(tmp_path / "cache.db")
    layer = SemanticLayer(backend, Letters(b"one"), Fine(), 0.5)
    cache = running.served.cache = ResponseCache(backend, semantic=layer)
    said = dict(zip(NAMES, ("base", *ADAPTERS), strict=True))
    for order in itertools.permutations(NAMES):
        for text in ("where is my parcel", "my parcel is where", "Where is my parcel?"):
            for name in order:
                assert ask(running, name, text).choices[0].message.content == said[name]
    assert cache.counters["stored"] == len(NAMES)
    assert cache.counters["hit_semantic"]
    assert cache.counters["hit_exact"]
