"""Triton's HTTP behind a guard: what is asked for, from where, and how large and deep its JSON is, is checked before.

Each of these ends Triton 24.10: a few megabytes of `[` (newer ones take 100 levels, as this does), a body in a million
chunks, a compressed one that becomes large, a tensor of 200 bytes whose shape says 2^40, and a request for an output's
2^40 likeliest classes. What goes on is a request written anew: a method and a path of the list, few headers, a length,
and JSON that has been read. Inference, health, metadata and statistics are there
(https://github.com/kserve/open-inference-protocol, and Triton's extensions for statistics, generate and binary
tensors); what administers Triton is not.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import httptools
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.gateway.api.sse import wait_for_disconnect
from pipeline.gateway.errors import ApiError
from pipeline.gateway.web import JSON, AllowedHosts, WebGuard

_BINARY = "application/octet-stream"
_MODEL = r"/v2/models/[\w.-]{1,200}(?:/versions/\d{1,9})?"
_READ = re.compile(
    rf"/v2/?|/v2/health/(?:live|ready)|/v2/models/stats|{_MODEL}(?:/(?:ready|config|stats)|/?)"
)
_ASK = re.compile(rf"{_MODEL}/(infer|generate|generate_stream)")
# Requests keep these headers, and answers all but those of the connection.
_KEPT = (b"content-type", b"accept", b"traceparent", b"tracestate")
_OF_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding")
_HEADER_LENGTH = b"inference-header-content-length"
_PIECE_BYTES = 64 * 2**10
_CONNECT_S = 5.0
_WIDEST_BYTES = 8  # of an element of a tensor
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class TritonHttpLimits:
    """Limits of what requests bring.

    Attributes:
        body_bytes: Longest body, and largest tensor; Triton's own limit, where it has one, is the same.
        json_bytes: Longest JSON, which is held until it has been read.
        held_bytes: JSON of all requests together.
        depth: Lists and objects within each other; as `HTTP_MAX_JSON_NESTING_DEPTH` of newer Tritons.
        parts: Texts, lists and objects in the JSON of a request, each of which becomes an object in memory.
    """

    body_bytes: int = 64 * 2**20
    json_bytes: int = 8 * 2**20
    held_bytes: int = 64 * 2**20
    depth: int = 100
    parts: int = 200_000


class JsonDepth:
    """Follows how deep a JSON text is nested. `feed` takes the text in pieces.

    It is no parser: what it takes for a string, a parser does, too, up to the first place at which that gives up.
    """

    _MARK = re.compile(rb'\\.?|["\[\]{}]', re.DOTALL)

    def __init__(self, limits: TritonHttpLimits) -> None:
        self._limits = limits
        self._depth = self._parts = 0
        self._in_string = self._escaped = False

    def feed(self, piece: bytes) -> None:
        """Take in a piece. Raises ApiError if the text is nested too deep, or has too many parts."""
        begin, self._escaped = int(self._escaped), False
        for match in self._MARK.finditer(piece, begin):
            mark = match[0]
            if mark == b'"':
                self._parts += self._in_string
                self._in_string = not self._in_string
            elif mark == b"\\":
                # The last byte: what it escapes comes with the next piece.
                self._escaped = True
            elif self._in_string or len(mark) > 1:
                continue
            elif mark in b"[{":
                self._parts += 1
                self._depth += 1
                if self._depth > self._limits.depth:
                    raise ApiError(400, f"The JSON is nested deeper than {self._limits.depth} levels")
            else:
                self._depth -= 1
        if self._parts > self._limits.parts:
            raise ApiError(413, f"The JSON has more than {self._limits.parts} texts, lists and objects")


class TritonHttp:
    """ASGI application that asks Triton. `guarded` is what a port may show."""

    def __init__(self, socket_path: str, limits: TritonHttpLimits | None = None) -> None:
        """`socket_path` is that of the socket on which Triton's HTTP listens."""
        self.limits = limits or TritonHttpLimits()
        self._path = socket_path
        self._buffered = 0

    def guarded(self, hosts: AllowedHosts) -> ASGIApp:
        """Make the application that refuses what a web page of another site may have sent; see `WebGuard`."""
        # tritonclient sends no content type. Where a page sends none, its browser names the page's origin.
        types = (JSON, _BINARY, "")
        return WebGuard(
            self,
            hosts,
            (),
            keys=False,
            content_types=types,
            refusal=lambda _, fault: _refusal(fault),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        buffered = _BufferedBytes(self)
        try:
            async with aclosing(self._request(scope, receive, buffered)) as request:
                await self._exchange(request, receive, send)
        except ApiError as error:
            await _refusal(error)(scope, receive, send)
        except _ClientLeft:
            pass
        except ConnectionError:
            # So that the client sees that the answer is not whole.
            scope["peer"].abort()
        finally:
            buffered.release()

    async def _request(
        self, scope: Scope, receive: Receive, buffered: _BufferedBytes
    ) -> AsyncGenerator[bytes]:
        """Yield the bytes of the request to Triton; the first of them when it is known that it is harmless."""
        headers = dict(scope["headers"])
        path = scope["raw_path"].decode("latin-1")
        call = self._check_call(scope["method"], path)
        if call is None:
            yield _head(scope["method"], path, headers, 0)
            return
        if b"content-encoding" in headers:
            raise ApiError(415, "Bodies cannot be compressed here: leave out the header Content-Encoding")
        declared = int(headers[b"content-length"]) if b"content-length" in headers else None
        if declared is not None and declared > self.limits.body_bytes:
            raise ApiError(413, f"The body is longer than {self.limits.body_bytes} bytes")
        text = None
        if call == "infer" and _HEADER_LENGTH in headers:
            if not re.fullmatch(rb"\d{1,9}", headers[_HEADER_LENGTH]):
                raise ApiError(400, "Inference-Header-Content-Length is not a number of bytes")
            text = int(headers[_HEADER_LENGTH])
            if declared is None:
                raise ApiError(411, "Binary tensors need the header Content-Length")
            if text > declared:
                raise ApiError(
                    400, f"Inference-Header-Content-Length is {text}, and the body has {declared} bytes"
                )
        body = _body(scope, receive)
        depth, json_bytes = JsonDepth(self.limits), bytearray()
        async for piece in body:
            more = piece if text is None else piece[: text - len(json_bytes)]
            if len(json_bytes) + len(more) > self.limits.json_bytes:
                raise ApiError(413, f"The JSON is longer than {self.limits.json_bytes} bytes")
            buffered.add(len(piece))
            try:
                depth.feed(more)
            except ApiError:
                await _drain(body, self.limits.json_bytes)
                raise
            json_bytes += piece
            if text is not None and len(json_bytes) >= text:
                break
        written = rewritten(json_bytes if text is None else json_bytes[:text], self.limits)
        if text is None:
            yield _head("POST", path, headers, len(written))
            yield written
            return
        assert declared is not None, "it was checked"
        yield _head("POST", path, headers, declared - text + len(written), len(written))
        yield written + json_bytes[text:]
        async for piece in body:
            yield piece

    def _check_call(self, method: str, path: str) -> str | None:
        """The kind of a call that has a body; None for a call that only reads. Raises ApiError for all others."""
        asks = _ASK.fullmatch(path)
        if asks is not None:
            if method != "POST":
                raise ApiError(405, "Inference takes the method POST")
            return asks[1]
        if _READ.fullmatch(path) is None:
            raise ApiError(403, "This API is restricted: inference, health, metadata and statistics are open")
        if method != "GET":
            raise ApiError(405, "This takes the method GET")
        return None

    async def _exchange(self, request: AsyncGenerator[bytes], receive: Receive, send: Send) -> None:
        """Send a request to Triton and its answer to the client, until either has ended."""
        first = await anext(request)
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            raise ApiError(
                503, "Triton does not answer: it is started, or has ended", retry_after_s=1
            ) from None
        try:
            # Triton may answer, and close, before it has read all.
            with suppress(ConnectionError):
                writer.write(first)
                async for piece in request:
                    writer.write(piece)
                    await writer.drain()
            answering = asyncio.ensure_future(_Answer(send).relay(reader))
            leaving = asyncio.ensure_future(wait_for_disconnect(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not answering.done():
                    answering.cancel()
            if answering.done() and not answering.cancelled():
                answering.result()
        finally:
            # Triton cancels what it still computes for this connection.
            writer.transport.abort()


def rewritten(text: bytes | bytearray, limits: TritonHttpLimits) -> bytes:
    """Read the JSON of an inference, and write it anew, so that Triton reads what was read here.

    Args:
        text: JSON that is not nested too deep.

    Raises:
        ApiError: it is no JSON, or would harm Triton.
    """
    if not text:
        return b""
    try:
        document = json.loads(text)
        written = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
            "utf-8"
        )
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}") from None
    if not isinstance(document, dict):
        return written
    for tensor in _objects(document.get("inputs")):
        shape = tensor.get("shape")
        sizes = [size for size in shape if isinstance(size, int)] if isinstance(shape, list) else []
        if _WIDEST_BYTES * prod(sizes) > limits.body_bytes or any(size < 0 for size in sizes):
            raise ApiError(400, f"The shape {str(shape)[:_MAX_SHOWN]} of an input is too large")
    for output in _objects(document.get("outputs")):
        if "classification" in (output.get("parameters") or ()):
            raise ApiError(400, "The classes of an output cannot be asked for here")
    return written


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    yield from (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))


class _ClientLeft(Exception):
    """The client has closed the connection."""


class _BufferedBytes:
    """Bytes that a request holds in memory, of those that all requests may hold."""

    def __init__(self, owner: TritonHttp) -> None:
        self._owner, self._bytes = owner, 0

    def add(self, count: int) -> None:
        """Take more. Raises ApiError if all hold too many."""
        if self._owner._buffered + count > self._owner.limits.held_bytes:
            raise ApiError(503, "Too many large requests are under way", code="overloaded", retry_after_s=1)
        self._owner._buffered += count
        self._bytes += count

    def release(self) -> None:
        """Give all back."""
        self._owner._buffered -= self._bytes
        self._bytes = 0


class _Answer:
    """An answer of Triton's on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._begun = self._ended = False
        self._pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _OF_CONNECTION:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._ended = True

    async def relay(self, reader: asyncio.StreamReader) -> None:
        """Pass the answer on. Raises ApiError if Triton ends before it begins, and ConnectionError if within it."""
        started = False
        while not self._ended:
            data = await self._read(reader)
            if not data:
                if started:
                    raise ConnectionError("Triton ended within its answer")
                raise ApiError(502, "Triton ended without an answer", code="upstream_lost", retry_after_s=1)
            self._parser.feed_data(data)
            if self._begun and not started:
                started = True
                status = self._parser.get_status_code()
                await self._send({"type": "http.response.start", "status": status, "headers": self._headers})
            if started and self._pieces:
                body, self._pieces = b"".join(self._pieces), []
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(_PIECE_BYTES)
        except ConnectionError:
            return b""


def _head(
    method: str, path: str, headers: dict[bytes, bytes], length: int, header_length: int | None = None
) -> bytes:
    """Write the head of a request to Triton."""
    lines = [f"{method} {path} HTTP/1.1".encode("ascii"), b"Host: localhost", b"Connection: close"]
    lines += [name + b": " + headers[name] for name in _KEPT if name in headers]
    lines += [f"Content-Length: {length}".encode("ascii")]
    if header_length is not None:
        lines += [_HEADER_LENGTH + f": {header_length}".encode("ascii")]
    return b"\r\n".join([*lines, b"", b""])


async def _body(scope: Scope, receive: Receive) -> AsyncGenerator[bytes]:
    """Yield a body in pieces that take a moment each."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        if scope.get("late"):
            raise ApiError(408, "The body did not come in time")
        body = message.get("body", b"")
        for begin in range(0, len(body), _PIECE_BYTES):
            yield body[begin : begin + _PIECE_BYTES]
            await asyncio.sleep(0)
        if not message.get("more_body"):
            return


async def _drain(body: AsyncGenerator[bytes], most: int) -> None:
    """Read what is left of a body, up to so many bytes: who is still sending would not see the answer."""
    async for piece in body:
        most -= len(piece)
        if most < 0:
            return


def _refusal(error: ApiError) -> Response:
    """An answer as Triton's clients read it: {"error": text}."""
    # What is left of the request is not read.
    headers = {"connection": "close"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(round(error.retry_after_s))
    return Response(json.dumps({"error": error.message}), error.status, headers, media_type=JSON)
