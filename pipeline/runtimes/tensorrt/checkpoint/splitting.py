"""One checkpoint in the Hugging Face layout into the rank files of TensorRT-LLM, streamed from file to file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.contracts.checkpoint import CheckpointLayout, check_files
from pipeline.errors import Fault, InvalidInput, StageError, UserError
from pipeline.models import Architecture, CheckpointReader, Format
from pipeline.models.tensors import DTYPES, Array, TensorMap
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.checkpoint.config import (
    MODEL_TYPES,
    ROPES,
    SAFETENSORS_DTYPES,
    rank_config,
    stored_dtype,
)
from pipeline.runtimes.tensorrt.checkpoint.layout import Part, Rank, Scale, Slice, parts
from pipeline.store import Json

FORMATS = (Format.NONE, Format.FP8)  # of linear layers that can be divided


def split(
    source: CheckpointReader, sizes: Parallelism, folder: Path, progress: Progress
) -> Mapping[str, Json]:
    """Write config.json and one file a rank into `folder`, which must not exist; return the facts of it.

    Returns:
        Ranks, bytes of all of them, type of the weights, and tensors in a rank.

    Raises:
        InvalidInput: The sizes do not divide the model.
        UserError: It is quantized in a format that is not split here.
        StageError: Tensors are missing, or not of their types, or scales differ that must be the same.
        CheckpointError: The written files are not as asked for.
    """
    model, quantization = source.architecture, source.quantization
    if quantization.format not in FORMATS:
        raise UserError(
            f"{source.directory}: {quantization.format} weights are not split; {', '.join(FORMATS)} are"
        )
    faults = [*_model_faults(model), *_split_faults(model, sizes)]
    if faults:
        raise InvalidInput(f"{model.class_name} cannot be split into {sizes.folder}", faults)
    dtype = SAFETENSORS_DTYPES[stored_dtype(model)]
    ranks = [list(parts(model, Rank(number, sizes), quantization)) for number in range(sizes.world)]
    absent = sorted({name for rank in ranks for part in rank for name in part.sources} - set(source.tensors))
    if absent:
        raise StageError(f"{source.directory} lacks {len(absent)} tensors: {', '.join(absent[:8])}")
    folder.mkdir(parents=True)
    total = sum(bytes_of(rank, dtype) for rank in ranks)
    with progress.task(f"{sizes.folder}: {sizes.world} ranks", total, "B") as task:
        for number, rank in enumerate(ranks):
            write_rank(folder / f"rank{number}.safetensors", rank, source.tensors, dtype, task.advance)
    text = json.dumps(rank_config(model, sizes, quantization), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    cache = "fp8" if quantization.kv_cache else "auto"
    layout = CheckpointLayout(
        model, dtype, quantization.format, None, cache, sizes.tensor, sizes.pipeline, sizes.expert
    )
    check_files(folder, layout, values=False)
    return {"ranks": sizes.world, "bytes": total, "dtype": stored_dtype(model), "tensors": len(ranks[0])}


def _model_faults(model: Architecture) -> Iterator[Fault]:
    """Models that no engine is built of here. Preflight's rules model.class and model.rope report them before."""
    if model.family not in MODEL_TYPES:
        yield Fault("cannot be converted", key="architectures", value=model.class_name)
    if model.rope.kind not in ROPES:
        yield Fault(
            "cannot be converted", key="rope_type", value=model.rope.kind, fix=f"one of {', '.join(ROPES)}"
        )
    if model.rope.share != 1:
        yield Fault("cannot be converted", key="partial_rotary_factor", value=model.rope.share, fix="1.0")


def _split_faults(model: Architecture, sizes: Parallelism) -> Iterator[Fault]:
    """Sizes that do not divide: a converter's own guard. Preflight's rules tp.*, pp.* and moe.* report them before."""
    key = "runtime.tensor_parallel"
    ranks = sizes.tensor
    for name, size in (("attention heads", model.heads), ("feed-forward columns", model.intermediate)):
        if size % ranks and not (model.experts and name != "attention heads"):
            yield Fault(f"does not divide the {size} {name}", key=key, value=ranks)
    if model.kv_heads % ranks and ranks % model.kv_heads:
        text = f"neither divides the {model.kv_heads} key-value heads nor is divided by them"
        yield Fault(text, key=key, value=ranks)
    yield from _pipeline_faults(model, sizes)
    if sizes.expert > 1 and not model.experts:
        yield Fault(
            "is given, but the model has no experts", key="runtime.expert_parallel", value=sizes.expert
        )
    elif model.experts and (model.experts % sizes.expert or ranks % sizes.expert):
        text = f"does not divide the {model.experts} experts and the {ranks} tensor-parallel ranks"
        yield Fault(text, key="runtime.expert_parallel", value=sizes.expert)
    elif model.experts and model.intermediate % (ranks // sizes.expert):
        yield Fault(f"does not divide the {model.intermediate} columns of an expert", key=key, value=ranks)


def _pipeline_faults(model: Architecture, sizes: Parallelism) -> Iterator[Fault]:
    """Unequal groups of layers are refused: Mapping.pp_layers drops the remainder in older releases, and gives it to
    the first ranks in newer ones. Phi-3's model (models/phi3/model.py) runs all layers on one rank.
    """
    key, stages = "runtime.pipeline_parallel", sizes.pipeline
    if model.layers % stages:
        yield Fault(f"does not divide the {model.layers} layers", key=key, value=stages)
    if stages > 1 and model.family == "phi3":
        yield Fault(f"is not offered by TensorRT-LLM's {model.class_name}", key=key, value=stages, fix="1")


_CHUNK_BYTES = 32 * 2**20
_ALIGNMENT = 8  # of the first tensor, as the reference implementation pads its header
_FLOATS = ("F32", "F16", "BF16")  # may become each other; quantized weights may not


def write_rank(
    file: Path, parts: Sequence[Part | Scale], source: TensorMap, dtype: str, advance: Callable[[int], None]
) -> None:
    """Write one rank.

    Args:
        dtype: Type of tensors that name none: "BF16" or "F16".
        advance: Called with the number of bytes as they are written.

    Raises:
        StageError: A source tensor is of a type that cannot become the rank's, or scales differ that must not.
    """
    with file.open("wb") as stream:
        stream.write(_header(parts, dtype))
        for part in parts:
            kind = part.dtype or dtype
            chunks = _scales(part, source) if isinstance(part, Scale) else _chunks(part, source, kind)
            for chunk in chunks:
                stream.write(chunk.data)
                advance(chunk.nbytes)


def bytes_of(parts: Sequence[Part | Scale], dtype: str) -> int:
    """Bytes of the tensors, without the header."""
    return sum(math.prod(part.shape) * DTYPES[part.dtype or dtype].itemsize for part in parts)


def _header(parts: Sequence[Part | Scale], dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for part in parts:
        end = at + bytes_of([part], dtype)
        entries[part.name] = {
            "dtype": part.dtype or dtype,
            "shape": list(part.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _scales(scale: Scale, source: TensorMap) -> Iterator[Array]:
    values = []
    for group in scale.groups:
        scales = np.array([source[name].astype(np.float32).reshape(()) for name in group])
        if scale.same and not (scales == scales[0]).all():
            raise StageError(f"{scale.name}: {', '.join(group)} must be equal, and are {scales.tolist()}")
        values.append(max(scales.max(), scale.least))
    yield np.array(values, np.float32).view(np.uint8)


def _chunks(part: Part, source: TensorMap, kind: str) -> Iterator[Array]:
    written, dtype = 0, DTYPES[kind]
    for piece in part.slices:
        stored = source.headers[piece.tensor].dtype
        if stored != kind and not (stored in _FLOATS and kind in _FLOATS):
            raise StageError(f"{piece.tensor} is {stored}, which cannot be stored as {kind}")
        for rows in _rows(piece, source[piece.tensor]):
            chunk = np.ascontiguousarray(rows.astype(dtype, copy=False))
            written += chunk.size
            yield chunk.reshape(-1).view(np.uint8)
    missing = math.prod(part.shape) - written
    if missing:
        yield np.zeros(missing, dtype).view(np.uint8)


def _rows(piece: Slice, tensor: Array) -> Iterator[Array]:
    low, high = piece.rows
    if tensor.ndim == 1:
        yield tensor[low:high]
        return
    columns = slice(*piece.columns) if piece.columns else slice(None)
    step = max(1, _CHUNK_BYTES // (tensor.shape[1] * tensor.itemsize))
    for at in range(low, high, step):
        yield tensor[at : min(at + step, high), columns]
