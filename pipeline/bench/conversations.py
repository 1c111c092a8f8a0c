"""Workload of a benchmark: conversations of a file, a calibration set or words at random, for a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.bench.lengths import Lengths
from pipeline.bench.load_settings import Load, LoadSettings
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
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.reading import read_tokenizer

if TYPE_CHECKING:
    from pipeline.bench.result import LevelResult
    from pipeline.bench.subject import Subject


class BenchWorkload:
    """Conversations for one subject, by the settings of a load."""

    def __init__(self, subject: Subject, settings: LoadSettings) -> None:
        """Read the file, if there is one, and the tokenizer, if lengths need it.

        Raises:
            InvalidInput: The file has faults, or is no trace where one is needed; or lengths are more than the
                deployment takes.
            UserError: The tokenizer is needed and not known; or its template takes no system prompt.
        """
        self._subject, self._settings = subject, settings
        self._shape = Shape(settings.prefix_tokens, settings.prefixes, settings.turns, settings.cancel)
        match settings.file:
            case None:
                self._file = None
            case "calibration":
                self._file = PromptFile.of_dataset(subject.dataset)
            case path:
                self._file = PromptFile.read(Path(path))
        self.span_s = (
            self._file.span_s
            if self._file is not None and any(load.kind == "trace" for load in settings.loads)
            else None
        )
        needs_words = self._file is None or self._file.needs_words
        if needs_words and subject.tokenizer is None:
            raise UserError(
                "prompts of a length need --tokenizer FOLDER, or the name of a deployment of this machine"
            )
        if (
            subject.way == "triton"
            and subject.tokenizer is None
            and self._file is not None
            and self._file.chats
        ):
            raise UserError("chats are sent to Triton through the model's chat template: --tokenizer FOLDER")
        self._tokenizer = (
            None if subject.tokenizer is None else read_tokenizer(subject.tokenizer / "tokenizer.json")
        )
        self._words = Words(self._tokenizer) if needs_words and self._tokenizer is not None else None
        self._around = self._template_tokens()
        self._prompts = settings.prompt_tokens or Lengths(min(512, subject.max_prompt // 2))
        self._answers = settings.output_tokens or (
            Lengths(min(128, subject.max_answer)) if self._file is None else None
        )

        if faults := list(self._too_long()):
            raise InvalidInput(f"what {subject.name} is to be asked", faults)

    def _template_tokens(self) -> TemplateTokens:
        if self._words is None or self._subject.tokenizer is None or self._settings.raw:
            return TemplateTokens()
        template = ChatTemplate.from_directory(self._subject.tokenizer)
        return TemplateTokens.of(template, self._words, system=self._shape.prefix_tokens > 0)

    def _too_long(self) -> Iterator[Fault]:
        """Yield lengths that the deployment would have to refuse."""
        subject, prefix = self._subject, self._shape.prefix_tokens
        prompt_tokens = prefix + self._around.first + math.ceil(self._prompts.high or self._prompts.mean)
        if self._file is None and prompt_tokens > subject.max_prompt:
            parts = f"{prefix} of the prefix, {self._around.first} of the chat template and {self._prompts}"
            yield Fault(
                f"are more than the {subject.max_prompt} tokens that a prompt may have",
                key="prompt tokens",
                value=parts,
            )
        if self._answers is not None and (self._answers.high or self._answers.mean) > subject.max_answer:
            yield Fault(
                f"are more than the {subject.max_answer} that an answer may have",
                key="output tokens",
                value=str(self._answers),
            )

    def conversations(self, load: Load, seed: int) -> Iterator[ScriptedConversation]:
        """Make the conversations of one load; a trace is gone through once."""
        subject = self._subject
        limits = {"most_prompt": subject.max_prompt, "most_answer": subject.max_answer}
        if self._file is not None:
            once = load.kind == "trace"
            source = self._file.conversations(self._words, self._answers, once=once, seed=seed, **limits)
        else:
            assert self._words is not None, "there is no file"
            assert self._answers is not None, "there is no file"
            source = synthetic(
                self._words,
                self._prompts,
                self._answers,
                self._shape,
                seed=seed,
                around=self._around,
                chat=not self._settings.raw,
                **limits,
            )
        return shaped(source, self._shape, seed)

    @property
    def token_counter(self) -> Callable[[str], int] | None:
        """Function that counts the tokens of an answer whose server does not; None without a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)

    def warnings(self, levels: Sequence[LevelResult]) -> Iterator[str]:
        """Yield reasons to mistrust what such prompts show."""
        if self._file is None and any(level.acceptance is not None for level in levels):
            yield "a draft model predicts words at random badly: --load prompts=FILE shows what it is worth"

    def described(self) -> dict[str, Any]:
        """The `workload` of a result."""
        settings, shape = self._settings, self._shape
        return {
            "source": "words at random" if self._file is None else self._file.name,
            "prompt_tokens": str(self._prompts) if self._file is None else None,
            "answer_tokens": None if self._answers is None else str(self._answers),
            "prefix_tokens": shape.prefix_tokens,
            "prefixes": shape.prefixes,
            "turns": shape.turns,
            "cancelled": shape.cancelled,
            "think_s": settings.think_s,
            "seconds": settings.period_s,
            "requests": settings.requests,
            "warm_up_s": settings.uncounted_s,
            "temperature": settings.temperature,
        }
