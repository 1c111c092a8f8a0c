"""Pickled weights, where a recipe allows them, to safetensors.

They are read with `torch.load(weights_only=True)`, which builds tensors and plain containers and refuses all else, so
that no code of the file runs. One file of weights gives one file of safetensors.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.extras import missing
from pipeline.progress import Progress
from pipeline.stages.fetch.selection import INDEX, PICKLE_INDEX, WHOLE


def to_safetensors(folder: Path, label: str, progress: Progress) -> None:
    """Replace the `*.bin` files of `folder`, and their index, by safetensors."""
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        raise missing(f"{label}: reading pickled weights", error, "calibrate") from error

    paths = sorted(folder.glob("*.bin"))
    placed: dict[str, str] = {}
    total = 0
    with progress.task("convert to safetensors", len(paths), "files") as task:
        for number, path in enumerate(paths, start=1):
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                reason = str(error).splitlines()[0]
                raise SourceError(f"{label}: {path.name} is not a file of plain tensors: {reason}") from error
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            name = WHOLE if len(paths) == 1 else f"model-{number:05d}-of-{len(paths):05d}.safetensors"
            # Tied tensors share their memory, which safetensors does not keep.
            save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, folder / name,
                      metadata={"format": "pt"})  # fmt: skip
            placed |= dict.fromkeys(tensors, name)
            total += sum(value.numel() * value.element_size() for value in tensors.values())
            del state, tensors
            path.unlink()
            task.advance()
    (folder / PICKLE_INDEX).unlink(missing_ok=True)
    if len(paths) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
