"""The page at /metrics, as Prometheus and OpenMetrics parse it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client import parser as text_format
from prometheus_client.openmetrics import parser as openmetrics

from tests.gateway.conftest import Start

FAMILIES = {
    "pipeline_gateway_requests": "counter",
    "pipeline_gateway_tokens": "counter",
    "pipeline_gateway_ttft_seconds": "histogram",
    "pipeline_gateway_itl_seconds": "histogram",
    "pipeline_gateway_queue": "gauge",
    "pipeline_gateway_cache": "counter",
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
    running = start(cached=True)
    for answered in (False, True):
        if answered:
            question = [{"role": "user", "content": "Hi"}]
            running.client().chat.completions.create(model="tiny", messages=question, temperature=0)
        answer = httpx.get(f"{running.url}/metrics", headers={"accept": accept}, trust_env=False)
        assert answer.headers["content-type"].startswith(content_type)
        families = list(parser.text_string_to_metric_families(answer.text))
        assert {family.name: family.type for family in families} == FAMILIES
        assert all(family.documentation for family in families)
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    model = ("model", "tiny")
    endpoint = ("endpoint", "/v1/chat/completions")
    assert values["pipeline_gateway_requests_total", endpoint, model, ("status", "200")] == 1
    assert values["pipeline_gateway_tokens_total", ("kind", "prompt"), model] > 0
    assert values["pipeline_gateway_ttft_seconds_count", model] == 1
    assert values["pipeline_gateway_itl_seconds_bucket", ("le", "+Inf"), model] == 1
    assert values["pipeline_gateway_queue", model, ("state", "running")] == 0
    assert values["pipeline_gateway_cache_total", ("event", "stored"), model] == 1


def test_gateways_of_one_process_count_for_themselves(start: Start) -> None:
    one, other = start(), start()
    one.client().models.list()
    assert "/v1/models" in httpx.get(f"{one.url}/metrics", trust_env=False).text
    assert "/v1/models" not in httpx.get(f"{other.url}/metrics", trust_env=False).text
