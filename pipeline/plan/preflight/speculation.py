"""Rules about a draft and its target, and about their tokenizers: ids go from one to the other as they are.

Each function is one rule of contracts/data/rules, under its id in SPECULATION_CHECKS or TOKENIZER_CHECKS. An Eagle-3
head has the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import llm_args
from pipeline.contracts.rules import rule
from pipeline.plan.model_facts import TokenizerFacts, tokenizer_corpus
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight.context import Check, Context, Objection
from pipeline.recipe import PyTorchRuntime

_SAME = "choose a draft with the target's tokenizer"


def _gpu_and_formats(context: Context) -> Iterator[Objection]:
    facts, gpu = rule("rt.spec_sm").facts, context.gpu
    if context.draft is None:
        return
    if gpu is not None and gpu.sm < facts["oldest_sm"]:
        yield Objection(
            ("runtime.gpu", "draft"),
            f"has compute capability {gpu.capability}, a draft needs {facts['oldest_sm'] / 10:.1f}",
            "remove draft, or choose another GPU",
        )
    tried: list[str] = facts["tried"]
    if context.target.format not in tried:
        yield Objection(
            (context.target.format_key, "draft"),
            f"as the target of a draft is not among what upstream describes, which is {', '.join(tried)}",
            "compare answers with and without the draft before relying on it",
            "warning",
        )


def _overlap(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or not runtime.overlap_scheduler or context.release_problem:
        return
    method = _method(context, runtime)
    if method is not None and llm_args.speculation(runtime.version, method).two_models:
        yield Objection(
            ("runtime.overlap_scheduler", "runtime.speculation" if context.draft is None else "draft"),
            f"cannot be true with {method} speculation, whose two models run in turns",
            "remove runtime.overlap_scheduler",
        )


def _pipeline(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or runtime.pipeline_parallel == 1:
        return
    method = _method(context, runtime)
    if method is not None:
        yield Objection(
            ("draft" if context.draft is not None else "runtime.speculation", "runtime.pipeline_parallel"),
            f"proposes tokens by {method}, which the LLM API cannot do over {runtime.pipeline_parallel} stages",
            f"set runtime.tensor_parallel to {runtime.tensor_parallel * runtime.pipeline_parallel} and "
            "runtime.pipeline_parallel to 1, or remove the first",
        )


def _method(context: Context, runtime: PyTorchRuntime) -> str | None:
    if context.recipe.draft is not None:
        return context.recipe.draft.method
    return runtime.speculation.method if runtime.speculation is not None else None


def _draft_ranks(context: Context) -> Iterator[Objection]:
    draft, target = context.draft, context.target
    if draft is not None and draft.split.world > target.split.world:
        yield Objection(
            (draft.tensor_key, target.tensor_key),
            f"needs {draft.split.world} GPUs, the target only {target.split.world}, and they share them",
            f"at most {target.split.world}",
        )


def _draft_length(context: Context) -> Iterator[Objection]:
    draft, (least, most) = context.recipe.draft, rule("rt.spec_len").facts["usual"]
    if draft is None:
        return
    engines = dict(context.engines)
    built = engines[TARGET]["max_draft_len"] if TARGET in engines else draft.max_draft_tokens
    if draft.max_draft_tokens > built:
        yield Objection(
            ("draft.max_draft_tokens",),
            f"is more than the {built} that the engine verifies",
            f"at most {built}",
            "error",
        )
    if not least <= draft.max_draft_tokens <= most:
        yield Objection(("draft.max_draft_tokens",), f"is outside the usual {least} to {most}")


def _backend(context: Context) -> Iterator[Objection]:
    """The settings name only ways to propose tokens that the backend has."""
    if context.version is None:
        return
    engines: list[str] = rule("rt.backend_supports_spec").facts["tensorrt"]
    known = engines if context.kind == "tensorrt" else llm_args.decoding_types(context.version)
    chosen = {flags["speculative_decoding_mode"] for _, flags in context.engines}
    chosen.add(_speculation(context.arguments).get("decoding_type"))
    for decoding in sorted(chosen - {None, *known}):
        yield Objection(
            ("draft.method" if context.draft else "runtime.speculation", "runtime.kind"),
            f"becomes {decoding}, which runtime.kind {context.kind} does not have",
            f"one of {', '.join(known)}",
        )


def _budget(context: Context) -> Iterator[Objection]:
    arguments, settings = context.arguments, _speculation(context.arguments)
    drafted = settings.get("max_draft_len") or settings.get("num_nextn_predict_layers") or 0
    least = arguments.get("max_batch_size", 0) * (drafted + 1)
    if drafted and arguments["max_num_tokens"] < least:
        yield Objection(
            ("limits.max_batch_tokens", "limits.max_concurrency"),
            f"makes max_num_tokens {arguments['max_num_tokens']}, a step of all requests and drafts is {least}",
            f"at least {least}",
        )


def _ngram(context: Context) -> Iterator[Objection]:
    settings = _speculation(context.arguments)
    if settings.get("decoding_type") == "NGram" and settings.get("max_matching_ngram_size", 0) < 1:
        yield Objection(
            ("runtime.speculation",),
            "has no max_matching_tokens",
            "set runtime.speculation.max_matching_tokens to 2",
        )


def _speculation(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return arguments.get("speculative_config") or {}


SPECULATION_CHECKS: Mapping[str, Check] = {
    "rt.spec_sm": _gpu_and_formats,
    "rt.spec_len": _draft_length,
    "rt.backend_supports_spec": _backend,
    "rt.spec_overlap": _overlap,
    "rt.spec_pipeline": _pipeline,
    "rt.spec_tokens_budget": _budget,
    "rt.ngram_size": _ngram,
    "draft.ranks": _draft_ranks,
}


def _same_vocabulary(context: Context) -> Iterator[Objection]:
    draft, target = context.draft, context.target
    if draft is None or draft.is_head or draft.sizes is None or target.sizes is None:
        return
    if draft.sizes.vocab != target.sizes.vocab:
        yield Objection(
            (draft.source_key, target.source_key),
            f"has a vocabulary of {draft.sizes.vocab} tokens, the target of {target.sizes.vocab}; they exchange ids",
            _SAME,
        )


def _both(context: Context) -> tuple[tuple[str, str], TokenizerFacts, TokenizerFacts] | None:
    """Keys, and the tokenizers of draft and target, where both are known."""
    draft, target = context.draft, context.target
    if draft is None or draft.is_head or draft.facts.tokenizer is None or target.facts.tokenizer is None:
        return None
    return (draft.source_key, target.source_key), draft.facts.tokenizer, target.facts.tokenizer


def _special_tokens(context: Context) -> Iterator[Objection]:
    if (both := _both(context)) is None:
        return
    keys, target, draft = both
    common = sorted(target.special.keys() & draft.special.keys())
    other = [token for token in common if target.special[token] != draft.special[token]]
    if other:
        token, more = other[0], f", and {len(other) - 1} more" if len(other) > 1 else ""
        yield Objection(
            keys,
            f"gives {token} the id {target.special[token]}, the target {draft.special[token]}{more}",
            _SAME,
        )


def _token_ids(context: Context) -> Iterator[Objection]:
    if (both := _both(context)) is None:
        return
    keys, target, draft = both
    if target.ids is None or draft.ids is None:
        return
    texts = [
        text
        for text, own, other in zip(tokenizer_corpus(), target.ids, draft.ids, strict=True)
        if own != other
    ]
    if texts:
        yield Objection(
            keys,
            f"gives other ids than the target to {len(texts)} of {len(target.ids)} texts, such as {texts[0]!r}",
            _SAME,
        )


def _tokenizer_files(context: Context) -> Iterator[Objection]:
    if (both := _both(context)) is None:
        return
    keys, target, draft = both
    names = sorted(
        name
        for name in target.files.keys() | draft.files.keys()
        if target.files.get(name) != draft.files.get(name)
    )
    if names:
        ids = (
            "; the ids of the corpus are the same"
            if target.ids is not None and target.ids == draft.ids
            else ""
        )
        yield Objection(keys, f"has another {', '.join(names)} than the target{ids}")


TOKENIZER_CHECKS: Mapping[str, Check] = {
    "rt.spec_same_vocab": _same_vocabulary,
    "tokenizer.special": _special_tokens,
    "tokenizer.ids": _token_ids,
    "tokenizer.files": _tokenizer_files,
}
