"""From a checkpoint to a verified engine: one run of trtllm-build, wherever it runs.

    engine/config.json, engine/rank<N>.engine    as upstream leaves them
    build.json                                   what was run, what came of it

Decided first, as values: limits, flags, workers, and by the contract what the builder will make of them for this very
checkpoint. Then an executor runs the command, and the files are judged: they decide, not the builder's exit code.

Every value that the command names is looked up in config.json, where the builder writes what it used; the checkpoint's
mapping and quantization must come back unchanged; every rank must have a plan. Warnings that say that a value was
changed count even where config.json looks right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.contracts.gpus import gpu
from pipeline.contracts.releases import container
from pipeline.contracts.rules import rule
from pipeline.contracts.trtllm_build import alike, check, data, flags, named_flags
from pipeline.errors import StageError
from pipeline.machine.gpus import read_gpus, visible
from pipeline.machine.host import read_memory
from pipeline.plan.parallelism import parallelism
from pipeline.recipe import Recipe
from pipeline.runtimes.base import EngineBuildRequest, ExecutorChoice
from pipeline.runtimes.tensorrt.build_effects import BuildEffects, CheckpointConfig, effects, parse_message
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.executors import BuildJob, executor_of, timing_cache_file
from pipeline.runtimes.tensorrt.flags import checkpoint_formats, formats, runtime_settings, trtllm_build_flags
from pipeline.store import Json

ENGINE = "engine"  # folder of a build's artifact
FACTS = "build.json"
_SHOWN = 5  # warnings that the contract does not know; all are among the facts
_LEFT_OPEN = (
    "auto",
    "none",
)  # formats of which the checkpoint says what became of them, or what it was before


def build_settings(recipe: Recipe, role: str) -> Mapping[str, Json]:
    """Settings that an engine depends on besides its checkpoint. The number of workers changes nothing; where the
    checkpoint has another format than the recipe (auto, or a source that is quantized already), flags follow it.

    Raises:
        UserError: The version or the GPU is not known, or the builder would not build what the recipe asks for.
    """
    runtime = runtime_settings(recipe)
    return {
        "runtime": "tensorrt",
        "version": runtime.version,
        "gpu": runtime.gpu,
        "flags": list(trtllm_build_flags(recipe, role)),
    }


def build(inputs: EngineBuildRequest) -> Mapping[str, Json]:
    """Make and judge one engine; return the facts of it.

    Raises:
        UserError: It cannot be built here; StageError: it was not built, or not as asked for.
    """
    job = build_job(inputs)
    expected = _expect(inputs, job)
    log = executor_of(inputs.executor).run(job, inputs.progress)
    try:
        verify(
            job.output,
            version=job.version,
            argv=job.flags,
            expected=expected,
            checkpoint=job.checkpoint,
            warnings=log.warnings,
        )
    except StageError as error:
        raise StageError(f"{error}\nthe builder's log: {job.log}") from None
    for line in [line for line in log.warnings if parse_message(line) is None][:_SHOWN]:
        inputs.progress.say(f"    trtllm-build warns: {line}")
    engine = EngineFolder.read(job.output)
    facts: dict[str, Json] = {
        "runtime": "tensorrt",
        "tensorrt_llm": engine.version,
        "gpu": job.gpu,
        "sm": job.sm,
        "tensor_parallel": engine.tensor_parallel,
        "pipeline_parallel": engine.pipeline_parallel,
        "quantization": engine.quantization,
        "kv_cache": engine.kv_cache_quantization or engine.dtype,
        "limits": {
            "max_batch_size": engine.max_batch_size,
            "max_input_len": engine.max_input_len,
            "max_seq_len": engine.max_seq_len,
            "max_num_tokens": engine.max_num_tokens,
            "max_draft_len": engine.max_draft_len,
            "tokens_per_block": engine.tokens_per_block,
        },
        "use_paged_context_fmha": engine.use_paged_context_fmha,
        "rank_bytes": list(engine.rank_bytes),
        "build": log.facts(),
    }
    (inputs.into / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    total = sum(engine.rank_bytes) / 2**30
    inputs.progress.say(
        f"    engine of {engine.world_size} rank{'s' if engine.world_size > 1 else ''}, {total:.1f} GiB: "
        "as asked for, by its config.json"
    )
    return facts


def build_job(inputs: EngineBuildRequest) -> BuildJob:
    """The run of trtllm-build that makes an engine.

    Raises:
        StageError: The checkpoint lacks files.
    """
    recipe, runtime = inputs.recipe, runtime_settings(inputs.recipe)
    assert inputs.ranks is not None, "on tensorrt every build has a checkpoint that is split for its ranks"
    ranks, device = parallelism(recipe, inputs.role).world, gpu(runtime.gpu)
    files = [inputs.ranks / f"rank{rank}.safetensors" for rank in range(ranks)]
    absent = [file.name for file in (inputs.ranks / "config.json", *files) if not file.is_file()]
    if absent:
        raise StageError(f"{inputs.ranks}: the checkpoint lacks {', '.join(absent)}")
    config = json.loads((inputs.ranks / "config.json").read_text(encoding="utf-8"))
    stored = checkpoint_formats(config) if formats(recipe, inputs.role).weights in _LEFT_OPEN else None
    gpus, memory = offered(inputs.executor, ranks, int(device.memory_gib * 2**30))
    name = f"{recipe.name}-{inputs.role}"
    return BuildJob(
        name=name,
        flags=trtllm_build_flags(recipe, inputs.role, stored),
        checkpoint=inputs.ranks,
        output=inputs.into / ENGINE,
        timing_cache=timing_cache_file(inputs.caches, runtime.version, runtime.gpu),
        log=inputs.reports / f"{name}-{inputs.into.name}.log",  # one an artifact: two may be built at once
        workers=workers((file.stat().st_size for file in files), gpus, memory),
        gpus=ranks,
        version=runtime.version,
        image=container(runtime.version).image,
        gpu=runtime.gpu,
        sm=device.sm,
    )


def _expect(inputs: EngineBuildRequest, job: BuildJob) -> BuildEffects:
    """Effect of the job on the builder, by the contract.

    Raises:
        StageError: The engine would differ from the recipe; this saves hours of building.
    """
    faults = check(job.version, job.command(job.checkpoint, job.output)[1:])
    config = json.loads((job.checkpoint / "config.json").read_text(encoding="utf-8"))
    outcome = effects(job.version, job.flags, CheckpointConfig.of(config), job.sm)
    faults += [str(change) for change in outcome.changes]
    faults += [outcome.refusal] if outcome.refusal else []
    faults += _checkpoint_faults(inputs, config)
    if faults:
        raise StageError(
            "\n  ".join([f"trtllm-build {job.version} would not build {job.name} as asked:", *faults])
        )
    return outcome


def _checkpoint_faults(inputs: EngineBuildRequest, config: Mapping[str, Mapping[str, Json]]) -> list[str]:
    """Differences between checkpoint and recipe."""
    sizes, expected = parallelism(inputs.recipe, inputs.role), formats(inputs.recipe, inputs.role)
    mapping, quantization = config["mapping"], config.get("quantization") or {}
    pairs = {
        "mapping.tp_size": (mapping.get("tp_size"), sizes.tensor),
        "mapping.pp_size": (mapping.get("pp_size", 1), sizes.pipeline),
        "mapping.moe_ep_size": (mapping.get("moe_ep_size", 1), sizes.expert),
        "quantization.quant_algo": (quantization.get("quant_algo"), expected.algorithm),
        "quantization.kv_cache_quant_algo": (quantization.get("kv_cache_quant_algo"), expected.kv_algorithm),
    }
    if expected.weights in _LEFT_OPEN:
        del pairs["quantization.quant_algo"], pairs["quantization.kv_cache_quant_algo"]
    return [
        f"the checkpoint's {key} is {got!r}, by the recipe {want!r}"
        for key, (got, want) in pairs.items()
        if got != want
    ]


def workers(rank_bytes: Iterable[int], gpus: int, memory_bytes: int) -> int:
    """Ranks to build at a time; at least one, and then the builder tries with what there is.

    >>> workers([20 * 2**30] * 4, gpus=4, memory_bytes=140 * 2**30)
    2
    """
    # A worker reads the weights, TensorRT copies them, and the plan holds them again before it is written. Besides
    # there are Python, CUDA, TensorRT and its kernels, whatever the model (TensorRT-LLM issues 102, 217, 489).
    sizes, facts = list(rank_bytes), rule("host.memory").facts
    each: int = max(sizes) * facts["copies"] + facts["worker_gib"] * 2**30
    return max(1, min(len(sizes), gpus, memory_bytes // each))


def offered(choice: ExecutorChoice, ranks: int, gpu_bytes: int) -> tuple[int, int]:
    """GPUs and bytes of host memory that a builder may use.

    Nothing is known of another machine, and its job must stay the same until its result comes back: it is taken to
    have a GPU a rank, and as much memory as these GPUs together.
    """
    if choice.name in ("print", "adopt"):
        return ranks, ranks * gpu_bytes
    gpus = visible(read_gpus()[0], choice.devices, os.environ)
    return len(gpus) or ranks, read_memory().available_bytes


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
    messages = [message for line in warnings if (message := parse_message(line)) is not None]
    reasons = {flag: message.text for message in messages for flag in message.changes}
    dtype = config["pretrained_config"].get("dtype")
    known = flags(version)
    for name in sorted(named_flags(version, argv)):
        flag, wanted = known[name], expected.values[name]
        if flag.config is None:
            continue
        built = _at(config, flag.in_config)
        if alike(built, wanted, dtype):
            continue
        reason = f" (the builder says: {reasons[name]})" if name in reasons else ""
        yield f"config.json: {flag.config} is {built!r}, asked for {wanted!r}{reason}"


def _changed_model(config: Mapping[str, Any], source: Mapping[str, Any]) -> Iterator[str]:
    mixed, quantization = data()["mixed"], source.get("quantization") or {}
    by_layer = quantization.get("quant_algo") == mixed["algorithm"]
    for key in _KEPT:
        section, _, name = key.partition(".")
        if by_layer and section == "quantization" and name not in mixed["keys"]:
            continue
        keys = tuple(key.split("."))
        wanted, built = _at(source, keys), _at(config["pretrained_config"], keys)
        if wanted not in (None, _UNSET) and built != wanted:
            yield f"config.json: pretrained_config.{key} is {built!r}, the checkpoint has {wanted!r}"


def _told_changes(
    version: str, argv: Sequence[str], expected: BuildEffects, warnings: Sequence[str]
) -> Iterator[str]:
    """Warnings of changes that the contract does not expect of this command."""
    foreseen, named = {message.id for message in expected.messages}, named_flags(version, argv)
    for line in warnings:
        message = parse_message(line)
        if message is None or message.id in foreseen:
            continue
        for flag in sorted(named.intersection(message.changes)):
            yield f"{flag} was changed: the builder says: {message.text}"


def _at(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
