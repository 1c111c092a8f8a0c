"""The first stage: copies the files of a resolved checkpoint into a folder that is not changed afterwards.

Only what later stages read is taken: safetensors, configuration, tokenizer. No code from a repository is, ever, and
pickled weights only where the recipe allows it: they are read with `torch.load(weights_only=True)`, which builds
tensors and plain containers and refuses all else, and kept as safetensors. Local files are copied (as a reflink where
the filesystem can) and never linked: the user may go on editing them. What not everybody may read in a local folder,
only its owner may read in the store.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError, InvalidInput, SourceError
from pipeline.extras import missing
from pipeline.models.adapter import read_adapter
from pipeline.models.folder import CONFIG, CheckpointFolder
from pipeline.models.template_trial import try_template
from pipeline.plan.lint import LocalFiles, lint_files, refuse_errors
from pipeline.progress import Progress
from pipeline.reading import UnreadableFile, read_json, read_tokenizer
from pipeline.sources.checkpoint import HubCheckpoint, LocalCheckpoint, ResolvedSource
from pipeline.sources.selection import INDEX, PICKLE_INDEX, WHOLE
from pipeline.store import Json, files, human_bytes

if TYPE_CHECKING:
    from pipeline.stages.download import Download


def fetch(
    resolved: ResolvedSource,
    into: Path,
    *,
    progress: Progress,
    graph: bool = False,
    allow_faults: bool = False,
) -> dict[str, Json]:
    """Bring the files of a checkpoint into a folder, and check them.

    Afterwards the folder holds config.json, tokenizer files and safetensors, flat, and each safetensors file's header
    adds up to its size; the chat template is tried within limits of time and memory.

    Args:
        resolved: A commit on the Hub, or the hashed files of a local folder.
        into: May hold what a killed fetch of the same checkpoint left, which is taken up.
        graph: Bring the ONNX graph of a repository of the Hub that publishes one (as model.onnx), with config.json and
            tokenizer.json, and no weights.
        allow_faults: Let errors pass that headers and scales of a checkpoint show which is quantized already.

    Returns:
        Facts for the manifest: source, revision, commit, architectures, number of tensors and parameters, dtypes.

    Raises:
        SourceError: The checkpoint cannot be had, or is damaged.
    """
    if isinstance(resolved, HubCheckpoint):
        facts: dict[str, Json] = {"revision": resolved.revision, "commit": resolved.commit}
        download = _hub_download(resolved, into, progress, allow_faults)
        if graph and download.run_graph():
            return {"source": resolved.label, **facts}
        pickled = download.run()
    else:
        _copy_local(resolved, into, progress, allow_faults)
        pickled = any(name.endswith(".bin") for name in resolved.files)
        facts = {}
    if resolved.adapter:
        return {"source": resolved.label, **facts, **_inspect_adapter(into, resolved.label)}
    if pickled:
        _to_safetensors(into, resolved.label, progress)
    return {"source": resolved.label, **facts, "pickled": pickled, **_inspect(into, resolved.label)}


def _hub_download(resolved: HubCheckpoint, into: Path, progress: Progress, allow_faults: bool) -> Download:
    if resolved.offline:
        raise SourceError(
            f"{resolved.label} at {resolved.commit} is not in the store, and the Hub is not asked in offline mode; "
            "build once without HF_HUB_OFFLINE"
        )
    try:
        from pipeline.sources.hub import HubClient
        from pipeline.stages.download import Download
    except ImportError as error:
        raise missing(f"{resolved.label}: the Hub", error, "hub") from error
    return Download(HubClient.from_environment(), resolved, into, progress, allow_faults)


def _copy_local(source: LocalCheckpoint, into: Path, progress: Progress, allow_faults: bool) -> None:
    """Copy the files, and check that they are what was resolved."""
    for leftover in into.iterdir():
        leftover.unlink()
    folder = CheckpointFolder(source.path)
    if not source.adapter:
        # A file that cannot be read is refused when it is copied.
        with contextlib.suppress(InvalidInput, UnreadableFile):
            findings = lint_files(LocalFiles(folder), quantized_only=True) or ()
            refuse_errors(findings, source.label, progress.say, allowed=allow_faults)
    plain = [name for name in source.files if not _copied(folder, name, into, files.clone)]
    needed = sum(source.files[name].bytes for name in plain)
    free = shutil.disk_usage(into).free
    if needed > free:
        raise SourceError(
            f"{source.label}: needs {human_bytes(needed)}, {into.parent} has {human_bytes(free)} free"
        )
    with progress.task(f"copy {source.path.name}", needed, "B") as task:
        for name in plain:
            _copied(folder, name, into, partial(files.copy, advance=task.advance))
    for name, digest in files.sha256_all(into, list(source.files)).items():
        if digest != source.files[name].sha256:
            raise SourceError(f"{source.label}: {name} was changed while it was read; run the command again")


def _copied(
    folder: CheckpointFolder, name: str, into: Path, copy: Callable[[BufferedReader, Path], bool | None]
) -> bool | None:
    """Copy a file in one of the ways of `files`, for those who may read it where it is."""
    try:
        with folder.open(name) as stream:
            if files.is_private(stream):
                into.chmod(0o700)
            return copy(stream, into / name)
    except UnreadableFile as error:
        raise SourceError(f"local:{folder.path}: {name}: {error.fault.problem}") from error


def _to_safetensors(folder: Path, label: str, progress: Progress) -> None:
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


def _inspect_adapter(folder: Path, label: str) -> dict[str, Json]:
    """Read an adapter's settings and header; what they say."""
    from pipeline.models.tensors import TensorFiles

    adapter = read_adapter(folder)
    try:
        TensorFiles(folder)
    except CheckpointError as error:
        raise SourceError(f"{label}: {str(error).replace(str(folder) + '/', '')}") from error
    if adapter.faults:
        raise SourceError("\n".join(f"{label}: {fault}" for fault in adapter.faults))
    return {"base": adapter.base, "rank": adapter.rank, "parameters": adapter.parameters}


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
            try_template(folder)
    except (CheckpointError, UnreadableFile) as error:
        raise SourceError(f"{label}: {str(error).replace(str(folder) + '/', '')}") from error
    return {
        "architectures": config.get("architectures"),
        "tensors": len(headers),
        "parameters": sum(math.prod(header.shape) for header in headers),
        "dtypes": dict(sorted(Counter(header.dtype for header in headers).items())),
    }
