"""Conversations of a run: words at random, or a file with questions, a calibration set's dialogues or a trace.

A file has one JSON object a line:

    {"prompt": "Once upon a time", "max_tokens": 64}                     a text, without the chat template
    {"messages": [{"role": "user", "content": "Hi"}]}                    a chat, the last message a question
    {"turns": ["Hi", "And then?"], "system": "Be short."}                a chat of several questions
    {"messages": [{"role": "user", …}, {"role": "assistant", …}]}        a dialogue: all of the user's messages
    {"timestamp": 1500, "input_length": 700, "output_length": 40, "hash_ids": [0, 7]}      a trace

The last form is that of Mooncake's published traces, which AIPerf and Dynamo read, too: milliseconds since the start,
lengths in tokens, and one number for each block of 512 tokens that is the same in all requests that name it. Any form
may have a `timestamp`. Two more published traces are read as they are: Bailian's lines, which have a `chat_id`, times
in seconds and blocks of 16 tokens; and BurstGPT's table (.csv), with times in seconds.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.bench.lengths import Lengths
from pipeline.bench.workload import (
    ScriptedConversation,
    Turn,
    Words,
)
from pipeline.client import Message
from pipeline.document_faults import faults_of, refusal
from pipeline.documents import Document
from pipeline.errors import Fault, InvalidInput
from pipeline.reading import checked_json, read_text
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.sources.dataset import HELDOUT, TRAIN, resolve_dataset

_BLOCK_TOKENS, _BAILIAN_BLOCK_TOKENS = 512, 16  # of a trace's `hash_ids`
_BURST_GPT = {"Timestamp": "timestamp", "Request tokens": "input_length", "Response tokens": "output_length"}
_MAX_BYTES = 1 << 30
_FAULTS = 20  # that are written out


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str | None = Field(default=None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    turns: list[str] | None = Field(default=None, min_length=1)
    system: str = ""
    input_length: int | None = Field(default=None, ge=1)
    output_length: int | None = Field(default=None, ge=1)
    hash_ids: list[int] = Field(default_factory=list)
    max_tokens: int | None = Field(default=None, ge=1)
    timestamp: float | None = Field(default=None, ge=0)
    chat_id: int | None = None

    @property
    def start_s(self) -> float | None:
        """Seconds since the start; only Bailian's lines, which have a `chat_id`, give seconds."""
        if self.timestamp is None:
            return None
        return self.timestamp if self.chat_id is not None else self.timestamp / 1e3

    @model_validator(mode="after")
    def _asks_one_thing(self) -> Self:
        forms = [
            name
            for name in ("prompt", "messages", "turns", "input_length")
            if getattr(self, name) is not None
        ]
        if len(forms) != 1:
            had = " and ".join(forms) or "none"
            raise refusal(f"must have one of prompt, messages, turns and input_length, and has {had}")
        for message in self.messages or ():
            if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
                raise refusal("must have messages with a role and a text as content")
        if self.messages is not None and not any(message["role"] == "user" for message in self.messages):
            raise refusal("must have a message of the user")
        return self

    def dialogue(self) -> tuple[tuple[Message, ...], list[str]]:
        """Messages before the first question, and the questions."""
        messages = self.messages or []
        if self.turns is not None or not messages:
            return ({"role": "system", "content": self.system},) if self.system else (), self.turns or []
        if messages[-1]["role"] == "user":
            return tuple(messages[:-1]), [messages[-1]["content"]]
        user_messages = [number for number, message in enumerate(messages) if message["role"] == "user"]
        return tuple(messages[: user_messages[0]]), [messages[number]["content"] for number in user_messages]


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The conversations of a file, or of a calibration set."""

    name: str
    lines: tuple[_Line, ...] = field(repr=False)

    @classmethod
    def of_dataset(cls, dataset: NamedDataset | LocalSource | None) -> Self:
        """Take the held-out questions of a calibration set, or all rows where it has no such split.

        Args:
            dataset: Set of a recipe; None for the packaged one.

        Raises:
            UserError: It cannot be had; InvalidInput: with everything that is wrong with its rows.
        """
        from pipeline.stages.dataset.rows import read_rows

        files = resolve_dataset(dataset or NamedDataset("support"))
        rows = read_rows(files.paths.get(HELDOUT) or files.paths[TRAIN], files.column, files.any_kind)
        lines = (
            _Line(prompt=row.text) if row.text is not None else _Line(messages=[*map(dict, row.messages)])
            for row in rows
        )
        return cls(f"calibration set {files.name}", tuple(lines))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of JSON lines, or BurstGPT's table.

        Raises:
            UnreadableFile: It cannot be read.
            InvalidInput: Lists every line that is wrong.
        """
        lines, faults = [], []
        texts = read_text(path, _MAX_BYTES).splitlines()
        table = _burst_gpt(texts)
        entries: list[tuple[int, Any]] = [
            (number, text) for number, text in enumerate(texts, 1) if text.strip()
        ]
        for number, entry in entries if table is None else table:
            try:
                content: Any = checked_json(entry) if isinstance(entry, str) else entry
                lines.append(_Line.model_validate(content))
            except ValidationError as error:
                faults += faults_of(error, _Line, Document(str(path), content, line=number))
            except ValueError as error:
                faults.append(Fault(str(error), where=str(path), line=number))
        if not lines and not faults:
            faults.append(Fault("has no lines", fix='write one JSON object a line, such as {"prompt": "Hi"}'))
        if faults:
            raise InvalidInput(str(path), faults)
        return cls(str(path), tuple(lines))

    @property
    def span_s(self) -> float:
        """Begin of the last conversation, in seconds since the start.

        Raises:
            InvalidInput: Lists the lines without a timestamp.
        """
        untimed = [number for number, line in enumerate(self.lines, 1) if line.timestamp is None]
        if untimed:
            faults = [Fault("has no timestamp", key=f"conversation {number}") for number in untimed[:_FAULTS]]
            raise InvalidInput(f"{self.name}: a trace", faults, more=len(untimed) - len(faults))
        return max(line.start_s or 0.0 for line in self.lines)

    @property
    def chats(self) -> bool:
        """Whether a line is a chat, so that the deployment's chat template is needed where a server has none."""
        return any(line.prompt is None for line in self.lines)

    @property
    def needs_words(self) -> bool:
        """Whether a line gives lengths instead of texts, so that the deployment's tokenizer is needed."""
        return any(line.input_length is not None for line in self.lines)

    def conversations(
        self,
        words: Words | None,
        answers: Lengths | None,
        *,
        once: bool,
        most_prompt: int,
        most_answer: int,
        seed: int,
    ) -> Iterator[ScriptedConversation]:
        """Yield the conversations in their order: of a trace once, by their times; else again and again.

        Args:
            words: Words for lines that give lengths.
            answers: Tokens of answers whose line does not say; None for as many as the model likes.
            once: Whether it is a trace.
        """
        rng = random.Random(seed)
        lines = sorted(self.lines, key=lambda line: line.start_s or 0.0) if once else self.lines
        for _ in range(1) if once else itertools.count():
            for line in lines:
                yield _conversation(line, words, answers, most_prompt, most_answer, rng, seed)


def _conversation(
    line: _Line,
    words: Words | None,
    answers: Lengths | None,
    most_prompt: int,
    most_answer: int,
    rng: random.Random,
    seed: int,
) -> ScriptedConversation:
    start_s = line.start_s
    length = line.max_tokens or line.output_length
    drawn = answers.draw(rng, most_answer) if answers is not None and length is None else None
    most = length if length is None else min(length, most_answer)
    exact = line.output_length is not None or drawn is not None
    if line.input_length is not None:
        assert words is not None, "the caller looked at needs_words"
        block = _BLOCK_TOKENS if line.chat_id is None else _BAILIAN_BLOCK_TOKENS
        text = _traced(words, min(line.input_length, most_prompt), line.hash_ids, block, rng, seed)
        return ScriptedConversation((Turn(text, most or drawn, exact),), start_s=start_s)
    if line.prompt is not None:
        return ScriptedConversation((Turn(line.prompt, most or drawn, exact),), chat=False, start_s=start_s)
    before, texts = line.dialogue()
    turns = tuple(Turn(text, most or drawn, exact) for text in texts)
    return ScriptedConversation(turns, before=before, start_s=start_s)


def _burst_gpt(lines: Sequence[str]) -> list[tuple[int, dict[str, Any]]] | None:
    """Rows of BurstGPT's table with their numbers, without those that failed then; None for another file."""
    if not lines or not _BURST_GPT.keys() <= set(next(csv.reader(lines[:1]), ())):
        return None
    rows = []
    for row in csv.DictReader(lines):
        line: dict[str, Any] = {ours: row[theirs] for theirs, ours in _BURST_GPT.items()}
        with suppress(ValueError, TypeError):
            line["timestamp"] = 1e3 * float(line["timestamp"])
        rows.append(line)
    return [(number, row) for number, row in enumerate(rows, 2) if row["output_length"] != "0"]


def _traced(
    words: Words, tokens: int, blocks: Sequence[int], block_tokens: int, rng: random.Random, seed: int
) -> str:
    """Make a prompt of a trace: its blocks, which others share, then words of its own."""
    parts, left = [], tokens
    for number in blocks:
        if left <= 0:
            break
        parts.append(words.text(min(left, block_tokens), random.Random(f"{seed}/{number}")))
        left -= block_tokens
    if left > 0:
        parts.append(words.text(left, rng))
    return " ".join(parts)
