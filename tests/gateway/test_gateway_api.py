"""What clients and operators of other servers look for: names of models, health, version, limits in headers."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from pipeline import __version__
from pipeline.client.testing import Reply
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Running, Start, keyed
from tests.support.http_clients import http, http_client
from tests.support.waiting import wait_for


def get(running: Running, path: str, **headers: str) -> httpx.Response:
    return http.get(running.url + path, headers=headers, timeout=20)


def test_an_alias_names_the_model_and_metrics_have_its_own_name(start: Start) -> None:
    running = start(Reply(["ok"]), aliases=("gpt-4o", "org/Tiny"))
    client = running.client()
    for name in ("tiny", "gpt-4o", "org/Tiny"):
        assert client.completions.create(model=name, prompt="x").model == "tiny"
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert list(listed) == ["tiny", "gpt-4o", "org/Tiny"]
    assert {model["root"] for model in listed.values()} == {"tiny"}
    assert client.models.retrieve("org/Tiny").model_dump() == listed["org/Tiny"]
    with pytest.raises(openai.NotFoundError, match=r"there are: tiny, gpt-4o, org/Tiny"):
        client.completions.create(model="gpt", prompt="x")
    assert (
        '{adapter="",endpoint="/v1/completions",model="tiny",status="200"} 3.0'
        in get(running, "/metrics").text
    )
    assert "gpt-4o" not in get(running, "/metrics").text


def test_health_and_version_as_vllms(start: Start) -> None:
    running = start()
    wait_for(lambda: get(running, "/health").status_code == 200, "health", 30)
    assert (get(running, "/health").content, get(running, "/version").json()) == (
        b"",
        {"version": __version__},
    )
    running.gateway.context.draining = True
    assert get(running, "/health", host="10.0.0.7").status_code == 503


def test_headers_say_what_a_tenant_may_still_ask(start: Start) -> None:
    limits = TenantLimits(requests_per_minute=3, tokens_per_minute=1000)
    tenants = {"a": Tenant("a", limits, clock=lambda: 0.0), "b": Tenant("b", TenantLimits())}
    running = start(
        Reply(["ok"]), tenants=Tenants({sha256(key.encode()).hexdigest(): of for key, of in tenants.items()})
    )
    kinds = ("limit", "remaining", "reset")
    names = [f"x-ratelimit-{kind}-{what}" for what in ("requests", "tokens") for kind in kinds]

    def ask(key: str) -> list[str | None]:
        body = {"model": "tiny", "prompt": "one two", "max_tokens": 8}
        answer = http.post(f"{running.url}/v1/completions", json=body, headers={"api-key": key})
        return [str(answer.status_code), *(answer.headers.get(name) for name in names)]

    assert ask("a") == ["200", "3", "2", "20s", "1000", "990", "600ms"]
    assert ask("a") == ["200", "3", "1", "40s", "1000", "980", "1.2s"]
    assert ask("a") == ["200", "3", "0", "1m0s", "1000", "970", "1.8s"]
    assert ask("a") == ["429", "3", "0", "1m0s", "1000", "970", "1.8s"]
    assert ask("b") == ["200", *[None] * 6]


def test_azures_client_with_its_header_and_paths(start: Start) -> None:
    running = start(Reply(["ok"]), tenants=keyed("key"))
    client = openai.AzureOpenAI(
        azure_endpoint=running.url, api_key="key", api_version="2024-10-21", max_retries=0, timeout=20,
        http_client=http_client(timeout=20),
    )  # fmt: skip
    with client:
        messages = [{"role": "user", "content": "Hi"}]
        chat: Any = client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == "ok"
    assert (
        '{adapter="",endpoint="/v1/chat/completions",model="tiny",status="200"} 1.0'
        in get(running, "/metrics").text
    )


def test_the_description_has_every_endpoint_and_refers_to_what_is_there(described: Running) -> None:
    api = get(described, "/openapi.json").json()
    table = described.gateway.context.routes
    operations = {(method.upper(), path) for path, found in api["paths"].items() for method in found}
    assert operations == {(route.method, re.sub(r":\w+}", "}", route.path)) for route in table}
    ids = [operation["operationId"] for found in api["paths"].values() for operation in found.values()]
    assert len(ids) == len(set(ids))
    text = json.dumps(api)
    schemas = api["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/([\w.-]+)", text)) <= schemas.keys()
    page = get(described, "/docs").text
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert f'id="{name}"' in page
    chat = schemas["ChatRequest"]["properties"]
    assert (chat["temperature"]["anyOf"][0]["maximum"], "messages" in schemas["ChatRequest"]["required"]) == (
        2,
        True,
    )


def test_its_page_has_nothing_of_other_hosts(described: Running) -> None:
    page = get(described, "/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=\"(?!#|/)([^\"]*)", page.text) == []
    assert "<script" not in page.text


@pytest.fixture(scope="module")
def described(shared_start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return shared_start(batches=BatchStorage(BatchFolder(tmp_path_factory.mktemp("batches"))))
