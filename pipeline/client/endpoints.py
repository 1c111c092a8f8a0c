"""The servers of a client: addresses, gRPC channels, and which server gets the next request.

Which server that is, is said in `pipeline.client.spreading`. One that failed is avoided for a while, longer each time,
and one that is marked as ill until it is not; both are used when no other is left. Servers come and go
(`pipeline.client.discovery`): one that is gone gets no new request, and keeps its connection until those it has are
done. One channel carries any number of streams at once.

A stream is a call with one request whose sending side is closed at once. On the wire that is `ModelStreamInfer` as
Triton speaks it, and it saves the thread that gRPC needs for a sending side that stays open.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.experimental
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.discovery import is_name, is_well_formed
from pipeline.client.errors import ConnectFailed, Refused, error_from_status
from pipeline.client.settings import KeepAlive
from pipeline.client.spreading import HashRing, Spread, load_bound

Metadata = tuple[tuple[str, str | bytes], ...]

_SERVICE = "/inference.GRPCInferenceService/"
_METADATA_KEY, _METADATA_TEXT = re.compile(r"[0-9a-z_.-]+"), re.compile(r"[ -~]*")
_FIRST_COOLDOWN_S = 0.5
_LONGEST_COOLDOWN_S = 30.0

# The thread that reads a blocking stream waits on the connection itself: no hand-over between threads for each token.
SINGLE_THREADED = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


def parse_target(url: str) -> str:
    """Return `host:port` for gRPC, or `dns:NAME:PORT` as it is. Raises Refused if the URL is something else.

    >>> parse_target("grpc://localhost:8001"), parse_target("dns:triton.models:8001")
    ('localhost:8001', 'dns:triton.models:8001')
    """
    if is_name(url):
        if not is_well_formed(url):
            raise Refused(
                f"{url!r}: give dns:NAME:PORT, a DNS name and the port of the servers' gRPC service"
            )
        return url
    scheme, _, address = url.rpartition("://")
    host, _, port = address.rstrip("/").rpartition(":")
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
        infer: ModelStreamInfer; its responses are bytes, most of which are never parsed.
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
                response_deserializer=None if reply is None else reply.FromString,
            )

        unary, stream = channel.unary_unary, channel.unary_stream
        return cls(
            url,
            channel,
            infer=method(stream, "ModelStreamInfer", pb.ModelInferRequest, None),
            config=method(unary, "ModelConfig", pb.ModelConfigRequest, pb.ModelConfigResponse),
            ready=method(unary, "ModelReady", pb.ModelReadyRequest, pb.ModelReadyResponse),
        )


class EndpointPool:
    """All servers of a client, which may come and go. Safe to use from any number of threads.

    Attributes:
        all: servers that requests may be sent to.
        spread: how requests are spread over them.
        slots: requests that each server takes at once; None: not known.
        fault: reason why there are no servers, while there are none.
        requests_sent: number of requests that each server was sent, by its url; those that are gone stay.
        changed: called after servers have come or gone, in the thread that calls `update`.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint] = (),
        *,
        spread: Spread = "affinity",
        slots: int | None = None,
    ) -> None:
        self.spread, self.slots = spread, slots
        self.fault = "no address of it is known yet"
        self.requests_sent: Counter[str] = Counter()
        self.changed: Callable[[], None] = lambda: None
        # Servers that are gone, with requests that are not done or a channel that is not closed.
        self._draining: list[Endpoint] = []
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._set_all(tuple(endpoints))

    def acquire(self, avoid: Endpoint | None = None, key: int | None = None) -> Endpoint:
        """Choose the server of the next request and count the request as in flight.

        Args:
            avoid: server on which the request has just failed; chosen only if there is no other.
            key: `spreading.affinity_key` of the request; None: by load alone.

        Raises:
            ConnectFailed: there is no server.
        """
        with self._lock:
            chosen = self._choose(avoid, key, time.monotonic())
            chosen.outstanding += 1
            self.requests_sent[chosen.url] += 1
            return chosen

    def release(self, endpoint: Endpoint, *, failed: bool = False) -> None:
        """Count a request as done. If its server could not be reached or was lost (`failed`), a cooldown begins."""
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
        """Take a server for a call that generates nothing, in a `with` block.

        Raises:
            ClientError: there is no server; or the block raised a `grpc.RpcError`, which counts as its failure.
        """
        failed = False
        with self._lock:
            endpoint = self._choose(None, None, time.monotonic())
            endpoint.outstanding += 1
        try:
            yield endpoint
        except grpc.RpcError as error:
            failed = True
            raise error_from_status(error, url=endpoint.url) from None
        finally:
            self.release(endpoint, failed=failed)

    def update(self, urls: Iterable[str], connect: Callable[[str], Endpoint]) -> None:
        """Go over to other servers: requests that come now go to them, those under way end where they are.

        Args:
            urls: host:port of all servers; those that are there already stay as they are.
            connect: makes the endpoint of a server that is new.
        """
        with self._lock:
            wanted = tuple(dict.fromkeys(urls))
            if set(wanted) == {endpoint.url for endpoint in self.all}:
                return
            # One that comes back while it drains is the same again.
            known = {endpoint.url: endpoint for endpoint in (*self._draining, *self.all)}
            self._draining = [endpoint for url, endpoint in known.items() if url not in wanted]
            self._set_all(tuple(known.get(url) or connect(url) for url in wanted))
        self.changed()

    def take_drained(self) -> list[Endpoint]:
        """Return the servers that are gone and have no request any more; whoever takes them closes their channels."""
        with self._lock:
            drained = [endpoint for endpoint in self._draining if not endpoint.outstanding]
            self._draining = [endpoint for endpoint in self._draining if endpoint.outstanding]
            return drained

    @property
    def every(self) -> tuple[Endpoint, ...]:
        """All servers, with those that drain."""
        return (*self.all, *self._draining)

    def _set_all(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.all = endpoints
        self._ring = HashRing([endpoint.url for endpoint in endpoints] if self.spread == "affinity" else [])

    def _choose(self, avoid: Endpoint | None, key: int | None, now: float) -> Endpoint:
        well = [
            endpoint
            for endpoint in self.all
            if not (endpoint.ill or endpoint is avoid or endpoint.cooldown_until > now)
        ]
        if not well:
            if not self.all:
                raise ConnectFailed(f"there is no server to ask: {self.fault}")
            # The server that is the likeliest to be back.
            return min(
                self._in_turn(self.all),
                key=lambda endpoint: (
                    endpoint.ill,
                    endpoint is avoid,
                    max(0.0, endpoint.cooldown_until - now),
                    endpoint.outstanding,
                ),
            )
        if self.spread == "random":
            return random.choice(well)
        if self.spread == "affinity" and key is not None and len(well) > 1:
            requests = sum(endpoint.outstanding for endpoint in well) + 1
            # Beyond its slots a request would wait in the server, while another server may have a slot.
            bound = min(load_bound(requests, len(well)), math.inf if self.slots is None else self.slots)
            for at in self._ring.walk(key):
                endpoint = self.all[at]
                if endpoint.outstanding < bound and endpoint in well:
                    return endpoint
        return min(self._in_turn(well), key=lambda endpoint: endpoint.outstanding)

    def _in_turn(self, endpoints: Sequence[Endpoint]) -> Iterator[Endpoint]:
        """Return all of them, another server first each time, so that equal servers take turns."""
        first = next(self._turn)
        return (endpoints[(first + at) % len(endpoints)] for at in range(len(endpoints)))
