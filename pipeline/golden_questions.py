"""The questions of a golden set: the keys of a line of the file, and when an answer is right.

    {"messages": [{"role": "user", "content": "Is there a warranty?"}], "contains": "two years", "max_tokens": 64}
    {"prompt": "1, 2, 3,", "regex": "^ ?4"}

A question has `prompt` (a text, without the chat template) or `messages`, and any of the checks `equals`, `contains`,
`regex` and `json_schema`, all of which must hold; without a check an answer must not be empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.document_faults import faults_of, refusal
from pipeline.documents import Document
from pipeline.errors import Fault
from pipeline.reading import checked_json, read_text

__all__ = ["GoldenQuestion", "read_questions"]

_MAX_BYTES = 4 << 20
_SHOWN = 80  # characters of an answer in a fault


class _ChatTurn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    role: str = Field(min_length=1)
    content: str


class GoldenQuestion(BaseModel):
    """One question, and the checks of its answer.

    >>> GoldenQuestion(prompt="1, 2, 3,", contains="4").fault(" 4, 5")
    >>> GoldenQuestion(prompt="1, 2, 3,", contains="4").fault(" 5, 6")
    "does not contain '4': ' 5, 6'"
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[_ChatTurn, ...] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    equals: str | None = None
    contains: str | None = Field(default=None, min_length=1)
    regex: str | None = Field(default=None, min_length=1)
    json_schema: dict[str, Any] | None = None

    @field_validator("regex")
    @classmethod
    def _is_expression(cls, regex: str | None) -> str | None:
        try:
            re.compile(regex or "")
        except re.error as error:
            raise refusal(f"is not a regular expression: {error}") from None
        return regex

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and (fault := _schema_fault(schema)):
            raise refusal(f"is not a JSON schema: {fault}")
        return schema

    @model_validator(mode="after")
    def _asks_one_thing(self) -> Self:
        if bool(self.prompt) == bool(self.messages):
            raise refusal("must have either prompt or messages")
        return self

    @property
    def asked(self) -> str | list[dict[str, str]]:
        """Question as a client takes it: a text, or messages."""
        return self.prompt if self.prompt is not None else [turn.model_dump() for turn in self.messages or ()]

    @property
    def text(self) -> str:
        """Question in words: the prompt, or the last message."""
        return self.prompt if self.prompt is not None else (self.messages or ())[-1].content

    def fault(self, answer: str) -> str | None:
        """Say why an answer is wrong; None if it is right."""
        shown = repr(answer if len(answer) <= _SHOWN else answer[: _SHOWN - 1] + "…")
        if self.equals is not None and answer.strip() != self.equals.strip():
            return f"is not {self.equals!r}, but {shown}"
        if self.contains is not None and self.contains not in answer:
            return f"does not contain {self.contains!r}: {shown}"
        if self.regex is not None and re.search(self.regex, answer) is None:
            return f"does not match {self.regex!r}: {shown}"
        if self.json_schema is not None and (wrong := _unlike(answer, self.json_schema)):
            return f"{wrong}: {shown}"
        return None if answer.strip() or self.equals is not None else "is empty"


def read_questions(file: Path, shown: str) -> tuple[list[GoldenQuestion], list[Fault]]:
    """Read a file of questions.

    Args:
        file: JSON lines; empty lines are passed over.
        shown: name of the file in faults.

    Returns:
        The questions that are valid, and every fault with its line and key.

    Raises:
        UnreadableFile: the file is not there, or no text.
    """
    questions, faults, lines = [], [], 0
    for number, line in enumerate(read_text(file, _MAX_BYTES).removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        lines += 1
        try:
            document = Document(shown, checked_json(line), line=number)
            questions.append(GoldenQuestion.model_validate_json(line))
        except ValidationError as error:
            faults += faults_of(error, GoldenQuestion, document)
        except json.JSONDecodeError as error:
            faults.append(Fault(f"is not JSON: {error.msg}", where=shown, line=number))
        except ValueError as error:
            faults.append(Fault(str(error), where=shown, line=number))
    if not lines:
        faults.append(Fault("holds no question", where=shown, fix='write {"prompt": "…", "contains": "…"}'))
    return questions, faults


def _schema_fault(schema: Mapping[str, Any]) -> str | None:
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"{error.json_path[2:]}: {error.message}".removeprefix(": ")
    return None


def _unlike(answer: str, schema: Mapping[str, Any]) -> str | None:
    """Say how an answer differs from a JSON schema; None if it is valid."""
    import jsonschema
    import referencing
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # With a registry of its own, it fetches nothing from the network.
    validator = kind(schema, registry=referencing.Registry())
    try:
        fault = next(validator.iter_errors(value), None)
    except (Unresolvable, RecursionError) as error:
        return f"cannot be held to its JSON schema ({error})"
    return None if fault is None else f"is unlike its JSON schema at {fault.json_path} ({fault.message})"
