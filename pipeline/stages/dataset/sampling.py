"""Rows to samples: an order that the seed fixes, tokens by the checkpoint's chat template and tokenizer, and a reason
for every row that is passed over.

Text that a template wrote holds its special tokens already; plain text gets those that the tokenizer adds itself.
Neither torch nor transformers is needed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError, UserError
from pipeline.models.chat_template import ChatTemplate, TemplateError
from pipeline.progress import Progress
from pipeline.reading import read_tokenizer
from pipeline.sources.dataset import sha256_of
from pipeline.stages.dataset.rows import DatasetRow
from pipeline.store import Json

# One token predicts nothing, and a handful says nothing about activations.
SHORTEST = 8
# Some templates write the date. Theirs stands still, or samples would differ from day to day.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one row, cut to the longest that is wanted."""

    row: int  # 0-based in its file
    tokens: tuple[int, ...]
    cut: bool


@dataclass(slots=True)
class SampleDraw:
    """Samples that were drawn, and how many rows were passed over for which reason."""

    samples: list[Sample] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)


def order(rows: int, seed: int, purpose: str) -> list[int]:
    """Permute the numbers of rows by seed and purpose alone, without any library's generator."""
    return sorted(range(rows), key=lambda row: hashlib.sha256(f"{seed}:{purpose}:{row}".encode()).digest())


def draw(
    rows: Sequence[DatasetRow],
    encoder: SampleEncoder,
    *,
    count: int,
    max_tokens: int,
    seed: int,
    purpose: str,
    without: Iterable[Sample] = (),
    same_file: bool = False,
    progress: Progress,
) -> SampleDraw:
    """Draw samples that all differ, each with a reason for every row that was passed over.

    Args:
        count: Most samples.
        max_tokens: Longer rows are cut.
        seed: Fixes the order of rows, with `purpose`.
        purpose: "calibration" or "held-out".
        without: Samples that are drawn already.
        same_file: `without` comes from the same rows, which are then not taken again.
    """
    without = list(without)
    drawn, seen = SampleDraw(), {sample.tokens for sample in without}
    taken = {sample.row for sample in without} if same_file else set()
    with progress.task(f"{purpose} samples", total=count, unit="samples") as task:
        for row in order(len(rows), seed, purpose):
            if len(drawn.samples) == count:
                break
            if row in taken:
                continue
            try:
                tokens = tuple(encoder.encode(rows[row]))
            except TemplateRefusal as refusal:
                drawn.passed_over[str(refusal)] += 1
                continue
            kept = tokens[:max_tokens]
            if len(kept) < SHORTEST:
                drawn.passed_over[f"shorter than {SHORTEST} tokens"] += 1
            elif kept in seen:
                drawn.passed_over["the same as another sample"] += 1
            else:
                seen.add(kept)
                drawn.samples.append(Sample(row, kept, cut=len(tokens) > max_tokens))
                task.advance()
    return drawn


class TemplateRefusal(UserError):
    """The template does not take these messages (roles that do not alternate, say)."""


class SampleEncoder:
    """The tokenizer and the chat template of one checkpoint.

    Raises:
        SourceError: There is no tokenizer.json, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.exists():
            raise SourceError(
                f"{path} is missing; where a checkpoint has only tokenizer.model, load it with transformers' "
                "AutoTokenizer and call save_pretrained, which writes tokenizer.json"
            )
        self.directory = directory
        self._tokenizer: Any = read_tokenizer(path)
        self._template: ChatTemplate | None = None

    def encode(self, row: DatasetRow) -> list[int]:
        """Encode a whole row.

        Raises:
            TemplateRefusal: The template does not take its messages.
        """
        if row.text is not None:
            return self._tokens(row.text, add_special_tokens=True)
        return self._tokens(self._render(row.messages), add_special_tokens=False)

    def encode_prompt(self, row: DatasetRow) -> tuple[list[int], str, str]:
        """Encode what comes before the last answer of a row.

        Returns:
            Tokens of the prompt, its last message, and the answer of the data set ("" for plain text).
        """
        if row.text is not None:
            tokens = self.encode(row)
            tokens = tokens[: max(2, len(tokens) // 2)]
            return tokens, self.decode(tokens), ""
        ends = [n for n, message in enumerate(row.messages) if message["role"] == "assistant"]
        end = ends[-1] if ends and ends[-1] > 0 else len(row.messages)
        text = self._render(row.messages[:end], add_generation_prompt=True)
        answer = row.messages[end]["content"] if end < len(row.messages) else ""
        return self._tokens(text, add_special_tokens=False), row.messages[end - 1]["content"], answer

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens to text, special tokens left out."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        try:
            return self.template.render(
                messages, add_generation_prompt=add_generation_prompt, strftime_now=_strftime_today
            )
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from error

    @property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            SourceError: There is none, or it cannot be read.
        """
        if self._template is None:
            try:
                self._template = ChatTemplate.from_directory(self.directory).compile()
            except TemplateError as error:
                raise SourceError(
                    f"samples of messages need the checkpoint's chat template, and {error}; give a data set of plain "
                    "text, or mend chat_template.jinja"
                ) from error
        return self._template

    def facts(self) -> dict[str, Json]:
        """What the data set's facts say of tokenizer and template."""
        facts: dict[str, Json] = {"tokenizer_sha256": sha256_of(self.directory / "tokenizer.json")}
        if self._template is not None:
            facts["template_date"] = TODAY.date().isoformat()
        return facts

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens


def _strftime_today(pattern: str) -> str:
    return TODAY.strftime(pattern)
