"""Names under which the metrics page shows what a gateway counts: its own, vLLM's, and OpenTelemetry's for GenAI.

A `View` shows one observation of `pipeline.gateway.metrics` under one name; nothing is counted twice. Written against

- vLLM 0.11 to 0.12, `vllm/v1/metrics/loggers.py` (class PrometheusStatLogger): names, label names `model_name` and
  `engine`, and the bounds of buckets, all of which are among ours up to 160 s;
- OpenTelemetry's semantic conventions 1.37 to 1.42, `docs/gen-ai/gen-ai-metrics.md` (status: development), with names
  and units as OpenTelemetry's Prometheus exporters write them: `_` for `.`, `_seconds` for the unit `s`, and no suffix
  for the unit `{token}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from pipeline.recipe.deployment import MetricNames

# vLLM's for time to first token (up to 160 s), and some between for targets such as 150 or 300 ms.
TTFT_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
# vLLM's and OpenTelemetry's begin at 10 ms, which is more than a token takes on a fast GPU: ours at 1 ms.
ITL_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# vLLM's for requests up to 480 s, and below them those of OpenTelemetry's request duration.
DURATION_BUCKETS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0,
)  # fmt: skip
# vLLM's for requests up to 120 s, and below them from 1 ms.
QUEUE_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0,
    120.0,
)  # fmt: skip
# OpenTelemetry's for gen_ai.client.token.usage.
TOKEN_BUCKETS = (
    1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """One family of the metrics page.

    Attributes:
        name: name of the family, without the `_total` of counters.
        help: one sentence for the page.
        kind: type of the family.
        source: name of the observation that it shows.
        labels: label of the page -> label of the observation. Samples that differ in others only are added up.
        constant: further labels, the same for every sample.
        where: label of the observation -> the value that is shown; samples with others are left out.
        sum_only: show the sum of a histogram as a counter.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    source: str
    labels: Mapping[str, str]
    constant: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    sum_only: bool = False

    def without_tenants(self) -> View:
        """Return a view in which all tenants are one, whose label is empty."""
        if "tenant" not in self.labels:
            return self
        others = {shown: of for shown, of in self.labels.items() if shown != "tenant"}
        return replace(self, labels=others, constant={**self.constant, "tenant": ""})

    def show(self, samples: Iterable[Sample]) -> Metric:
        """Build the family from samples of the observation, whose names begin with its name."""
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in samples:
            suffix = sample.name.removeprefix(self.source)
            if self.sum_only:
                if suffix != "_sum":
                    continue
                suffix = "_total"
            if any(sample.labels[name] != value for name, value in self.where.items()):
                continue
            labels = {**{shown: sample.labels[name] for shown, name in self.labels.items()}, **self.constant}
            if "le" in sample.labels:
                labels["le"] = sample.labels["le"]
            key = (suffix, tuple(labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        metric = Metric(self.name, self.help, self.kind)
        for (suffix, labels_of), value in sums.items():
            metric.add_sample(self.name + suffix, dict(labels_of), value)
        return metric


_MODEL = {"model": "model"}

OWN_VIEWS = (
    View(
        "pipeline_requests",
        "HTTP requests by the status they ended with, those refused before the application included; probes, scrapes "
        "and the page at / are not counted. A stream that fails after its header counts with the status of its error, "
        "a client that leaves with 499. The model is empty if the request named none that exists.",
        "counter",
        "requests",
        {"endpoint": "endpoint", "model": "model", "status": "status"},
    ),
    View(
        "pipeline_time_to_first_token_seconds",
        "Time to first token: from the arrival of a request, waiting included, to the first chunk of each choice. "
        "Answers from the cache are not among them.",
        "histogram",
        "ttft",
        _MODEL,
    ),
    View(
        "pipeline_inter_token_latency_seconds",
        "Inter-token latency: from each chunk of an answer to the next. Answers from the cache are not among them.",
        "histogram",
        "itl",
        _MODEL,
    ),
    View(
        "pipeline_time_per_output_token_seconds",
        "Time per output token after the first, one value a choice; a chunk may hold several tokens.",
        "histogram",
        "tpot",
        _MODEL,
    ),
    View(
        "pipeline_request_duration_seconds",
        "From the arrival of a request to the end of its answer; completions that succeeded, cached ones included.",
        "histogram",
        "duration",
        _MODEL,
        where={"error_type": ""},
    ),
    View(
        "pipeline_request_queue_seconds",
        "How long each choice waited for a slot of the model; 0 where one was free.",
        "histogram",
        "queue",
        _MODEL,
    ),
    View(
        "pipeline_prompt_tokens",
        "Tokens of the prompts of completions, cached answers included.",
        "counter",
        "tokens",
        _MODEL,
        where={"kind": "input"},
        sum_only=True,
    ),
    View(
        "pipeline_generation_tokens",
        "Tokens of the answers of completions, cached answers included.",
        "counter",
        "tokens",
        _MODEL,
        where={"kind": "output"},
        sum_only=True,
    ),
    View(
        "pipeline_draft_tokens",
        "Draft tokens that were proposed, and those of them that the model accepted, of choices that have ended.",
        "counter",
        "drafts",
        {**_MODEL, "draft_token_type": "kind"},
    ),
    View(
        "pipeline_choices",
        "Choices that began, by the engine's reason to end: stop, length, unknown, or abort if they broke off.",
        "counter",
        "choices",
        {"model": "model", "finish_reason": "finish_reason"},
    ),
    View("pipeline_requests_running", "Choices that have a slot of the model.", "gauge", "running", _MODEL),
    View("pipeline_requests_waiting", "Choices that wait for a slot.", "gauge", "waiting", _MODEL),
    View(
        "pipeline_stalled_streams",
        "Choices that have begun and had no chunk for 10 times the inter-token latency of the recipe's SLO, or for 5 s "
        "where it has none.",
        "gauge",
        "stalled",
        _MODEL,
    ),
    View("pipeline_model_ready", "1 if requests can be answered, else 0.", "gauge", "ready", _MODEL),
    View(
        "pipeline_restarts",
        "Restarts since `pipeline serve` was started, as its running record says, by component: triton or gateway.",
        "counter",
        "restarts",
        {"model": "model", "component": "component"},
    ),
    View("pipeline_workers", "Processes that serve the gateway (gateway.workers).", "gauge", "workers", {}),
    View(
        "pipeline_worker_restarts",
        "Worker processes of the gateway that died or hung, and were started again.",
        "counter",
        "worker_restarts",
        {},
    ),
    View(
        "pipeline_retries",
        "Requests that were sent to the model again, because their server was lost or had too much to do.",
        "counter",
        "retries",
        _MODEL,
    ),
    View(
        "pipeline_migrations",
        "Streams whose server was lost after they had begun: resumed where their client was, or ended with an error.",
        "counter",
        "migrations",
        {"model": "model", "outcome": "outcome"},
    ),
    View(
        "pipeline_loss_events",
        "Servers that were lost (lost), requests that are refused for a while because they were in flight at two "
        "losses (quarantined), and tenants that are refused for a while because servers were lost with their "
        "requests (cool_down).",
        "counter",
        "loss_events",
        {"model": "model", "event": "event"},
    ),
    View(
        "pipeline_server_requests",
        "Requests that this gateway sent to each server (host:port of its gRPC, or socket), those included that failed "
        "there and were asked again elsewhere.",
        "counter",
        "server_requests",
        {"model": "model", "server": "server"},
    ),
    View(
        "pipeline_cache_events",
        "Events of the response cache: hits by layer, misses, stored answers, failures, reports of wrong hits.",
        "counter",
        "cache",
        {"model": "model", "event": "event"},
    ),
    View(
        "pipeline_tenant_requests",
        "HTTP requests by tenant; the tenant is empty where keys are not needed or the key is not known, and where the "
        "reader of this page has no key of a tenant with `metrics: true`.",
        "counter",
        "tenant_requests",
        {"tenant": "tenant", "status": "status"},
    ),
    View(
        "pipeline_tenant_tokens",
        "Tokens by tenant, of prompts and of completions; the tenant is empty as above.",
        "counter",
        "tenant_tokens",
        {"tenant": "tenant", "kind": "kind"},
    ),
    View(
        "pipeline_limits_fallbacks",
        "How often what a tenant uses was counted by this gateway alone, because the server of gateway.limits_redis "
        "did not answer.",
        "counter",
        "limits_fallbacks",
        {},
    ),
)

# One engine stands behind a name, so `engine` is "0", as it is in vLLM without data parallelism.
_VLLM_LABELS = {"model_name": "model"}
_ENGINE = {"engine": "0"}
_GEN_AI_LABELS = {
    "gen_ai_operation_name": "operation",
    "gen_ai_request_model": "model",
    "gen_ai_response_model": "model",
}
# The convention has no well-known value for Triton, and allows a custom one.
PROVIDER = "nvidia.triton"
_PROVIDER = {"gen_ai_provider_name": PROVIDER}

OTHER_VIEWS: Mapping[MetricNames, tuple[View, ...]] = {
    "vllm": (
        View("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", "histogram", "ttft",
             _VLLM_LABELS, _ENGINE),
        View("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", "histogram", "itl",
             _VLLM_LABELS, _ENGINE),
        View("vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.",
             "histogram", "tpot", _VLLM_LABELS, _ENGINE),
        View("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", "histogram",
             "duration", _VLLM_LABELS, _ENGINE, where={"error_type": ""}),
        View("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", "histogram",
             "queue", _VLLM_LABELS, _ENGINE),
        View("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", "histogram",
             "prefill", _VLLM_LABELS, _ENGINE),
        View("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", "histogram",
             "decode", _VLLM_LABELS, _ENGINE),
        View("vllm:request_prompt_tokens", "Number of prefill tokens processed.", "histogram", "tokens", _VLLM_LABELS,
             _ENGINE, where={"kind": "input"}),
        View("vllm:request_generation_tokens", "Number of generation tokens processed.", "histogram", "tokens",
             _VLLM_LABELS, _ENGINE, where={"kind": "output"}),
        View("vllm:prompt_tokens", "Number of prefill tokens processed.", "counter", "tokens", _VLLM_LABELS, _ENGINE,
             where={"kind": "input"}, sum_only=True),
        View("vllm:generation_tokens", "Number of generation tokens processed.", "counter", "tokens", _VLLM_LABELS,
             _ENGINE, where={"kind": "output"}, sum_only=True),
        View("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", "counter", "drafts", _VLLM_LABELS, _ENGINE,
             where={"kind": "proposed"}),
        View("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", "counter", "drafts", _VLLM_LABELS,
             _ENGINE, where={"kind": "accepted"}),
        View("vllm:request_success", "Count of successfully processed requests.", "counter", "choices",
             {**_VLLM_LABELS, "finished_reason": "finish_reason"}, _ENGINE),
        View("vllm:num_requests_running", "Number of requests in model execution batches.", "gauge", "running",
             _VLLM_LABELS, _ENGINE),
        View("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "gauge", "kv_usage",
             _VLLM_LABELS, _ENGINE),
        View("vllm:num_requests_waiting", "Number of requests waiting to be processed.", "gauge", "waiting",
             _VLLM_LABELS, _ENGINE),
    ),
    "gen_ai": (
        View("gen_ai_server_time_to_first_token_seconds", "Time to generate first token for successful responses.",
             "histogram", "ttft", _GEN_AI_LABELS, _PROVIDER),
        View("gen_ai_server_time_per_output_token_seconds",
             "Time per output token generated after the first token for successful responses.",
             "histogram", "tpot", _GEN_AI_LABELS, _PROVIDER),
        View("gen_ai_server_request_duration_seconds",
             "Generative AI server request duration such as time-to-last byte or last output token.",
             "histogram", "duration", {**_GEN_AI_LABELS, "error_type": "error_type"}, _PROVIDER),
        View("gen_ai_client_token_usage", "Number of input and output tokens used.", "histogram", "tokens",
             {**_GEN_AI_LABELS, "gen_ai_token_type": "kind"}, _PROVIDER),
    ),
}  # fmt: skip
