"""Triton models `tensorrt_llm` and `tensorrt_llm_draft` of the cpu runtime: token ids to token ids, by a paged engine.

Tensors and behaviour are those of TensorRT-LLM's C++ backend, release 1.2, as far as the engine can honour them; the
rest is refused by name (`request_parser`). One engine serves all requests, and each joins while others run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import engine
import triton_python_backend_utils as pb_utils
from gauges import Gauges
from request_manager import RequestManager
from request_parser import RequestLimits
from shared.parameters import Parameters


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = Parameters(args)
        settings = _settings(parameters)
        draft = parameters.path("cpu_draft_model_path") if parameters.has("cpu_draft_model_path") else None
        adapters = parameters.path("cpu_adapters_path") if parameters.has("cpu_adapters_path") else None
        self._engine = engine.Engine(
            parameters.path("gpt_model_path"), draft, settings, _vocabulary(parameters), adapters
        )
        for role, precision in self._engine.precisions.items():
            pb_utils.Logger.log_info(f"{args['model_name']}: {role} computes in {precision}")
        stats_period_s = parameters.number("stats_check_period_ms", 100) / 1000
        self._gauges = Gauges(
            args["model_name"], self._engine.stats, settings.max_concurrency, stats_period_s
        )
        queue = _max_queue_size(args)
        self._manager = RequestManager(
            self._engine,
            RequestLimits(
                max_input_tokens=parameters.number("cpu_max_input_tokens"),
                max_output_tokens=parameters.number("cpu_max_output_tokens"),
                max_draft_tokens=settings.max_draft_tokens,
                adapters=self._engine.adapters,
            ),
            exclude_input_in_output=parameters.flag("exclude_input_in_output", False),
            decoupled=parameters.decoupled,
            max_open=settings.max_concurrency + queue if queue else None,
            cancellation_period_s=parameters.number("cancellation_check_period_ms", 100) / 1000,
            on_finish=self._gauges.count_finished,
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._manager.take(request)

    def finalize(self) -> None:
        self._gauges.close()
        self._engine.close()
        self._manager.close()


def _settings(parameters: Parameters) -> engine.EngineSettings:
    def optional(name: str) -> int | None:
        return parameters.number(name) if parameters.has(name) else None

    defaults = engine.EngineSettings()
    return engine.EngineSettings(
        max_concurrency=parameters.number("cpu_max_concurrency"),
        max_batch_tokens=optional("cpu_max_batch_tokens"),
        max_sequence_tokens=parameters.number("cpu_max_sequence_tokens"),
        max_draft_tokens=parameters.number("cpu_max_draft_tokens", defaults.max_draft_tokens),
        kv_cache_mib=optional("cpu_kv_cache_mib"),
        prefix_caching=parameters.flag("enable_kv_cache_reuse", True),
        threads=optional("cpu_threads"),
        precision=parameters.text("cpu_precision", defaults.precision),  # type: ignore[arg-type]  # it checks
    )


def _vocabulary(parameters: Parameters) -> engine.Vocabulary | None:
    """Grammar server of guided answers, where the deployment offers them."""
    if not parameters.text("guided_decoding_backend", ""):
        return None
    return engine.Vocabulary(parameters.path("tokenizer_dir") / "tokenizer.json", parameters.number("end_id"))


def _max_queue_size(args: Mapping[str, str]) -> int:
    """Upstream's backend hands Triton's queue limit to its executor, because requests leave Triton's queue at once."""
    batching = json.loads(args["model_config"]).get("dynamic_batching", {})
    return int(batching.get("default_queue_policy", {}).get("max_queue_size", 0))
