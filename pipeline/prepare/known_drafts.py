"""Drafts that are known to have a model's tokenizer: those of packaged recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.tensors import parameter_counts
from pipeline.plan.model_facts import TokenizerFacts, read_model_facts
from pipeline.recipe import Draft, HubSource, LocalSource
from pipeline.recipe.catalog import entries


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A draft as a packaged recipe has it, and a sentence that says why it is known to fit."""

    draft: Draft
    why: str

    @property
    def values(self) -> dict[str, Any]:
        """Values for a recipe, defaults left out."""
        keys = {"source", "revision", "method", "max_draft_tokens"}
        return self.draft.model_dump(mode="json", include=keys, exclude_defaults=True, exclude_none=True)


def known_draft(source: HubSource | LocalSource, sizes: ModelSizes, *, eagle: bool) -> KnownDraft | None:
    """Find a draft for a model.

    Args:
        eagle: Whether the runtime takes Eagle-3 heads.

    Returns:
        For a repository of the Hub, the draft of a packaged recipe for the same one; for a local folder, a local draft
        of at most half its size, whose tokenizer gives the same ids. None if there is none.
    """
    mine = TokenizerFacts.read(source.path) if isinstance(source, LocalSource) else None
    for entry in entries():
        other = entry.recipe
        if other is None or other.draft is None or (other.draft.method == "eagle3" and not eagle):
            continue
        theirs = other.draft.source
        if isinstance(source, HubSource):
            if other.model.source == source:
                return KnownDraft(other.draft, f"the draft of the recipe {other.name} for the same model")
        elif (
            mine is not None
            and isinstance(theirs, LocalSource)
            and TokenizerFacts.read(theirs.path) == mine
            and _is_smaller(theirs.path, sizes)
        ):
            why = f"the draft of the recipe {other.name}, whose tokenizer gives the same ids"
            return KnownDraft(other.draft, why)
    return None


def _is_smaller(folder: Path, than: ModelSizes) -> bool:
    sizes = read_model_facts(folder).sizes
    return sizes is not None and 2 * _weights(sizes) <= _weights(than)


def _weights(sizes: ModelSizes) -> int:
    return sum(parameter_counts(sizes).values())
