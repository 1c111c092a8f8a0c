"""Tokenizers of a target and its draft, as far as rules look at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.plan.model_facts import ModelFacts, TokenizerFacts, tokenizer_corpus
from tests.support.preflight.case import Models

Ids = tuple[tuple[int, ...], ...] | None
IDS: Ids = tuple((number,) for number in range(len(tokenizer_corpus())))
ONE_DIFFERS: Ids = (*((number,) for number in range(len(tokenizer_corpus()) - 1)), (0,))
FILES, SPECIAL = {"tokenizer.json": "same"}, {"<eos>": 2}


def tokenizers(
    draft_special: Mapping[str, int] = SPECIAL,
    draft_files: Mapping[str, str] = FILES,
    draft_ids: Ids = IDS,
) -> Models:
    """What is known of the models, and these tokenizers."""

    def change(known: dict[str, ModelFacts]) -> Mapping[str, ModelFacts]:
        found = {
            "target": TokenizerFacts(FILES, SPECIAL, IDS),
            "draft": TokenizerFacts(draft_files, draft_special, draft_ids),
        }
        return {role: replace(facts, tokenizer=found[role]) for role, facts in known.items()}

    return change
