"""The one model of a `pytorch` repository, from the values that a recipe gives.

Pure: values in, config out. Tensors are those of TensorRT-LLM's `llmapi` model of the version. It has no batch
dimension. Whether it is decoupled, and so can stream, stands in config.pbtxt as well as in model.yaml, because the
launcher turns off the completion of configs that upstream's model relies on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.contracts import llmapi
from pipeline.contracts.inflight_batcher import TensorSpec
from pipeline.errors import UserError
from pipeline.triton.config import model_config
from pipeline.triton.deployment import TARGET_MODEL

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

_UNBATCHED = 0
_PROMPT_LOG_PROBS = "sampling_param_prompt_logprobs"
# Upstream's llmapi model takes none. The names are those of its other models, so that a client sends the same to all.
_GUIDES = tuple(
    TensorSpec(name=name, data_type="TYPE_STRING", dims=(1,), optional=True)
    for name in ("guided_decoding_guide_type", "guided_decoding_guide")
)


@dataclass(frozen=True, slots=True)
class LlmapiSettings:
    """Serving settings of a recipe."""

    version: str  # of TensorRT-LLM
    ranks: int = 1  # GPUs of one instance
    instances: int = 1
    max_open_requests: int | None = None  # of one instance, running and waiting; None: no limit
    cancellation_check_period_ms: int = 100
    guided_decoding: bool = False
    decoupled: bool = True  # an answer may come in many responses; else in one
    prompt_log_probs: bool = False  # offered, because prompts are computed without reuse of the KV cache

    @property
    def gpus(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each instance."""
        return tuple(
            tuple(range(instance * self.ranks, (instance + 1) * self.ranks))
            for instance in range(self.instances)
        )


def llmapi_model(settings: LlmapiSettings) -> ModelConfig:
    """The config.

    Raises:
        UserError: The version is not known, or has no several instances.
    """
    have, own = llmapi.tensors(settings.version), llmapi.own_tensors(settings.version)
    inputs = (*have.inputs, *own.inputs, *(_GUIDES if settings.guided_decoding else ()))
    outputs = (*have.outputs, *own.outputs)
    if not settings.prompt_log_probs:
        inputs = tuple(tensor for tensor in inputs if tensor.name != _PROMPT_LOG_PROBS)
        outputs = tuple(tensor for tensor in outputs if not tensor.name.startswith("prompt_log_probs"))
    if settings.instances > 1 and not llmapi.has_instances(settings.version):
        raise UserError(
            f"runtime.instances = {settings.instances}: TensorRT-LLM {settings.version} has one instance only "
            "(set runtime.instances to 1, or runtime.version to 1.3.0 or newer)"
        )
    parameters = {"tokens_per_block": str(llmapi.tokens_per_block())}
    if settings.instances > 1:
        parameters["gpu_device_ids"] = ";".join(",".join(map(str, group)) for group in settings.gpus)
    return model_config(
        TARGET_MODEL,
        backend="python",
        max_batch_size=_UNBATCHED,
        instances=settings.instances,
        decoupled=settings.decoupled,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
    )


def model_yaml(settings: LlmapiSettings, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Content of model.yaml: the arguments of the LLM API, and the model's own section."""
    own: dict[str, Any] = {
        **llmapi.triton_config(settings.version),
        "max_batch_size": _UNBATCHED,
        "decoupled": settings.decoupled,
        "cancellation_check_period_ms": settings.cancellation_check_period_ms,
    }
    if ignored := llmapi.ignored_sampling(settings.version):
        own["ignored_sampling"] = list(ignored)
    if settings.max_open_requests is not None:
        own["max_open_requests"] = settings.max_open_requests
    return {**arguments, "triton_config": own}
