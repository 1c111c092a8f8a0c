"""Which token ends an answer, which fills a batch, and which others end an answer too, from a tokenizer's files.

As upstream's preprocessing has it: the end token is the tokenizer's `eos_token`, the pad token its `pad_token` or else
the end token. Further ends are in generation_config.json (Llama 3 has three). Reads JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import StageError
from pipeline.reading import MAX_TOKENIZER_BYTES, UnreadableFile, optional_json, read_json


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids that tokenizer and model agree on."""

    end: int  # ends an answer
    pad: int  # fills short rows of a batch
    stop: tuple[int, ...]  # further tokens that end an answer
    vocab_size: int  # of the model: tokens that it can write; 0 where the runtime knows that itself


def token_ids(tokenizer: Path, vocab_size: int = 0) -> TokenIds:
    """Read the ids of a folder with tokenizer.json and the files beside it.

    Raises:
        StageError: there is no tokenizer.json, or no token that ends an answer. UnreadableFile: a file is damaged.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        raise StageError(
            f"{tokenizer}: no tokenizer.json; tokenizers that only have a .model file are not served"
        )
    by_name = dict(read_tokens(tokenizer / "tokenizer.json"))
    settings = optional_json(tokenizer / "special_tokens_map.json") | optional_json(
        tokenizer / "tokenizer_config.json"
    )
    ends = [by_name[name] for name in _names(settings, "eos_token") if name in by_name]
    for file in ("generation_config.json", "config.json"):
        declared = optional_json(tokenizer / file).get("eos_token_id")
        if declared is not None:
            ids = declared if isinstance(declared, list) else [declared]
            if not all(type(id) is int for id in ids):
                raise UnreadableFile(
                    tokenizer / file, f"eos_token_id = {declared!r:.60}: must be ids of tokens"
                )
            ends += ids
            break
    if not ends:
        raise StageError(
            f"{tokenizer}: no eos_token in tokenizer_config.json, no eos_token_id in generation_config.json"
        )
    pads = [by_name[name] for name in _names(settings, "pad_token") if name in by_name]
    further = tuple(dict.fromkeys(id for id in ends if id != ends[0]))
    return TokenIds(end=ends[0], pad=(pads or ends)[0], stop=further, vocab_size=vocab_size)


def read_tokens(file: Path) -> list[tuple[str, int]]:
    """List each token of a tokenizer.json with its id, added ones last. Raises UnreadableFile."""
    try:
        tokens = list(_tokens(read_json(file, most=MAX_TOKENIZER_BYTES)))
        sound = all(isinstance(token, str) and type(id) is int for token, id in tokens)
    except (AttributeError, LookupError, TypeError, ValueError):
        sound = False
    if not sound:
        raise UnreadableFile(file, "has no vocabulary of texts and ids that can be read")
    return tokens


def _tokens(tokenizer: dict[str, Any]) -> Iterator[tuple[str, int]]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # Unigram: pairs of token and score
        yield from ((token, id) for id, (token, _) in enumerate(vocabulary))
    yield from ((token["content"], token["id"]) for token in tokenizer.get("added_tokens", ()))


def _names(settings: dict[str, Any], key: str) -> Iterator[str]:
    token = settings.get(key)
    if token:
        yield str(token.get("content") if isinstance(token, dict) else token)
