"""What a benchmark asks: lengths by any tokenizer, seeds, prefixes, turns, files and their faults."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.bench.lengths import Lengths
from pipeline.bench.prompts import PromptFile
from pipeline.bench.workload import (
    ScriptedConversation,
    Shape,
    TemplateTokens,
    Words,
    shaped,
    synthetic,
)
from pipeline.client import ChatTemplate
from pipeline.errors import InvalidInput
from pipeline.reading import read_tokenizer
from pipeline.recipe.source import NamedDataset
from tests.support import CHECKPOINTS
from tests.support.nasty_tokenizers import byte_fallback, byte_level

TARGET = CHECKPOINTS / "support-target"


def of_bytes() -> Tokenizer:
    """As ByT5: no tokens but bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


SUPPORT = Words(read_tokenizer(TARGET / "tokenizer.json"))
KINDS = {
    "support": SUPPORT,
    **{tokenizer.__name__: Words(tokenizer()) for tokenizer in (of_bytes, byte_level, byte_fallback)},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(tokens=st.integers(1, 600), seed=st.integers(0, 1000))
def test_random_words_have_the_length_that_was_asked_for(kind: str, tokens: int, seed: int) -> None:
    words = KINDS[kind]
    text = words.text(tokens, random.Random(seed))
    # Some tokenizers put one in front of every text.
    assert words.count(text) == max(tokens, words.count("a"))
    assert words.text(tokens, random.Random(seed)) == text
    assert text == text.strip()


def conversations(shape: Shape, seed: int) -> Iterator[ScriptedConversation]:
    made = synthetic(
        SUPPORT, Lengths(60, 10), Lengths.parse("5-50"), shape, seed=seed, around=TemplateTokens(),
        most_prompt=400, most_answer=40,
    )  # fmt: skip
    return shaped(made, shape, seed)


@settings(max_examples=20)
@given(
    shape=st.builds(
        Shape, st.integers(0, 50), st.integers(1, 4), st.integers(1, 5), st.sampled_from((0.0, 0.5, 1.0))
    ),
    seed=st.integers(0, 99),
)
def test_conversations_are_those_of_their_seed_share_prefixes_and_fit(shape: Shape, seed: int) -> None:
    found = list(islice(conversations(shape, seed), 12))
    assert found == list(islice(conversations(shape, seed), 12))
    assert found != list(islice(conversations(shape, seed + 1), 12))
    prefixes = {"".join(message["content"] for message in conversation.before) for conversation in found}
    assert len(prefixes) <= shape.prefixes
    assert {SUPPORT.count(prefix) for prefix in prefixes} == {shape.prefix_tokens}
    for conversation in found:
        assert 1 <= len(conversation.turns) <= shape.turns
        asked = sum(SUPPORT.count(turn.text) for turn in conversation.turns)
        said = sum(turn.max_tokens or 0 for turn in conversation.turns[:-1])
        assert shape.prefix_tokens + asked + said <= 400
        assert all(turn.exact and 5 <= (turn.max_tokens or 0) <= 40 for turn in conversation.turns)
        assert (conversation.leaves_at is not None) >= (shape.cancelled == 1.0)
        assert conversation.leaves_at is None or shape.cancelled > 0
    texts = [conversation.turns[0].text for conversation in found]
    assert len(set(texts)) == len(texts)


def test_the_template_is_counted() -> None:
    template = ChatTemplate.from_directory(TARGET)
    around = TemplateTokens.of(template, SUPPORT, system=True)
    conversation = next(
        synthetic(
            SUPPORT, Lengths(60), Lengths(8), Shape(prefix_tokens=20, turns=2), seed=0, around=around,
            most_prompt=512, most_answer=64,
        )
    )  # fmt: skip
    first = [*conversation.before, {"role": "user", "content": conversation.turns[0].text}]
    assert SUPPORT.count(template.render(first)) == 20 + 60 + around.first
    answer = SUPPORT.text(8, random.Random(0))
    second = [
        *first,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": conversation.turns[1].text},
    ]
    assert SUPPORT.count(template.render(second)) == 20 + 60 + around.first + 8 + 60 + around.turn


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("20-30", 20, 30), ("100~1000", 1, 200)])
def test_lengths_are_drawn_within_their_bounds(text: str, low: int, high: int) -> None:
    drawn = [Lengths.parse(text).draw(random.Random(number), 200) for number in range(200)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize("text", ["0", "-1", "5-3", "0-3", "x", "1~", "1.5", "~3"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MEAN~DEVIATION"):
        Lengths.parse(text)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path, *, once: bool = False, answers: Lengths | None = None) -> Iterator[ScriptedConversation]:
    return PromptFile.read(path).conversations(
        SUPPORT, answers, once=once, most_prompt=4000, most_answer=64, seed=0
    )


def test_each_form_of_a_line_is_read(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "Once", "max_tokens": 1000},
        {"messages": [*said, {"role": "user", "content": "C?"}]},
        {"messages": [*said, {"role": "user", "content": "C?"}, said[1]]},
        "",
        {"turns": ["One?", "Two?"], "system": "Short."},
    )
    raw, chat, dialogue, turns, again = islice(read(path), 5)
    assert (raw.chat, raw.turns[0].text, raw.turns[0].max_tokens) == (False, "Once", 64)
    assert ([*chat.before], [turn.text for turn in chat.turns]) == (said, ["C?"])
    assert (dialogue.before, [turn.text for turn in dialogue.turns]) == ((), ["A?", "C?"])
    assert turns.before == ({"role": "system", "content": "Short."},)
    assert [turn.text for turn in turns.turns] == ["One?", "Two?"]
    assert again == raw
    answered = next(read(path, answers=Lengths(9)))
    assert (answered.turns[0].max_tokens, answered.turns[0].exact) == (64, False)


def test_a_trace_is_asked_in_its_order_once_and_shares_its_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 2000, "input_length": 1000, "output_length": 7, "hash_ids": [1, 3]},
        {"timestamp": 500, "input_length": 1100, "output_length": 900, "hash_ids": [1, 2]},
    )
    first, second = read(path, once=True)
    assert (first.start_s, second.start_s) == (0.5, 2.0)
    assert [SUPPORT.count(conversation.turns[0].text) for conversation in (first, second)] == [1100, 1000]
    assert (first.turns[0].max_tokens, second.turns[0].max_tokens) == (64, 7)
    shared = SUPPORT.text(512, random.Random("0/1"))
    assert first.turns[0].text.startswith(shared)
    assert second.turns[0].text.startswith(shared)
    assert PromptFile.read(path).span_s == 2.0


def test_published_traces_are_read_as_they_are(tmp_path: Path) -> None:
    """Bailian's lines, whose blocks have 16 tokens and whose times are seconds, and BurstGPT's table."""
    bailian, burst = tmp_path / "bailian.jsonl", tmp_path / "burst.csv"
    line = {"parent_chat_id": -1, "input_length": 40, "output_length": 7, "type": "text", "turn": 1}
    rows = [
        {"chat_id": 159, "timestamp": 61.5, "hash_ids": [1, 2, 3], **line},
        {"chat_id": 160, "timestamp": 60.25, "hash_ids": [1, 2, 4], **line},
    ]
    bailian.write_text("\n".join(map(json.dumps, rows)))
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,87,0,87,Conversation log\n"
        "110.5,GPT-4,17,505,522,API log\n"
    )
    ends = {"once": True, "most_prompt": 900, "most_answer": 100, "seed": 0}
    (first, second) = PromptFile.read(bailian).conversations(SUPPORT, None, **ends)
    assert (first.start_s, second.start_s) == (60.25, 61.5)
    texts = [conversation.turns[0].text.split() for conversation in (first, second)]
    shared = [a == b for a, b in zip(*texts, strict=True)]
    assert all(shared[:32])
    assert not all(shared[32:])
    table = PromptFile.read(burst)
    assert table.span_s == 110.5
    found = [
        (conversation.start_s, conversation.turns[0])
        for conversation in table.conversations(SUPPORT, None, **ends)
    ]
    assert [(at_s, SUPPORT.count(turn.text), turn.max_tokens) for at_s, turn in found] == [
        (5.0, 472, 18), (110.5, 17, 100),
    ]  # fmt: skip
    burst.write_text("Timestamp,Request tokens,Response tokens\nsoon,0,5\n")
    with pytest.raises(InvalidInput) as caught:
        PromptFile.read(burst)
    assert {(fault.line, fault.key) for fault in caught.value.faults} == {
        (2, "timestamp"),
        (2, "input_length"),
    }


def test_all_faults_of_a_file_are_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "bad.jsonl",
        {"prompt": "fine"},
        "{",
        {"prompt": "both", "turns": ["x"]},
        {"max_tokens": 3},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"prompt": "x", "max_tokens": 0},
    )
    with pytest.raises(InvalidInput) as caught:
        PromptFile.read(path)
    found = [(fault.line, fault.key) for fault in caught.value.faults]
    assert found == [(2, ""), (3, ""), (4, ""), (5, ""), (6, "max_tokens")]
    with pytest.raises(InvalidInput, match="no timestamp"):
        _ = PromptFile.read(write(tmp_path / "untimed.jsonl", {"prompt": "x"})).span_s
    with pytest.raises(InvalidInput, match="has no lines"):
        PromptFile.read(write(tmp_path / "empty.jsonl"))


def test_a_calibration_set_gives_its_held_out_questions() -> None:
    file = PromptFile.of_dataset(NamedDataset("support"))
    assert len(file.lines) == 320
    conversation = next(file.conversations(None, None, once=False, most_prompt=512, most_answer=64, seed=0))
    assert conversation.turns[0].text == "Hallo! Mein Paket TP-194080 ist noch nicht da."
    assert conversation.turns[0].max_tokens is None
