"""Counters and histograms of one gateway, rendered for Prometheus by `prometheus_client`.

Each observation is made once; `pipeline.gateway.metric_names` says under which names and labels the page shows it.
Label values are bounded: models, servers and tenants that exist, endpoints that are known, HTTP statuses. Every gateway
has a registry of its own; the library's global one, with its figures of the process, is not used.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pipeline.cache.response_cache import CacheCounters
from pipeline.client import AsyncClient
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.metric_names import BUCKETS, OTHER_VIEWS, OWN_VIEWS, View
from pipeline.gateway.readiness import GatewayStatus
from pipeline.gateway.served_model import ServedModel
from pipeline.recipe.deployment import MetricNames

# Model -> component -> number of restarts.
Restarts = Callable[[], Mapping[str, Mapping[str, int]]]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
# Of these each model has a series from the start: `increase` does not see a series begin at 1.
_STATUSES = (200, 400, 429, 499, 500, 502, 503, 504)
_CACHE_EVENTS = ("miss", "hit_exact", "stored", "failed_lookup", "failed_store", "false_hit_reported")
_COMPONENTS = ("triton", "gateway")

# Else each series has a twin with the time of its creation, which the text format shows as one more gauge.
disable_created_metrics()  # type: ignore[no-untyped-call]


def share_metrics(folder: Path, process: int) -> None:
    """Keep the counters and histograms that are made from now on in files of a folder, for `GatewayMetrics(shared=…)`.

    Args:
        process: number of this process. One that takes the place of another goes on with its files, so that no counter
            falls.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]


class GatewayMetrics(Collector):
    """Metrics of one gateway."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        *,
        names: Sequence[MetricNames] = (),
        restarts: Restarts = dict,
        shared: Path | None = None,
    ) -> None:
        """
        Args:
            models: models whose queues and caches are read whenever the metrics are.
            names: naming schemes that the page shows besides the gateway's own.
            restarts: reads how often what serves each model was restarted.
            shared: folder of `share_metrics`, whose files are added up; None shows what this process counts.
        """
        self._models, self._restarts, self._shared = models, restarts, shared
        self._views = [*OWN_VIEWS, *(view for name in names for view in OTHER_VIEWS[name])]
        self._generations: dict[int, Generation] = {}  # under way, by identity
        self._status = GatewayStatus()
        self._kv_usage: Mapping[str, float] = {}
        self._names_tenants = True
        by_operation = ("model", "operation", "adapter")
        self._counters = {
            "requests": _counter("requests", "endpoint", "model", "status", "adapter"),
            "tenant_requests": _counter("tenant_requests", "tenant", "status"),
            "tenant_tokens": _counter("tenant_tokens", "tenant", "kind"),
            "choices": _counter("choices", *by_operation, "finish_reason"),
            "retries": _counter("retries", "model"),
            "migrations": _counter("migrations", "model", "outcome"),
            "server_requests": _counter("server_requests", "model", "server"),
            "cache": _counter("cache", "model", "event"),
            "drafts": _counter("drafts", "model", "kind"),
            "limits_fallbacks": _counter("limits_fallbacks"),
        }
        self._histograms = {
            "ttft": _histogram("ttft", BUCKETS["ttft"], *by_operation),
            "itl": _histogram("itl", BUCKETS["itl"], *by_operation),
            "tpot": _histogram("tpot", BUCKETS["itl"], *by_operation),
            "duration": _histogram("duration", BUCKETS["duration"], *by_operation, "error_type"),
            "queue": _histogram("queue", BUCKETS["queue"], *by_operation),
            # As far as the gateway sees it: until the first chunk of an answer, and from there to its last.
            "prefill": _histogram("prefill", BUCKETS["duration"], *by_operation),
            "decode": _histogram("decode", BUCKETS["duration"], *by_operation),
            "tokens": _histogram("tokens", BUCKETS["tokens"], *by_operation, "kind"),
        }
        # What was counted already of what each cache and each client has counted.
        self._counted: WeakKeyDictionary[CacheCounters | AsyncClient, Mapping[str, int]] = WeakKeyDictionary()
        for model in models:
            self._begin(model)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_request(
        self, endpoint: str, model: str, status: int, tenant: str = "", adapter: str = ""
    ) -> None:
        """Count an HTTP request that was answered.

        Args:
            endpoint: path of the request, or "other".
            model: name of the model; "" if the request named none that exists.
            tenant: name of the tenant; "" if the request had no key that is known.
            adapter: LoRA adapter that the request named; "" for the base.
        """
        self._counters["requests"].labels(endpoint, model, status, adapter).inc()
        self._counters["tenant_requests"].labels(tenant, status).inc()

    def count_tokens(self, tenant: str, kind: str, tokens: int) -> None:
        """Count tokens that a tenant used; `kind` is "prompt" or "completion"."""
        self._counters["tenant_tokens"].labels(tenant, kind).inc(tokens)

    def count_limits_fallback(self) -> None:
        """Count that this gateway counted by itself what it shares with others, because it did not reach them."""
        self._counters["limits_fallbacks"].inc()

    def begin(self, generation: Generation) -> None:
        """Watch a generation for stalls, until `observe` is called."""
        self._generations[id(generation)] = generation

    def count_elsewhere(self) -> None:
        """Count what the caches and the clients of all models have counted since the last time."""
        for model in self._models.values():
            sent: dict[str, int] = defaultdict(int)
            for url, count in model.client.requests_sent.items():
                # A socket has another name after each start of the deployment.
                sent["socket" if url.startswith("unix:") else url] += count
            self._count_since("server_requests", model.name, model.client, sent)
            if model.cache is not None:
                counters = model.cache.counters
                if counters not in self._counted:
                    for event in _CACHE_EVENTS:
                        self._counters["cache"].labels(model.name, event)
                self._count_since("cache", model.name, counters, counters.as_dict())

    def _count_since(
        self, name: str, model: str, source: CacheCounters | AsyncClient, now: Mapping[str, int]
    ) -> None:
        """Add to a counter what a source has counted since the last time, by its second label."""
        counted = self._counted.get(source, {})
        for label, count in now.items():
            if new := count - counted.get(label, 0):
                self._counters[name].labels(model, label).inc(new)
        self._counted[source] = dict(now)

    def stalled(self) -> Mapping[str, int]:
        """Return how many choices of each model have begun, and had no chunk for long."""
        stalled = dict.fromkeys(self._models, 0)
        now = time.perf_counter()
        for generation in self._generations.values():
            stall_s = generation.model.stall_s
            late = [times for times in generation.times.values() if times.is_stalled(now, stall_s)]
            stalled[generation.model.name] = stalled.get(generation.model.name, 0) + len(late)
        return stalled

    def observe(self, generation: Generation, *, began: float, status: int) -> None:
        """Count the tokens of a completion that is over, and record its latencies.

        Args:
            began: arrival of the request, by `time.perf_counter()`.
            status: HTTP status that it ended with.
        """
        self._generations.pop(id(generation), None)
        model = generation.model.name
        of = (model, generation.operation, generation.adapter or "")
        observed = self._histograms
        error_type = "" if status < 400 else str(status)
        self._counters["retries"].labels(model).inc(generation.retries)
        for outcome, count in (("resumed", generation.resumed), ("ended", generation.broken)):
            self._counters["migrations"].labels(model, outcome).inc(count)
        # In the background nobody waits: latencies there say nothing of the service.
        timed = not generation.tenant.background
        if timed:
            observed["duration"].labels(*of, error_type).observe(time.perf_counter() - began)
        for times in generation.times.values():
            if timed and times.started is not None:
                observed["queue"].labels(*of).observe(times.started - times.requested)
        completion_tokens = 0
        for index, stats in generation.stats.items():
            times = generation.times[index]
            completion_tokens += stats.output_tokens or 0
            self._counters["choices"].labels(*of, times.finish_reason or "abort").inc()
            if stats.cached is None and stats.draft_tokens:
                self._counters["drafts"].labels(model, "proposed").inc(stats.draft_tokens)
                self._counters["drafts"].labels(model, "accepted").inc(stats.accepted_tokens or 0)
            if stats.cached is not None or not timed:
                continue
            if times.first_chunk is not None and times.last_chunk is not None and times.sent is not None:
                observed["ttft"].labels(*of).observe(times.first_chunk - began)
                observed["prefill"].labels(*of).observe(times.first_chunk - times.sent)
                observed["decode"].labels(*of).observe(times.last_chunk - times.first_chunk)
            observed["itl"].labels(*of).observe_all([gap_ms / 1e3 for gap_ms in stats.itl_ms])
            if stats.tpot_ms is not None:
                observed["tpot"].labels(*of).observe(stats.tpot_ms / 1e3)
        if not generation.stats:
            return
        observed["tokens"].labels(*of, "input").observe(generation.prompt_tokens)
        observed["tokens"].labels(*of, "output").observe(completion_tokens)
        self.count_tokens(generation.tenant.name, "prompt", generation.prompt_tokens)
        self.count_tokens(generation.tenant.name, "completion", completion_tokens)

    def render(
        self,
        accept: str,
        status: GatewayStatus,
        kv_usage: Mapping[str, float] | None = None,
        *,
        names_tenants: bool = True,
    ) -> tuple[bytes, str]:
        """Render all metrics.

        Args:
            accept: Accept header of the scraper, by which the format is chosen: Prometheus' text format, or
                OpenMetrics.
            status: status of all models; its numbers are shown as gauges.
            kv_usage: share of each engine's KV cache that is used, as far as that is known.
            names_tenants: whether each tenant has series of its own, or all have one, whose label is empty.

        Returns:
            The page and its content type.
        """
        self._status, self._kv_usage, self._names_tenants = status, kv_usage or {}, names_tenants
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield each family of the page."""
        self.count_elsewhere()
        samples: dict[str, list[Sample]] = defaultdict(
            list, {metric.name: metric.samples for metric in self._observed()}
        )
        for sample in self._current():
            samples[sample.name.removesuffix("_total")].append(sample)
        for view in self._views if self._names_tenants else map(View.without_tenants, self._views):
            yield view.show(samples[view.source])

    def _begin(self, model: str) -> None:
        """Make the series of a model, with zeros."""
        self._counters["retries"].labels(model)
        for outcome in ("resumed", "ended"):
            self._counters["migrations"].labels(model, outcome)
        for endpoint, operation in _OPERATIONS.items():
            for status in _STATUSES:
                self._counters["requests"].labels(endpoint, model, status, "")
            for name in ("ttft", "itl", "tpot", "queue", "prefill", "decode"):
                self._histograms[name].labels(model, operation, "")
            self._histograms["duration"].labels(model, operation, "", "")
            for kind in ("input", "output"):
                self._histograms["tokens"].labels(model, operation, "", kind)

    def _observed(self) -> Iterable[Metric]:
        """Yield counters and histograms, of this process or of all."""
        if self._shared is not None:
            # It keeps nothing: it reads the files.
            collector = MultiProcessCollector(None, str(self._shared))  # type: ignore[no-untyped-call]
            yield from collector.collect()  # type: ignore[no-untyped-call]
            return
        for observed in (*self._counters.values(), *self._histograms.values()):
            yield from observed.collect()

    def _current(self) -> Iterator[Sample]:
        """Yield samples of gauges and of others that are read at the time of a scrape."""
        status = self._status
        yield Sample("workers", {}, status.workers)
        yield Sample("worker_restarts_total", {}, status.worker_restarts)
        for model, state in status.models.items():
            for name in ("running", "waiting", "stalled"):
                yield Sample(name, {"model": model}, getattr(state, name))
            yield Sample("ready", {"model": model}, int(state.fault is None))
            for event, count in state.loss_events.items():
                yield Sample("loss_events_total", {"model": model, "event": event}, count)
        for model, usage in self._kv_usage.items():
            yield Sample("kv_usage", {"model": model}, usage)
        for model, restarts in self._restarts().items():
            for component, count in {**dict.fromkeys(_COMPONENTS, 0), **restarts}.items():
                yield Sample("restarts_total", {"model": model, "component": component}, count)


class _Histogram(Histogram):
    """A histogram that takes many observations at once: each would cost two locks, or two writes to a shared file."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe each of `amounts`."""
        self._sum.inc(sum(amounts))
        counts = [0] * len(self._upper_bounds)
        for amount in amounts:
            counts[bisect_left(self._upper_bounds, amount)] += 1
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


def _counter(name: str, *labels: str) -> Counter:
    return Counter(name, name, labels, registry=None)


def _histogram(name: str, buckets: Sequence[float], *labels: str) -> _Histogram:
    return _Histogram(name, name, labels, registry=None, buckets=buckets)
