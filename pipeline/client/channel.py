"""The connection: where it goes, and how it is kept. One channel carries any number of streams at once.

A stream is opened as a call with one request whose sending side is closed at once. On the wire that is
`ModelStreamInfer` as Triton speaks it, and it saves the thread that gRPC needs for a sending side that stays open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.experimental

from pipeline.client.errors import Refused

METHODS = "/inference.GRPCInferenceService/"
Metadata = tuple[tuple[str, str | bytes], ...]
_KEY, _TEXT = re.compile(r"[0-9a-z_.-]+"), re.compile(r"[ -~]*")
# gRPC's own wait grows to 120 s, so that a server that was away for minutes stays away for minutes more.
_RECONNECT_MS = (100, 1000)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Pings on a connection that is silent, so that a dead one is noticed and a quiet one is not cut by a firewall.

    A server closes connections that ping more often than it allows. 300 s is what Triton and gRPC allow by default;
    for less, start the server with `--grpc-http2-min-recv-ping-interval-without-data`.
    """

    time_s: float = 300.0
    timeout_s: float = 20.0
    while_idle: bool = False  # also while no stream is open


def target(url: str) -> str:
    """host:port for gRPC.

    >>> target("grpc://localhost:8001")
    'localhost:8001'
    """
    scheme, _, rest = url.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme not in ("", "grpc") or not host or not port.isdecimal():
        raise Refused(f"{url!r}: give host:port of the server's gRPC service (usually port 8001)")
    return f"{host}:{port}"


def metadata(headers: Mapping[str, str | bytes]) -> Metadata:
    """Headers as gRPC sends them. Refused if it could not; those whose name ends in `-bin` have bytes.

    >>> metadata({"authorization": "Bearer x"})
    (('authorization', 'Bearer x'),)
    """
    for name, value in headers.items():
        fits = isinstance(value, bytes) if name.endswith("-bin") else bool(_TEXT.fullmatch(str(value)))
        if not _KEY.fullmatch(name) or not fits:
            raise Refused(f"{name!r}: {value!r} cannot be sent as metadata")
    return tuple(headers.items())


def options(keep_alive: KeepAlive) -> list[tuple[str, int]]:
    """For a channel; messages may have any size, as in tritonclient."""
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
        ("grpc.keepalive_time_ms", round(keep_alive.time_s * 1e3)),
        ("grpc.keepalive_timeout_ms", round(keep_alive.timeout_s * 1e3)),
        ("grpc.keepalive_permit_without_calls", int(keep_alive.while_idle)),
    ]


def single_threaded() -> tuple[str, int]:
    """The thread that reads a stream waits on the connection itself: no hand-over between threads for each token."""
    return (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
