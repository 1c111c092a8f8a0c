"""Rules about the tokenizers of a draft and its target: ids go from one to the other as they are.

Each function is one rule of contracts/data/rules, under its id in CHECKS. An Eagle-3 head has the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.plan.model_facts import TokenizerFacts, tokenizer_corpus
from pipeline.plan.preflight.context import Context
from pipeline.plan.preflight.finding import Check, Objection

SAME = "choose a draft with the target's tokenizer"


def _same_vocabulary(context: Context) -> Iterator[Objection]:
    draft, target = context.draft, context.target
    if draft is None or draft.is_head or draft.sizes is None or target.sizes is None:
        return
    if draft.sizes.vocab != target.sizes.vocab:
        yield Objection(
            (draft.source_key, target.source_key),
            f"has a vocabulary of {draft.sizes.vocab} tokens, the target of {target.sizes.vocab}; they exchange ids",
            SAME,
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
    keys, ours, theirs = both
    common = sorted(ours.special.keys() & theirs.special.keys())
    other = [token for token in common if ours.special[token] != theirs.special[token]]
    if other:
        token, rest = other[0], f", and {len(other) - 1} more" if len(other) > 1 else ""
        yield Objection(
            keys,
            f"gives {token} the id {ours.special[token]}, the target {theirs.special[token]}{rest}",
            SAME,
        )


def _token_ids(context: Context) -> Iterator[Objection]:
    if (both := _both(context)) is None:
        return
    keys, ours, theirs = both
    if ours.ids is None or theirs.ids is None:
        return
    texts = [
        text
        for text, own, other in zip(tokenizer_corpus(), ours.ids, theirs.ids, strict=True)
        if own != other
    ]
    if texts:
        yield Objection(
            keys,
            f"gives other ids than the target to {len(texts)} of {len(ours.ids)} texts, such as {texts[0]!r}",
            SAME,
        )


def _tokenizer_files(context: Context) -> Iterator[Objection]:
    if (both := _both(context)) is None:
        return
    keys, ours, theirs = both
    names = sorted(
        name
        for name in ours.files.keys() | theirs.files.keys()
        if ours.files.get(name) != theirs.files.get(name)
    )
    if names:
        told = (
            "; the ids of the corpus are the same" if ours.ids is not None and ours.ids == theirs.ids else ""
        )
        yield Objection(keys, f"has another {', '.join(names)} than the target{told}")


CHECKS: Mapping[str, Check] = {
    "rt.spec_same_vocab": _same_vocabulary,
    "tokenizer.special": _special_tokens,
    "tokenizer.ids": _token_ids,
    "tokenizer.files": _tokenizer_files,
}
