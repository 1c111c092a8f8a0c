"""Traces as W3C Trace Context 1 has them: `traceparent` comes in, goes on to Triton, and into answers and logs.

Spans are exported by OpenTelemetry (OTLP over HTTP) where the extra `traces` is installed and an endpoint is named;
otherwise a request has a trace's ids and nothing is sent anywhere.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.errors import UserError
from pipeline.extras import install_line

_HEADER = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # environment


@dataclass(frozen=True, slots=True)
class Trace:
    """A place in a trace."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    flags: int = 1  # 1: sampled

    @classmethod
    def read(cls, header: str | None) -> Trace | None:
        """A `traceparent`; None if there is none, or none that is valid.

        >>> Trace.read("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id
        'b7ad6b7169203331'
        """
        found = _HEADER.fullmatch((header or "").strip())
        return cls(found[1], found[2], int(found[3], 16)) if found else None

    def header(self) -> str:
        """As it is sent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def hex_digits(count: int) -> str:
    """An id that tells requests apart; nothing is kept secret by it."""
    return f"{random.getrandbits(4 * count):0{count}x}"


class Span(Protocol):
    """One request within a trace."""

    @property
    def trace(self) -> Trace:
        """Where it is."""
        ...

    def end(self, attributes: Mapping[str, Any], error: str | None) -> None:
        """It is over."""
        ...


class Spans(Protocol):
    """Where spans go."""

    def begin(self, name: str, parent: Trace | None) -> Span: ...

    def close(self) -> None:
        """Send what has not been sent."""
        ...


@dataclass(frozen=True, slots=True)
class _Unsent:
    trace: Trace

    def end(self, attributes: Mapping[str, Any], error: str | None) -> None:
        """Nothing is kept."""


class Unsent:
    """Spans that only have ids."""

    def begin(self, name: str, parent: Trace | None) -> Span:  # noqa: ARG002
        own = hex_digits(16)
        return _Unsent(Trace(parent.trace_id, own, parent.flags) if parent else Trace(hex_digits(32), own, 0))

    def close(self) -> None:
        """There is nothing to send."""


def spans(endpoint: str | None) -> Spans:
    """To an OTLP endpoint such as http://127.0.0.1:4318, or the one that OpenTelemetry's environment names.

    Raises:
        UserError: an endpoint is named, and OpenTelemetry is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
        return Unsent()
    try:
        from pipeline.gateway.otlp import Otlp
    except ImportError as error:
        raise UserError(f"traces need OpenTelemetry ({error}): {install_line('traces')}") from None
    return Otlp(endpoint)
