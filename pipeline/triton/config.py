"""A model's config.pbtxt: Triton's own protobuf message, filled, written as text and read back.

Upstream fills templates by string substitution, and what it forgets stays behind as `${name}`. Here nothing is
substituted: a config is tritonclient's `ModelConfig` (`model_config.proto`, read with tritonclient 2.73).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.contracts.inflight_batcher import EnsembleStep, TensorSpec
from pipeline.errors import StageError

if TYPE_CHECKING:  # imports grpc, which takes a quarter of a second
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelDynamicBatching

_WIDTH = 150  # columns; a message that needs more is written over several lines
# Fields come as the protocol declares them, except that long lists follow everything else.
_LONG = ("input", "output", "ensemble_scheduling", "parameters")


def model_config(
    name: str,
    *,
    max_batch_size: int,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    backend: str = "",
    instances: int = 0,
    decoupled: bool = False,
    dynamic_batching: ModelDynamicBatching | None = None,
    parameters: Mapping[str, str] | None = None,
    steps: Iterable[EnsembleStep] = (),
) -> ModelConfig:
    """Fill the config of one model: executed by a backend, or an ensemble of others.

    Args:
        max_batch_size: 0 for a model whose tensors have no batch dimension.
        backend: `python` or `tensorrtllm`; empty for an ensemble.
        instances: Instances on the CPU; 0 for an ensemble.
        decoupled: Whether a request may have any number of responses.
        dynamic_batching: Triton's queue in front of the model; None for no queue.
        steps: The models of an ensemble, in order.

    Raises:
        StageError: Triton has no such data type, or a number is out of range.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    try:
        config = pb.ModelConfig(
            name=name,
            backend=backend,
            max_batch_size=max_batch_size,
            input=[
                pb.ModelInput(
                    **_tensor(tensor), optional=tensor.optional, allow_ragged_batch=tensor.allow_ragged_batch
                )
                for tensor in inputs
            ],
            output=[pb.ModelOutput(**_tensor(tensor)) for tensor in outputs],
            dynamic_batching=dynamic_batching,
            parameters={
                key: pb.ModelParameter(string_value=value) for key, value in (parameters or {}).items()
            },
        )
    except ValueError as error:
        raise StageError(f"{name}/config.pbtxt: {error}") from None
    if instances:
        config.instance_group.add(count=instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    if decoupled:
        config.model_transaction_policy.decoupled = True
    for step in steps:
        config.platform = "ensemble"
        config.ensemble_scheduling.step.add(
            model_name=step.model, model_version=-1, input_map=step.input_map, output_map=step.output_map
        )
    return config


def dynamic_batching(
    *, preferred_batch_size: int | None = None, max_queue_delay_us: int = 0, max_queue_size: int = 0
) -> ModelDynamicBatching:
    """Triton's queue in front of a model; 0 means no delay, and no limit of waiting requests."""
    from tritonclient.grpc import model_config_pb2 as pb

    return pb.ModelDynamicBatching(
        preferred_batch_size=[] if preferred_batch_size is None else [preferred_batch_size],
        max_queue_delay_microseconds=max_queue_delay_us,
        default_queue_policy=pb.ModelQueuePolicy(max_queue_size=max_queue_size) if max_queue_size else None,
    )


def parameters_of(config: ModelConfig) -> dict[str, str]:
    """The parameters of a model, by name."""
    return {name: value.string_value for name, value in sorted(config.parameters.items())}


def render(config: ModelConfig) -> str:
    """Write a config as text, one tensor and one parameter a line.

    >>> print(render(model_config("echo", max_batch_size=8, inputs=(), outputs=(), backend="python", instances=1)))
    name: "echo"
    backend: "python"
    max_batch_size: 8
    instance_group { count: 1 kind: KIND_CPU }

    Raises:
        StageError: A value holds a placeholder of upstream's templates, `${…}`.
    """
    lines = list(_lines(config))
    for line in lines:
        if "${" in line:
            raise StageError(f"{config.name}/config.pbtxt: a placeholder is left: {line.strip()}")
    return "\n".join(lines) + "\n"


def parse(text: str) -> ModelConfig:
    """Read a config as Triton does.

    Raises:
        StageError: It is not the text of a `ModelConfig`.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb

    try:
        return text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        raise StageError(f"config.pbtxt: {error}") from None


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    from tritonclient.grpc import model_config_pb2 as pb

    reshape = None if tensor.reshape is None else pb.ModelTensorReshape(shape=tensor.reshape)
    return {"name": tensor.name, "data_type": tensor.data_type, "dims": tensor.dims, "reshape": reshape}


def _lines(message: Any) -> Iterator[str]:
    """The fields of a message, a line each where they fit."""
    from google.protobuf import text_format

    for field, value in sorted(message.ListFields(), key=lambda pair: _position(pair[0])):
        for element in _elements(value):
            text = io.StringIO()
            text_format.PrintField(
                field, element, text, as_utf8=True, as_one_line=True, use_short_repeated_primitives=True
            )
            if len(text.getvalue()) <= _WIDTH or field.message_type is None:
                yield text.getvalue().rstrip()
            else:
                yield f"{field.name} {{"
                yield from (f"  {line}" for line in _lines(element))
                yield "}"


def _position(field: Any) -> tuple[bool, int]:
    return field.name in _LONG, field.index


def _elements(value: Any) -> Sequence[Any]:
    """Values of a field, each to be written after the field's name; for a map, its entries, sorted."""
    if isinstance(value, MutableMapping):
        entry = value.GetEntryClass()  # type: ignore[attr-defined]  # protobuf's own mapping
        return [entry(key=key, value=value[key]) for key in sorted(value)]
    return value if isinstance(value, MutableSequence) else [value]
