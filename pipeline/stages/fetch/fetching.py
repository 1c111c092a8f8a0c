"""From a resolved source to the files of a checkpoint, checked."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from pathlib import Path

from pipeline.errors import CheckpointError, SourceError
from pipeline.extras import missing
from pipeline.models.folder import CONFIG
from pipeline.progress import Progress
from pipeline.reading import UnreadableFile, read_json, read_tokenizer
from pipeline.stages.fetch.local import copy_local
from pipeline.stages.fetch.pickles import to_safetensors
from pipeline.stages.fetch.resolved import HubCheckpoint, ResolvedSource
from pipeline.store import Json


def fetch(resolved: ResolvedSource, into: Path, *, progress: Progress) -> dict[str, Json]:
    """Bring the checkpoint into `into`, which may hold what a killed fetch of it left; facts for the manifest.

    Afterwards it holds config.json, tokenizer files and safetensors, flat, and each safetensors file's header adds up
    to its size. Raises SourceError if the checkpoint cannot be had or is damaged.
    """
    if isinstance(resolved, HubCheckpoint):
        pickled = _download(resolved, into, progress)
        facts: dict[str, Json] = {"revision": resolved.revision, "commit": resolved.commit}
    else:
        copy_local(resolved, into, progress)
        pickled = any(name.endswith(".bin") for name in resolved.files)
        facts = {}
    if pickled:
        to_safetensors(into, resolved.label, progress)
    return {"source": resolved.label, **facts, "pickled": pickled, **_inspect(into, resolved.label)}


def _download(resolved: HubCheckpoint, into: Path, progress: Progress) -> bool:
    if resolved.offline:
        raise SourceError(
            f"{resolved.label} at {resolved.commit} is not in the store, and the Hub is not asked in offline mode; "
            "build once without --offline (and without HF_HUB_OFFLINE)"
        )
    try:
        from pipeline.stages.fetch.download import Download
        from pipeline.stages.fetch.hub import Hub
    except ImportError as error:
        raise missing(f"{resolved.label}: the Hub", error, "hub") from error
    return Download(Hub.from_environment(), resolved, into, progress).run()


def _inspect(folder: Path, label: str) -> dict[str, Json]:
    """Read the configuration and every header; what they say."""
    from pipeline.models.tensors import TensorFiles

    try:
        config = read_json(folder / CONFIG)
        headers = TensorFiles(folder).headers.values()
        if (folder / "tokenizer.json").is_file():
            # Where the library is not installed, no later stage reads the file here.
            with contextlib.suppress(ImportError):
                read_tokenizer(folder / "tokenizer.json")
    except (CheckpointError, UnreadableFile) as error:
        raise SourceError(f"{label}: {str(error).replace(str(folder) + '/', '')}") from error
    return {
        "architectures": config.get("architectures"),
        "tensors": len(headers),
        "parameters": sum(math.prod(header.shape) for header in headers),
        "dtypes": dict(sorted(Counter(header.dtype for header in headers).items())),
    }
