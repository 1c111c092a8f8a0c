"""The servers of a client: addresses, gRPC channels, and which one gets the next request.

The next request goes to the healthy server with the fewest requests in flight. A server that failed is avoided for a
while, longer each time, and one that is marked as ill until it is not; both are used when no other is left. One channel
carries any number of streams at once.

A stream is a call with one request whose sending side is closed at once. On the wire that is `ModelStreamInfer` as
Triton speaks it, and it saves the thread that gRPC needs for a sending side that stays open.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.experimental
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.errors import Refused
from pipeline.client.settings import KeepAlive

Metadata = tuple[tuple[str, str | bytes], ...]

_SERVICE = "/inference.GRPCInferenceService/"
_METADATA_KEY, _METADATA_TEXT = re.compile(r"[0-9a-z_.-]+"), re.compile(r"[ -~]*")
_FIRST_COOLDOWN_S = 0.5
_LONGEST_COOLDOWN_S = 30.0

# The thread that reads a blocking stream waits on the connection itself: no hand-over between threads for each token.
SINGLE_THREADED = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


def parse_target(url: str) -> str:
    """Return `host:port` for gRPC. Raises Refused if the URL is something else.

    >>> parse_target("grpc://localhost:8001")
    'localhost:8001'
    """
    scheme, _, rest = url.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme not in ("", "grpc") or not host or not port.isdecimal():
        raise Refused(f"{url!r}: give host:port of the server's gRPC service (usually port 8001)")
    return f"{host}:{port}"


def checked_metadata(headers: Mapping[str, str | bytes]) -> Metadata:
    """Return headers as gRPC metadata. Raises Refused for a header that gRPC cannot send.

    >>> checked_metadata({"authorization": "Bearer x"})
    (('authorization', 'Bearer x'),)
    """
    for name, value in headers.items():
        fits = isinstance(value, bytes) if name.endswith("-bin") else _METADATA_TEXT.fullmatch(str(value))
        if not _METADATA_KEY.fullmatch(name) or not fits:
            raise Refused(f"{name!r}: {value!r} cannot be sent as metadata")
    return tuple(headers.items())


def channel_options(keep_alive: KeepAlive) -> list[tuple[str, int]]:
    """Return the gRPC options of a channel. Messages may have any size, as in tritonclient."""
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # gRPC's own backoff grows to 120 s: a server that was away for minutes would stay away for minutes more.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.keepalive_time_ms", round(keep_alive.time_s * 1e3)),
        ("grpc.keepalive_timeout_ms", round(keep_alive.timeout_s * 1e3)),
        ("grpc.keepalive_permit_without_calls", int(keep_alive.while_idle)),
    ]


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server and the calls that are made to it.

    Attributes:
        url: host:port.
        channel: a channel of `grpc` or `grpc.aio`.
        infer: ModelStreamInfer.
        config: ModelConfig.
        ready: ModelReady.
        outstanding: requests in flight.
        failures: failures in a row.
        cooldown_until: avoided until then, by `time.monotonic()`.
        ill: avoided as long as this is set, by whoever probes the server.
        last_chunk_at: when the last part of an answer came from it, by `time.monotonic()`.
    """

    url: str
    channel: Any
    infer: Any
    config: Any
    ready: Any
    outstanding: int = 0
    failures: int = 0
    cooldown_until: float = 0.0
    ill: bool = False
    last_chunk_at: float = -math.inf

    @classmethod
    def from_channel(cls, channel: Any, url: str) -> Self:
        """Make an endpoint of a channel of `grpc` or `grpc.aio`."""

        def method(kind: Any, name: str, request: Any, reply: Any) -> Any:
            return kind(
                _SERVICE + name,
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )

        unary, stream = channel.unary_unary, channel.unary_stream
        return cls(
            url,
            channel,
            infer=method(stream, "ModelStreamInfer", pb.ModelInferRequest, pb.ModelStreamInferResponse),
            config=method(unary, "ModelConfig", pb.ModelConfigRequest, pb.ModelConfigResponse),
            ready=method(unary, "ModelReady", pb.ModelReadyRequest, pb.ModelReadyResponse),
        )


class EndpointPool:
    """All servers of a client. Safe to use from any number of threads."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.all = tuple(endpoints)
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def acquire(self, avoid: Endpoint | None = None) -> Endpoint:
        """Choose the server of the next request and count the request as in flight.

        Args:
            avoid: server on which the request has just failed; chosen only if there is no other.
        """
        with self._lock:
            now, turn = time.monotonic(), next(self._turn)
            order = [self.all[(turn + at) % len(self.all)] for at in range(len(self.all))]
            chosen = min(
                order,
                key=lambda one: (
                    one.ill,
                    one is avoid,
                    max(0.0, one.cooldown_until - now),
                    one.outstanding,
                ),
            )
            chosen.outstanding += 1
            return chosen

    def release(self, endpoint: Endpoint, *, failed: bool = False) -> None:
        """Count a request as done.

        Args:
            endpoint: server that `acquire` chose.
            failed: the server could not be reached, or was lost; its cooldown begins.
        """
        with self._lock:
            endpoint.outstanding -= 1
            if failed:
                cooldown_s = min(_FIRST_COOLDOWN_S * 2**endpoint.failures, _LONGEST_COOLDOWN_S)
                endpoint.failures += 1
                endpoint.cooldown_until = time.monotonic() + cooldown_s
            else:
                endpoint.failures, endpoint.cooldown_until = 0, 0.0

    @contextmanager
    def lease(self) -> Iterator[Endpoint]:
        """Acquire a server for one call in a `with` block; `grpc.RpcError` counts as its failure."""
        endpoint, failed = self.acquire(), False
        try:
            yield endpoint
        except grpc.RpcError:
            failed = True
            raise
        finally:
            self.release(endpoint, failed=failed)
