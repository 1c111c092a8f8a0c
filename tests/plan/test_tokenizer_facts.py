"""What tells tokenizers apart: their files, special tokens, and ids of the corpus."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import pytest

from pipeline import resources
from pipeline.plan.model_facts import TokenizerFacts, tokenizer_corpus

SUPPORT = resources.folder("recipes") / "checkpoints" / "support-target"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for file in SUPPORT.glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def read(folder: Path) -> TokenizerFacts:
    facts = TokenizerFacts.read(folder)
    assert facts is not None
    return facts


def edit(folder: Path, change: object) -> None:
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)  # type: ignore[operator]
    file.write_text(json.dumps(data), encoding="utf-8")


def test_the_corpus_has_many_scripts_code_numbers_emoji_and_whitespace() -> None:
    assert len(set(tokenizer_corpus())) == len(tokenizer_corpus()) >= 40
    letters = {
        unicodedata.name(sign, "?").split()[0]
        for text in tokenizer_corpus()
        for sign in text
        if sign.isalpha()
    }
    scripts = {
        "LATIN", "CYRILLIC", "GREEK", "HEBREW", "ARABIC", "DEVANAGARI", "THAI", "CJK", "HIRAGANA", "KATAKANA", "HANGUL",
        "GEORGIAN", "ARMENIAN", "ETHIOPIC",
    }  # fmt: skip
    assert scripts <= letters
    whole = "".join(tokenizer_corpus())
    assert all(sign in whole for sign in "\t\n\r\u00a0\u3000\u200d\ufeff0123456789{}[]()<>|\\👍🏽")
    assert any(text.isspace() for text in tokenizer_corpus())


def test_a_tokenizer_equals_itself(copy: Path) -> None:
    assert read(SUPPORT) == read(copy)
    ids = read(copy).ids
    assert ids is not None
    assert len(ids) == len(tokenizer_corpus())


def test_another_order_of_merges_gives_other_ids(copy: Path) -> None:
    edit(copy, lambda data: data["model"]["merges"].reverse())
    ours, theirs = read(SUPPORT), read(copy)
    assert ours.files != theirs.files
    assert ours.special == theirs.special
    assert ours.ids != theirs.ids


def test_a_file_that_says_the_same_in_other_bytes(copy: Path) -> None:
    edit(copy, dict)
    assert read(copy).files != read(SUPPORT).files
    assert read(copy).ids == read(SUPPORT).ids


def test_special_tokens_are_those_that_are_marked(copy: Path) -> None:
    special = read(copy).special
    assert special
    edit(copy, lambda data: [token.update(special=False) for token in data["added_tokens"]])
    assert read(copy).special == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"added_tokens": [1, {"special": true}]}', '{"model": {"type": "nobody"}}']
)
def test_what_no_library_loads_has_files_only(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    facts = read(tmp_path)
    assert (set(facts.files), facts.special, facts.ids) == ({"tokenizer.json"}, {}, None)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert TokenizerFacts.read(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    assert read(tmp_path).ids is None
