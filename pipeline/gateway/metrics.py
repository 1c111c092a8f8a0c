"""Counters and latencies of one gateway, rendered for Prometheus by `prometheus_client`.

Every gateway has a registry of its own; the library's global one, with its figures of the process, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.client import Stats
from pipeline.gateway.served_model import ServedModel

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# Else each series has a twin with the time of its creation, which the text format shows as one more gauge.
disable_created_metrics()  # type: ignore[no-untyped-call]


class GatewayMetrics:
    """Metrics of one gateway."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        """
        Args:
            models: those whose queues and caches are read whenever the metrics are.
        """
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pipeline_gateway_requests",
            "HTTP requests, by endpoint, model and the status they were answered with.",
            ["endpoint", "model", "status"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "pipeline_gateway_tokens",
            "Tokens of prompts and of completions.",
            ["model", "kind"],
            registry=self._registry,
        )
        self._ttft_s = Histogram(
            "pipeline_gateway_ttft_seconds",
            "Time to first token: from sending a request to the model to the first chunk of its answer.",
            ["model"],
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        self._itl_s = Histogram(
            "pipeline_gateway_itl_seconds",
            "Inter-token latency: from each chunk of an answer to the next.",
            ["model"],
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        self._registry.register(_ModelCollector(models))

    def count_request(self, endpoint: str, model: str, status: int) -> None:
        """Count an HTTP request that was answered.

        Args:
            endpoint: path of the request, or "other".
            model: name of the model; "" if the request named none that exists.
            status: of the response.
        """
        self._requests.labels(endpoint, model, status).inc()

    def observe_completion(self, model: str, prompt_tokens: int, choices: Iterable[Stats]) -> None:
        """Count the tokens of a completion, and record its latencies.

        Args:
            model: name of the model.
            prompt_tokens: of all prompts of the request.
            choices: figures of each choice.
        """
        ttft_s, itl_s = self._ttft_s.labels(model), self._itl_s.labels(model)
        completion_tokens = 0
        for stats in choices:
            if stats.ttft_ms is not None:
                ttft_s.observe(stats.ttft_ms / 1e3)
            for gap_ms in stats.itl_ms:
                itl_s.observe(gap_ms / 1e3)
            completion_tokens += stats.output_tokens or 0
        self._tokens.labels(model, "prompt").inc(prompt_tokens)
        self._tokens.labels(model, "completion").inc(completion_tokens)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Render all metrics.

        Args:
            accept: Accept header of the scraper, by which the format is chosen: Prometheus' text format, or
                OpenMetrics.

        Returns:
            The page and its content type.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _ModelCollector(Collector):
    """Reads the queue and the cache of each model at the time of a scrape."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily(
            "pipeline_gateway_queue",
            "Requests that run on the model or wait for it.",
            labels=["model", "state"],
        )
        cache = CounterMetricFamily(
            "pipeline_gateway_cache",
            "Events of the response cache: hits, misses, answers that were stored, failures.",
            labels=["model", "event"],
        )
        for model in self._models.values():
            queue.add_metric([model.name, "running"], model.queue.running)
            queue.add_metric([model.name, "waiting"], model.queue.waiting)
            if model.cache is not None:
                for event, count in model.cache.counters.as_dict().items():
                    cache.add_metric([model.name, event], count)
        yield queue
        yield cache
