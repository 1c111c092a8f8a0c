"""Rules about what Triton's models will say, how they are started, and what the response cache answers.

Each check is one rule: those of contracts/data/rules/serving.yaml are in CHECKS, those of caching.yaml in CACHE_CHECKS.
Most rules of serving.yaml are held where the files are written, and have no check here (`held` in the data says where).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import llm_args, llmapi
from pipeline.contracts.rules import rule
from pipeline.contracts.version_range import precedes
from pipeline.plan.preflight.context import Check, Context, Objection
from pipeline.recipe import PyTorchRuntime

VERSION, KIND, CONCURRENCY = "runtime.version", "runtime.kind", "limits.max_concurrency"


def _reuse(context: Context) -> Iterator[Objection]:
    if not context.recipe.kv_cache.reuse:
        return
    for role, flags in context.engines:
        if wrong := _not_paged(flags):
            yield Objection(
                ("kv_cache.reuse",), f"is true, but the {role}'s engine has {wrong}", "set it to false"
            )


def _chunks(context: Context) -> Iterator[Objection]:
    key = "scheduler.chunked_context"
    if not context.recipe.scheduler.chunked_context:
        return
    for role, flags in context.engines:
        block, step = flags["tokens_per_block"], flags["max_num_tokens"]
        if wrong := _not_paged(flags):
            yield Objection((key,), f"is true, but the {role}'s engine has {wrong}", "set it to false")
        elif block and step % block:
            yield Objection(
                (key, "limits.max_batch_tokens"),
                f"cuts prompts into chunks of {step - step % block} tokens, because {step} of the {role}'s engine are "
                f"no whole blocks of {block}",
                severity="note",
            )


def _whole_answers(context: Context) -> Iterator[Objection]:
    slo = context.recipe.slo
    goals = {"slo.ttft_p95_ms": slo.ttft_p95_ms, "slo.itl_p95_ms": slo.itl_p95_ms}
    keys = [key for key, value in goals.items() if value is not None]
    if keys and not context.recipe.serving.decoupled:
        yield Objection(
            ("serving.decoupled", *keys),
            f"makes each answer one response: {' and '.join(keys)} cannot be seen by a client",
            f"remove {' and '.join(keys)}, or set serving.decoupled to true",
        )


def _prompt_log_probs(context: Context) -> Iterator[Objection]:
    key, recipe, runtime = "serving.prompt_log_probs", context.recipe, context.gpu_runtime
    if not recipe.serving.prompt_log_probs or runtime is None:
        return
    if recipe.kv_cache.reuse:
        yield Objection(
            (key, "kv_cache.reuse"),
            "needs whole prompts to be computed, but kv_cache.reuse takes their beginnings from the KV cache",
            "set kv_cache.reuse to false",
        )
    if recipe.draft is not None and runtime.kind == "tensorrt":
        yield Objection(
            (key, "draft"), "needs an engine that gathers logits of prompts, which cannot verify a draft"
        )
    lacks = runtime.kind == "pytorch" and not context.release_problem
    if lacks and not llmapi.returns_context_logits(runtime.version):
        yield Objection(
            (key, VERSION),
            f"needs logits of prompts, which TensorRT-LLM {runtime.version} does not return",
            f"set {VERSION} to {llmapi.versions_where(llmapi.returns_context_logits)}",
        )


def _not_paged(flags: Mapping[str, Any]) -> str:
    wanted = {"use_paged_context_fmha": "enable", "kv_cache_type": "paged"}
    return " and ".join(f"{name} {flags[name]}" for name, value in wanted.items() if flags[name] != value)


def _concurrency(context: Context) -> Iterator[Objection]:
    offered = context.emitted.of_package("limits").get("max_concurrency", 0)
    steps = [flags["max_batch_size"] for _, flags in context.engines]
    steps += [context.arguments["max_batch_size"]] if context.arguments else []
    # The arguments' batch is that of a rank, and ranks may have requests of their own.
    runs = min(steps, default=offered) * context.target.split.request_groups * context.instances
    if offered > runs:
        yield Objection(
            (CONCURRENCY,), f"is offered as {offered}, the engine runs {runs} at once; further ones wait"
        )


def _unbatched(context: Context) -> Iterator[Objection]:
    config = context.emitted.package.get("config")
    # A config without the field has 0, protobuf's default.
    size = re.search(r"^max_batch_size: (\d+)$", str(config), re.MULTILINE) if config else None
    if size is not None and size[1] != "0":
        yield Objection((KIND,), f"makes max_batch_size of the llmapi model {size[1]}, not 0")


def _arguments(context: Context) -> Iterator[Objection]:
    if context.version is not None and context.arguments:
        for fault in llm_args.check(context.version, context.arguments):
            yield Objection((VERSION,), f"has other arguments: {fault}", fault.fix)


def _host_tier(context: Context) -> Iterator[Objection]:
    if context.version is None or context.recipe.kv_cache.host_memory_gib:
        return
    every = not precedes(context.version, rule("rt.kv_host_tier").facts["every_model_since"])
    yield Objection(
        ("kv_cache.host_memory_gib", VERSION),
        f"leaves the size of the KV cache in host memory to TensorRT-LLM {context.version}, which pins as much as on "
        "the GPU and at most half of what is available"
        + ("" if every else ", for models that use KV cache manager V2"),
        "set it to what each rank may pin",
    )


def _own_arguments(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    if isinstance(runtime, PyTorchRuntime) and (names := llm_args.unplanned(runtime.llm_args)):
        text = f"adds {', '.join(names)}, which memory and speed of the plan do not count"
        yield Objection(("runtime.llm_args",), text, "measure it (pipeline bench)")


def _unverified(context: Context) -> Iterator[Objection]:
    if context.version is not None and context.arguments:
        for fault in llm_args.unverified(context.version, context.arguments):
            yield Objection((VERSION,), f"may have other arguments: {fault}")


CHECKS: Mapping[str, Check] = {
    "rt.kv_reuse": _reuse,
    "rt.chunked": _chunks,
    "rt.batch_cap": _concurrency,
    "serving.prompt_log_probs": _prompt_log_probs,
    "slo.whole_answers": _whole_answers,
    "rt.max_batch_llmapi": _unbatched,
    "llmapi.unknown_keys": _arguments,
    "llmapi.own_arguments": _own_arguments,
    "llmapi.unverified": _unverified,
    "rt.kv_host_tier": _host_tier,
}


def _unchecked(context: Context) -> Iterator[Objection]:
    semantic = context.recipe.cache.semantic
    if semantic is not None and semantic.guards == () and semantic.min_score == 0:
        yield Objection(
            ("cache.semantic.guards", "cache.semantic.min_score"),
            "turn off all that is looked at besides: each near question gets the answer of the nearest one from a"
            f" cosine of {semantic.min_similarity:g} on, whatever it says",
            "leave out cache.semantic.guards for all guards, or cache.semantic.min_score for the default",
        )


CACHE_CHECKS: Mapping[str, Check] = {"cache.unchecked": _unchecked}
