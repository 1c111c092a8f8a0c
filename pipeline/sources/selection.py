"""Which files of a checkpoint are taken: names in, names out; only `chosen_files` looks into a folder.

The rules are those of transformers: `model.safetensors` if it is there, else the shards that
`model.safetensors.index.json` names. Other safetensors of a folder (`consolidated.safetensors`, adapters) are other
copies of the weights, or no weights of the model, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.models.adapter import WEIGHTS as ADAPTER_WEIGHTS
from pipeline.models.folder import ADAPTER_CONFIG, COMPANIONS, CONFIG, CheckpointFolder
from pipeline.reading import UnreadableFile, parse_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_WHOLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Selection:
    """Small files, and either one file of weights or the index that names the shards."""

    companions: tuple[str, ...]
    weights: str  # a file of weights, or an index
    pickled: bool

    @property
    def is_index(self) -> bool:
        return self.weights in (INDEX, PICKLE_INDEX)


def select(names: Collection[str], *, allow_pickle: bool, label: str, adapter: bool = False) -> Selection:
    """Choose the small files, and the weights or their index.

    Args:
        allow_pickle: Whether pickled weights are taken where there are no safetensors.
        adapter: Whether it is a LoRA adapter.

    Raises:
        SourceError: Files are missing, or the weights are pickled and that is not allowed.
    """
    if adapter:
        if lacking := [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if name not in names]:
            raise SourceError(f"{label} has no {' and no '.join(lacking)}: it is not a LoRA adapter of peft")
        return Selection((ADAPTER_CONFIG,), ADAPTER_WEIGHTS, pickled=False)
    if CONFIG not in names:
        raise SourceError(f"{label} has no {CONFIG}: it is not a checkpoint in the layout of transformers")
    companions = (CONFIG, *(name for name in COMPANIONS if name in names))
    for weights in (WHOLE, INDEX):
        if weights in names:
            return Selection(companions, weights, pickled=False)
    pickled = [weights for weights in (PICKLE_WHOLE, PICKLE_INDEX) if weights in names]
    if pickled and allow_pickle:
        return Selection(companions, pickled[0], pickled=True)
    raise SourceError(f"{label} {_why_no_weights(names, bool(pickled))}")


def _why_no_weights(names: Collection[str], usable_pickle: bool) -> str:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if usable_pickle:
        return (
            f"has only pickled weights ({', '.join(pickles[:3])}), which can run code when they are read; take a "
            "repository with safetensors, or set allow_pickle: true beside its source (its tensors are then read "
            "without running code, and kept as safetensors)"
        )
    if any(name.endswith(".gguf") for name in names):
        return (
            "has only GGUF files, which are quantized already; name the repository that they were made from"
        )
    others = sorted(name for name in names if name.endswith(".safetensors")) or pickles
    if others:
        return (
            f"has neither {WHOLE} nor {INDEX}; {', '.join(others[:3])} is not in the layout of transformers"
        )
    return f"has no weights: neither {WHOLE} nor {INDEX}"


def shards(index: bytes, names: Collection[str], *, pickled: bool, label: str) -> tuple[str, ...]:
    """List the files of weights that an index names, sorted.

    Raises:
        SourceError: The index is damaged, or names files that are not among `names`.
    """
    name = PICKLE_INDEX if pickled else INDEX
    suffix = ".bin" if pickled else ".safetensors"
    try:
        placed = parse_json(index, name)["weight_map"]
        shard_names = sorted(set(placed.values()))
    except (UnreadableFile, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{label}: {name} is damaged: it has no map of weights to files") from error
    for shard in shard_names:
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(suffix):
            raise SourceError(f"{label}: {name} names {shard!r}, which is not a {suffix} file beside it")
    missing = [shard for shard in shard_names if shard not in names]
    if missing or not shard_names:
        listed = ", ".join(missing[:5]) or "no file at all"
        raise SourceError(f"{label}: {name} names files that are not there: {listed}")
    return tuple(shard_names)


def chosen_files(
    path: Path, *, allow_pickle: bool, adapter: bool = False
) -> tuple[CheckpointFolder, list[str]]:
    """Open a local folder and choose the files that a build takes.

    Args:
        allow_pickle: Whether pickled weights are taken where there are no safetensors.
        adapter: Whether it is a LoRA adapter.

    Returns:
        The folder, and the sorted names of the files.

    Raises:
        SourceError: The folder is not there, or is not a checkpoint.
        InvalidInput: A link leads out of the folder, or to something that is not a regular file.
        UnreadableFile: The index of the weights cannot be read.
    """
    label = f"local:{path}"
    if not path.is_dir():
        raise SourceError(
            f"{label}: {'is a file, not a folder' if path.exists() else 'there is no such folder'}"
        )
    folder = CheckpointFolder(path)
    selection = select(folder.names, allow_pickle=allow_pickle, label=label, adapter=adapter)
    weights: tuple[str, ...] = (selection.weights,)
    if selection.is_index:
        index = folder.read(selection.weights)
        weights += shards(index, folder.names, pickled=selection.pickled, label=label)
    return folder, sorted({*selection.companions, *weights})
