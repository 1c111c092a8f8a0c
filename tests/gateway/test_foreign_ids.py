"""An id of another tenant's is answered as one that does not exist, wherever an id can be given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from tests.gateway.conftest import Running, Start, keyed
from tests.support.http_clients import http, http_client

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
# Parameter of a path -> what it is the id of. Models belong to nobody.
KINDS = {"file_id": "file", "batch_id": "batch", "response_id": "response", "name": None}
# Further places for an id: method, path with its query, body.
PLACES = {
    "files after": ("file", "GET", "/v1/files?after={id}", None),
    "files after, the oldest first": ("file", "GET", "/v1/files?after={id}&order=asc", None),
    "batches after": ("batch", "GET", "/v1/batches?after={id}", None),
    "message batches after": ("message batch", "GET", "/v1/messages/batches?after_id={id}", None),
    "a batch's input": (
        "file", "POST", "/v1/batches",
        {"input_file_id": "{id}", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    "previous response": (
        "response", "POST", "/v1/responses", {"model": "tiny", "input": "Hi", "previous_response_id": "{id}"}
    ),
    "an item": (
        "item", "POST", "/v1/responses", {"model": "tiny", "input": [{"type": "item_reference", "id": "{id}"}]}
    ),
    "a false hit": ("request", "POST", "/v1/cache/false_hits", {"request_id": "{id}"}),
}  # fmt: skip


class Asker:
    """One tenant."""

    def __init__(self, running: Running, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.http = http_client(base_url=running.url, headers=headers, timeout=30)

    def ask(self, method: str, path: str, body: Any, id: str) -> tuple[Any, ...]:
        """What comes of a request with an id; the id and what is new each time left out."""
        text = None if body is None else json.dumps(body).replace("{id}", id)
        headers = {} if text is None else {"content-type": "application/json"}
        answer = self.http.request(method, path.replace("{id}", id), content=text, headers=headers)
        names = {"content-type", "content-disposition", "retry-after", "location"}
        kept = {name: value for name, value in answer.headers.items() if name in names}
        said = answer.text.replace(id, "ID").replace(answer.headers["x-request-id"], "REQUEST")
        return answer.status_code, kept, said


@pytest.fixture(scope="module")
def running(shared_start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder: Path = tmp_path_factory.mktemp("batches")
    return shared_start(
        tenants=keyed("owner", "other"), batches=BatchStorage(BatchFolder(folder)), cached=True
    )


@pytest.fixture(scope="module")
def owner(running: Running) -> Iterator[httpx.Client]:
    with Asker(running, "owner").http as client:
        yield client


@pytest.fixture(scope="module")
def other(running: Running) -> Iterator[Asker]:
    asker = Asker(running, "other")
    with asker.http:
        yield asker


def submit(client: httpx.Client) -> tuple[str, str]:
    """A new file, and a batch of it."""
    parts = {"file": ("in.jsonl", json.dumps(LINE))}
    file: str = client.post("/v1/files", files=parts, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch: str = client.post("/v1/batches", json=asked).json()["id"]
    return file, batch


@pytest.fixture(scope="module")
def ids(owner: httpx.Client, other: Asker) -> dict[str, str]:
    """What the owner has, by its kind; the other one's is older and newer."""
    submit(other.http)
    file, batch = submit(owner)
    submit(other.http)
    params = {**CHAT, "max_tokens": 8}
    asked = {"requests": [{"custom_id": "a", "params": params}]}
    message_batch = owner.post("/v1/messages/batches", json=asked).json()
    response = owner.post("/v1/responses", json={"model": "tiny", "input": "Hi"}).json()
    for _ in range(2):
        cached = owner.post("/v1/chat/completions", json={**CHAT, "temperature": 0})
    return {
        "file": file,
        "batch": batch,
        "message batch": message_batch["id"],
        "response": response["id"],
        "item": response["output"][0]["id"],
        "request": cached.headers["x-request-id"],
    }


def unknown(id: str) -> str:
    """An id of the same form that was never given."""
    return id[:-8] + "".join("0" if digit != "0" else "1" for digit in id[-8:])


def places(running: Running) -> Iterator[tuple[str, str, str, Any]]:
    """Every place where the gateway's own description says that an id can be given: kind, method, path, body."""
    described = http.get(f"{running.url}/openapi.json").json()
    for path, methods in described["paths"].items():
        names = [part.partition("}")[0] for part in path.split("{")[1:]]
        assert set(names) <= set(KINDS), "say of what it is the id"
        for name in names:
            if (kind := KINDS[name]) is not None:
                kind = "message batch" if path.startswith("/v1/messages/") else kind
                for method in methods:
                    yield kind, method.upper(), path.replace(f"{{{name}}}", "{id}"), None
    yield from PLACES.values()


def test_ids_of_others_are_unknown_ids(
    running: Running, owner: httpx.Client, other: Asker, ids: dict[str, str]
) -> None:
    seen = set()
    for kind, method, path, body in places(running):
        seen.add(kind)
        foreign = other.ask(method, path, body, ids[kind])
        assert foreign == other.ask(method, path, body, unknown(ids[kind])), (method, path)
        assert foreign[0] in ({200} if "after" in path else {400, 404}), (method, path)
    assert seen == set(ids)
    for path in ("files", "batches", "messages/batches"):
        assert not set(ids.values()) & {item["id"] for item in other.http.get(f"/v1/{path}").json()["data"]}
    # All of it is there as it was, for its owner.
    for path in (f"files/{ids['file']}", f"batches/{ids['batch']}", f"responses/{ids['response']}"):
        assert owner.get(f"/v1/{path}").status_code == 200
    assert owner.post("/v1/cache/false_hits", json={"request_id": ids["request"]}).status_code == 200
