"""/v1/messages/batches over HTTP. What Anthropic's own client makes of them: tests/clients/anthropic_python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.client.testing import Ending, Received, Reply
from pipeline.gateway.api.batches import message_batches
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage, StorageLimits
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("short_polls")

NOTHING = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}


@pytest.fixture
def begin(start: Start, tmp_path: Path) -> Callable[..., Running]:
    def begin(reply: Any = None, limits: StorageLimits | None = None, **settings: Any) -> Running:
        storage = BatchStorage(BatchFolder(tmp_path / "batches"), limits or StorageLimits())
        return start(reply or Reply(["On", " its way."]), batches=storage, **settings)

    return begin


def call(running: Running, method: str, path: str = "", key: str = "none", **more: Any) -> httpx.Response:
    url = f"{running.url}/v1/messages/batches{path}"
    # As Anthropic's client does it, also where there is no body.
    headers = {"x-api-key": key, "content-type": "application/json"}
    return http.request(method, url, headers=headers, timeout=30, **more)


def item(number: int, **params: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": f"line{number}"}]}
    return {"custom_id": f"r{number}", "params": asked | params}


def create(running: Running, *items: dict[str, Any], key: str = "none") -> Any:
    answer = call(running, "POST", key=key, json={"requests": items})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(running: Running, id: str) -> Any:
    wait_for(lambda: call(running, "GET", f"/{id}").json()["processing_status"] == "ended", "its end", 60)
    return call(running, "GET", f"/{id}").json()


def results(batch: Any) -> dict[str, Any]:
    answer = http.get(batch["results_url"], timeout=30)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    found = {line["custom_id"]: line["result"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_a_batch_from_its_requests_to_its_results(begin: Callable[..., Running]) -> None:
    running = begin()
    made = create(running, item(0), item(1, max_tokens=0), item(2, stop_sequences=["way."]))
    assert (made["type"], made["processing_status"], made["results_url"]) == (
        "message_batch",
        "in_progress",
        None,
    )
    assert made["request_counts"] == {**NOTHING, "processing": 3}
    done = ended(running, made["id"])
    assert done["request_counts"] == {**NOTHING, "succeeded": 2, "errored": 1}
    assert made["created_at"] <= done["ended_at"] <= done["expires_at"]
    found = results(done)
    assert (found["r0"]["type"], found["r0"]["message"]["content"][0]["text"]) == ("succeeded", "On its way.")
    assert found["r2"]["message"]["stop_sequence"] == "way."
    error = found["r1"]["error"]
    assert (found["r1"]["type"], error["type"]) == ("errored", "error")
    assert (error["error"]["type"], "max_tokens" in error["error"]["message"]) == (
        "invalid_request_error",
        True,
    )
    assert call(running, "DELETE", f"/{made['id']}").json() == {
        "id": made["id"],
        "type": "message_batch_deleted",
    }
    for path in ("", "/results"):
        assert call(running, "GET", f"/{made['id']}{path}").status_code == 404
    assert running.client().files.list().data == []


def test_a_cancelled_batch_keeps_what_was_answered(begin: Callable[..., Running]) -> None:
    def reply(received: Received) -> Reply:
        return Reply(["yes"]) if "line0" in received.prompt else Reply([], ending=Ending.HANG)

    running = begin(reply)
    made = create(running, *map(item, range(3)))
    wait_for(
        lambda: running.client().batches.list().data == [] and len(running.upstream.requests) > 1,
        "a second",
        60,
    )
    path = f"/{made['id']}"
    assert call(running, "GET", f"{path}/results").status_code == 404
    assert call(running, "DELETE", path).json()["error"]["type"] == "invalid_request_error"
    cancelled = call(running, "POST", f"{path}/cancel").json()
    assert (cancelled["processing_status"], bool(cancelled["cancel_initiated_at"])) == ("canceling", True)
    done = ended(running, made["id"])
    kinds = {id: result["type"] for id, result in results(done).items()}
    assert kinds in (
        {"r0": "succeeded", "r1": "canceled", "r2": "canceled"},
        dict.fromkeys(("r0", "r1", "r2"), "canceled"),
    )
    counts = done["request_counts"]
    assert counts == {**NOTHING, "succeeded": counts["succeeded"], "canceled": 3 - counts["succeeded"]}
    assert call(running, "POST", f"{path}/cancel").status_code == 400


def test_requests_that_have_expired(begin: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_batches, "WINDOW_S", 0)
    running = begin(Reply([], ending=Ending.HANG))
    done = ended(running, create(running, item(0), item(1))["id"])
    assert done["request_counts"] == {**NOTHING, "expired": 2}
    assert results(done) == {"r0": {"type": "expired"}, "r1": {"type": "expired"}}


def test_lists_by_pages_and_apart_from_openais(begin: Callable[..., Running]) -> None:
    running = begin()
    client = running.client()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny"}}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch").id
    other = client.batches.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"
    ).id
    three, two, one = [create(running, item(number))["id"] for number in range(3)]
    pages = {
        "": ([one, two, three], False), "?limit=2": ([one, two], True), f"?limit=2&after_id={two}": ([three], False),
        f"?limit=1&before_id={three}": ([two], True), f"?before_id={two}": ([one], False), "?after_id=x": ([], False),
    }  # fmt: skip
    for query, (ids, more) in pages.items():
        found = call(running, "GET", query).json()
        assert ([batch["id"] for batch in found["data"]], found["has_more"]) == (ids, more), query
        assert (found["first_id"], found["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    assert [batch.id for batch in client.batches.list()] == [other]
    assert call(running, "GET", f"/{other}").status_code == 404
    for path in ("", "/cancel"):
        asked = http.request("POST" if path else "GET", f"{running.url}/v1/batches/{one}{path}", headers={
            "content-type": "application/json"})  # fmt: skip
        assert asked.status_code == 404


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "requests: List should have at least 1 item"),
        ([item(0), item(0)], "requests.1.custom_id: is that of requests.0, too"),
        ([{**item(0), "custom_id": "a b"}], "requests.0.custom_id: String should match pattern"),
        ([item(0), item(1, model="other"), item(2, stream=True)],
         "requests.1: The model 'other' is not that of the first request, 'tiny': a batch has one.; "
         "requests.2: No answer of a batch is streamed: leave out params.stream."),
        ([item(0, model="other")], "requests.0: The model 'other' does not exist; there are: tiny."),
        ([item(0, model=None)], "requests.0: params.model must be the name of a model."),
    ],
)  # fmt: skip
def test_what_is_refused_at_once(begin: Callable[..., Running], requests: list[Any], said: str) -> None:
    running = begin()
    answer = call(running, "POST", json={"requests": requests})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["message"]) == (
        400,
        "invalid_request_error",
        error["message"],
    )
    assert said in error["message"]
    assert running.client().files.list().data == []


def test_too_many_batches_leave_no_file_behind(begin: Callable[..., Running]) -> None:
    running = begin(limits=StorageLimits(unfinished=0))
    answer = call(running, "POST", json={"requests": [item(0)]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert running.client().files.list().data == []


def test_a_gateway_without_a_place_for_batches(refusing: Running) -> None:
    assert call(refusing, "POST", json={"requests": [item(0)]}).status_code == 501
