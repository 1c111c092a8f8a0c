"""What web pages may ask of a gateway: those of other sites nothing, unless they are told; and what else is let in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from pipeline.cli.gateway import command
from pipeline.errors import InvalidInput
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.web import AllowedHosts
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http

CHAT = "/v1/chat/completions"
QUESTION = '{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}'
JSON = {"content-type": "application/json"}
ELSEWHERE = "https://evil.example"


def ask(running: Running, headers: dict[str, str], path: str = CHAT, method: str = "POST") -> httpx.Response:
    content = QUESTION if method == "POST" else None
    return http.request(method, running.url + path, content=content, headers=headers, timeout=20)


@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/")]
)
def test_a_name_that_is_not_the_gateways_reads_nothing(refusing: Running, method: str, path: str) -> None:
    """As after DNS rebinding: Host and Origin are the page's own. Probes may name it as they like."""
    for host in ("evil.example", "127.0.0.1.evil.example:8080", "localhost.evil.example", "10.0.0.7"):
        answer = ask(refusing, JSON | {"host": host, "origin": f"http://{host}"}, path, method)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_host")
        assert "gateway.allowed_hosts" in answer.json()["error"]["message"]
    assert ask(refusing, {"host": "10.0.0.7:8080"}, "/healthz", "GET").status_code == 200


@pytest.mark.parametrize("origin", [ELSEWHERE, "null", "http://localhost:1", "http://127.0.0.1"])
def test_pages_of_other_origins_are_refused(refusing: Running, origin: str) -> None:
    answer = ask(refusing, JSON | {"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_origin")
    asked = {"origin": origin, "access-control-request-method": "POST"}
    assert ask(refusing, asked, method="OPTIONS").status_code == 403


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_what_pages_send_without_asking_is_refused(refusing: Running, kind: str | None) -> None:
    answer = ask(refusing, {} if kind is None else {"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_its_own_page_and_programs_ask_as_before(start: Start) -> None:
    running = start()
    for headers in (
        {},
        {"origin": running.url},
        {"host": "localhost:1", "origin": "http://localhost:1"},
        {"host": "[::1]:8080"},
        {"content-type": "Application/JSON; charset=utf-8"},
    ):
        assert ask(running, JSON | headers).status_code == 200


def test_pages_of_a_named_origin_ask_and_read(start: Start) -> None:
    running = start(origins=["https://chat.example"])
    asked = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    preflight = ask(running, asked, method="OPTIONS")
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    allowed = preflight.headers["access-control-allow-headers"].split(",")
    assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
    deleting = asked | {"access-control-request-method": "DELETE"}
    assert ask(running, deleting, "/v1/files/file-1", method="OPTIONS").status_code == 200
    for content, status in ((QUESTION, 200), ('{"model": "other", "messages": [{}]}', 404)):
        answer = http.post(running.url + CHAT, content=content, headers=JSON | asked)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
    assert ask(running, JSON | {"origin": ELSEWHERE}).status_code == 403
    refused = ask(running, asked | {"origin": ELSEWHERE}, method="OPTIONS")
    assert "access-control-allow-origin" not in refused.headers
    assert ask(running, JSON | {"origin": running.url}).status_code == 200


def test_with_keys_the_origin_does_not_matter_but_others_cannot_read(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("tenants: {a: {keys: [secret]}}")
    running = start(tenants=Tenants.load(tmp_path / "keys.yaml"))
    headers = JSON | {"origin": ELSEWHERE, "authorization": "Bearer secret"}
    answer = ask(running, headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert ask(running, headers | {"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("listens_on", "names", "allowed", "refused"),
    [
        (
            "127.0.0.1",
            [],
            ["localhost", "LOCALHOST:80", "127.0.0.9", "[::1]:1", "localhost."],
            ["", "10.0.0.7", "x"],
        ),
        ("0.0.0.0", [], ["localhost", "10.0.0.7:80", "[fd00::1]:80"], ["", "x", "1.example", "10.0.0.7.x"]),
        ("gateway", ["*.svc"], ["gateway:8080", "a.svc", "a.b.svc:1"], ["svc", "xsvc", "a.svc.x"]),
        ("::", ["*"], ["anything", "10.0.0.7"], [""]),
    ],
)
def test_hosts(listens_on: str, names: list[str], allowed: list[str], refused: list[str]) -> None:
    hosts: Any = AllowedHosts(listens_on, names)
    assert [host for host in allowed if host not in hosts] == []
    assert [host for host in refused if host in hosts] == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("allowed_origins", "chat.example", "is not an origin"),
        ("allowed_origins", "https://chat.example/page", "is not an origin"),
        ("allowed_hosts", "https://gateway.example", "is not a host"),
    ],
)
def test_values_that_are_none(key: str, value: str, said: str) -> None:
    result = CliRunner().invoke(command, ["tiny-cpu", "--set", f"gateway.{key}=[{value}]"])
    assert isinstance(result.exception, InvalidInput)
    (fault,) = result.exception.faults
    assert (fault.key, fault.value) == (f"gateway.{key}[0]", value)
    assert said in fault.problem
