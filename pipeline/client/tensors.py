"""The tensors of a served model: which it takes and returns, and their bytes.

`read_signature` recognizes the layouts by their tensors: `ensemble` and `tensorrt_llm_bls` of the TensorRT-LLM backend
(1.0 to 1.2), and the `llmapi` model of these releases, whose tensors have no batch dimension and whose text
accumulates.

`encode` and `decode_*` convert values as KServe v2 carries them in `raw_input_contents` and `raw_output_contents`:
little-endian; a BYTES element is a 4-byte length and that many bytes. No I/O here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb

# Values of `accumulate_tokens` that the BLS model reads as true.
_TRUE = ("true", "yes", "1", "t")

# datatype -> struct code
_STRUCT_CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input of a model.

    Attributes:
        datatype: KServe's name: BYTES, INT32, FP32, …
        optional: whether a request may leave it out.
    """

    datatype: str
    optional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelSignature:
    """Inputs and outputs of one model. Compared by identity: a client reads it once.

    Attributes:
        inputs: by tensor name.
        outputs: tensor names.
        batched: every tensor has a leading batch dimension.
        decoupled: the model sends any number of responses to a request.
        cumulative: each response repeats the text so far.
        tokens_per_block: tokens that one block of the engine's KV cache holds; None where the model does not say.
    """

    name: str
    inputs: Mapping[str, InputTensor]
    outputs: frozenset[str]
    batched: bool
    decoupled: bool
    cumulative: bool
    tokens_per_block: int | None = None

    def input_named(self, candidates: tuple[str, ...]) -> str | None:
        """Return the first of `candidates` that this model takes (names differ between releases), or None."""
        return next((name for name in candidates if name in self.inputs), None)


def read_signature(config: pb.ModelConfig) -> ModelSignature:
    """Read a model's signature from its Triton configuration, the reply to a ModelConfig call."""
    inputs = {
        tensor.name: InputTensor(datatype=datatype_name(tensor.data_type), optional=tensor.optional)
        for tensor in config.input
    }
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    accumulates, block = parameters.get("accumulate_tokens", ""), parameters.get("tokens_per_block", "")
    return ModelSignature(
        name=config.name,
        inputs=inputs,
        outputs=frozenset(tensor.name for tensor in config.output),
        batched=config.max_batch_size > 0,
        decoupled=config.model_transaction_policy.decoupled,
        cumulative=accumulates.lower() in _TRUE or "sampling_param_max_tokens" in inputs,
        tokens_per_block=int(block) if block.isdecimal() else None,
    )


def datatype_name(number: int) -> str:
    """Return KServe's name (BYTES, INT32, …) of a Triton `DataType`."""
    name: str = pb.DataType.Name(number).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def encode(datatype: str, values: Sequence[bytes | str | bool | int | float]) -> bytes:
    """Encode a tensor's values, flat, in row-major order.

    >>> encode("INT32", [7]), encode("BYTES", ["hé"])
    (b'\\x07\\x00\\x00\\x00', b'\\x03\\x00\\x00\\x00h\\xc3\\xa9')
    """
    if datatype != "BYTES":
        return struct.pack(f"<{len(values)}{_STRUCT_CODES[datatype]}", *values)
    parts = []
    for value in values:
        data = value.encode() if isinstance(value, str) else value
        if not isinstance(data, bytes):
            raise TypeError(f"{value!r}: BYTES takes str or bytes")
        parts += [len(data).to_bytes(4, "little"), data]
    return b"".join(parts)


def decode_bytes(raw: bytes) -> list[bytes]:
    """Decode the elements of a BYTES tensor. Raises ValueError if the last element is cut off.

    >>> decode_bytes(b"\\x03\\x00\\x00\\x00h\\xc3\\xa9")
    [b'h\\xc3\\xa9']
    """
    # Nearly always there is one element.
    if len(raw) >= 4 and int.from_bytes(raw[:4], "little") == len(raw) - 4:
        return [raw[4:]]
    values, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        end = at + 4 + length
        if end > len(raw):
            raise ValueError(f"element of {length} bytes at {at}, but only {len(raw)} bytes in all")
        values.append(raw[at + 4 : end])
        at = end
    return values


def decode_numbers(datatype: str, raw: bytes) -> tuple[float, ...]:
    """Decode the elements of a tensor of numbers.

    >>> decode_numbers("INT32", b"\\x07\\x00\\x00\\x00")
    (7,)
    """
    code = _STRUCT_CODES[datatype]
    return struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)
