"""The engine's state as Prometheus metrics on Triton's own page, under the names that TensorRT-LLM's backend uses.

    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 12

Names, labels, types and buckets are those of TensorRT-LLM 1.2, `triton_backend/inflight_batcher_llm/src/
custom_metrics_reporter/custom_metrics_reporter.cc`, where batching is in flight. Three values of `general_type`, and
the family of draft tokens, are our own: upstream has none. What this engine does not have is reported as 0: micro
batches, paused requests, memory of GPUs and pinned memory, and disaggregated serving.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Literal

import engine
import triton_python_backend_utils as pb_utils


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    help: str
    label: str
    values: Callable[[engine.EngineStats, int], Mapping[str, float]]
    kind: Literal["GAUGE", "COUNTER"] = "GAUGE"


_FAMILIES = (
    _Family(
        "nv_trt_llm_request_metrics",
        "TRT LLM request metrics",
        "request_type",
        lambda stats, most: {
            "active": stats.running + stats.waiting,
            "max": most,
            "scheduled": stats.running,
            "context": stats.context_requests,
            "waiting": stats.waiting,
        },
    ),
    _Family(
        "nv_trt_llm_runtime_memory_metrics",
        "TRT LLM runtime memory metrics",
        "memory_type",
        lambda _, __: {"cpu": _resident_bytes(), "gpu": 0, "pinned": 0},
    ),
    _Family(
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        lambda stats, _: {
            "max": stats.kv_blocks_total,
            "free": stats.kv_blocks_free,
            "used": stats.kv_blocks_used,
            "tokens_per": stats.tokens_per_block,
            "reused": stats.kv_blocks_reused,
            "fraction": stats.kv_blocks_used / max(1, stats.kv_blocks_total),
        },
    ),
    _Family(
        "nv_trt_llm_disaggregated_serving_metrics",
        "TRT LLM disaggregated serving metrics",
        "disaggregated_serving_type",
        lambda _, __: {"kv_cache_transfer_ms": 0, "request_count": 0},
        kind="COUNTER",
    ),
    _Family(
        "nv_trt_llm_inflight_batcher_metrics",
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        lambda stats, _: {
            "total_context_tokens": stats.context_tokens,
            "generation_requests": stats.generation_requests,
            "micro_batch_id": 0,
            "paused_requests": 0,
        },
    ),
    _Family(
        "nv_trt_llm_general_metrics",
        "General TRT LLM metrics",
        "general_type",
        lambda stats, _: {
            # Microseconds since the epoch, of the last step.
            "timestamp": round(stats.stepped_at * 1e6),
            "iteration_counter": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "prompt_tokens_reused": stats.prompt_tokens_reused,
            "generated_tokens": stats.generated_tokens,
        },
    ),
    _Family(
        "pipeline_draft_tokens",
        "Tokens that were proposed, and those of them that the target accepted, since the start",
        "draft_token_type",
        lambda stats, _: {"proposed": stats.draft_tokens_total, "accepted": stats.draft_tokens_accepted},
    ),
)

# Family -> value of its label `response_metric_type`.
_LENGTHS = {"nv_llm_input_token_len": "total_input_tokens", "nv_llm_output_token_len": "total_output_tokens"}
_LENGTH_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]
_PAGE_BYTES = resource.getpagesize()


class Gauges:
    """Publishes the statistics of an engine every `period_s` seconds, from a thread of its own."""

    def __init__(
        self, model: str, stats: Callable[[], engine.EngineStats], max_requests: int, period_s: float
    ) -> None:
        self._labels = {"model": model, "version": "1"}
        self._stats, self._max_requests, self._period_s = stats, max_requests, period_s
        self._families: list[Any] = []  # Triton wants them to outlive their metrics
        self._metrics: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], float] = {}
        self._lengths: SimpleQueue[tuple[int, int]] = SimpleQueue()  # of finished requests: input, output
        self._create()
        self._closed = Event()
        self._thread = Thread(target=self._run, name="gauges", daemon=True)
        self._thread.start()

    def count_finished(self, metrics: engine.RequestMetrics) -> None:
        """Count a request that is complete; its lengths are published with the next statistics."""
        self._lengths.put((metrics.num_input_tokens, metrics.num_output_tokens))

    def close(self) -> None:
        """Stop publishing."""
        self._closed.set()
        self._thread.join()
        self._metrics.clear()
        self._families.clear()

    def _create(self) -> None:
        stats = self._stats()
        for family in _FAMILIES:
            made = self._family(family.name, family.help, family.kind)
            for value in family.values(stats, self._max_requests):
                self._metrics[family.name, value] = made.Metric(labels={**self._labels, family.label: value})
        for name, value in _LENGTHS.items():
            made = self._family(name, "TRT LLM response metrics", "HISTOGRAM")
            labels = {**self._labels, "response_metric_type": value}
            self._metrics[name, value] = made.Metric(labels=labels, buckets=_LENGTH_BUCKETS)

    def _family(self, name: str, about: str, kind: str) -> Any:
        made = pb_utils.MetricFamily(name=name, description=about, kind=getattr(pb_utils.MetricFamily, kind))
        self._families.append(made)
        return made

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            stats = self._stats()
            for family in _FAMILIES:
                for name, value in family.values(stats, self._max_requests).items():
                    self._show((family.name, name), value)
            while not self._lengths.empty():
                for (name, kind), length in zip(_LENGTHS.items(), self._lengths.get(), strict=True):
                    self._metrics[name, kind].observe(length)

    def _show(self, key: tuple[str, str], value: float) -> None:
        if self._shown.get(key, 0) != value:  # a trip to the server process, which holds up this one
            self._metrics[key].set(value)
            self._shown[key] = value


def _resident_bytes() -> int:
    """Memory of this process, rounded to MiB, so that an idle engine publishes nothing."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * _PAGE_BYTES >> 20 << 20
