"""From a row to tokens: the checkpoint's chat template, then its tokenizer. Neither torch nor transformers
is needed.

Text that a template wrote holds its special tokens already; plain text gets those that the tokenizer adds
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError, UserError
from pipeline.models.chat_template import ChatTemplate, TemplateError
from pipeline.reading import read_tokenizer
from pipeline.sources.dataset import sha256_of
from pipeline.stages.dataset.rows import Row
from pipeline.store import Json

# Some templates write the date. Theirs stands still, or samples would differ from day to day.
TODAY = datetime(2024, 7, 26)


class TemplateRefusal(UserError):
    """The template does not take these messages (roles that do not alternate, say)."""


class Encoder:
    """The tokenizer and the chat template of one checkpoint."""

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

    def encode(self, row: Row) -> list[int]:
        """All tokens of a row; TemplateRefusal if the template does not take its messages."""
        if row.text is not None:
            return self._tokens(row.text, add_special_tokens=True)
        return self._tokens(self._render(row.messages), add_special_tokens=False)

    def encode_prompt(self, row: Row) -> tuple[list[int], str, str]:
        """What comes before the last answer of a row: its tokens, its last message, and that answer."""
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
        """Raises SourceError: there is none, or it cannot be read."""
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
        facts: dict[str, Json] = {"tokenizer_sha256": sha256_of(self.directory / "tokenizer.json")}
        if self._template is not None:
            facts["template_date"] = TODAY.date().isoformat()
        return facts

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens


def _strftime_today(pattern: str) -> str:
    return TODAY.strftime(pattern)
