"""Rules about lengths and the tokens of a step, in the recipe and in the flags of its engines.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts.rules import rule
from pipeline.models.sizes import ModelSizes
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight.context import Subject
from pipeline.plan.preflight.finding import Check, Said

BATCH_TOKENS, CONCURRENCY, FLAGS = "limits.max_batch_tokens", "limits.max_concurrency", "runtime.build_flags"


def _clipped_batch_tokens(subject: Subject) -> Iterator[Said]:
    limits = subject.recipe.limits
    most = limits.max_sequence_tokens * limits.max_concurrency
    if limits.max_batch_tokens is not None and limits.max_batch_tokens > most:
        yield Said(
            (BATCH_TOKENS, "limits.max_concurrency"),
            f"is cut to {most} by the engine builder, which is limits.max_concurrency whole sequences",
            f"at most {most}",
        )


def _large_batch_tokens(subject: Subject) -> Iterator[Said]:
    given, most = subject.recipe.limits.max_batch_tokens, rule("build.max_num_tokens_large").facts["most"]
    if given is not None and given > most:
        yield Said(
            (BATCH_TOKENS,), f"is more than {most}, which the engine builder warns of", f"at most {most}"
        )


def _block(subject: Subject) -> Iterator[Said]:
    given, block = (
        subject.recipe.limits.max_batch_tokens,
        rule("build.max_num_tokens_block").facts["tokens_per_block"],
    )
    if given is not None and given < block:
        yield Said(
            (BATCH_TOKENS,),
            f"is raised to {block}, the tokens of a block of the KV cache",
            f"at least {block}",
        )


def _drafts(subject: Subject) -> Iterator[Said]:
    for _, flags in subject.engines:
        least = flags["max_batch_size"] * (flags["max_draft_len"] + 1)
        if flags["speculative_decoding_mode"] and flags["max_num_tokens"] < least:
            yield Said(
                (BATCH_TOKENS, CONCURRENCY, "draft.max_draft_tokens"),
                f"makes max_num_tokens {flags['max_num_tokens']}, a step of all requests and drafts is {least}",
                f"at least {least}",
            )


def _batch(subject: Subject) -> Iterator[Said]:
    steps = [flags for _, flags in subject.engines]
    steps += [subject.arguments] if subject.arguments else []
    for step in steps:
        if step["max_batch_size"] > step["max_num_tokens"]:
            yield Said(
                (CONCURRENCY, BATCH_TOKENS),
                f"makes max_batch_size {step['max_batch_size']}, a step holds {step['max_num_tokens']} tokens",
                "raise limits.max_batch_tokens",
            )


def _input(subject: Subject) -> Iterator[Said]:
    for role, flags in subject.engines:
        if flags["max_seq_len"] is not None and flags["max_input_len"] > flags["max_seq_len"]:
            yield Said(
                ("limits.max_input_tokens", "limits.max_output_tokens"),
                f"makes max_input_len of the {role}'s engine {flags['max_input_len']}, its max_seq_len is "
                f"{flags['max_seq_len']}",
            )


def _opt_tokens(subject: Subject) -> Iterator[Said]:
    for _, flags in subject.engines:
        if flags["opt_num_tokens"] is not None and flags["opt_num_tokens"] > flags["max_num_tokens"]:
            yield Said(
                (FLAGS, BATCH_TOKENS),
                f"has opt_num_tokens {flags['opt_num_tokens']}, which is cut to max_num_tokens "
                f"{flags['max_num_tokens']}",
                f"at most {flags['max_num_tokens']}",
            )


def _tokens_per_block(subject: Subject) -> Iterator[Said]:
    sizes = {role: flags["tokens_per_block"] for role, flags in subject.engines}
    for role, size in sizes.items():
        if size is not None and size.bit_count() != 1:
            yield Said(
                ("runtime.kind",),
                f"gives the {role}'s engine blocks of {size} tokens, which is no power of two",
            )
    if len(set(sizes.values())) > 1:
        yield Said(
            ("runtime.kind",),
            f"gives target and draft blocks of {' and '.join(map(str, sizes.values()))} tokens",
        )


def _draft_flags(subject: Subject) -> Iterator[Said]:
    draft, engines = subject.recipe.draft, dict(subject.engines)
    if draft is None or TARGET not in engines:
        return
    flags = engines[TARGET]
    wrong = [
        *(
            []
            if flags["speculative_decoding_mode"] == "draft_tokens_external"
            else ["speculative_decoding_mode"]
        ),
        *([] if flags["use_paged_context_fmha"] == "enable" else ["use_paged_context_fmha"]),
        *([] if flags["max_draft_len"] >= draft.max_draft_tokens else ["max_draft_len"]),
    ]
    if wrong:
        text = ", ".join(f"{name} {flags[name]}" for name in wrong)
        yield Said(("draft", "draft.max_draft_tokens"), f"cannot be verified by an engine with {text}")


def _context_logits(subject: Subject) -> Iterator[Said]:
    for role, flags in subject.engines:
        gathered = flags["gather_context_logits"] or flags["gather_all_token_logits"]
        if gathered and flags["max_draft_len"]:
            yield Said(
                ("draft",), f"cannot be verified by the {role}'s engine while it gathers logits of the prompt"
            )


def _positions(subject: Subject) -> Iterator[Said]:
    limits = subject.recipe.limits
    for model, sizes in subject.sized:
        longest = _longest(sizes)
        if not model.is_head and limits.max_sequence_tokens > longest:
            yield Said(
                ("limits.max_input_tokens", "limits.max_output_tokens", model.source_key),
                f"and limits.max_output_tokens are {limits.max_sequence_tokens} tokens together, "
                f"the {model.role} knows {longest} positions",
                f"together at most {longest}",
            )


def _longest(sizes: ModelSizes) -> int:
    """Positions that a model has, with those that its rotary embedding is stretched to."""
    unscaled: list[str] = rule("limits.positions").facts["unscaled"]
    factor = 1.0 if sizes.rope.get("kind") in unscaled else float(sizes.rope.get("factor", 1))
    return int(sizes.max_positions * factor)


CHECKS: Mapping[str, Check] = {
    "build.max_num_tokens_clip": _clipped_batch_tokens,
    "build.max_num_tokens_large": _large_batch_tokens,
    "build.max_num_tokens_block": _block,
    "build.max_num_tokens_spec": _drafts,
    "build.batch_le_tokens": _batch,
    "build.input_lt_seq": _input,
    "build.opt_tokens": _opt_tokens,
    "build.tokens_per_block": _tokens_per_block,
    "build.draft_flags": _draft_flags,
    "build.ctx_logits": _context_logits,
    "limits.positions": _positions,
}
