"""Which questions are shared by meaning: languages by their letters, text to work on, and what the encoder sees."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pipeline.cache.entry import StoredChunk
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.decision import default_verifier
from pipeline.cache.semantic.layer import LETTERS, MAX_CHARS, SemanticLayer, is_shareable
from pipeline.cache.sqlite import SqliteBackend
from pipeline.recipe.response_cache import Language, SemanticSettings
from tests.support.cache_asking import question
from tests.support.encoder import minilm

# "Open the door" and "close the door", or the like.
SCRIPTS = {
    "Chinese": ("今天银行开门吗", "今天银行关门吗"),
    "Japanese": ("ドアを開けますか", "ドアを閉めますか"),
    "Korean": ("문을 열어 주세요", "문을 닫아 주세요"),
    "Thai": ("เปิดประตู", "ปิดประตู"),
    "Georgian": ("გახსენი კარი", "დახურე კარი"),
    "Amharic": ("በሩን ክፈት", "በሩን ዝጋ"),
    "Armenian": ("բացիր դուռը", "փակիր դուռը"),
    "Arabic": ("افتح الباب", "أغلق الباب"),
    "Hebrew": ("תפתח את הדלת", "תסגור את הדלת"),
    "Hindi": ("दरवाज़ा खोलो", "दरवाज़ा बंद करो"),
    "Tamil": ("கதவைத் திற", "கதவை மூடு"),
    "Bengali": ("দরজা খোলো", "দরজা বন্ধ করো"),
    "Russian": ("открой дверь", "закрой дверь"),
    "Greek": ("άνοιξε την πόρτα", "κλείσε την πόρτα"),
    "Vietnamese": ("mở cửa", "đóng cửa"),
    "Polish": ("podnieś żaluzje", "opuść żaluzje"),
    "emoji": ("👍👍👍", "😡😡😡"),
    "a word with an emoji": ("Open the 🚪", "Open the 🪟"),
    "signs": ("What is ♀?", "What is ♂?"),
    "digits": ("Is it ٣?", "Is it ٤?"),
}
# Scripts whose letters are whole pieces to the encoder, and which only the list of languages keeps out.
SPELLED = {"Korean", "Arabic", "Hebrew", "Bengali", "Russian", "Greek", "Vietnamese", "Polish"}


def cache_of(folder: Path, *languages: str) -> ResponseCache:
    """A cache on the real encoder that serves whatever is near at all."""
    backend = SqliteBackend(folder / "cache.db")
    layer = SemanticLayer(
        backend,
        minilm(),
        default_verifier(None),
        0.3,
        0.3,
        languages=languages or SemanticSettings().languages,
    )
    return ResponseCache(backend, semantic=layer)


def answer(cache: ResponseCache, text: str) -> tuple[str, str] | None:
    hit = cache.lookup(question(text))
    return None if hit is None else (hit.cached.kind, hit.entry.text)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_encoder_does_not_read_is_answered_by_the_exact_cache_alone(
    script: str, tmp_path: Path
) -> None:
    opened, closed = SCRIPTS[script]
    cache = cache_of(tmp_path)
    assert cache.store(question(opened), [StoredChunk("opened")], finish_reason="stop")
    assert answer(cache, closed) is None
    assert answer(cache, f"{opened}!") is None
    assert answer(cache, opened) == ("exact", "opened")
    assert cache.backend.usage().with_vectors == 0
    cache.close()


@pytest.mark.parametrize("script", SCRIPTS)
def test_where_any_language_is_asked_for_unknown_characters_still_keep_a_question_out(script: str) -> None:
    assert is_shareable(SCRIPTS[script][0], ["any"])
    assert (minilm()(SCRIPTS[script][0]) is not None) is (script in SPELLED)


@pytest.mark.parametrize("dropped", ["\u200b", "\u200d", "\ufe0f", "\u00ad", "\ufffd", "\x00", "\u0301 "])
def test_a_character_that_the_normalizer_drops_keeps_a_question_out(dropped: str) -> None:
    assert minilm()("Is it open?") is not None
    assert minilm()(f"Is {dropped}it open?") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ist das schon?", "Ist das schön?"),
        ("Soll ich drucken?", "Soll ich drücken?"),
        ("¿Cuántos años tienes?", "¿Cuántos anos tienes?"),
        ("Il est où ?", "Il est ou ?"),
        ("Je veux du café", "Je veux du cafe"),
    ],
)
def test_accents_that_the_encoder_does_not_see_make_another_question(
    one: str, other: str, tmp_path: Path
) -> None:
    vectors = minilm()(one), minilm()(other)
    assert vectors[0] is not None
    assert vectors[1] is not None
    assert float(vectors[0] @ vectors[1]) == pytest.approx(1, abs=1e-3)
    cache = cache_of(tmp_path)
    assert cache.store(question(one), [StoredChunk("yes")], finish_reason="stop")
    assert answer(cache, other) is None
    assert answer(cache, one.swapcase()) == ("semantic", "yes")
    cache.close()


def test_the_measured_languages_are_shared_and_others_only_if_asked_for(tmp_path: Path) -> None:
    assert get_args(Language) == (*LETTERS, "any")
    assert SemanticSettings().languages == tuple(LETTERS)
    texts = {
        "en": "Where is my parcel?",
        "de": "Wo ist die große Tür?",
        "fr": "Où est le château de sa sœur ?",
        "es": "¿Dónde está la niña del pingüino?",
        "any": "Где моя посылка?",
    }
    for language, text in texts.items():
        assert is_shareable(text, [language])
        assert is_shareable(text, tuple(LETTERS)) is (language != "any")
        assert is_shareable(text, ["en"]) is (language == "en")
    # Letters are one thing to it, however they are encoded.
    assert is_shareable("Scho\u0308n?", ["de"])
    assert not is_shareable("Scho\u0308n?", ["es"])
    cache = cache_of(tmp_path, "any")
    assert cache.store(question(texts["any"]), [StoredChunk("там")], finish_reason="stop")
    assert answer(cache, texts["any"].lower()) == ("semantic", "там")
    cache.close()


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("How do I reset my password?", True),
        ("  How do I reset my password?\n", True),
        ("Is it open at 9:30?", True),
        ("What's the dog's name?", True),
        ('Is a 15" laptop too large?', True),
        ("Translate: the door is open", False),
        ("Summarize:\nThe door is open.", False),
        ("Fix this\n\nprint(1)", False),
        ("Fix this\r\nprint(1)", False),
        ('Translate "the door is open" into French', False),
        ("Translate “the door is open” into French", False),
        ("Übersetze „die Tür ist offen“ ins Englische", False),
        ("Traduis « la porte est ouverte » en anglais", False),
        ("What does `rm -r` do?", False),
        ("why " * 50, True),
        ("why " * 50 + "?", False),
    ],
)
def test_text_to_work_on_is_no_question(text: str, shared: bool) -> None:
    assert MAX_CHARS == 200
    assert is_shareable(text, tuple(LETTERS)) is shared
    assert is_shareable(text, ["any"]) is shared
