"""Tokens from the cpu engine's model to the text model beside it: one datagram for all requests that have some.

Triton carries every response by itself, through its queues and gRPC, which costs more than the token. Only the middle
of a stream comes this way: the last tokens of an answer, and everything that is not tokens, are a response of Triton,
sent after them.

A message is int64 numbers: for each request its number, how many tokens follow, and these. Numbers of requests are
random, and told to the engine's model alone. So nobody else can write into an answer, or have the engine write into
it, though /proc/net/unix shows the name of the socket to all users of the machine. Messages of other users are dropped.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import select
import socket
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import NamedTuple

from shared.refusal import RequestRefused

# Parameter of a request to the engine's model: name of the socket, and number of the request.
PARAMETER = "token_socket"
# Abstract: gone with the process that has bound it.
_ADDRESS = "\0pipeline-tokens-{}"
_TARGET = re.compile(r"([0-9a-f]{32}):([0-9a-f]{15})")
_NUMBER_BITS = 60
# Most of one message.
_MESSAGE_REQUESTS, _MESSAGE_TOKENS = 64, 64
_MESSAGE_BYTES = 8 * _MESSAGE_REQUESTS * (2 + _MESSAGE_TOKENS)
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a sender

OnTokens = Callable[[list[int]], None]


class TokenTarget(NamedTuple):
    """Where tokens of a request go: name of the socket, and number of the request there."""

    socket: str
    number: int

    @classmethod
    def read(cls, parameter: str) -> TokenTarget:
        """Read the parameter of a request.

        Raises:
            RequestRefused: It is not one that `TokenReceiver` makes.
        """
        if not (target := _TARGET.fullmatch(parameter)):
            raise RequestRefused(f"{PARAMETER} = {parameter[:64]!r}: is for the text model beside this one")
        return cls(target[1], int(target[2], 16))

    def parameter(self) -> str:
        """Write the parameter of a request."""
        return f"{self.socket}:{self.number:0{_NUMBER_BITS // 4}x}"


class TokenSender:
    """The engine's side, for one thread. Tokens wait here while the text model is behind."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._waiting: dict[str, dict[int, list[int]]] = {}  # by socket, by number

    @property
    def waits(self) -> bool:
        """Whether tokens wait to be sent."""
        return bool(self._waiting)

    def put(self, target: TokenTarget, tokens: Sequence[int]) -> None:
        """Add tokens to the next message."""
        self._waiting.setdefault(target.socket, {}).setdefault(target.number, []).extend(tokens)

    def take_back(self, target: TokenTarget) -> list[int]:
        """Return those tokens that have not been sent; they will not be."""
        return self._waiting.get(target.socket, {}).pop(target.number, [])

    def flush(self) -> list[str]:
        """Send what was put, as far as there is room. Returns the sockets that are gone."""
        gone = []
        for name, waiting in list(self._waiting.items()):
            try:
                self._send(name, waiting)
            except BlockingIOError:
                continue
            except OSError:
                gone.append(name)
            del self._waiting[name]
        return gone

    def _send(self, name: str, waiting: dict[int, list[int]]) -> None:
        while waiting:
            numbers, sent = array("q"), list(itertools.islice(waiting.items(), _MESSAGE_REQUESTS))
            for number, tokens in sent:
                some = tokens[:_MESSAGE_TOKENS]
                numbers.extend((number, len(some), *some))
            self._socket.sendto(numbers, socket.MSG_DONTWAIT, _ADDRESS.format(name))
            for number, tokens in sent:
                del tokens[:_MESSAGE_TOKENS]
                if not tokens:
                    del waiting[number]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class TokenReceiver:
    """The text model's side: hands tokens on in a thread of its own, those of several messages at once if late."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(_ADDRESS.format(self._name))
        self._buffer = bytearray(_MESSAGE_BYTES)
        self._taken: dict[int, OnTokens] = {}
        self._lock = Lock()  # guards all of these, and is held while tokens are handed on
        self._closed = False
        self._thread = Thread(target=self._run, name="tokens", daemon=True)
        self._thread.start()

    @contextmanager
    def listen(self, on_tokens: OnTokens) -> Iterator[str]:
        """Yield the parameter of a request whose tokens `on_tokens` gets until the block ends. It raises nothing."""
        target = TokenTarget(self._name, secrets.randbits(_NUMBER_BITS))
        with self._lock:
            self._taken[target.number] = on_tokens
        try:
            yield target.parameter()
        finally:
            with self._lock:
                del self._taken[target.number]

    def catch_up(self) -> None:
        """Hand on all tokens that have been sent by now."""
        with self._lock:
            ready: dict[int, list[int]] = {}
            while (numbers := self._read()) is not None:
                at = 0
                while at + 2 <= len(numbers):
                    number, count = numbers[at : at + 2]
                    begin, at = at + 2, at + 2 + max(0, count)
                    ready.setdefault(number, []).extend(numbers[begin:at])
            for number, tokens in ready.items():
                if on_tokens := self._taken.get(number):
                    on_tokens(tokens)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            poll.poll()
            if self._closed:
                return
            self.catch_up()

    def _read(self) -> list[int] | None:
        """The next message, empty if it is not of this user's engine; None if there is none."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            size, more, _, _ = self._socket.recvmsg_into([self._buffer], room, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        users = [_CREDENTIALS.unpack(data)[1] for _, kind, data in more if kind == socket.SCM_CREDENTIALS]
        if users != [os.getuid()] or size % 8:
            return []
        return memoryview(self._buffer)[:size].cast("q").tolist()
