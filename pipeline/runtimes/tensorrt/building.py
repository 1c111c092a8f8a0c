"""From a checkpoint to a verified engine: one run of trtllm-build, wherever it runs.

    engine/config.json, engine/rank<N>.engine    as upstream leaves them
    build.json                                   what was run, what came of it

Decided first, as values: limits, flags, workers, and by the contract what the builder will make of them for this very
checkpoint. Then an executor runs the command, and the files are judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pipeline.contracts.gpus import gpu
from pipeline.contracts.releases import container
from pipeline.contracts.trtllm_build import check
from pipeline.contracts.trtllm_build_effects import Model, Outcome, effects, understood
from pipeline.errors import StageError
from pipeline.plan.parallelism import parallelism
from pipeline.recipe import Recipe, TensorRTRuntime
from pipeline.runtimes.base import Order
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.executors import BuildJob, executor_of, timing_cache_file
from pipeline.runtimes.tensorrt.flags import build_flags, checkpoint_formats, formats
from pipeline.runtimes.tensorrt.verification import verify
from pipeline.runtimes.tensorrt.workers import offered, workers
from pipeline.store import Json

ENGINE = "engine"  # folder of a build's artifact
FACTS = "build.json"
_SHOWN = 5  # warnings that the contract does not know; all are among the facts
_LEFT_OPEN = (
    "auto",
    "none",
)  # formats of which the checkpoint says what became of them, or what it was before


def build_settings(recipe: Recipe, role: str) -> Mapping[str, Json]:
    """What an engine depends on besides its checkpoint. How many workers build it changes nothing; where the checkpoint
    is in another format than the recipe says (auto, or a source that is quantized already), flags follow it.

    Raises:
        UserError: the version or the GPU is not known, or the builder would not build what the recipe asks for.
    """
    runtime = _runtime(recipe)
    return {
        "runtime": "tensorrt",
        "version": runtime.version,
        "gpu": runtime.gpu,
        "flags": list(build_flags(recipe, role)),
    }


def build(order: Order) -> Mapping[str, Json]:
    """Make and judge one engine; return the facts of it.

    Raises:
        UserError: it cannot be built here; StageError: it was not built, or not as asked for.
    """
    job = build_job(order)
    expected = _expect(order, job)
    log = executor_of(order.executor).run(job, order.progress)
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
    for line in [line for line in log.warnings if understood(line) is None][:_SHOWN]:
        order.progress.say(f"    trtllm-build warns: {line}")
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
    (order.into / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    total = sum(engine.rank_bytes) / 2**30
    order.progress.say(
        f"    engine of {engine.world_size} rank{'s' if engine.world_size > 1 else ''}, {total:.1f} GiB: "
        "as asked for, by its config.json"
    )
    return facts


def build_job(order: Order) -> BuildJob:
    """The run of trtllm-build that an order asks for.

    Raises:
        StageError: the checkpoint lacks files.
    """
    recipe, runtime = order.recipe, _runtime(order.recipe)
    assert order.ranks is not None, "on tensorrt every build has a checkpoint that is split for its ranks"
    ranks, device = parallelism(recipe, order.role).world, gpu(runtime.gpu)
    files = [order.ranks / f"rank{rank}.safetensors" for rank in range(ranks)]
    absent = [file.name for file in (order.ranks / "config.json", *files) if not file.is_file()]
    if absent:
        raise StageError(f"{order.ranks}: the checkpoint lacks {', '.join(absent)}")
    config = json.loads((order.ranks / "config.json").read_text(encoding="utf-8"))
    found = checkpoint_formats(config) if formats(recipe, order.role).weights in _LEFT_OPEN else None
    gpus, memory = offered(order.executor, ranks, int(device.memory_gib * 2**30))
    name = f"{recipe.name}-{order.role}"
    return BuildJob(
        name=name,
        flags=build_flags(recipe, order.role, found),
        checkpoint=order.ranks,
        output=order.into / ENGINE,
        timing_cache=timing_cache_file(order.caches, runtime.version, runtime.gpu),
        log=order.reports / f"{name}-{order.into.name}.log",  # one an artifact: two may be built at once
        workers=workers((file.stat().st_size for file in files), gpus, memory),
        gpus=ranks,
        version=runtime.version,
        image=container(runtime.version).image,
        gpu=runtime.gpu,
        sm=device.sm,
    )


def _expect(order: Order, job: BuildJob) -> Outcome:
    """What the contract says that the builder will make of the job.

    Raises:
        StageError: something else than it is asked for; hours are better not spent on that.
    """
    faults = check(job.version, job.command(job.checkpoint, job.output)[1:])
    config = json.loads((job.checkpoint / "config.json").read_text(encoding="utf-8"))
    outcome = effects(job.version, job.flags, Model.of(config), job.sm)
    faults += [str(change) for change in outcome.changes]
    faults += [outcome.refusal] if outcome.refusal else []
    faults += _checkpoint_faults(order, config)
    if faults:
        raise StageError(
            "\n  ".join([f"trtllm-build {job.version} would not build {job.name} as asked:", *faults])
        )
    return outcome


def _checkpoint_faults(order: Order, config: Mapping[str, Mapping[str, Json]]) -> list[str]:
    """Where checkpoint and recipe disagree."""
    sizes, found = parallelism(order.recipe, order.role), formats(order.recipe, order.role)
    mapping, quantization = config["mapping"], config.get("quantization") or {}
    pairs = {
        "mapping.tp_size": (mapping.get("tp_size"), sizes.tensor),
        "mapping.pp_size": (mapping.get("pp_size", 1), sizes.pipeline),
        "mapping.moe_ep_size": (mapping.get("moe_ep_size", 1), sizes.expert),
        "quantization.quant_algo": (quantization.get("quant_algo"), found.algorithm),
        "quantization.kv_cache_quant_algo": (quantization.get("kv_cache_quant_algo"), found.kv_algorithm),
    }
    if found.weights in _LEFT_OPEN:
        del pairs["quantization.quant_algo"], pairs["quantization.kv_cache_quant_algo"]
    return [
        f"the checkpoint's {key} is {got!r}, by the recipe {want!r}"
        for key, (got, want) in pairs.items()
        if got != want
    ]


def _runtime(recipe: Recipe) -> TensorRTRuntime:
    assert isinstance(recipe.runtime, TensorRTRuntime), "chosen by runtime.kind"
    return recipe.runtime
