"""Triton's metrics page on `cpu`: what TensorRT-LLM's backend reports, and what dashboards of it ask for."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families as parse

from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.streams import joined, metrics
from tests.support.waiting import wait_for

# custom_metrics_reporter.cc of TensorRT-LLM 1.2: family -> type, label, its values.
UPSTREAM = {
    "nv_trt_llm_request_metrics": (
        "gauge",
        "request_type",
        {"active", "max", "scheduled", "context", "waiting"},
    ),
    "nv_trt_llm_runtime_memory_metrics": ("gauge", "memory_type", {"cpu", "gpu", "pinned"}),
    "nv_trt_llm_kv_cache_block_metrics": (
        "gauge",
        "kv_cache_block_type",
        {"max", "free", "used", "tokens_per", "reused", "fraction"},
    ),
    "nv_trt_llm_disaggregated_serving_metrics": (
        "counter",
        "disaggregated_serving_type",
        {"kv_cache_transfer_ms", "request_count"},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "gauge",
        "inflight_batcher_specific_metric",
        {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
    ),
    "nv_trt_llm_general_metrics": ("gauge", "general_type", {"timestamp", "iteration_counter"}),
    "nv_llm_output_token_len": ("histogram", "response_metric_type", {"total_output_tokens"}),
    "nv_llm_input_token_len": ("histogram", "response_metric_type", {"total_input_tokens"}),
}
# What the dashboard, rules and autoscalers of triton-inference-server/tutorials (Deployment/Kubernetes) read.
READ_BY_TUTORIALS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_infer_duration_us",
)
OURS = {"nv_trt_llm_general_metrics": {"prompt_tokens", "prompt_tokens_reused", "generated_tokens"}}


def test_the_page_has_what_the_backend_of_tensorrt_llm_reports(server: TritonServer) -> None:
    with urllib.request.urlopen(server.metrics_url, timeout=5) as page:
        families = {family.name: family for family in parse(page.read().decode())}
    for name, (kind, label, values) in UPSTREAM.items():
        assert families[name].type == kind
        found = [
            sample.labels for sample in families[name].samples if sample.labels["model"] == "tensorrt_llm"
        ]
        assert {labels[label] for labels in found} == values | OURS.get(name, set())
        assert {frozenset(labels) - {"le"} for labels in found} == {frozenset({"model", "version", label})}
    for name in READ_BY_TUTORIALS:
        assert "tensorrt_llm" in {sample.labels["model"] for sample in families[name].samples}


def test_figures_follow_a_request(server: TritonServer) -> None:
    def value(family: str, name: str, kind: str) -> float:
        # Labels as upstream's README shows them: in the order of the alphabet.
        labels = sorted([f'{name}="{kind}"', 'model="tensorrt_llm"', 'version="1"'])
        return metrics(server.metrics_url)[f"{family}{{{','.join(labels)}}}"]

    def steps() -> float:
        return value("nv_trt_llm_general_metrics", "general_type", "iteration_counter")

    def finished(which: str) -> float:
        return value(f"nv_llm_{which}_token_len_count", "response_metric_type", f"total_{which}_tokens")

    def output_tokens() -> float:
        return value("nv_llm_output_token_len_sum", "response_metric_type", "total_output_tokens")

    def reused() -> float:
        return value("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "reused")

    before = (steps(), finished("input"), output_tokens(), reused())
    prompt = TURN.format(QUESTIONS[0] * 8)
    for _ in range(2):
        joined(server.grpc_url, "tensorrt_llm_bls", text_input=prompt, max_tokens=6, end_id=-1, stream=True)
    # The server's own check of its health may be among them.
    wait_for(lambda: finished("output") >= before[1] + 2, "both requests to be counted")
    wait_for(lambda: output_tokens() >= before[2] + 12, "their tokens to be counted")
    wait_for(lambda: steps() >= before[0] + 12, "their steps to be counted")
    wait_for(lambda: reused() > before[3], "the second to find the first one's blocks")
    assert value("nv_trt_llm_general_metrics", "general_type", "timestamp") > 1e15
    assert value("nv_trt_llm_runtime_memory_metrics", "memory_type", "cpu") > 2**20
    assert value("nv_trt_llm_request_metrics", "request_type", "max") == 8
