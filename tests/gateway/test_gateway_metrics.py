"""The page at /metrics, as Prometheus and OpenMetrics parse it."""

from __future__ import annotations

from hashlib import sha256
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import parser as text_format
from prometheus_client.openmetrics import parser as openmetrics

from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.run import run_bench
from pipeline.bench.subject import Subject
from pipeline.client.testing import Ending, Reply
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.metric_names import OWN_VIEWS
from pipeline.gateway.tenants import Tenants
from pipeline.progress import Silent
from tests.gateway.conftest import Start
from tests.support import CHECKPOINTS
from tests.support.http_clients import http
from tests.support.waiting import wait_for

SHOP = Tenant("shop", TenantLimits())
MONITOR = Tenant("monitor", TenantLimits(), reads_metrics=True)
TINY = ("model", "tiny")


class Restarted:
    """Stands in for a `RecordFollower` whose record tells of two restarts."""

    name, restarts, fault, replaced_requests = "tiny", MappingProxyType({"triton": 2}), None, 0

    async def run(self, models: object) -> None: ...

    async def aclose(self) -> None: ...


PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"


@pytest.mark.parametrize(
    ("accept", "parser", "content_type"),
    [
        ("*/*", text_format, "text/plain; version=0.0.4; charset=utf-8"),
        (PROMETHEUS, openmetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_every_family_has_help_and_type(start: Start, accept: str, parser: Any, content_type: str) -> None:
    running = start(cached=True, followers=lambda _: [Restarted()])
    for _ in range(2):
        question = [{"role": "user", "content": "Hi"}]
        running.client().chat.completions.create(model="tiny", messages=question, temperature=0)
        answer = http.get(f"{running.url}/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith(content_type)
        families = list(parser.text_string_to_metric_families(answer.text))
        assert {family.name: family.type for family in families} == {
            view.name: view.kind for view in OWN_VIEWS
        }
        assert all(family.documentation for family in families)
        labels = {view.name: view.labels.keys() for view in OWN_VIEWS}
        for family in families:
            assert all(sample.labels.keys() - {"le"} == labels[family.name] for sample in family.samples)
    values = samples(answer.text)
    endpoint = ("endpoint", "/v1/chat/completions")
    assert values["pipeline_requests_total", endpoint, TINY, ("status", "200")] == 2
    assert values["pipeline_prompt_tokens_total", TINY] == 4
    assert values["pipeline_generation_tokens_total", TINY] == 4
    assert values["pipeline_request_duration_seconds_count", TINY] == 2
    # The second answer was the cache's.
    assert values["pipeline_time_to_first_token_seconds_count", TINY] == 1
    assert values["pipeline_inter_token_latency_seconds_bucket", ("le", "+Inf"), TINY] == 1
    assert values["pipeline_server_requests_total", TINY, ("server", running.upstream.url)] == 1
    assert values["pipeline_requests_running", TINY] == 0
    assert values["pipeline_model_ready", TINY] == 1
    assert values["pipeline_restarts_total", ("component", "triton"), TINY] == 2
    assert values["pipeline_cache_events_total", ("event", "stored"), TINY] == 1
    assert values["pipeline_cache_events_total", ("event", "hit_exact"), TINY] == 1
    assert values["pipeline_tenant_tokens_total", ("kind", "completion"), ("tenant", "")] == 4


def samples(page: str) -> dict[tuple[Any, ...], float]:
    """Values of a page by name and sorted labels; an empty adapter is none, as it is to Prometheus."""
    return {
        (sample.name, *sorted(sample.labels.items() - {("adapter", "")})): sample.value
        for family in text_format.text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_gateways_of_one_process_count_for_themselves(start: Start) -> None:
    first, second = start(), start()
    first.client().models.list()
    assert "/v1/models" in http.get(f"{first.url}/metrics").text
    assert "/v1/models" not in http.get(f"{second.url}/metrics").text


def test_how_streams_end_is_counted_after_their_header_too(start: Start) -> None:
    broken = Reply(["a"], ending=Ending.ERROR, error="it broke")
    running = start(
        [broken, Reply(["a", "b"], delay_s=600)],
        tenants=Tenants({sha256(b"k").hexdigest(): SHOP, sha256(b"m").hexdigest(): MONITOR}),
    )
    running.served.stall_s = 0.0
    headers = {"authorization": "Bearer k"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    chat, status = ("endpoint", "/v1/chat/completions"), lambda code: ("status", str(code))

    def page() -> dict[tuple[Any, ...], float]:
        monitor = {"authorization": "Bearer m"}
        return samples(http.get(f"{running.url}/metrics", headers=monitor).text)

    failed = http.post(f"{running.url}{chat[1]}", json=body, headers=headers)
    assert failed.status_code == 200
    with http.stream("POST", f"{running.url}{chat[1]}", json=body, headers=headers) as left:
        events = left.iter_text()
        assert "data:" in next(events)
        wait_for(lambda: page()["pipeline_stalled_streams", TINY] == 1, "a stalled stream")
        assert page()["pipeline_requests_running", TINY] == 1
    wait_for(lambda: page()["pipeline_requests_total", chat, TINY, status(499)] == 1, "a client that left")
    found = page()
    assert found["pipeline_stalled_streams", TINY] == 0
    assert found["pipeline_requests_total", chat, TINY, status(502)] == 1
    assert found["pipeline_requests_total", chat, TINY, status(200)] == 0
    assert found["pipeline_choices_total", ("finish_reason", "abort"), TINY] == 2
    assert found["pipeline_request_duration_seconds_count", TINY] == 0
    assert found["pipeline_time_to_first_token_seconds_count", TINY] == 2
    tenant = ("tenant", "shop")
    assert found["pipeline_tenant_requests_total", status(499), tenant] == 1
    assert http.post(f"{running.url}{chat[1]}", json=body).status_code == 401
    wait_for(lambda: page().get(("pipeline_tenant_requests_total", status(401), ("tenant", ""))) == 1, "401")


@pytest.mark.parametrize("names", [(), ("vllm", "gen_ai")])
def test_tenants_are_named_to_a_key_that_may_read_them_alone(start: Start, names: tuple[Any, ...]) -> None:
    keys = {"k": SHOP, "other": Tenant("other", TenantLimits()), "m": MONITOR}
    tenants = Tenants({sha256(key.encode()).hexdigest(): tenant for key, tenant in keys.items()})
    running = start(Reply(["a"]), tenants=tenants, metric_names=names)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    for key in ("k", "k", "other"):
        headers = {"authorization": f"Bearer {key}"}
        http.post(f"{running.url}/v1/chat/completions", json=body, headers=headers)

    def page(**headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = http.get(f"{running.url}/metrics", headers=named)
        assert answer.status_code == 200
        return answer.text

    ok = ("status", "200")
    for hidden in (page(), page(authorization="Bearer k"), page(x_api_key="other")):
        assert not any(name in hidden for name in ("shop", "other", "monitor"))
        assert samples(hidden)["pipeline_tenant_requests_total", ok, ("tenant", "")] == 3
    seen = samples(page(authorization="Bearer m"))
    assert seen["pipeline_tenant_requests_total", ok, ("tenant", "shop")] == 2
    assert seen["pipeline_tenant_requests_total", ok, ("tenant", "other")] == 1
    # All else is the same page.
    plain = {key: value for key, value in seen.items() if "tenant" not in dict(key[1:])}
    assert plain.keys() <= samples(page()).keys()
    wrong = http.get(f"{running.url}/metrics", headers={"api-key": "wrong"})
    assert wrong.status_code == 401


def test_a_load_on_the_gateway_learns_how_many_drafts_were_accepted(start: Start) -> None:
    running = start(Reply(["a", "b"], draft_tokens=8, accepted_tokens=6))
    http.post(f"{running.url}/v1/completions", json={"model": "tiny", "prompt": "before the load"})
    subject = Subject(
        name="deployed", way="gateway", url=running.url, model="tiny", tokenizer=CHECKPOINTS / "support-target",
        max_prompt=40, max_answer=8, gateway_url=running.url,
    )  # fmt: skip
    load = LoadSettings(concurrency=(1,), requests=3, warmup_s=0)
    (level,) = run_bench(subject, load, Silent()).levels
    assert level.acceptance == 0.75


# Series of vLLM's own dashboard: examples/observability/prometheus_grafana/grafana.json at 4b5c627c.
VLLM_DASHBOARD = (
    "e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total",
    "inter_token_latency_seconds_bucket", "num_requests_running", "num_requests_waiting",
    "time_to_first_token_seconds_bucket", "kv_cache_usage_perc", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_success_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum",
)  # fmt: skip


def test_other_names_show_the_same_observations(start: Start) -> None:
    reply = Reply(["a", "b", "c"], draft_tokens=8, accepted_tokens=6)
    running = start(reply, metric_names=("vllm", "gen_ai"), kv_cache_usage=lambda: {"tiny": 0.25})
    client = running.client()
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    client.completions.create(model="tiny", prompt="One two three")
    found = samples(http.get(f"{running.url}/metrics").text)
    engine, model_name = ("engine", "0"), ("model_name", "tiny")
    for ours, theirs in {
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "request_duration_seconds_count": "e2e_request_latency_seconds_count",
        "request_queue_seconds_count": "request_queue_time_seconds_count",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "request_generation_tokens_sum",
    }.items():
        value = found[f"pipeline_{ours}", TINY]
        assert value > 0
        assert found[f"vllm:{theirs}", engine, model_name] == pytest.approx(value)
    for phase in ("prefill", "decode"):
        assert found[f"vllm:request_{phase}_time_seconds_count", engine, model_name] == 2
    assert found["vllm:request_success_total", engine, ("finished_reason", "stop"), model_name] == 2
    for kind, theirs, count in (("proposed", "draft", 16), ("accepted", "accepted", 12)):
        assert found["pipeline_draft_tokens_total", ("draft_token_type", kind), TINY] == count
        assert found[f"vllm:spec_decode_num_{theirs}_tokens_total", engine, model_name] == count
    assert found["vllm:num_requests_running", engine, model_name] == 0
    assert found["vllm:kv_cache_usage_perc", engine, model_name] == 0.25
    shown = {key[0] for key in found}
    assert {f"vllm:{name}" for name in VLLM_DASHBOARD} - shown == {
        "vllm:request_max_num_generation_tokens_sum"
    }
    named = {
        ("gen_ai_operation_name", "text_completion"),
        ("gen_ai_provider_name", "nvidia.triton"),
        ("gen_ai_request_model", "tiny"),
        ("gen_ai_response_model", "tiny"),
    }

    def of_text_completions(name: str, *more: tuple[str, str]) -> float:
        return found[name, *sorted({*named, *more})]

    assert of_text_completions("gen_ai_server_time_to_first_token_seconds_count") == 1
    assert of_text_completions("gen_ai_server_time_per_output_token_seconds_count") == 1
    assert of_text_completions("gen_ai_server_request_duration_seconds_count", ("error_type", "")) == 1
    assert of_text_completions("gen_ai_client_token_usage_sum", ("gen_ai_token_type", "input")) == 3
    assert of_text_completions("gen_ai_client_token_usage_sum", ("gen_ai_token_type", "output")) == 3
