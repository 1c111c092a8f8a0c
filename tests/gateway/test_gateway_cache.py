"""The response cache behind the gateway: what fails inside it costs its hits and no request; `ttl_s` of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from pipeline.cache.near_hits import NearHitLog
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.decision import default_verifier
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.cache.sqlite import SqliteBackend
from pipeline.cli.cache import command
from pipeline.client.testing import Reply
from tests.gateway.conftest import Running, Start, keyed
from tests.support.cache_asking import Fine, Letters, broken
from tests.support.http_clients import http
from tests.support.waiting import wait_for


def ask(running: Running, question: str, *, stream: bool = False) -> str:
    """The text of an answer, however it comes; every request must be answered."""
    chats = running.client().chat.completions
    messages = [{"role": "user", "content": question}]
    if stream:
        chunks = chats.create(model="tiny", messages=messages, temperature=0, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return str(chats.create(model="tiny", messages=messages, temperature=0).choices[0].message.content)


@pytest.mark.parametrize(
    ("part", "method", "counter"),
    [
        ("backend", "remote", "failed_lookup"),
        ("backend", "get", "failed_lookup"),
        ("backend", "near", "failed_lookup"),
        ("backend", "put", "failed_store"),
        ("embedder", "__call__", "failed_embedding"),
        ("verifier", "decide", "failed_comparison"),
        ("redactor", "objection", "failed_store"),
    ],
)
def test_requests_are_answered_whatever_part_of_the_cache_raises(
    start: Start, tmp_path: Path, part: str, method: str, counter: str
) -> None:
    running = start(Reply(["a", "b"]))
    running.served.cache = broken(SqliteBackend(tmp_path / "cache.db"), part, method)
    questions = ["where is my parcel", "Where is my parcel?", "my parcel is where"]
    assert [ask(running, text, stream=stream) for stream in (False, True) for text in questions] == ["ab"] * 6
    page = http.get(f"{running.url}/metrics").text
    line = next(line for line in page.splitlines() if f'event="{counter}"' in line)
    assert float(line.split()[-1]) >= 1


def test_options_of_a_command_are_asked_about(start: Start, tmp_path: Path) -> None:
    """The very question that once failed, and its neighbour."""
    running, backend = start(Reply(["no"])), SqliteBackend(tmp_path / "cache.db")
    layer = SemanticLayer(backend, Letters(b"one"), default_verifier(None), 0.5)
    cache = running.served.cache = ResponseCache(backend, semantic=layer)
    undo = ["How do I undo rm -rf in linux?", "How do I undo rm in linux?", "how do I undo rm -rf in Linux"]
    assert [ask(running, question) for question in undo] == ["no"] * 3
    assert cache.counters.as_dict() == {"hit_semantic": 1, "miss": 2, "stored": 2}


COLOR = [{"role": "user", "content": "Name a colour."}]
RECIPES = 86_400  # the cache's own


def color(running: Running, **fields: Any) -> str:
    answer = running.client().chat.completions.create(
        model="tiny", messages=COLOR, temperature=0, extra_body=fields
    )
    return str(answer.choices[0].message.content)


def test_an_answer_is_served_again_as_long_as_its_request_said(start: Start) -> None:
    running = start([Reply(["red"]), Reply(["blue"])], cached=True)
    assert color(running, ttl_s=0.05) == "red"
    wait_for(lambda: color(running, ttl_s=RECIPES) == "blue", "the end of its time")
    assert [color(running), color(running, ttl_s=1)] == ["blue"] * 2
    assert len(running.upstream.requests) == 2


def test_no_longer_than_the_recipe_allows(start: Start) -> None:
    running = start(cached=True)
    wrong: list[tuple[Any, str]] = [
        (RECIPES + 1, "at most 86400 s"),
        (0, "greater than 0"),
        ("long", "a valid number"),
    ]
    for ttl_s, said in wrong:
        with pytest.raises(openai.BadRequestError, match=f"ttl_s: .*{said}") as refused:
            color(running, ttl_s=ttl_s)
        assert refused.value.param == "ttl_s"
    assert not running.upstream.requests


def test_where_there_is_no_cache_any_time_is_kept_to(start: Start) -> None:
    assert color(start(), ttl_s=10 * RECIPES) == "Hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_answer_of_the_cache_is_reported_and_removed(start: Start, *, stream: bool) -> None:
    running = start([Reply(["no"]), Reply(["yes"])], cached=True, tenants=keyed("shop", "other"))

    def post(path: str, key: str = "shop", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return http.post(f"{running.url}{path}", json=body, headers=headers, timeout=20)

    def ask() -> httpx.Response:
        messages = [{"role": "user", "content": "Where is my parcel?"}]
        answer = post("/v1/chat/completions", model="tiny", messages=messages, temperature=0, stream=stream)
        assert answer.status_code == 200
        return answer

    reports = "/v1/cache/false_hits"
    generated = ask()
    wait_for(
        lambda: running.served.cache is not None and running.served.cache.counters["stored"] == 1, "storing"
    )
    hit = ask()
    assert (hit.headers["x-cache"], "no" in hit.text) == ("exact", True)
    about = {"request_id": hit.headers["x-request-id"]}
    # What the model said, what another tenant was told, and what is no report.
    assert post(reports, request_id=generated.headers["x-request-id"]).status_code == 404
    assert post(reports, "other", **about).json()["error"]["code"] == "cache_hit_not_found"
    assert post(reports, id="x").status_code == 400
    assert post(reports, **about).json() == {
        "object": "cache.false_hit", **about, "model": "tiny", "removed": 1
    }  # fmt: skip
    assert post(reports, **about).status_code == 404
    again = ask()
    assert (again.headers["x-cache"], "yes" in again.text) == ("miss", True)
    page = http.get(f"{running.url}/metrics").text
    assert 'pipeline_cache_events_total{event="false_hit_reported",model="tiny"} 1.0' in page


def test_what_a_person_marks_as_wrong_is_counted_when_metrics_are_read(start: Start, tmp_path: Path) -> None:
    running, backend = start(Reply(["no"])), SqliteBackend(tmp_path / "cache.db")
    log = NearHitLog(SqliteBackend(tmp_path / "cache.near-hits.db"))
    layer = SemanticLayer(backend, Letters(b"one"), Fine(), 0.5)
    cache = running.served.cache = ResponseCache(backend, semantic=layer, near_hits=log)
    assert [ask(running, text) for text in ("where is my parcel", "Where is my parcel?")] == ["no"] * 2
    assert cache.counters["hit_semantic"] == 1
    log.flush()
    line = 'pipeline_cache_events_total{event="false_hit_reported",model="tiny"}'
    assert f"{line} 0.0" in http.get(f"{running.url}/metrics").text
    marked = CliRunner().invoke(
        command,
        ["review", str(tmp_path / "cache.db"), "--pairs", str(tmp_path / "pairs.jsonl")],
        input="w\n",
    )
    assert marked.exit_code == 0, marked.output
    for _ in range(2):
        assert f"{line} 1.0" in http.get(f"{running.url}/metrics").text
    assert ask(running, "Where is my parcel?") == "no"
    assert cache.counters["hit_semantic"] == 1, "the answer has gone"
