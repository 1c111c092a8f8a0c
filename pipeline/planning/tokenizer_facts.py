"""What tells two tokenizers apart: their files, their special tokens, and the ids that they give to a set of texts.

The texts are data (`contracts/data/tokenizer_corpus.yaml`). Special tokens are not added to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

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
        files = {name: _digest(folder / name) for name in FILES if (folder / name).is_file()}
        if not files:
            return None
        try:
            data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls(files, {})
        return cls(files, _special(data), _ids(folder / "tokenizer.json"))


@cache
def corpus() -> tuple[str, ...]:
    """The texts."""
    file = resources.files("pipeline.contracts") / "data" / "tokenizer_corpus.yaml"
    return tuple(yaml.safe_load(file.read_text("utf-8"))["texts"])


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _special(data: Any) -> dict[str, int]:
    added = data.get("added_tokens") if isinstance(data, Mapping) else None
    marked = [token for token in added or () if isinstance(token, Mapping) and token.get("special")]
    return {token["content"]: token["id"] for token in marked if {"content", "id"} <= token.keys()}


def _ids(file: Path) -> tuple[tuple[int, ...], ...] | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:  # an extra: without it, files and special tokens are compared
        return None
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more exact for a file that it does not take
        return None
    return tuple(tuple(loaded.encode(text, add_special_tokens=False).ids) for text in corpus())
