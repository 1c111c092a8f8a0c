"""Triton model `tensorrt_llm` of the pytorch runtime: text to text, by TensorRT-LLM's LLM API in this process.

Tensors and behaviour are those of TensorRT-LLM's own `llmapi` model (1.0 and newer): no batch dimension, each response
of a stream repeats the text so far, `stop` with a request's id ends it, a client that leaves frees the engine. Where
upstream writes numbers as text, this writes what config.pbtxt declares. Arguments of the LLM are in model.yaml.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from llm_settings import LlmSettings, choose_gpus, gpus_of
from shared.parameters import is_decoupled


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Take from model.yaml what config.pbtxt of upstream's packages leaves out: whether the model is decoupled."""
        settings = LlmSettings.read(Path(pb_utils.get_model_dir()) / _settings_file())
        config.set_model_transaction_policy({"decoupled": settings.decoupled})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        settings = LlmSettings.read(folder / _settings_file())
        gpus = gpus_of(config, args["model_instance_name"])
        if gpus:
            choose_gpus(gpus)  # before tensorrt_llm is imported, which initializes CUDA
        import llm_ranks
        from llm_request_manager import LlmRequestManager

        self._manager: LlmRequestManager | None = None
        if not llm_ranks.is_leader():
            pb_utils.Logger.log_info(f"[trtllm] rank{llm_ranks.rank()} is waiting for the leader node...")
            llm_ranks.work_for_leader()
            return
        arguments = llm_ranks.with_session(settings.arguments)
        if gpus:
            arguments["gpus_per_node"] = len(gpus)
        pb_utils.Logger.log_info(f"[trtllm] starting the LLM with {settings.arguments}")
        try:
            self._manager = LlmRequestManager(
                args["model_name"], arguments, settings, _types(config), decoupled=is_decoupled(config)
            )
        except Exception as error:
            pb_utils.Logger.log_error(f"[trtllm] Failed to start engine: {error}")
            raise

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            if self._manager is None:
                error = pb_utils.TritonError("this rank works for another and takes no requests")
                sender = request.get_response_sender()
                response = pb_utils.InferenceResponse(error=error)
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                self._manager.take(request)

    def finalize(self) -> None:
        if self._manager is not None:
            self._manager.close()
            pb_utils.Logger.log_info("[trtllm] Shutdown complete")


def _settings_file() -> str:
    return os.environ.get("LLM_CONFIG_PATH", "model.yaml")


def _types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name of an output -> numpy type, as config.pbtxt declares them."""
    return {
        output["name"]: pb_utils.triton_string_to_numpy(output["data_type"]) for output in config["output"]
    }
