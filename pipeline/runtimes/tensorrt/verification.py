"""Whether a folder holds the engine that was asked for. Files decide, not the builder's exit code.

Every value that the command names is looked up in config.json, where the builder writes what it used; the checkpoint's
mapping and quantization must come back unchanged; every rank must have a plan. Warnings that say that a value was
changed count even where config.json looks right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.contracts.trtllm_build import alike, data, flags, named_flags
from pipeline.errors import StageError
from pipeline.runtimes.tensorrt.build_effects import BuildEffects, parse_message

_KEPT = (  # of the checkpoint's config.json; logits_dtype has a flag
    "architecture",
    "dtype",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "mapping.world_size",
    "mapping.tp_size",
    "mapping.pp_size",
    "mapping.moe_tp_size",
    "mapping.moe_ep_size",
    "quantization.quant_algo",
    "quantization.kv_cache_quant_algo",
    "quantization.group_size",
)
_UNSET = -1  # moe_tp_size and moe_ep_size of a checkpoint that leaves them to upstream (mapping.py)
_SMALLEST_SHARE = 0.5  # of the checkpoint's bytes; a plan holds all weights, at most embeddings are shared


def verify(
    folder: Path,
    *,
    version: str,
    argv: Sequence[str],
    expected: BuildEffects,
    checkpoint: Path,
    warnings: Sequence[str],
) -> None:
    """Hold the files of an engine against the command that made it.

    `expected`: what the contract says of the command; `checkpoint`: the folder that it was built from; `warnings`:
    those of the builder's log.

    Raises:
        StageError: With everything that differs.
    """
    source = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config, broken = _config(folder)
    differences = list(broken)
    differences += _missing_ranks(folder, checkpoint, source["mapping"]["world_size"])
    if config is not None:
        if config.get("version") != version:
            differences.append(
                f"config.json: version is {config.get('version')!r}, runtime.version is {version!r}"
            )
        differences += _changed_values(config, version, argv, expected, warnings)
        differences += _changed_model(config, source)
    differences += _told_changes(version, argv, expected, warnings)
    if differences:
        raise StageError(
            "\n  ".join(["trtllm-build left something else than it was asked for:", *differences])
        )


def _config(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    path = folder / "config.json"
    if not path.is_file():
        return None, ["config.json is missing"]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return None, [f"config.json cannot be read: {error}"]
    if not isinstance(config, dict) or not config.keys() >= set(data()["config"]["keys"]):
        return None, [f"config.json lacks one of {', '.join(data()['config']['keys'])}"]
    return config, []


def _missing_ranks(folder: Path, checkpoint: Path, ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        plan, weights = folder / f"rank{rank}.engine", checkpoint / f"rank{rank}.safetensors"
        if not plan.is_file():
            yield f"{plan.name} is missing"
            continue
        size, least = plan.stat().st_size, int(weights.stat().st_size * _SMALLEST_SHARE)
        managed = folder / f"rank{rank}_managed_weights.safetensors"
        size += managed.stat().st_size if managed.is_file() else 0
        if not size:
            yield f"{plan.name} is empty"
        elif size < least:
            yield f"{plan.name} has {size} bytes and cannot hold the weights of {weights.name}: it was cut off"
    known = {f"rank{rank}.engine" for rank in range(ranks)}
    yield from (
        f"{path.name} is of no rank" for path in sorted(folder.glob("rank*.engine")) if path.name not in known
    )


def _changed_values(
    config: Mapping[str, Any],
    version: str,
    argv: Sequence[str],
    expected: BuildEffects,
    warnings: Sequence[str],
) -> Iterator[str]:
    told = [message for line in warnings if (message := parse_message(line)) is not None]
    reasons = {flag: message.text for message in told for flag in message.changes}
    dtype = config["pretrained_config"].get("dtype")
    known = flags(version)
    for name in sorted(named_flags(version, argv)):
        flag, wanted = known[name], expected.values[name]
        if flag.config is None:
            continue
        found = _at(config, flag.in_config)
        if alike(found, wanted, dtype):
            continue
        reason = f" (the builder says: {reasons[name]})" if name in reasons else ""
        yield f"config.json: {flag.config} is {found!r}, asked for {wanted!r}{reason}"


def _changed_model(config: Mapping[str, Any], source: Mapping[str, Any]) -> Iterator[str]:
    mixed, quantization = data()["mixed"], source.get("quantization") or {}
    by_layer = quantization.get("quant_algo") == mixed["algorithm"]
    for key in _KEPT:
        section, _, name = key.partition(".")
        if by_layer and section == "quantization" and name not in mixed["keys"]:
            continue
        keys = tuple(key.split("."))
        wanted, found = _at(source, keys), _at(config["pretrained_config"], keys)
        if wanted not in (None, _UNSET) and found != wanted:
            yield f"config.json: pretrained_config.{key} is {found!r}, the checkpoint has {wanted!r}"


def _told_changes(
    version: str, argv: Sequence[str], expected: BuildEffects, warnings: Sequence[str]
) -> Iterator[str]:
    """Warnings of changes that the contract does not expect of this command."""
    foreseen, asked = {message.id for message in expected.messages}, named_flags(version, argv)
    for line in warnings:
        message = parse_message(line)
        if message is None or message.id in foreseen:
            continue
        for flag in sorted(asked.intersection(message.changes)):
            yield f"{flag} was changed: the builder says: {message.text}"


def _at(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
