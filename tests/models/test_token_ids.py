"""Which tokens end an answer, from the files that checkpoints really have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds, token_ids
from tests.support import CHECKPOINTS


def folder(path: Path, **files: dict[str, Any]) -> Path:
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0, "<unk>": 1}},
        "added_tokens": [
            {"id": 2, "content": "</s>"},
            {"id": 3, "content": "<|eot|>"},
            {"id": 4, "content": "<pad>"},
        ],
    }
    for name, content in {"tokenizer": tokenizer, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_the_support_pair() -> None:
    assert token_ids(CHECKPOINTS / "support-target", 2048) == TokenIds(
        end=5, pad=0, stop=(2,), vocab_size=2048
    )


@pytest.mark.parametrize(
    ("files", "end", "pad", "stop"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, 2, 2, ()),
        ({"tokenizer_config": {"eos_token": {"content": "<|eot|>"}, "pad_token": "<pad>"}}, 3, 4, ()),
        (
            {"tokenizer_config": {"eos_token": "<|eot|>"}, "generation_config": {"eos_token_id": [2, 3]}},
            3,
            3,
            (2,),
        ),
        ({"generation_config": {"eos_token_id": 2}}, 2, 2, ()),
        ({"generation_config": {}, "config": {"eos_token_id": [3, 2]}}, 3, 3, (2,)),
        ({"special_tokens_map": {"eos_token": "</s>"}}, 2, 2, ()),
        ({"tokenizer_config": {"eos_token": "gone"}, "generation_config": {"eos_token_id": 3}}, 3, 3, ()),
    ],
)
def test_where_the_ends_are_said(
    tmp_path: Path, files: dict[str, Any], end: int, pad: int, stop: tuple[int, ...]
) -> None:
    assert token_ids(folder(tmp_path, **files), 8) == TokenIds(end, pad, stop, 8)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"no eos_token in .*, no eos_token_id in "):
        token_ids(folder(tmp_path), 8)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StageError, match=r"no tokenizer\.json"):
        token_ids(tmp_path, 8)


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    unigram = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}
    assert token_ids(folder(tmp_path, tokenizer=unigram, tokenizer_config={"eos_token": "</s>"}), 8).end == 1
