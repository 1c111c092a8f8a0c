"""What tells two tokenizers apart: their files, their special tokens, and the ids that they give to a set of texts.

The texts are data (`contracts/data/tokenizer_corpus.yaml`). Special tokens are not added to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.reading import MAX_TOKENIZER_BYTES, UnreadableFile, open_file, read_json, read_tokenizer
from pipeline.resources import parse_yaml

FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """One tokenizer."""

    files: Mapping[str, str]  # name -> SHA-256, of the files that decide ids
    special: Mapping[str, int]  # special token -> id
    ids: tuple[tuple[int, ...], ...] | None = (
        None  # of each text of the corpus; None: it cannot be loaded here
    )

    @classmethod
    def read(cls, folder: Path) -> TokenizerFacts | None:
        """Those of a checkpoint; None if it has no tokenizer that can be read, which fetching explains."""
        try:
            files = {name: _digest(folder / name) for name in FILES if (folder / name).is_file()}
        except UnreadableFile:
            return None
        if not files:
            return None
        try:
            data = read_json(folder / "tokenizer.json", most=MAX_TOKENIZER_BYTES)
        except UnreadableFile:
            return cls(files, {})
        return cls(files, _special(data), _ids(folder / "tokenizer.json"))


@cache
def corpus() -> tuple[str, ...]:
    """The texts."""
    file = resources.files("pipeline.contracts") / "data" / "tokenizer_corpus.yaml"
    return tuple(parse_yaml(file.read_text("utf-8"))["texts"])


def _digest(file: Path) -> str:
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _special(data: Mapping[str, Any]) -> dict[str, int]:
    added = data.get("added_tokens")
    marked = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
    return {
        token["content"]: token["id"]
        for token in marked
        if token.get("special") and isinstance(token.get("content"), str) and "id" in token
    }


def _ids(file: Path) -> tuple[tuple[int, ...], ...] | None:
    try:
        loaded = read_tokenizer(file)
    except (ImportError, UnreadableFile):
        # Without the library, which is an extra, files and special tokens are compared.
        return None
    return tuple(tuple(loaded.encode(text, add_special_tokens=False).ids) for text in corpus())
