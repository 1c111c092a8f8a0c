"""Records of requests: fields for the log line, the span and the metrics, and which cache entries answered."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.gateway.traces import Span

if TYPE_CHECKING:
    from pipeline.cache.redaction import Redaction

_REMEMBERED = 10_000  # requests


class PromptLog:
    """Prompts and answers in the log, for those who want them there.

    The judge is the response cache's (`pipeline.cache.redaction`): it finds keys, e-mail addresses, payment cards, bank
    accounts, national ids and telephone numbers. Nothing is blacked out within a text: a text that holds one is left
    out, and the line says what it holds.
    """

    def __init__(self, redactor: Redaction | None) -> None:
        """`redactor` judges texts; None: all are logged as they are."""
        self._redactor = redactor

    def fields(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a line: prompts as the engine got them, and answers as far as they came."""
        return {"prompts": list(map(self._shown, prompts)), "answers": list(map(self._shown, answers))}

    def _shown(self, text: str) -> str:
        objection = None if self._redactor is None else self._redactor.objection(text, "")
        return text if objection is None else f"[left out: holds {objection}]"


@dataclass(slots=True)
class RequestRecord:
    """Record of one request, in scope["record"]. Handlers add to `fields`.

    Attributes:
        id: the client's X-Request-ID, or a random id.
        span: span of the request.
        began: time of arrival, by `time.perf_counter()`.
        status: HTTP status sent; 499 if the client left before any was.
        outcome: status that a stream would have had, had it not been sent before the end was known; None: `status`.
        exception: cause of the error.
        fields: fields of the log line, which become attributes of the span.
        attributes: attributes of the span only.
        prompt_log: logs prompts and answers; None: neither is logged.
        headers: response headers besides its own.
        rate_limits: makes the headers that say what the tenant may still ask, if it has limits.
    """

    id: str
    span: Span
    began: float = field(default_factory=time.perf_counter)
    status: int = 499
    outcome: int | None = None
    error: str | None = None
    error_type: str | None = None
    exception: BaseException | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    prompt_log: PromptLog | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    rate_limits: Callable[[], Iterable[tuple[bytes, bytes]]] | None = None


class CacheHit(NamedTuple):
    """Entries of a model's cache that answered one request."""

    model: str
    keys: Sequence[str]


class CacheHits:
    """The last 10,000 requests that the cache answered, by tenant and request id."""

    def __init__(self) -> None:
        self._hits: OrderedDict[tuple[str, str], CacheHit] = OrderedDict()

    def remember(self, tenant: str, request_id: str, hit: CacheHit) -> None:
        """Note that a request was answered by the cache."""
        self._hits[tenant, request_id] = hit
        while len(self._hits) > _REMEMBERED:
            self._hits.popitem(last=False)

    async def take(self, tenant: str, request_id: str) -> CacheHit | None:
        """Return what answered a request, and forget it; None if nothing is known of it."""
        return self.pop(tenant, request_id)

    def pop(self, tenant: str, request_id: str) -> CacheHit | None:
        """`take` without waiting."""
        return self._hits.pop((tenant, request_id), None)
