"""Rules about lengths and the tokens of a step, and about the GPU memory that they take.

Each check is one rule: those of contracts/data/rules/budgets.yaml are in CHECKS, those of memory.yaml in MEMORY_CHECKS.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from pipeline.contracts.rules import rule
from pipeline.models.sizes import ModelSizes
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight.context import Check, Context, Objection

BATCH_TOKENS, CONCURRENCY, FLAGS = "limits.max_batch_tokens", "limits.max_concurrency", "runtime.build_flags"


def _clipped_batch_tokens(context: Context) -> Iterator[Objection]:
    limits = context.recipe.limits
    most = limits.max_sequence_tokens * limits.max_concurrency
    if limits.max_batch_tokens is not None and limits.max_batch_tokens > most:
        yield Objection(
            (BATCH_TOKENS, "limits.max_concurrency"),
            f"is cut to {most} by the engine builder, which is limits.max_concurrency whole sequences",
            f"at most {most}",
        )


def _large_batch_tokens(context: Context) -> Iterator[Objection]:
    batch_tokens, most = (
        context.recipe.limits.max_batch_tokens,
        rule("build.max_num_tokens_large").facts["most"],
    )
    if batch_tokens is not None and batch_tokens > most:
        yield Objection(
            (BATCH_TOKENS,), f"is more than {most}, which the engine builder warns of", f"at most {most}"
        )


def _block(context: Context) -> Iterator[Objection]:
    block = rule("build.max_num_tokens_block").facts["tokens_per_block"]
    batch_tokens = context.recipe.limits.max_batch_tokens
    if batch_tokens is not None and batch_tokens < block:
        yield Objection(
            (BATCH_TOKENS,),
            f"is raised to {block}, the tokens of a block of the KV cache",
            f"at least {block}",
        )


def _drafts(context: Context) -> Iterator[Objection]:
    for _, flags in context.engines:
        least = flags["max_batch_size"] * (flags["max_draft_len"] + 1)
        if flags["speculative_decoding_mode"] and flags["max_num_tokens"] < least:
            yield Objection(
                (BATCH_TOKENS, CONCURRENCY, "draft.max_draft_tokens"),
                f"makes max_num_tokens {flags['max_num_tokens']}, a step of all requests and drafts is {least}",
                f"at least {least}",
            )


def _batch(context: Context) -> Iterator[Objection]:
    steps = [flags for _, flags in context.engines]
    steps += [context.arguments] if context.arguments else []
    for step in steps:
        if step["max_batch_size"] > step["max_num_tokens"]:
            yield Objection(
                (CONCURRENCY, BATCH_TOKENS),
                f"makes max_batch_size {step['max_batch_size']}, a step holds {step['max_num_tokens']} tokens",
                "raise limits.max_batch_tokens",
            )


def _input(context: Context) -> Iterator[Objection]:
    for role, flags in context.engines:
        if flags["max_seq_len"] is not None and flags["max_input_len"] > flags["max_seq_len"]:
            yield Objection(
                ("limits.max_input_tokens", "limits.max_output_tokens"),
                f"makes max_input_len of the {role}'s engine {flags['max_input_len']}, its max_seq_len is "
                f"{flags['max_seq_len']}",
            )


def _opt_tokens(context: Context) -> Iterator[Objection]:
    for _, flags in context.engines:
        if flags["opt_num_tokens"] is not None and flags["opt_num_tokens"] > flags["max_num_tokens"]:
            yield Objection(
                (FLAGS, BATCH_TOKENS),
                f"has opt_num_tokens {flags['opt_num_tokens']}, which is cut to max_num_tokens "
                f"{flags['max_num_tokens']}",
                f"at most {flags['max_num_tokens']}",
            )


def _tokens_per_block(context: Context) -> Iterator[Objection]:
    sizes = {role: flags["tokens_per_block"] for role, flags in context.engines}
    for role, size in sizes.items():
        if size is not None and size.bit_count() != 1:
            yield Objection(
                ("runtime.kind",),
                f"gives the {role}'s engine blocks of {size} tokens, which is no power of two",
            )
    if len(set(sizes.values())) > 1:
        yield Objection(
            ("runtime.kind",),
            f"gives target and draft blocks of {' and '.join(map(str, sizes.values()))} tokens",
        )


def _draft_flags(context: Context) -> Iterator[Objection]:
    draft, engines = context.recipe.draft, dict(context.engines)
    if draft is None or TARGET not in engines:
        return
    flags = engines[TARGET]
    right = {
        "speculative_decoding_mode": flags["speculative_decoding_mode"] == "draft_tokens_external",
        "use_paged_context_fmha": flags["use_paged_context_fmha"] == "enable",
        "max_draft_len": flags["max_draft_len"] >= draft.max_draft_tokens,
    }
    if wrong := [name for name, holds in right.items() if not holds]:
        text = ", ".join(f"{name} {flags[name]}" for name in wrong)
        yield Objection(("draft", "draft.max_draft_tokens"), f"cannot be verified by an engine with {text}")


def _context_logits(context: Context) -> Iterator[Objection]:
    for role, flags in context.engines:
        gathered = flags["gather_context_logits"] or flags["gather_all_token_logits"]
        if gathered and flags["max_draft_len"]:
            yield Objection(
                ("draft",), f"cannot be verified by the {role}'s engine while it gathers logits of the prompt"
            )


def _positions(context: Context) -> Iterator[Objection]:
    limits = context.recipe.limits
    for model, sizes in context.sized:
        longest = _longest(sizes)
        if not model.is_head and limits.max_sequence_tokens > longest:
            yield Objection(
                ("limits.max_input_tokens", "limits.max_output_tokens", model.source_key),
                f"and limits.max_output_tokens are {limits.max_sequence_tokens} tokens together, "
                f"the {model.role} knows {longest} positions",
                f"together at most {longest}",
            )


def _longest(sizes: ModelSizes) -> int:
    """Positions that a model has, with those that its rotary embedding is stretched to."""
    original = sizes.rope.get("original_max_positions")
    if sizes.rope.get("kind") == "yarn" and original is not None:
        return max(sizes.max_positions, int(float(original) * float(sizes.rope.get("factor", 1))))
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


GPU, TENSOR, CONCURRENCY = "runtime.gpu", "runtime.tensor_parallel", "limits.max_concurrency"


def _fits(context: Context) -> Iterator[Objection]:
    memory = context.memory
    if memory is None or memory.verdict != "does not fit":
        return
    short, longest = -memory.tightest.headroom, memory.spec.sequence_tokens
    where = f" on {memory.fullest_named or f'each of {len(memory.ranks)}'}"
    if short > 0:
        problem = f"lacks {short / 2**30:.1f} GiB for weights and buffers alone,{where}"
    else:
        problem = f"holds {memory.tokens} tokens in its KV cache{where}, and one request may have {longest}"
    keys = (GPU, TENSOR, "quantization.format", "limits.max_input_tokens")
    yield Objection(keys, problem, f"{_plan(context)} names what would fit")


def _concurrency(context: Context) -> Iterator[Objection]:
    memory = context.memory
    if memory is not None and memory.verdict == "fits in part":
        sequences, longest = memory.sequences, memory.spec.sequence_tokens
        yield Objection(
            (CONCURRENCY, GPU, TENSOR),
            f"is more than the {sequences} requests of {longest} tokens that the KV cache holds at a time",
            f"{sequences}, or what {_plan(context)} names",
        )


def _plan(context: Context) -> str:
    return shlex.join(("pipeline", "plan", *context.recipe.argv))


MEMORY_CHECKS: Mapping[str, Check] = {"memory.fits": _fits, "memory.concurrency": _concurrency}
