"""How long a prompt may be, so that one that is too long is refused before it is sent.

The count is that of the tokenizer that the deployment was packaged with, which is also what cuts the prompt on the
server. Needs the distribution `tokenizers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pipeline.client.errors import PromptTooLong, Refused
from pipeline.reading import UnreadableFile, read_json, read_tokenizer

_DEPLOYMENT, _TOKENIZER = "deployment.json", "tokenizer.json"


class Tokenizer(Protocol):
    """What is needed of the `tokenizers` library."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """
    >>> limit = PromptLimit.from_package(Path("package"))                          # doctest: +SKIP
    >>> client = Client("localhost:8001", prompt_limit=limit)                      # doctest: +SKIP
    """

    tokenizer: Tokenizer
    max_tokens: int  # that the engine takes

    @classmethod
    def from_package(cls, package: Path | str) -> Self:
        """Of the folder that `pipeline build` made, or of a copy of its deployment.json and tokenizer.

        Raises:
            Refused: a file is missing, or is not what it should be.
        """
        file = Path(package) / _DEPLOYMENT
        try:
            deployment = read_json(file)
            folder, most = str(deployment["tokenizer_dir"]), int(deployment["limits"]["max_input_tokens"])
        except (UnreadableFile, ValueError, LookupError, TypeError) as error:
            raise Refused(f"{file}: does not tell the limits of a deployment: {error!r}") from error
        return cls.from_tokenizer(file.parent / folder, most)

    @classmethod
    def from_tokenizer(cls, folder: Path | str, max_tokens: int) -> Self:
        """With the tokenizer.json of a folder. Refused if there is none, or it cannot be read."""
        file = Path(folder) / _TOKENIZER
        if not file.exists():
            raise Refused(f"{folder}: holds no {_TOKENIZER}")
        try:
            return cls(read_tokenizer(file), max_tokens)
        except UnreadableFile as error:
            raise Refused(str(error)) from error

    def check(self, text: str) -> int:
        """How many tokens a prompt has.

        Raises:
            PromptTooLong: more than the engine takes.
        """
        tokens = len(self.tokenizer.encode(text).ids)
        if tokens > self.max_tokens:
            raise PromptTooLong(tokens, self.max_tokens)
        return tokens
