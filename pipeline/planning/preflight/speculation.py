"""Rules about a draft and its target.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts import llm_args
from pipeline.contracts.rules import rule
from pipeline.planning.preflight.finding import Check, Said
from pipeline.planning.preflight.subject import Subject
from pipeline.recipe import PyTorchRuntime


def _same_vocabulary(subject: Subject) -> Iterator[Said]:
    draft, target = subject.draft, subject.target
    if draft is None or draft.is_head or draft.sizes is None or target.sizes is None:
        return
    if draft.sizes.vocab != target.sizes.vocab:
        yield Said(
            (draft.source_key, target.source_key),
            f"has a vocabulary of {draft.sizes.vocab} tokens, the target of {target.sizes.vocab}; they exchange ids",
            "choose a draft with the target's tokenizer",
        )


def _formats_of_speculation(subject: Subject) -> Iterator[Said]:
    tried: list[str] = rule("rt.spec_formats").facts["tried"]
    if subject.draft is not None and subject.target.format not in tried:
        yield Said(
            (subject.target.format_key, "draft"),
            f"as the target of a draft is not among what upstream describes, which is {', '.join(tried)}",
            "compare answers with and without the draft before relying on it",
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
    draft, (least, most) = subject.recipe.draft, rule("rt.spec_length").facts["usual"]
    if draft is not None and not least <= draft.max_draft_tokens <= most:
        yield Said(("draft.max_draft_tokens",), f"is outside the usual {least} to {most}")


CHECKS: Mapping[str, Check] = {
    "rt.spec_same_vocab": _same_vocabulary,
    "rt.spec_formats": _formats_of_speculation,
    "rt.spec_overlap": _overlap,
    "draft.ranks": _draft_ranks,
    "rt.spec_length": _draft_length,
}
