"""Conversations that a benchmark asks, and how they are made of words at random; those of a file are in `prompts`."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from pipeline.bench.lengths import Lengths
from pipeline.client import ChatTemplate, Message

_FEW_WORDS = 64
_LETTERS = "aeiours"
_TRIES = 16  # at making a text longer by a token
_WORD = re.compile(r"[a-z]{2,}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, and how long its answer may be.

    Attributes:
        text: The user's message.
        max_tokens: Tokens that the answer may have; None for what the deployment allows.
        exact: Whether the answer must have `max_tokens` tokens, whatever the model would like.
    """

    text: str
    max_tokens: int | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class ScriptedConversation:
    """Questions that follow each other, each with everything said before.

    Attributes:
        turns: One or more.
        before: Messages in front of the first question: a system prompt, or a chat so far.
        chat: Whether the questions go through the model's chat template; a raw text has one turn.
        start_s: Begin by the trace, in seconds since the start of the run; None without a trace.
        leaves_at: Share of an answer after which the client leaves, 0 to 1; None: it stays.
    """

    turns: tuple[Turn, ...]
    before: tuple[Message, ...] = ()
    chat: bool = True
    start_s: float | None = None
    leaves_at: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Form of conversations; see the fields of `LoadSettings`."""

    prefix_tokens: int = 0
    prefixes: int = 1
    turns: int = 1
    cancelled: float = 0.0


class Words:
    """Texts of a given number of tokens, of words that are one token each to a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Find the words in the vocabulary of a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer
        candidates = sorted({text.strip() for text in self._vocabulary() if _WORD.fullmatch(text.strip())})
        start = len(self._encode("a"))
        alone = [
            word
            for word, ids in zip(candidates, self._batch([f"a {word}" for word in candidates]), strict=True)
            if len(ids) == start + 1
        ]
        # Of those, the ones that may begin a text, too, if there are enough.
        first = [word for word, ids in zip(alone, self._batch(alone), strict=True) if len(ids) == 1]
        words = first if len(first) >= _FEW_WORDS else alone
        # A tokenizer of letters or bytes has no such words; then short ones do, and are cut.
        self._words = (
            words
            if len(words) >= _FEW_WORDS
            else ["".join(two) for two in itertools.product(_LETTERS, repeat=2)]
        )
        rng = random.Random(0)
        samples = [self._drawn(count, rng) for count in (1, 2, 3, 16, 64, 256, 1024)]
        # Where words never melt into each other, their number is that of the tokens, and nothing needs to be counted.
        self._exact = [len(ids) for ids in self._batch(samples)] == [1, 2, 3, 16, 64, 256, 1024]

    def text(self, tokens: int, rng: random.Random) -> str:
        """Draw a text of so many tokens; where a tokenizer makes that impossible, it has one or two fewer.

        Args:
            tokens: Tokens without those that a tokenizer or a template puts around the text; 1 or more.
            rng: Source of randomness.
        """
        text = self._drawn(tokens, rng)
        return text if self._exact else self._fitted(text, tokens, rng)

    def count(self, text: str) -> int:
        """Count the tokens of a text, without those that a tokenizer puts around it."""
        return len(self._encode(text))

    def _drawn(self, count: int, rng: random.Random) -> str:
        return " ".join(rng.choices(self._words, k=count))

    def _fitted(self, text: str, tokens: int, rng: random.Random) -> str:
        """Cut a text to at most so many tokens, and fill up with letters what is then too short."""
        while (over := len(self._encode(text)) - tokens) > 0 and len(text) > 1:
            ends = self._tokenizer.encode(text, add_special_tokens=False).offsets
            cut = ends[tokens - 1][1]
            text = (
                text[: cut if 0 < cut < len(text) else len(text) - min(over, len(text) - 1)].rstrip()
                or text[0]
            )
        for _ in range(_TRIES):
            if len(self._encode(text)) >= tokens:
                break
            longer = f"{text}{rng.choice((' ', ''))}{rng.choice(_LETTERS)}"
            text = longer if len(self._encode(longer)) <= tokens else text
        return text

    def _vocabulary(self) -> list[str]:
        ids: list[str] = self._tokenizer.decode_batch(
            [[number] for number in range(self._tokenizer.get_vocab_size())]
        )
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """Tokens that a chat template puts around messages.

    Attributes:
        first: Tokens around a first question, and the system prompt if there is one.
        turn: Tokens around an answer and the question after it.
    """

    first: int = 0
    turn: int = 0

    @classmethod
    def of(cls, template: ChatTemplate, words: Words, *, system: bool) -> Self:
        """Count the tokens of a template, with or without a system prompt.

        Raises:
            TemplateError: The template takes no system prompt.
        """
        messages: list[Message] = [{"role": "system", "content": "a"}] if system else []
        messages.append({"role": "user", "content": "a"})
        first = words.count(template.render(messages))
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]
        letter = words.count("a")
        return cls(first - (1 + system) * letter, words.count(template.render(messages)) - first - 2 * letter)


def synthetic(
    words: Words,
    prompts: Lengths,
    answers: Lengths,
    shape: Shape,
    *,
    most_prompt: int,
    most_answer: int,
    seed: int,
    around: TemplateTokens,
    chat: bool = True,
) -> Iterator[ScriptedConversation]:
    """Make conversations of words at random, without end; no two begin alike unless they share a prefix.

    Args:
        shape: Prefixes and turns.
        most_prompt: Tokens that a whole prompt may have: prefix, questions, answers before, and the template's.
        chat: Whether they go through the chat template; else each is one raw text.
    """
    rng = random.Random(seed)
    shared = (
        [words.text(shape.prefix_tokens, rng) for _ in range(shape.prefixes)] if shape.prefix_tokens else []
    )
    while True:
        left = most_prompt - shape.prefix_tokens - around.first
        turns: list[Turn] = []
        for _ in range(shape.turns):
            prompt_tokens, answer_tokens = prompts.draw(rng, most_prompt), answers.draw(rng, most_answer)
            if turns and prompt_tokens > left:
                break
            turns.append(Turn(words.text(min(prompt_tokens, max(1, left)), rng), answer_tokens, exact=True))
            left -= prompt_tokens + answer_tokens + around.turn
        prefix = rng.choice(shared) if shared else ""
        if chat:
            yield ScriptedConversation(
                tuple(turns), before=({"role": "system", "content": prefix},) if prefix else ()
            )
        else:
            first = replace(turns[0], text=f"{prefix} {turns[0].text}".strip())
            yield ScriptedConversation((first,), chat=False)


def shaped(source: Iterator[ScriptedConversation], shape: Shape, seed: int) -> Iterator[ScriptedConversation]:
    """Let clients of some conversations leave, each somewhere between the first and the last tenth of an answer."""
    rng = random.Random(f"{seed}/leaves")
    for conversation in source:
        leaves = rng.random() < shape.cancelled
        yield replace(conversation, leaves_at=rng.uniform(0.1, 0.9)) if leaves else conversation
