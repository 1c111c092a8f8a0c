"""config.pbtxt as text: written from typed values, one tensor a line, and read back with Triton's own protobuf.

Upstream fills templates by string substitution, and what it forgets stays behind as `${name}`. Here nothing is
substituted, and `checked` compares what Triton will read with what was meant, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from pipeline.contracts.inflight_batcher import EnsembleStep, Tensor
from pipeline.errors import StageError
from pipeline.triton.config import DynamicBatching, ModelConfig


def checked(config: ModelConfig) -> str:
    """The text of a config, proven: read back, it is the same config.

    Raises:
        StageError: it is not, or it holds a placeholder.
    """
    text = render(config)
    if "${" in text:
        line = next(line.strip() for line in text.splitlines() if "${" in line)
        raise StageError(f"{config.name}/config.pbtxt: a placeholder is left: {line}")
    back = parse(text)
    for field in fields(ModelConfig):
        meant, read = getattr(config, field.name), getattr(back, field.name)
        if meant != read:
            raise StageError(
                f"{config.name}/config.pbtxt: {field.name}: meant {meant!r}, Triton reads {read!r}"
            )
    return text


def render(config: ModelConfig) -> str:
    """The text of a config.

    >>> print(render(ModelConfig("echo", 8, (), (), backend="python", instances=1)))
    name: "echo"
    backend: "python"
    max_batch_size: 8
    instance_group [ { count: 1, kind: KIND_CPU } ]
    """
    return "\n".join(_lines(config)) + "\n"


def parse(text: str) -> ModelConfig:
    """The config that Triton reads from a text.

    Raises:
        StageError: Triton could not read it, or it holds a field that `ModelConfig` has no place for.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise StageError(f"config.pbtxt: {error}") from None
    return _config(message)


def _lines(config: ModelConfig) -> Iterator[str]:
    yield f"name: {_quoted(config.name)}"
    yield 'platform: "ensemble"' if config.steps else f"backend: {_quoted(config.backend)}"
    yield f"max_batch_size: {config.max_batch_size}"
    if config.decoupled:
        yield "model_transaction_policy { decoupled: true }"
    if config.dynamic_batching is not None:
        yield _dynamic_batching(config.dynamic_batching)
    if config.instances:
        yield f"instance_group [ {{ count: {config.instances}, kind: KIND_CPU }} ]"
    yield from _list("input", map(_tensor, config.inputs))
    yield from _list("output", map(_tensor, config.outputs))
    for name, value in config.parameters.items():
        yield f"parameters {{ key: {_quoted(name)}, value: {{ string_value: {_quoted(value)} }} }}"
    if config.steps:
        yield "ensemble_scheduling {"
        for step in config.steps:
            yield from _step(step)
        yield "}"


def _tensor(tensor: Tensor) -> str:
    parts = [f"name: {_quoted(tensor.name)}", f"data_type: {tensor.data_type}", f"dims: {list(tensor.dims)}"]
    if tensor.reshape is not None:
        parts.append(f"reshape: {{ shape: {list(tensor.reshape)} }}")
    if tensor.optional:
        parts.append("optional: true")
    if tensor.allow_ragged_batch:
        parts.append("allow_ragged_batch: true")
    return f"{{ {', '.join(parts)} }}"


def _dynamic_batching(batching: DynamicBatching) -> str:
    parts = []
    if batching.preferred_batch_size:
        parts.append(f"preferred_batch_size: {list(batching.preferred_batch_size)}")
    if batching.max_queue_delay_us:
        parts.append(f"max_queue_delay_microseconds: {batching.max_queue_delay_us}")
    if batching.max_queue_size:
        parts.append(f"default_queue_policy: {{ max_queue_size: {batching.max_queue_size} }}")
    return f"dynamic_batching {{ {', '.join(parts)} }}"


def _step(step: EnsembleStep) -> Iterator[str]:
    yield "  step {"
    yield f"    model_name: {_quoted(step.model)}"
    yield "    model_version: -1"
    for way, names in (("input_map", step.input_map), ("output_map", step.output_map)):
        for inner, outer in names.items():
            yield f"    {way} {{ key: {_quoted(inner)}, value: {_quoted(outer)} }}"
    yield "  }"


def _list(name: str, entries: Iterable[str]) -> Iterator[str]:
    rows = [f"  {entry}" for entry in entries]
    if rows:
        yield f"{name} ["
        yield ",\n".join(rows)
        yield "]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _config(message: Any) -> ModelConfig:
    _refuse_others(
        message, "name", "platform", "backend", "max_batch_size", "input", "output", "instance_group", "parameters",
        "model_transaction_policy", "dynamic_batching", "ensemble_scheduling",
    )  # fmt: skip
    return ModelConfig(
        name=message.name,
        max_batch_size=message.max_batch_size,
        inputs=tuple(map(_read_tensor, message.input)),
        outputs=tuple(map(_read_tensor, message.output)),
        backend=message.backend,
        instances=sum(map(_read_instances, message.instance_group)),
        decoupled=message.model_transaction_policy.decoupled,
        dynamic_batching=_read_batching(message.dynamic_batching)
        if message.HasField("dynamic_batching")
        else None,
        parameters={name: value.string_value for name, value in message.parameters.items()},
        steps=tuple(map(_read_step, message.ensemble_scheduling.step)),
    )


def _read_instances(message: Any) -> int:
    _refuse_others(message, "count", "kind")
    if message.kind != message.KIND_CPU:
        raise StageError("config.pbtxt: instance_group: only KIND_CPU is known here")
    count: int = message.count
    return count


def _read_tensor(message: Any) -> Tensor:
    _refuse_others(message, "name", "data_type", "dims", "optional", "reshape", "allow_ragged_batch")
    from tritonclient.grpc import model_config_pb2

    is_input = "optional" in message.DESCRIPTOR.fields_by_name
    return Tensor(
        name=message.name,
        data_type=model_config_pb2.DataType.Name(message.data_type),
        dims=tuple(message.dims),
        optional=is_input and message.optional,
        reshape=tuple(message.reshape.shape) if message.HasField("reshape") else None,
        allow_ragged_batch=is_input and message.allow_ragged_batch,
    )


def _read_batching(message: Any) -> DynamicBatching:
    _refuse_others(message, "preferred_batch_size", "max_queue_delay_microseconds", "default_queue_policy")
    return DynamicBatching(
        preferred_batch_size=tuple(message.preferred_batch_size),
        max_queue_delay_us=message.max_queue_delay_microseconds,
        max_queue_size=message.default_queue_policy.max_queue_size,
    )


def _read_step(message: Any) -> EnsembleStep:
    _refuse_others(message, "model_name", "model_version", "input_map", "output_map")
    return EnsembleStep(message.model_name, _names(message.input_map), _names(message.output_map))


def _names(message: Mapping[str, str]) -> dict[str, str]:
    return dict(message.items())


def _refuse_others(message: Any, *known: str) -> None:
    others = [field.name for field, _ in message.ListFields() if field.name not in known]
    if others:
        raise StageError(f"config.pbtxt: {message.DESCRIPTOR.name}: no place for {', '.join(others)}")
