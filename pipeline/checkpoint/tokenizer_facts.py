"""What tells two tokenizers apart: their files, their special tokens, and the ids that they give to a set of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """One tokenizer."""

    files: Mapping[str, str]  # name -> SHA-256, of the files that decide ids
    special: Mapping[str, int]  # special token -> id
    largest_id: int | None = None  # of all tokens; None: it could not be loaded here
    ids: tuple[tuple[int, ...], ...] | None = None  # of each text of the corpus; None: as above
