"""The page at /metrics, as Prometheus and OpenMetrics parse it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client import parser as text_format
from prometheus_client.openmetrics import parser as openmetrics

from tests.gateway.conftest import Start

TINY = ("model", "tiny")
# Names, types and labels that dashboards and alerts are written for.
FAMILIES = {
    "pipeline_requests": ("counter", {"endpoint", "model", "status"}),
    "pipeline_time_to_first_token_seconds": ("histogram", {"model"}),
    "pipeline_inter_token_latency_seconds": ("histogram", {"model"}),
    "pipeline_time_per_output_token_seconds": ("histogram", {"model"}),
    "pipeline_request_duration_seconds": ("histogram", {"model"}),
    "pipeline_request_queue_seconds": ("histogram", {"model"}),
    "pipeline_prompt_tokens": ("counter", {"model"}),
    "pipeline_generation_tokens": ("counter", {"model"}),
    "pipeline_choices": ("counter", {"model", "finish_reason"}),
    "pipeline_requests_running": ("gauge", {"model"}),
    "pipeline_requests_waiting": ("gauge", {"model"}),
    "pipeline_stalled_streams": ("gauge", {"model"}),
    "pipeline_model_ready": ("gauge", {"model"}),
    "pipeline_restarts": ("counter", {"model", "component"}),
    "pipeline_retries": ("counter", {"model"}),
    "pipeline_cache_events": ("counter", {"model", "event"}),
    "pipeline_tenant_requests": ("counter", {"tenant", "status"}),
    "pipeline_tenant_tokens": ("counter", {"tenant", "kind"}),
}
PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"


@pytest.mark.parametrize(
    ("accept", "parser", "content_type"),
    [
        ("*/*", text_format, "text/plain; version=0.0.4; charset=utf-8"),
        (PROMETHEUS, openmetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_every_family_has_help_and_type(start: Start, accept: str, parser: Any, content_type: str) -> None:
    running = start(cached=True, restarts=lambda: {"tiny": {"triton": 2}})
    for _ in range(2):
        question = [{"role": "user", "content": "Hi"}]
        running.client().chat.completions.create(model="tiny", messages=question, temperature=0)
        answer = httpx.get(f"{running.url}/metrics", headers={"accept": accept}, trust_env=False)
        assert answer.headers["content-type"].startswith(content_type)
        families = list(parser.text_string_to_metric_families(answer.text))
        assert {family.name: family.type for family in families} == {
            name: kind for name, (kind, _) in FAMILIES.items()
        }
        assert all(family.documentation for family in families)
        for family in families:
            for sample in family.samples:
                assert sample.labels.keys() - {"le"} == FAMILIES[family.name][1]
    values = samples(answer.text)
    endpoint = ("endpoint", "/v1/chat/completions")
    assert values["pipeline_requests_total", endpoint, TINY, ("status", "200")] == 2
    assert values["pipeline_prompt_tokens_total", TINY] == 4
    assert values["pipeline_generation_tokens_total", TINY] == 4
    assert values["pipeline_request_duration_seconds_count", TINY] == 2
    # The second answer was the cache's.
    assert values["pipeline_time_to_first_token_seconds_count", TINY] == 1
    assert values["pipeline_inter_token_latency_seconds_bucket", ("le", "+Inf"), TINY] == 1
    assert values["pipeline_requests_running", TINY] == 0
    assert values["pipeline_model_ready", TINY] == 1
    assert values["pipeline_restarts_total", ("component", "triton"), TINY] == 2
    assert values["pipeline_cache_events_total", ("event", "stored"), TINY] == 1
    assert values["pipeline_cache_events_total", ("event", "hit_exact"), TINY] == 1
    assert values["pipeline_tenant_tokens_total", ("kind", "completion"), ("tenant", "")] == 4


def samples(page: str) -> dict[tuple[Any, ...], float]:
    """Values of a page by name and sorted labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_format.text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_gateways_of_one_process_count_for_themselves(start: Start) -> None:
    one, other = start(), start()
    one.client().models.list()
    assert "/v1/models" in httpx.get(f"{one.url}/metrics", trust_env=False).text
    assert "/v1/models" not in httpx.get(f"{other.url}/metrics", trust_env=False).text
