"""A model that answers as TensorRT-LLM's own `llmapi` model of 1.2 does, by its contract (llmapi.yaml, `behaviours`).

A stream has one response, the whole answer, which is the prompt's words again. Figures are written as text, though the
config declares numbers. Errors come beside the text "N/A".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_FIGURES = {
    "kv_cache_reused_block": 2, "kv_cache_hit_rate": 0.5, "kv_cache_alloc_new_blocks": 1,
    "kv_cache_alloc_total_blocks": 1, "kv_cache_missed_block": 2, "arrival_time_ns": 1_000_000,
    "first_scheduled_time_ns": 3_000_000, "first_token_time_ns": 8_000_000, "last_token_time_ns": 9_000_000,
    "acceptance_rate": 0.75, "total_accepted_draft_tokens": 3, "total_draft_tokens": 4,
}  # fmt: skip


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        self._decoupled = bool(policy.get("decoupled", False))

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                response = self._answer(request)
            except Exception as error:
                text = pb_utils.Tensor("text_output", np.array(["N/A"], np.object_))
                response = pb_utils.InferenceResponse(
                    [text], error=pb_utils.TritonError(f"Error generating request: {error}")
                )
            sender.send(response, flags=FINAL)

    def _answer(self, request: Any) -> Any:
        prompt = self._read(request, "text_input").item(0).decode()
        if self._scalar(request, "stop"):
            raise ValueError("A request id must be provided for request cancellation")
        if self._scalar(request, "streaming") and not self._decoupled:
            raise ValueError("Streaming is only supported in decoupled mode.")
        if "breaks" in prompt:
            raise ValueError("out of luck")
        most = self._scalar(request, "sampling_param_max_tokens") or 32
        words = prompt.split()
        outputs = {"text_output": " ".join(words[:most]).encode()}
        if self._scalar(request, "return_finish_reason"):
            outputs["finish_reason"] = "length" if len(words) > most else "stop"
        if self._scalar(request, "return_stop_reason"):
            outputs["stop_reason"] = "None"
        if self._scalar(request, "return_cumulative_logprob"):
            outputs["cumulative_logprob"] = "-1.5"
        if self._scalar(request, "sampling_param_return_perf_metrics"):
            outputs |= {name: str(value) for name, value in _FIGURES.items()}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, np.array([value], np.object_)) for name, value in outputs.items()]
        )

    def _read(self, request: Any, name: str) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()

    def _scalar(self, request: Any, name: str) -> Any:
        array = self._read(request, name)
        return None if array is None else array.item(0)
