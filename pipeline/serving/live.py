"""Pages of Prometheus metrics of a running deployment, and the figures that are read from them.

`pipeline ps`, `pipeline top`, the supervisor and acceptance runs use it. Two pages are needed for rates and latencies,
because counters and histograms count from the start of the process that shows them:

    before = DeploymentPages.fetch(triton_url, gateway_url)
    ...
    now = DeploymentPages.fetch(triton_url, gateway_url)
    LiveFigures.read("tiny-cpu", now, before).ttft_p95_ms

Names of metrics: those of the gateway (docs/reference/metrics.md), `nv_*` of Triton, and `nv_trt_llm_*` of
TensorRT-LLM's backend, which the `cpu` engine shows, too. Figures that a page does not have are None.
"""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from pipeline.triton.deployment import ENTRY, TARGET_MODEL

_KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_TTFT, _ITL = "pipeline_time_to_first_token_seconds", "pipeline_inter_token_latency_seconds"
# No proxy stands between this machine and its deployments.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One page of metrics, as Prometheus scrapes it."""

    # Monotonic, in seconds.
    taken_s: float
    # Name of a sample, such as `…_bucket` -> its labels and values. Triton's counters, which are not called `…_total`,
    # are here: the parser brings all counters to OpenMetrics' form.
    samples: Mapping[str, list[tuple[Labels, float]]]

    @classmethod
    def parse(cls, text: str, taken_s: float = 0.0) -> Self:
        """Read a page in Prometheus' text format.

        Raises:
            ValueError: The text is not in that format.
        """
        samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
        return cls(taken_s, samples)

    @classmethod
    def fetch(cls, url: str, timeout_s: float = 2.0) -> Self | None:
        """Get the page at `url`; None if nothing there answers with a page in time."""
        try:
            with OPENER.open(url, timeout=timeout_s) as answer:
                return cls.parse(answer.read().decode(), time.monotonic())
        except (OSError, ValueError, urllib.error.URLError):
            return None

    def total(self, name: str, **labels: str) -> float | None:
        """Sum the samples that have these labels; None if there is none."""
        values = [value for has, value in self.samples.get(name, ()) if labels.items() <= has.items()]
        return sum(values) if values else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sum the samples that have these labels, by the values of another label."""
        sums: dict[str, float] = defaultdict(float)
        for has, value in self.samples.get(name, ()):
            if label in has and labels.items() <= has.items():
                sums[has[label]] += value
        return dict(sums)


def histogram_quantile(
    quantile: float, name: str, now: MetricsPage, before: MetricsPage | None, **labels: str
) -> float | None:
    """Estimate a quantile of what a histogram observed between two pages, as PromQL's function of this name does.

    Args:
        quantile: Quantile between 0 and 1.
        before: Earlier page; None for the time since the process began.
        labels: Labels of the samples that are added up.

    Returns:
        Estimate in the unit of the histogram; None if nothing was observed. In the last bucket, which has no upper
        bound, the bound of the bucket before it.
    """
    ends, starts = now.by(f"{name}_bucket", "le", **labels), {}
    if before is not None:
        starts = before.by(f"{name}_bucket", "le", **labels)
        if sum(starts.values()) > sum(ends.values()):
            starts = {}
    counts = sorted((float(bound), count - starts.get(bound, 0.0)) for bound, count in ends.items())
    if not counts or counts[-1][1] <= 0:
        return None
    rank, lower, below = quantile * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


@dataclass(frozen=True, slots=True)
class DeploymentPages:
    """The pages of one deployment at one time; None for one that does not answer, or is not there."""

    triton: MetricsPage | None
    gateway: MetricsPage | None
    # Monotonic, in seconds.
    taken_s: float = 0.0

    @classmethod
    def fetch(cls, triton_url: str | None, gateway_url: str | None, timeout_s: float = 2.0) -> Self:
        """Get both pages at the same time.

        Args:
            triton_url: URL of Triton's metrics, with its path; None if it is not known.
            gateway_url: URL of the gateway, without a path; None if there is none.
            timeout_s: Time for each page.
        """
        now_s = time.monotonic()

        def page(url: str | None) -> MetricsPage | None:
            return None if url is None else MetricsPage.fetch(url, timeout_s)

        with ThreadPoolExecutor(1) as pool:
            gateway = pool.submit(page, gateway_url and f"{gateway_url.rstrip('/')}/metrics")
            return cls(page(triton_url), gateway.result(), now_s)


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Figures of one deployment. Counts are since its processes began, rates and latencies between two pages.

    With a gateway, requests are the gateway's; without, those of Triton's entry model and of the engine.
    """

    ready: bool | None = None
    running: int | None = None
    waiting: int | None = None
    requests: int | None = None
    stalled: int | None = None
    tokens_per_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    # Shares, between 0 and 1.
    cache_hits: float | None = None
    kv_used: float | None = None

    @classmethod
    def read(cls, model: str, now: DeploymentPages, before: DeploymentPages | None = None) -> Self:
        """Read the figures of a deployment.

        Args:
            model: Name of the recipe, which is the gateway's label `model`.
            before: Earlier pages; None for latencies since the start, and no rates.
        """
        earlier = before or DeploymentPages(None, None)
        if now.gateway is not None:
            source, since = _of_gateway(model, now.gateway), earlier.gateway
            tokens = _rate(now.gateway, since, "pipeline_generation_tokens_total", model=model)
            for figure, name in (("ttft", _TTFT), ("itl", _ITL)):
                for percent in (50, 95):
                    latency_s = histogram_quantile(percent / 100, name, now.gateway, since, model=model)
                    source[f"{figure}_p{percent}_ms"] = None if latency_s is None else 1e3 * latency_s
        else:
            source, since = _of_triton(now.triton), earlier.triton
            tokens = _rate(now.triton, since, "nv_trt_llm_general_metrics", general_type="generated_tokens")
        return cls(**source, tokens_per_s=tokens, kv_used=_kv_used(now.triton))


def memory_bytes(pid: int) -> int | None:
    """Return the memory of a process and of all that descend from it, in bytes.

    What several of them map is divided among them (PSS); where the system does not tell that, it is counted by each
    (RSS). None if the process is gone.
    """
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    total = 0
    for process in family:
        with suppress(psutil.NoSuchProcess):
            try:
                total += process.memory_full_info().pss
            except psutil.AccessDenied:
                total += process.memory_info().rss
    return total


def _of_gateway(model: str, page: MetricsPage) -> dict[str, Any]:
    ready = page.total("pipeline_model_ready", model=model)
    events = page.by("pipeline_cache_events_total", "event", model=model)
    hits = sum(count for event, count in events.items() if event.startswith("hit_"))
    lookups = hits + events.get("miss", 0.0)
    return {
        "ready": None if ready is None else ready > 0,
        "running": _whole(page.total("pipeline_requests_running", model=model)),
        "waiting": _whole(page.total("pipeline_requests_waiting", model=model)),
        "requests": _whole(page.total("pipeline_requests_total", model=model)),
        "stalled": _whole(page.total("pipeline_stalled_streams", model=model)),
        "cache_hits": hits / lookups if lookups else None,
    }


def _of_triton(page: MetricsPage | None) -> dict[str, Any]:
    """Read requests as the engine and the entry model count them."""
    if page is None:
        return {}
    states = page.by("nv_trt_llm_request_metrics", "request_type", model=TARGET_MODEL)
    requests = page.by("nv_inference_request_success_total", "model")
    return {
        "running": _whole(states.get("scheduled")),
        "waiting": _whole(states.get("waiting")),
        "requests": _whole(requests.get(ENTRY, requests.get(TARGET_MODEL))),
    }


def kv_cache_usage(triton_url: str) -> float | None:
    """Return the share of the KV cache's blocks that are used, 0 to 1, by Triton's page of metrics.

    None if the page does not have it, or does not come within a second.
    """
    return _kv_used(MetricsPage.fetch(triton_url, 1.0))


def _kv_used(page: MetricsPage | None) -> float | None:
    """Return the share of used blocks over all instances of the target."""
    blocks = {} if page is None else page.by(_KV_BLOCKS, "kv_cache_block_type", model=TARGET_MODEL)
    return blocks.get("used", 0.0) / blocks["max"] if blocks.get("max") else None


def _rate(page: MetricsPage | None, before: MetricsPage | None, name: str, **labels: str) -> float | None:
    """Return the growth of a counter between two pages, per second."""
    if page is None or before is None or page.taken_s <= before.taken_s:
        return None
    now, then = page.total(name, **labels), before.total(name, **labels)
    if now is None:
        return None
    # A counter that is smaller than before began anew.
    grown = now if then is None or now < then else now - then
    return grown / (page.taken_s - before.taken_s)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
