"""One checkpoint in the Hugging Face layout into the rank files of TensorRT-LLM, streamed from file to file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.contracts.checkpoint import Layout
from pipeline.contracts.checkpoint_files import check
from pipeline.errors import Fault, InvalidInput, StageError, UserError
from pipeline.models import Architecture, Checkpoint, Format
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.checkpoint.config import DTYPES, rank_config, stored_dtype
from pipeline.runtimes.tensorrt.checkpoint.layout import parts
from pipeline.runtimes.tensorrt.checkpoint.parts import Rank
from pipeline.runtimes.tensorrt.checkpoint.writing import bytes_of, write_rank
from pipeline.store import Json

FORMATS = (Format.NONE, Format.FP8)  # of linear layers that can be divided


def split(source: Checkpoint, sizes: Parallelism, folder: Path, progress: Progress) -> Mapping[str, Json]:
    """Write config.json and one file a rank into `folder`, which must not exist; the facts of it.

    Raises:
        InvalidInput: the sizes do not divide the model. UserError: it is quantized in a format that is not split here.
        StageError: tensors are missing, or not of their types, or scales differ that must be the same.
    """
    model, quantization = source.architecture, source.quantization
    if quantization.format not in FORMATS:
        raise UserError(
            f"{source.directory}: {quantization.format} weights are not split; {', '.join(FORMATS)} are"
        )
    faults = list(split_faults(model, sizes))
    if faults:
        raise InvalidInput(f"{model.class_name} cannot be split into {sizes.folder}", faults)
    dtype = DTYPES[stored_dtype(model)]
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
    layout = Layout(
        model, dtype, quantization.format, None, cache, sizes.tensor, sizes.pipeline, sizes.expert
    )
    check(folder, layout, values=False)
    return {"ranks": sizes.world, "bytes": total, "dtype": stored_dtype(model), "tensors": len(ranks[0])}


def split_faults(
    model: Architecture, sizes: Parallelism, key: str = "runtime.tensor_parallel"
) -> Iterator[Fault]:
    """What does not divide; `key` is where the tensor-parallel size was given.

    Rules: tp.* and pp.* of TensorRT-LLM's attention and loader.
    """
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
