"""Rules about a draft and its target.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import llm_args
from pipeline.contracts.rules import rule
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight.context import Subject
from pipeline.plan.preflight.finding import Check, Said
from pipeline.recipe import PyTorchRuntime


def _gpu_and_formats(subject: Subject) -> Iterator[Said]:
    facts, gpu = rule("rt.spec_sm").facts, subject.gpu
    if subject.draft is None:
        return
    if gpu is not None and gpu.sm < facts["oldest_sm"]:
        yield Said(
            ("runtime.gpu", "draft"),
            f"has compute capability {gpu.capability}, a draft needs {facts['oldest_sm'] / 10:.1f}",
            "remove draft, or choose another GPU",
        )
    tried: list[str] = facts["tried"]
    if subject.target.format not in tried:
        yield Said(
            (subject.target.format_key, "draft"),
            f"as the target of a draft is not among what upstream describes, which is {', '.join(tried)}",
            "compare answers with and without the draft before relying on it",
            "warning",
        )


def _overlap(subject: Subject) -> Iterator[Said]:
    runtime = subject.recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or not runtime.overlap_scheduler or subject.release_problem:
        return
    method = _method(subject, runtime)
    if method is not None and llm_args.speculation(runtime.version, method).two_models:
        yield Said(
            ("runtime.overlap_scheduler", "runtime.speculation" if subject.draft is None else "draft"),
            f"cannot be true with {method} speculation, whose two models run in turns",
            "remove runtime.overlap_scheduler",
        )


def _method(subject: Subject, runtime: PyTorchRuntime) -> str | None:
    if subject.recipe.draft is not None:
        return subject.recipe.draft.method
    return runtime.speculation.method if runtime.speculation is not None else None


def _draft_ranks(subject: Subject) -> Iterator[Said]:
    draft, target = subject.draft, subject.target
    if draft is not None and draft.split.world > target.split.world:
        yield Said(
            (draft.tensor_key, target.tensor_key),
            f"needs {draft.split.world} GPUs, the target only {target.split.world}, and they share them",
            f"at most {target.split.world}",
        )


def _draft_length(subject: Subject) -> Iterator[Said]:
    draft, (least, most) = subject.recipe.draft, rule("rt.spec_len").facts["usual"]
    if draft is None:
        return
    engines = dict(subject.engines)
    built = engines[TARGET]["max_draft_len"] if TARGET in engines else draft.max_draft_tokens
    if draft.max_draft_tokens > built:
        yield Said(
            ("draft.max_draft_tokens",),
            f"is more than the {built} that the engine verifies",
            f"at most {built}",
            "error",
        )
    if not least <= draft.max_draft_tokens <= most:
        yield Said(("draft.max_draft_tokens",), f"is outside the usual {least} to {most}")


def _backend(subject: Subject) -> Iterator[Said]:
    """Of what will be written: ways to propose tokens that the backend has."""
    known: list[str] = rule("rt.backend_supports_spec").facts[subject.kind]
    chosen = {flags["speculative_decoding_mode"] for _, flags in subject.engines}
    chosen.add(_speculation(subject.arguments).get("decoding_type"))
    for way in sorted(chosen - {None, *known}):
        yield Said(
            ("draft.method" if subject.draft else "runtime.speculation", "runtime.kind"),
            f"becomes {way}, which runtime.kind {subject.kind} does not have",
            f"one of {', '.join(known)}",
        )


def _budget(subject: Subject) -> Iterator[Said]:
    arguments, settings = subject.arguments, _speculation(subject.arguments)
    drafted = settings.get("max_draft_len") or settings.get("num_nextn_predict_layers") or 0
    least = arguments.get("max_batch_size", 0) * (drafted + 1)
    if drafted and arguments["max_num_tokens"] < least:
        yield Said(
            ("limits.max_batch_tokens", "limits.max_concurrency"),
            f"makes max_num_tokens {arguments['max_num_tokens']}, a step of all requests and drafts is {least}",
            f"at least {least}",
        )


def _ngram(subject: Subject) -> Iterator[Said]:
    settings = _speculation(subject.arguments)
    if settings.get("decoding_type") == "NGram" and settings.get("max_matching_ngram_size", 0) < 1:
        yield Said(
            ("runtime.speculation",),
            "has no max_matching_tokens",
            "set runtime.speculation.max_matching_tokens to 2",
        )


def _speculation(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return arguments.get("speculative_config") or {}


CHECKS: Mapping[str, Check] = {
    "rt.spec_sm": _gpu_and_formats,
    "rt.spec_len": _draft_length,
    "rt.backend_supports_spec": _backend,
    "rt.spec_overlap": _overlap,
    "rt.spec_tokens_budget": _budget,
    "rt.ngram_size": _ngram,
    "draft.ranks": _draft_ranks,
}
