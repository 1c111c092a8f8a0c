"""What a served model takes and gives, read once from its Triton configuration. Pure: the calls are made elsewhere.

Three layouts are known by their tensors: `ensemble` and `tensorrt_llm_bls` of the TensorRT-LLM backend (0.19 to 1.2),
and the `llmapi` model of 1.0 and newer, whose tensors have no batch dimension and whose text accumulates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb

_TYPES: dict[int, str] = {number: name.removeprefix("TYPE_") for name, number in pb.DataType.items()}
_TRUE = ("true", "yes", "1", "t")  # as the BLS model reads `accumulate_tokens`


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input: its KServe datatype, and whether a request may leave it out."""

    datatype: str  # BYTES, INT32, FP32, …
    optional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The facts about one model that shape a request. Compared by identity: a client reads it once."""

    name: str
    inputs: Mapping[str, Tensor]
    outputs: frozenset[str]
    batched: bool  # every tensor has a leading batch dimension
    decoupled: bool  # sends many responses to one request
    cumulative: bool  # each response repeats the text so far

    def input_named(self, candidates: tuple[str, ...]) -> str | None:
        """The first of `candidates` that this model takes: names differ between releases."""
        return next((name for name in candidates if name in self.inputs), None)


def read_model(config: pb.ModelConfig) -> Model:
    """From the answer to a ModelConfig call."""
    inputs = {
        tensor.name: Tensor(datatype=_datatype(tensor.data_type), optional=tensor.optional)
        for tensor in config.input
    }
    accumulates = (
        config.parameters["accumulate_tokens"].string_value
        if "accumulate_tokens" in config.parameters
        else ""
    )
    return Model(
        name=config.name,
        inputs=inputs,
        outputs=frozenset(tensor.name for tensor in config.output),
        batched=config.max_batch_size > 0,
        decoupled=config.model_transaction_policy.decoupled,
        cumulative=accumulates.lower() in _TRUE or "sampling_param_max_tokens" in inputs,
    )


def _datatype(number: int) -> str:
    name = _TYPES[number]
    return "BYTES" if name == "STRING" else name
