"""Artifact that `build` leaves for the `pytorch` runtime, written and then judged by reading it again.

    llm_args.yaml   arguments of the LLM API, paths relative to this folder (target only)
    checkpoint/     the unified Hugging Face checkpoint, hard links
    build.json      facts

There is no engine to build: TensorRT-LLM reads the checkpoint when the server starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.contracts import llm_args
from pipeline.errors import StageError
from pipeline.models import CheckpointQuantization, Format, TensorFiles
from pipeline.store import Json
from pipeline.store.files import link_or_copy, walk

ARGUMENTS, FACTS = "llm_args.yaml", "build.json"
CHECKPOINT = "checkpoint"
_OF_THE_STORE = ("manifest.json", "manifest.txt")
_HEAD = (
    "# Arguments of TensorRT-LLM {version}'s LLM API (PyTorch backend); paths begin at this file's folder.\n"
)


def write_checkpoint(source: Path, into: Path) -> dict[str, Json]:
    """Hard links to all of a checkpoint's files; how many there are, and how large."""
    folder = into / CHECKPOINT
    files = [(name, info.st_size) for name, info in walk(source) if name not in _OF_THE_STORE]
    for name, _ in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, folder / name)
    return {"files": len(files), "bytes": sum(size for _, size in files)}


def write_arguments(version: str, arguments: Mapping[str, Any], into: Path) -> None:
    """Write llm_args.yaml; a reader finds the keys in the order of the arguments."""
    text = yaml.safe_dump(dict(arguments), sort_keys=False, allow_unicode=True)
    (into / ARGUMENTS).write_text(_HEAD.format(version=version) + text, encoding="utf-8")


def read_arguments(folder: Path) -> dict[str, Any]:
    """The arguments of an artifact.

    Raises:
        StageError: There are none.
    """
    path = folder / ARGUMENTS
    if not path.is_file():
        raise StageError(f"{folder}: no {ARGUMENTS}")
    arguments = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(arguments, dict):
        raise StageError(f"{path}: holds no settings")
    return arguments


def write_facts(facts: Mapping[str, Json], into: Path) -> None:
    (into / FACTS).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def judge_arguments(version: str, meant: Mapping[str, Any], folder: Path) -> None:
    """Raises StageError if the file does not say what was meant, or TensorRT-LLM would refuse it."""
    read = read_arguments(folder)
    if read != dict(meant):
        raise StageError(f"{folder / ARGUMENTS} does not say what was meant")
    faults = llm_args.check(version, read)
    if faults:
        raise StageError(f"{folder / ARGUMENTS}: " + "; ".join(map(str, faults)))


def judge_checkpoint(folder: Path, form: str, kv_cache: str) -> CheckpointQuantization | None:
    """Look at the files again: complete, and quantized as the recipe says. No weight is read.

    Args:
        form: Format of the weights, as in the recipe; `none` takes what the source is, `auto` any mix.
        kv_cache: As in the recipe.

    Returns:
        What the checkpoint says about its quantization; None for a mix of formats.

    Raises:
        StageError: A file is missing, or the checkpoint is another than the recipe asks for.
        CheckpointError: A file of weights is damaged.
    """
    checkpoint = folder / CHECKPOINT
    if not (checkpoint / "config.json").is_file():
        raise StageError(f"{checkpoint}: no config.json")
    if any(checkpoint.glob("*.safetensors")):
        TensorFiles(checkpoint)
    elif not any(checkpoint.glob("*.bin")):
        raise StageError(f"{checkpoint}: no weights")
    if form == "auto":
        _require_details(checkpoint)
        return None
    found = CheckpointQuantization.read(checkpoint)
    if form == "none":
        return found
    _require_details(checkpoint)
    asked = Format(form)
    if found.format is not asked:
        raise StageError(f"{checkpoint} is {found.format}, not {asked}")
    scaled = found.kv_cache == "FP8"
    if scaled != (kv_cache == "fp8"):
        raise StageError(
            f"{checkpoint}: its KV cache is {found.kv_cache or 'not quantized'}, "
            f"but quantization.kv_cache is {kv_cache}"
        )
    return found


def _require_details(checkpoint: Path) -> None:
    """TensorRT-LLM reads the quantization from this file."""
    if not (checkpoint / "hf_quant_config.json").is_file():
        raise StageError(
            f"{checkpoint}: no hf_quant_config.json, so TensorRT-LLM would take it as unquantized"
        )
