"""Several servers with the same model: which one gets the next request, and which rests after a failure.

The healthy one with the fewest requests under way is chosen. One that failed rests, longer each time, and is asked
again before others fail for want of it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.channel import METHODS

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0


@dataclass(frozen=True, slots=True)
class Retries:
    """Asking again what failed before its first token: connections that fail, servers that have too much to do."""

    attempts: int = 3  # in all; 1 asks once
    first_s: float = 0.05  # wait before the second; each further wait is twice as long
    longest_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts = {self.attempts}: must be 1 or more")

    def wait_s(self, failures: int) -> float:
        """How long to wait after so many failures: half of it is drawn, so that clients do not come back together."""
        most = min(self.first_s * 2.0 ** (failures - 1), self.longest_s)
        return float(most * (0.5 + 0.5 * random.random()))


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server, with the calls of its channel."""

    url: str  # host:port
    channel: Any
    infer: Any  # ModelStreamInfer
    config: Any  # ModelConfig
    ready: Any  # ModelReady
    outstanding: int = 0  # requests under way
    failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic()

    @classmethod
    def on(cls, channel: Any, url: str) -> Self:
        """The calls of a channel of gRPC, blocking or of asyncio."""

        def method(kind: Any, name: str, request: Any, reply: Any) -> Any:
            return kind(
                METHODS + name,
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


class Endpoints:
    """All servers of a client; safe to use from any number of threads."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.all = tuple(endpoints)
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def take(self, avoid: Endpoint | None = None) -> Endpoint:
        """The endpoint for the next request, which counts as under way; `avoid`: where it has just failed."""
        if len(self.all) == 1:
            chosen = self.all[0]
            chosen.outstanding += 1
            return chosen
        with self._lock:
            now, turn = time.monotonic(), next(self._turn)
            order = [self.all[(turn + at) % len(self.all)] for at in range(len(self.all))]
            chosen = min(
                order, key=lambda one: (one is avoid, max(0.0, one.rests_until - now), one.outstanding)
            )
            chosen.outstanding += 1
            return chosen

    @contextmanager
    def lent(self) -> Iterator[Endpoint]:
        """The endpoint for one call, given back after it."""
        endpoint, failed = self.take(), False
        try:
            yield endpoint
        except grpc.RpcError:
            failed = True
            raise
        finally:
            self.give_back(endpoint, failed=failed)

    def give_back(self, endpoint: Endpoint, *, failed: bool = False) -> None:
        """The request is over; `failed`: the server could not be reached, or was lost."""
        with self._lock:
            endpoint.outstanding -= 1
            if failed:
                rest = min(_FIRST_REST_S * 2**endpoint.failures, _LONGEST_REST_S)
                endpoint.failures += 1
                endpoint.rests_until = time.monotonic() + rest
            else:
                endpoint.failures, endpoint.rests_until = 0, 0.0
