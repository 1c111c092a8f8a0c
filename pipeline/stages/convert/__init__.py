"""The convert stage: an unquantized checkpoint, split into the ranks of a TensorRT-LLM checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.checkpoint import Architecture, Checkpoint, Format
from pipeline.errors import Fault, InvalidInput, StageError, UserError
from pipeline.planning.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.stages.convert.config import DTYPES, rank_config, stored_dtype
from pipeline.stages.convert.layout import Rank, parts
from pipeline.stages.convert.writing import bytes_of, write_rank
from pipeline.store import Json


def convert(checkpoint: Path, sizes: Parallelism, *, into: Path, progress: Progress) -> Mapping[str, Json]:
    """Write `into`/`sizes.folder`: config.json and one safetensors file a rank; the facts of it.

    Raises:
        InvalidInput: the sizes do not divide the model. UserError: it is quantized. StageError: weights are missing.
    """
    import json

    model = Architecture.read(checkpoint)
    source = Checkpoint(checkpoint)
    if source.quantization.format is not Format.NONE:
        raise UserError(
            f"{checkpoint} is quantized already ({source.quantization.format}): engines are built from a checkpoint"
            " that `quantization.format` calibrates, or from an unquantized one"
        )
    faults = list(_faults(model, sizes))
    if faults:
        raise InvalidInput(f"{model.class_name} cannot be split into {sizes.folder}", faults)
    folder, dtype = into / sizes.folder, DTYPES[stored_dtype(model)]
    folder.mkdir(parents=True)
    ranks = [list(parts(model, Rank(number, sizes))) for number in range(sizes.world)]
    absent = sorted(
        {piece.tensor for rank in ranks for part in rank for piece in part.slices} - set(source.tensors)
    )
    if absent:
        raise StageError(f"{checkpoint} lacks {len(absent)} tensors: {', '.join(absent[:8])}")
    total = sum(bytes_of(rank, dtype) for rank in ranks)
    with progress.task(f"{sizes.folder}: {sizes.world} ranks", total, "B") as task:
        for number, rank in enumerate(ranks):
            write_rank(folder / f"rank{number}.safetensors", rank, source.tensors, dtype, task.advance)
    (folder / "config.json").write_text(
        json.dumps(rank_config(model, sizes), indent=2) + "\n", encoding="utf-8"
    )
    return {"ranks": sizes.world, "bytes": total, "dtype": stored_dtype(model), "tensors": len(ranks[0])}


def _faults(model: Architecture, sizes: Parallelism) -> Iterator[Fault]:
    """What does not divide. Rules: tp.* and pp.* of TensorRT-LLM's attention and loader."""
    key, ranks = "runtime.tensor_parallel", sizes.tensor
    for name, size in (("attention heads", model.heads), ("feed-forward columns", model.intermediate)):
        if size % ranks and not (model.experts and name != "attention heads"):
            yield Fault(f"does not divide the {size} {name}", key=key, value=ranks)
    if model.kv_heads % ranks and ranks % model.kv_heads:
        text = f"neither divides the {model.kv_heads} key-value heads nor is divided by them"
        yield Fault(text, key=key, value=ranks)
    if model.layers % sizes.pipeline:
        yield Fault(
            f"does not divide the {model.layers} layers",
            key="runtime.pipeline_parallel",
            value=sizes.pipeline,
        )
    if sizes.expert > 1 and not model.experts:
        yield Fault(
            "is given, but the model has no experts", key="runtime.expert_parallel", value=sizes.expert
        )
    elif model.experts and (model.experts % sizes.expert or ranks % sizes.expert):
        text = f"does not divide the {model.experts} experts and the {ranks} tensor-parallel ranks"
        yield Fault(text, key="runtime.expert_parallel", value=sizes.expert)
    elif model.experts and model.intermediate % (ranks // sizes.expert):
        yield Fault(f"does not divide the {model.intermediate} columns of an expert", key=key, value=ranks)
