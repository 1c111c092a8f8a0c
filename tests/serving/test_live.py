"""Figures of a deployment from its pages, which `prometheus_client` writes here as the gateway's are written."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipeline.serving.live import DeploymentPages, LiveFigures, MetricsPage, histogram_quantile
from pipeline.serving.server import TritonServer
from tests.support.waiting import wait_for

BUCKETS_S = (0.01, 0.1, 1.0, 10.0)
LATENCIES_S = st.lists(st.floats(0.001, 9.9), max_size=30)


def page(registry: CollectorRegistry, taken_s: float = 0.0) -> MetricsPage:
    return MetricsPage.parse(generate_latest(registry).decode(), taken_s)


@settings(max_examples=20)
@given(earlier=LATENCIES_S, later=LATENCIES_S, quantile=st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(
    earlier: list[float], later: list[float], quantile: float
) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "Latency.", ["model"], buckets=BUCKETS_S, registry=registry)
    histogram.labels("other").observe(5)
    for value in earlier:
        histogram.labels("tiny").observe(value)
    before = page(registry)
    for value in later:
        histogram.labels("tiny").observe(value)
    found = histogram_quantile(quantile, "h", page(registry), before, model="tiny")
    if not later:
        assert found is None
        return
    true = sorted(later)[math.ceil(quantile * len(later)) - 1]
    upper = next(bound for bound in BUCKETS_S if true <= bound)
    lower = max((bound for bound in BUCKETS_S if bound < true), default=0.0)
    assert found is not None
    assert lower <= found <= upper


def test_a_process_that_began_anew_counts_from_zero() -> None:
    pages = []
    for count, taken_s in ((50, 0.0), (10, 2.0)):
        registry = CollectorRegistry()
        tokens = Counter("pipeline_generation_tokens", "Tokens.", ["model"], registry=registry)
        tokens.labels("tiny").inc(count)
        ttft = Histogram("pipeline_time_to_first_token_seconds", "TTFT.", ["model"], registry=registry)
        for _ in range(count):
            ttft.labels("tiny").observe(0.02)
        pages.append(DeploymentPages(None, page(registry, taken_s)))
    figures = LiveFigures.read("tiny", pages[1], pages[0])
    assert figures.tokens_per_s == 5
    assert figures.ttft_p50_ms is not None
    assert 10 < figures.ttft_p50_ms <= 25


def test_the_gateway_counts_requests_where_there_is_one() -> None:
    registry = CollectorRegistry()
    Gauge("pipeline_requests_running", "Running.", ["model"], registry=registry).labels("tiny").set(3)
    events = Counter("pipeline_cache_events", "Events.", ["model", "event"], registry=registry)
    for event, count in {"hit_exact": 2, "hit_semantic": 1, "miss": 9, "stored": 9}.items():
        events.labels("tiny", event).inc(count)
    figures = LiveFigures.read("tiny", DeploymentPages(None, page(registry)))
    assert (figures.running, figures.cache_hits, figures.waiting) == (3, 0.25, None)
    nothing = LiveFigures.read("tiny", DeploymentPages(None, None))
    assert nothing == replace(nothing, **dict.fromkeys(LiveFigures.__dataclass_fields__))


def test_triton_alone_tells_requests_and_memory(server: TritonServer) -> None:
    def figures() -> LiveFigures:
        return LiveFigures.read("support", DeploymentPages.fetch(server.metrics_url, "http://127.0.0.1:9"))

    wait_for(lambda: figures().kv_used is not None, "the engine's figures", 30)
    found = figures()
    assert found.requests is not None
    assert found.requests > 0
    assert found.waiting == 0
    assert found.ttft_p95_ms is None
