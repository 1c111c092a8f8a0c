"""The grammar of support dialogues: reads `intents.yaml` and writes dialogues from it.

    >>> expand("[Reset|Change] my password[| please].")
    ['Reset my password.', 'Reset my password please.', 'Change my password.', 'Change my password please.']

A dialogue has one or two questions. Its splits share no phrasing and no value of an open slot (see `slots`).
It is not a model of real customers: it is meant to be small enough to learn in minutes and to be copied from.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from tiny.slots import SLOTS, Split, pick

HELD_OUT_SHARE = 6  # one phrasing in six of every intent is held out
TWO_TURN_SHARE = 0.25  # of all dialogues
INTENTS = Path(__file__).with_name("intents.yaml")
_CHOICE = re.compile(r"\[([^\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


class Intent(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    ask: tuple[str, ...]
    answer: str
    language: str = "en"
    needs: str | None = None  # the slot that an earlier question must have given

    @cached_property
    def phrasings(self) -> dict[Split, list[str]]:
        """Every phrasing, in an order that depends on its text only, cut into splits."""
        phrasings = sorted({text for pattern in self.ask for text in expand(pattern)}, key=_digest)
        cut = max(1, len(phrasings) // HELD_OUT_SHARE)
        return {"heldout": phrasings[:cut], "train": phrasings[cut:]}


@dataclass(frozen=True)
class Dialogue:
    intents: tuple[str, ...]  # one a question
    turns: tuple[tuple[str, str], ...]  # (question, answer)

    def messages(self) -> list[dict[str, str]]:
        roles = itertools.cycle(("user", "assistant"))
        texts = itertools.chain.from_iterable(self.turns)
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


class Grammar(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    openings: dict[str, tuple[str, ...]]  # by language, as are the next three
    closings: dict[str, tuple[str, ...]]
    bridges: dict[str, tuple[str, ...]]
    greetings: dict[str, str]
    intents: dict[str, Intent]

    @classmethod
    def load(cls, path: Path = INTENTS) -> "Grammar":
        return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))

    def dialogues(self, split: Split, *, seed: int) -> Iterator[Dialogue]:
        """Dialogues without end: every intent opens one in turn, in an order that is shuffled anew each round."""
        rng = random.Random(f"{split} {seed}")
        names = [name for name, intent in self.intents.items() if intent.needs is None]
        while True:
            rng.shuffle(names)
            for name in names:
                yield self._dialogue(name, rng, split)

    def _dialogue(self, name: str, rng: random.Random, split: Split) -> Dialogue:
        intent = self.intents[name]
        values: dict[str, str] = {}
        opening = pick(rng, self.openings[intent.language])
        question, answer = self._turn(intent, opening, values, rng, split)
        if _SLOT.search(opening):
            answer = f"{fill(self.greetings[intent.language], values)} {answer}"
        if rng.random() >= TWO_TURN_SHARE:
            return Dialogue((name,), ((question, answer),))
        second = rng.choice(self._follow_ups(name, values))
        bridge = pick(rng, self.bridges[intent.language])
        follow_up = self._turn(self.intents[second], bridge, values, rng, split)
        return Dialogue((name, second), ((question, answer), follow_up))

    def _follow_ups(self, first: str, values: dict[str, str]) -> list[str]:
        """Intents that may come second; one that recalls the first question comes as often as the others together."""
        language = self.intents[first].language
        recalls = [name for name, intent in self.intents.items() if intent.needs in values]
        others = [
            name
            for name, intent in self.intents.items()
            if name != first and intent.needs is None and intent.language == language
        ]
        return others + [name for name in recalls if self.intents[name].language == language] * len(others)

    def _turn(
        self, intent: Intent, opening: str, values: dict[str, str], rng: random.Random, split: Split
    ) -> tuple[str, str]:
        """One question and its answer. Adds the values that the question gives to `values`."""
        phrasing = rng.choice(intent.phrasings[split])
        closing = pick(rng, self.closings[intent.language])
        question = " ".join(part for part in (opening, phrasing, closing) if part)
        for slot in _SLOT.findall(question):
            values[slot] = SLOTS[slot].draw(rng, split)
        return fill(question, values), fill(intent.answer, values)


def expand(pattern: str) -> list[str]:
    """All texts that a pattern with `[a|b]` stands for."""
    pieces = _CHOICE.split(pattern)  # text, choice, text, choice, ..., text
    options = [piece.split("|") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(choice) for choice in itertools.product(*options)]


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text with its slots filled."""
    return _SLOT.sub(lambda match: values[match[1]], text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
