"""Rules about what Triton's models will say, and how they are started.

Each function is one rule of contracts/data/rules, under its id in CHECKS. Most rules of this group are held where the
files are written, and have no check here (`held` in the data says where).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import llm_args
from pipeline.plan.preflight.context import Subject
from pipeline.plan.preflight.finding import Check, Said

VERSION, KIND, CONCURRENCY = "runtime.version", "runtime.kind", "limits.max_concurrency"


def _reuse(subject: Subject) -> Iterator[Said]:
    if not subject.recipe.kv_cache.reuse:
        return
    for role, flags in subject.engines:
        if wrong := _not_paged(flags):
            yield Said(
                ("kv_cache.reuse",), f"is true, but the {role}'s engine has {wrong}", "set it to false"
            )


def _chunks(subject: Subject) -> Iterator[Said]:
    key = "scheduler.chunked_context"
    if not subject.recipe.scheduler.chunked_context:
        return
    for role, flags in subject.engines:
        block, step = flags["tokens_per_block"], flags["max_num_tokens"]
        if wrong := _not_paged(flags):
            yield Said((key,), f"is true, but the {role}'s engine has {wrong}", "set it to false")
        elif block and step % block:
            yield Said(
                (key, "limits.max_batch_tokens"),
                f"cuts prompts into chunks of {step - step % block} tokens, because {step} of the {role}'s engine are "
                f"no whole blocks of {block}",
                severity="note",
            )


def _whole_answers(subject: Subject) -> Iterator[Said]:
    slo = subject.recipe.slo
    asked = {"slo.ttft_p95_ms": slo.ttft_p95_ms, "slo.itl_p95_ms": slo.itl_p95_ms}
    keys = [key for key, value in asked.items() if value is not None]
    if keys and not subject.recipe.serving.decoupled:
        yield Said(
            ("serving.decoupled", *keys),
            f"makes each answer one response: {' and '.join(keys)} cannot be seen by a client",
            f"remove {' and '.join(keys)}, or set serving.decoupled to true",
        )


def _not_paged(flags: Mapping[str, Any]) -> str:
    wanted = {"use_paged_context_fmha": "enable", "kv_cache_type": "paged"}
    return " and ".join(f"{name} {flags[name]}" for name, value in wanted.items() if flags[name] != value)


def _concurrency(subject: Subject) -> Iterator[Said]:
    if subject.emitted is None:
        return
    offered = subject.emitted.of_package("limits").get("max_concurrency", 0)
    steps = [flags["max_batch_size"] for _, flags in subject.engines]
    steps += [subject.arguments["max_batch_size"]] if subject.arguments else []
    runs = min(steps, default=offered) * subject.instances
    if offered > runs:
        yield Said(
            (CONCURRENCY,), f"is offered as {offered}, the engine runs {runs} at once; further ones wait"
        )


def _unbatched(subject: Subject) -> Iterator[Said]:
    config = subject.emitted.package.get("config") if subject.emitted is not None else None
    # Protobuf's text form leaves out 0.
    size = re.search(r"^max_batch_size: (\d+)$", str(config), re.MULTILINE) if config else None
    if size is not None and size[1] != "0":
        yield Said((KIND,), f"makes max_batch_size of the llmapi model {size[1]}, not 0")


def _arguments(subject: Subject) -> Iterator[Said]:
    if not subject.arguments or subject.release_problem:
        return
    runtime = subject.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    for fault in llm_args.check(runtime.version, subject.arguments):
        yield Said((VERSION,), f"has other arguments: {fault}", fault.fix)


CHECKS: Mapping[str, Check] = {
    "rt.kv_reuse": _reuse,
    "rt.chunked": _chunks,
    "rt.batch_cap": _concurrency,
    "slo.whole_answers": _whole_answers,
    "rt.max_batch_llmapi": _unbatched,
    "llmapi.unknown_keys": _arguments,
}
