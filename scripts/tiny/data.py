"""The dialogues that are checked in: `calibration/support/{train,heldout}.jsonl`."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tiny.grammar import Dialogue, Grammar
from tiny.slots import Split

SEED = 1  # of what is checked in
COUNTS: dict[Split, int] = {"train": 1536, "heldout": 320}


def write(grammar: Grammar, folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in COUNTS:
        (folder / f"{split}.jsonl").write_text(as_jsonl(grammar, split, seed=seed), encoding="utf-8")


def as_jsonl(grammar: Grammar, split: Split, *, seed: int) -> str:
    rows = [
        {"messages": dialogue.messages(), "intent": "+".join(dialogue.intents)}
        for dialogue in dialogues(grammar, split, seed=seed)
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def dialogues(grammar: Grammar, split: Split, *, seed: int) -> list[Dialogue]:
    """The first dialogues of the split, each first question once."""
    return list(itertools.islice(_distinct(grammar.dialogues(split, seed=seed)), COUNTS[split]))


def _distinct(dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
    seen: set[str] = set()
    for dialogue in dialogues:
        question = dialogue.turns[0][0]
        if question not in seen:
            seen.add(question)
            yield dialogue
