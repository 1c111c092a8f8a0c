"""The engine's state as Prometheus metrics on Triton's own page, under the names that TensorRT-LLM's backend uses.

    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 12

Families and labels: tensorrtllm_backend, README. Draft tokens have no family upstream; theirs is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import engine
import triton_python_backend_utils as pb_utils


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    help: str
    label: str
    values: Callable[[engine.EngineStats, int], Mapping[str, float]]


_FAMILIES = (
    _Family(
        "nv_trt_llm_request_metrics",
        "Requests in the engine",
        "request_type",
        lambda stats, most: {
            "active": stats.running + stats.waiting,
            "scheduled": stats.running,
            "waiting": stats.waiting,
            "max": most,
        },
    ),
    _Family(
        "nv_trt_llm_kv_cache_block_metrics",
        "Blocks of the KV cache",
        "kv_cache_block_type",
        lambda stats, _: {
            "used": stats.kv_blocks_used,
            "free": stats.kv_blocks_free,
            "max": stats.kv_blocks_total,
            "tokens_per": stats.tokens_per_block,
            "reused": stats.kv_blocks_cached,
            "fraction": stats.kv_blocks_used / max(1, stats.kv_blocks_total),
        },
    ),
    _Family(
        "nv_trt_llm_inflight_batcher_metrics",
        "What a step computes",
        "inflight_batcher_specific_metric",
        lambda stats, _: {"generation_requests": stats.running, "mean_batch": stats.mean_batch},
    ),
    _Family(
        "nv_trt_llm_general_metrics",
        "Steps and tokens since the start",
        "general_type",
        lambda stats, _: {
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


class Gauges:
    """Publishes the statistics of an engine every `period_s` seconds, from a thread of its own."""

    def __init__(
        self, model: str, stats: Callable[[], engine.EngineStats], max_requests: int, period_s: float
    ) -> None:
        self._model, self._stats, self._max_requests, self._period_s = model, stats, max_requests, period_s
        self._families: list[Any] = []  # Triton wants them to outlive their metrics
        self._metrics: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], float] = {}
        self._create()
        self._closed = Event()
        self._thread = Thread(target=self._run, name="gauges", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop publishing."""
        self._closed.set()
        self._thread.join()
        self._metrics.clear()
        self._families.clear()

    def _create(self) -> None:
        stats = self._stats()
        for family in _FAMILIES:
            made = pb_utils.MetricFamily(
                name=family.name, description=family.help, kind=pb_utils.MetricFamily.GAUGE
            )
            self._families.append(made)
            for value in family.values(stats, self._max_requests):
                labels = {"model": self._model, "version": "1", family.label: value}
                self._metrics[family.name, value] = made.Metric(labels=labels)

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            stats = self._stats()
            for family in _FAMILIES:
                for name, value in family.values(stats, self._max_requests).items():
                    self._show((family.name, name), value)

    def _show(self, key: tuple[str, str], value: float) -> None:
        if self._shown.get(key) != value:  # a trip to the server process, which holds up this one
            self._metrics[key].set(value)
            self._shown[key] = value
