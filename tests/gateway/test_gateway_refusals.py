"""What is answered as the fault of whoever asks, and that each answer is counted."""

from __future__ import annotations

import logging
import re
import socket
import struct
from typing import Any
from urllib.parse import quote

import openai
import pytest

from pipeline.gateway.access_log import JsonFormatter
from pipeline.printable import PrintableFormatter
from tests.gateway.conftest import Running, Start, keyed
from tests.support.http_clients import http
from tests.support.waiting import wait_for

QUESTION = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e308},
        {"repetition_penalty": 1e-320},
        {"temperature": 1e-320},
        {"top_k": 2**40},
        {"min_tokens": 2**40},
    ],
    ids=str,
)
def test_numbers_that_no_engine_has_are_refused_by_name(refusing: Running, fields: dict[str, Any]) -> None:
    chats: Any = refusing.same_client().chat.completions
    for more in ({}, {"n": 3}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            chats.create(model="tiny", messages=QUESTION, **more, extra_body=fields)
        (name,) = fields
        assert refused.value.param == name
        assert f"{name} = " in refused.value.message


def counted(running: Running) -> dict[tuple[str, str, str], int]:
    """By endpoint, model and status, without zeros."""
    page = http.get(f"{running.url}/metrics").text
    pattern = r'requests_total{adapter="",endpoint="(.*)",model="(.*)",status="(.*)"} ([0-9]+)'
    return {found[:3]: int(found[3]) for found in re.findall(pattern, page) if found[3] != "0"}


def test_every_answer_is_counted_and_names_of_others_are_no_labels(start: Start) -> None:
    running = start(tenants=keyed("key"))
    key = {"authorization": "Bearer key"}

    def post(path: str, headers: dict[str, str], **fields: Any) -> int:
        url, body = running.url + path, {"model": "tiny", "messages": QUESTION} | fields
        return http.post(url, json=body, headers=headers).status_code

    assert post(CHAT, key) == 200
    assert post(CHAT, key, temperature=9) == 400
    assert post(CHAT, key, model="elsewhere", stream=True) == 404
    assert post(CHAT, {}) == 401
    assert post(CHAT, key, messages=[{"role": "user", "content": "word " * 60}]) == 400
    assert post("/v1/embeddings", key, model="x", input=[]) == 400
    assert post("/v1/never/heard/of", key) == 404
    assert post("/nor/this", key) == 404
    assert http.get(f"{running.url}/v1/models").status_code == 401
    with socket.create_connection(("127.0.0.1", running.server.port)) as client:
        client.sendall(b"no HTTP\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    expected = {
        (CHAT, "tiny", "200"): 1,
        (CHAT, "tiny", "400"): 1,
        (CHAT, "", "400"): 1,
        (CHAT, "", "404"): 1,
        (CHAT, "", "401"): 1,
        ("/v1/embeddings", "", "400"): 1,
        ("/v1/models", "", "401"): 1,
        ("other", "", "404"): 2,
        ("other", "", "400"): 1,
    }
    wait_for(lambda: counted(running) == expected, str(expected))


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_who_leaves_while_sending_is_no_failure_of_the_server(
    start: Start, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    running = start()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
    with caplog.at_level(logging.INFO):
        for abrupt in (False, True):
            client = socket.create_connection(("127.0.0.1", running.server.port))
            client.sendall(head.encode() + b"{")
            if abrupt:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        wait_for(lambda: counted(running) == {(path, "", "499"): 2}, "two requests that were left")
    assert all(record.exc_info is None and record.levelno <= logging.INFO for record in caplog.records)


SINGLE = {
    "host": ("localhost", "evil.example"),
    "content-length": ("2", "2"),
    "content-type": ("application/json", "text/plain"),
    "transfer-encoding": ("chunked", "chunked"),
    "authorization": ("Bearer a", "Bearer b"),
    "x-api-key": ("a", "b"),
    "origin": ("http://localhost", "http://evil.example"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_header_that_stands_twice_is_refused(refusing: Running, name: str) -> None:
    """In either order, whichever of them a proxy in front had believed."""
    for values, case in ((SINGLE[name], str.lower), (SINGLE[name][::-1], str.upper)):
        headers = {"host": "localhost", "content-type": "application/json", "content-length": "2"}
        if name == "transfer-encoding":
            del headers["content-length"]
        headers.pop(name, None)
        lines = [*(f"{other}: {value}" for other, value in headers.items())]
        lines += [f"{name}: {values[0]}", f"{case(name)}: {values[1]}"]
        with socket.create_connection(("127.0.0.1", refusing.server.port), 10) as client:
            head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, "", ""])
            client.sendall(head.encode() + b"{}")
            with client.makefile("rb") as stream:
                # The server closes: what follows is no request of anybody's.
                answer = stream.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1


def test_what_a_client_sends_cannot_control_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Each record of it is one line, whoever writes which field."""
    running = start()
    nasty = "\x1b[2J\r\n2026-01-01 pipeline.gateway forged\x9b\u202e"
    body = {"model": nasty, "messages": QUESTION, "user": nasty}
    with caplog.at_level(logging.INFO):
        http.post(running.url + CHAT, json=body, headers={"x-request-id": "a\x1bb"})
        http.get(f"{running.url}/{quote(nasty)}")
        wait_for(lambda: len(caplog.records) >= 2, "two lines")
    for formatter in (PrintableFormatter("%(name)s %(message)s"), JsonFormatter()):
        lines = [formatter.format(record) for record in caplog.records]
        assert any("forged" in line for line in lines)
        assert all(line.isprintable() for line in lines)
