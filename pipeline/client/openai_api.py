"""Blocking client of OpenAI's API, such as the gateway's, for `pipeline stream`, `chat` and `generate`.

    with OpenAIClient("http://localhost:8080/v1") as client, client.stream("Once upon a time") as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)

It has the streams, figures and errors of `Client`, and neither its retries nor its several servers. Written against
OpenAI's chat completions and completions as of 2026, streamed by server-sent events.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import urlsplit

from pipeline.client.answer import Answer, Cached, Chunk, FinishReason, Stats, timing
from pipeline.client.errors import (
    BetweenTokensDeadline,
    Busy,
    Cancelled,
    ClientError,
    ConnectFailed,
    FirstTokenDeadline,
    ModelNotFound,
    Refused,
    ServerFailed,
    ServerLost,
    one_line,
)
from pipeline.client.sampling import Sampling
from pipeline.client.settings import Timeouts
from pipeline.models.chat_template import Message

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
_CACHED = {"exact": Cached("exact"), "semantic": Cached("semantic"), "shared": Cached("shared")}
# Where a chunk of a chat has its text; the last two are reasoning, as vLLM called it until 0.11 and calls it since.
_TEXTS = ("content", "reasoning_content", "reasoning")
_BUSY = (429, 503)
_TIMEOUTS = Timeouts()


class OpenAIClient:
    """A model of a server of OpenAI's API. Streams may run in several threads."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        defaults: Sampling | None = None,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: http://host:port or https://host, with or without /v1.
            model: name that requests give; None for the only one of the server.
            key: API key.
            defaults: sampling parameters of all requests.

        Raises:
            Refused: the address is malformed.
        """
        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self._place, self._model = urlsplit(self.url), model
        try:
            usable = bool(self._place.hostname) and (self._place.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise Refused(f"{url!r}: give http://host:port/v1")
        self._headers = {"content-type": "application/json"}
        self._headers |= {"authorization": f"Bearer {key}"} if key else {}
        self._defaults: Sampling = defaults or {}
        self._open: set[OpenAIStream] = set()
        self._guard = threading.Lock()
        self.closed = False

    @property
    def model_name(self) -> str:
        """Name of the model; the server is asked for it the first time. Raises the errors of `model`."""
        if self._model is None:
            self.model()
        assert self._model is not None, "`model` raises otherwise"
        return self._model

    def model(self) -> None:
        """Look whether the server is there and has the model.

        Raises:
            Refused: no model was named, and the server has several; or the key is not known.
            ModelNotFound: it has no such model.
            ConnectFailed: it cannot be reached.
        """
        try:
            with contextlib.closing(self.exchange("GET", "/models")) as exchange:
                names = [str(model["id"]) for model in json.loads(exchange.response.read())["data"]]
        except (ValueError, LookupError, TypeError, OSError, http.client.HTTPException):
            raise ServerFailed(f"{self.url}/models: is not a list of models") from None
        if self._model is None and names and all(name.startswith(f"{names[0]}:") for name in names[1:]):
            # The only model, and its adapters.
            self._model = names[0]
        elif self._model is None:
            raise Refused(f"{self.url} has several models: name one of {', '.join(names)}")
        elif self._model not in names:
            raise ModelNotFound(f"{self.url} has no model {self._model}, but {', '.join(names)}")

    def stream(self, prompt: str | Sequence[Message], **sampling: Any) -> OpenAIStream:
        """Prepare an answer that comes chunk by chunk; it is sent by `with`.

        Args:
            prompt: a text, which is sent without a chat template, or the messages of a chat.
            sampling: parameters of `Sampling`, besides the defaults.
        """
        chat = not isinstance(prompt, str)
        values = {**self._defaults, **sampling}
        adapter = values.pop("adapter", None)
        body = {
            "model": f"{self.model_name}:{adapter}" if adapter else self.model_name,
            "messages" if chat else "prompt": list(prompt) if chat else prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in values.items() if value is not None},
        }
        return OpenAIStream(self, "/chat/completions" if chat else "/completions", body)

    def generate(self, prompt: str | Sequence[Message], **sampling: Any) -> Answer:
        """Generate a complete answer. See `stream`."""
        with self.stream(prompt, **sampling) as stream:
            for _ in stream:
                pass
        return Answer(stream.text, stream.finish_reason or "unknown", stream.stats, stream.request_id)

    def exchange(self, method: str, path: str, body: object = None) -> _Exchange:
        """Send a request, and return as soon as the headers of its response are there.

        Raises:
            ClientError: the server cannot be reached, or answered with an error.
        """
        place = self._place
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(place.hostname), place.port, timeout=_TIMEOUTS.connect_s)
        try:
            connection.connect()
            connection.sock.settimeout(_TIMEOUTS.first_token_s)
            wire = connection.sock
            text = None if body is None else json.dumps(body).encode()
            connection.request(method, f"{place.path}{path}", text, self._headers)
            made = _Exchange(connection, wire, connection.getresponse())
        except TimeoutError:
            connection.close()
            raise FirstTokenDeadline(
                f"no answer from {self.url} within {_TIMEOUTS.first_token_s} s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectFailed(f"no answer from {self.url}: {error or type(error).__name__}") from None
        if made.response.status != HTTPStatus.OK:
            with contextlib.closing(made):
                raise self._error_of(made.response)
        return made

    def _error_of(self, response: http.client.HTTPResponse) -> ClientError:
        try:
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        try:
            text = str(json.loads(text)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            text = one_line(text) if text else response.reason
        if response.status in _BUSY:
            return Busy(f"the server has too much to do: {text}")
        if response.status == HTTPStatus.NOT_FOUND:
            return ModelNotFound(text)
        kind = Refused if response.status < HTTPStatus.INTERNAL_SERVER_ERROR else ServerFailed
        return kind(f"HTTP {response.status}: {text}")

    def enter(self, stream: OpenAIStream) -> None:
        """Note a stream that is open. Raises Cancelled if the client is closed."""
        with self._guard:
            if self.closed:
                raise Cancelled("the client is closed")
            self._open.add(stream)

    def leave(self, stream: OpenAIStream) -> None:
        """Forget a stream."""
        with self._guard:
            self._open.discard(stream)

    def close(self) -> None:
        """End all streams, on the server too."""
        with self._guard:
            self.closed, streams = True, list(self._open)
        for stream in streams:
            stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenAIStream:
    """One answer, to be used in `with`: iterate over its chunks.

    Attributes:
        text: text so far.
        finish_reason: why it ended; None before.
        request_id: id of the answer at the server.
    """

    def __init__(self, client: OpenAIClient, path: str, body: Mapping[str, Any]) -> None:
        self._client, self._path, self._body = client, path, body
        self._exchange: _Exchange | None = None
        self._cancelled = False
        self._began = self._ended = time.perf_counter()
        self._times: list[float] = []
        self._chunks = 0
        self._usage: Mapping[str, Any] = {}
        self._cached: Cached | None = None
        self.text, self.request_id = "", ""
        self.finish_reason: FinishReason | None = None

    @property
    def stats(self) -> Stats:
        """Figures so far, by the clock of this process; token counts are the server's."""
        return Stats(
            **timing(self._began, self._times, self._ended),
            input_tokens=self._usage.get("prompt_tokens"),
            output_tokens=self._usage.get("completion_tokens"),
            cached=self._cached,
        )

    def __enter__(self) -> Self:
        self._client.enter(self)
        self._began = self._ended = time.perf_counter()
        try:
            self._exchange = self._client.exchange("POST", self._path, self._body)
        except BaseException:
            self._client.leave(self)
            raise
        self._cached = _CACHED.get(self._exchange.response.headers.get("x-cache", "").partition(";")[0])
        return self

    def __iter__(self) -> Iterator[Chunk]:
        for event in self._events():
            self.request_id = self.request_id or str(event.get("id") or "")
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                part = next((text for name in _TEXTS if (text := delta.get(name))), choice.get("text")) or ""
                reason = choice.get("finish_reason")
                self.finish_reason = _REASONS.get(reason, "unknown") if reason else None
                if part:
                    self._note(part)
                if part or reason:
                    yield Chunk(part, self._chunks, self.finish_reason, cached=self._cached)
                    self._chunks += 1

    def _note(self, part: str) -> None:
        self._ended = time.perf_counter()
        if not self._times and self._exchange is not None:
            self._exchange.wire.settimeout(_TIMEOUTS.between_tokens_s)
        self._times.append(self._ended)
        self.text += part

    def _events(self) -> Iterator[Mapping[str, Any]]:
        assert self._exchange is not None, "iterate in `with`"
        try:
            for line in self._exchange.response:
                if self._cancelled:
                    break
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    self._ended = time.perf_counter()
                    return
                if data:
                    yield self._event(data)
        except TimeoutError:
            kind = BetweenTokensDeadline if self._times else FirstTokenDeadline
            raise kind(f"{self._client.url} has sent nothing for too long") from None
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
        else:
            why = "it ended without [DONE]"
        if self._cancelled:
            raise Cancelled("the answer was stopped")
        raise ServerLost(f"the server was lost in the middle of the answer: {why}")

    def _event(self, data: bytes) -> Mapping[str, Any]:
        try:
            event: Mapping[str, Any] = json.loads(data)
            error = event.get("error")
            text = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, AttributeError):
            raise ServerFailed(f"{self._client.url} sent no JSON object") from None
        if error:
            raise ServerFailed(str(text))
        return event

    def cancel(self) -> None:
        """Stop the answer, on the server too, which sees that its reader is gone. May be called in another thread."""
        self._cancelled = True
        if self._exchange is not None:
            with contextlib.suppress(OSError):
                self._exchange.wire.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self._client.leave(self)
        if self._exchange is not None:
            self._exchange.close()


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request and its response, on a connection of their own."""

    connection: http.client.HTTPConnection
    # The socket, which the connection may forget while the response is still read.
    wire: socket.socket
    response: http.client.HTTPResponse

    def close(self) -> None:
        """End the connection."""
        self.response.close()
        self.connection.close()
        self.wire.close()
