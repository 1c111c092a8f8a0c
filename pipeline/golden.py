"""Golden questions: prompts with checks of their answers, by which a package is judged before it takes traffic.

A file of JSON lines beside the recipe, one question a line:

    {"messages": [{"role": "user", "content": "Is there a warranty?"}], "contains": "two years", "max_tokens": 64}
    {"prompt": "1, 2, 3,", "regex": "^ ?4"}

A question has `prompt` (a text, without the chat template) or `messages`, and any of the checks `equals`, `contains`,
`regex` and `json_schema`, all of which must hold; without a check an answer must not be empty. A package carries its
questions as `golden.json`, so that it can be judged where the recipe is not.

Nothing here asks a server: whoever judges hands over how a question is answered. It is no room of the house, because
recipes, packages and servers on three of its floors need it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from pipeline.errors import Fault, InvalidInput
from pipeline.reading import UnreadableFile, checked_json, read_json, read_text

__all__ = ["GoldenAnswer", "GoldenQuestion", "GoldenReport", "GoldenSet", "read_questions", "write_document"]

_FILE = "golden.json"  # of a package, beside its deployment.json
_MAX_BYTES = 4 << 20
_SHOWN = 80  # characters of an answer in a fault


class _ChatTurn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    role: str = Field(min_length=1)
    content: str


class GoldenQuestion(BaseModel):
    """One question, and what its answer must be like.

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
    def _is_expression(cls, given: str | None) -> str | None:
        try:
            re.compile(given or "")
        except re.error as error:
            raise PydanticCustomError(
                "refused", "is not a regular expression: {text}", {"text": str(error)}
            ) from None
        return given

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given is not None and (fault := _schema_fault(given)):
            raise PydanticCustomError("refused", "is not a JSON schema: {text}", {"text": fault})
        return given

    @model_validator(mode="after")
    def _asks_one_thing(self) -> Self:
        if bool(self.prompt) == bool(self.messages):
            raise PydanticCustomError("refused", "must have either prompt or messages")
        return self

    @property
    def asked(self) -> str | list[dict[str, str]]:
        """What a client is given: the text, or the messages."""
        return self.prompt if self.prompt is not None else [turn.model_dump() for turn in self.messages or ()]

    @property
    def text(self) -> str:
        """The question in words: the prompt, or the last message."""
        return self.prompt if self.prompt is not None else (self.messages or ())[-1].content

    def fault(self, answer: str) -> str | None:
        """Judge an answer.

        Args:
            answer: Text that the model generated.

        Returns:
            Why it is wrong; None if it is right.
        """
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


@dataclass(frozen=True, slots=True)
class GoldenAnswer:
    """The answer to one question."""

    question: GoldenQuestion
    answer: str
    fault: str | None  # why it is wrong; None if it is right


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """All answers of one package."""

    answers: tuple[GoldenAnswer, ...]
    min_passed: float

    @property
    def right(self) -> int:
        """Number of questions that were answered right."""
        return sum(one.fault is None for one in self.answers)

    @property
    def passed(self) -> bool:
        """Whether enough of them were."""
        return self.right >= self.min_passed * len(self.answers)

    def __str__(self) -> str:
        share = "all" if self.min_passed == 1 else f"{self.min_passed:.0%}"
        lines = [f"golden questions: {self.right} of {len(self.answers)} right, {share} needed"]
        lines += [
            f"  {json.dumps(one.question.text, ensure_ascii=False)}: the answer {one.fault}"
            for one in self.answers
            if one.fault
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """The golden questions of a recipe or a package."""

    questions: tuple[GoldenQuestion, ...]
    min_passed: float = 1.0  # share of the questions

    @classmethod
    def read(cls, file: Path, min_passed: float = 1.0) -> Self:
        """Read the file of a recipe.

        Args:
            file: JSON lines.
            min_passed: Share of the questions that must be answered right, above 0 up to 1.

        Raises:
            InvalidInput: With every fault of the file.
        """
        questions, faults = read_questions(file, str(file))
        if faults:
            raise InvalidInput(str(file), faults)
        return cls(tuple(questions), min_passed)

    @classmethod
    def load(cls, package: Path) -> Self | None:
        """Read the questions that a package carries; None if it carries none.

        Raises:
            UnreadableFile: The file is there, and holds no questions.
        """
        path = package / _FILE
        if not path.exists():
            return None
        try:
            document = read_json(path)
            questions = [GoldenQuestion.model_validate_json(json.dumps(one)) for one in document["questions"]]
            return cls(tuple(questions), float(document["min_passed"]))
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            raise UnreadableFile(path, f"holds no golden questions: {error}") from error

    @property
    def document(self) -> dict[str, Any]:
        """The content of a package's golden.json; equal for equal questions, however their file is written."""
        questions = [question.model_dump(mode="json", exclude_none=True) for question in self.questions]
        return {"min_passed": self.min_passed, "questions": questions}

    def ask(self, answer: Callable[[GoldenQuestion], str]) -> GoldenReport:
        """Ask every question, and judge the answers.

        Args:
            answer: Answers one question, greedily; what it raises is raised here.
        """
        texts = [answer(question) for question in self.questions]
        judged = (
            GoldenAnswer(question, text, question.fault(text))
            for question, text in zip(self.questions, texts, strict=True)
        )
        return GoldenReport(tuple(judged), self.min_passed)


def read_questions(file: Path, shown: str) -> tuple[list[GoldenQuestion], list[Fault]]:
    """Read a file of questions.

    Args:
        file: JSON lines; empty lines are passed over.
        shown: How faults name the file.

    Returns:
        The questions that are valid, and every fault with its line and key.

    Raises:
        UnreadableFile: The file is not there, or no text.
    """
    questions, faults, lines = [], [], 0
    for number, line in enumerate(read_text(file, _MAX_BYTES).removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        lines += 1
        try:
            checked_json(line)
            questions.append(GoldenQuestion.model_validate_json(line))
        except ValidationError as error:
            faults += [_fault(one, shown, number) for one in error.errors(include_url=False)]
        except json.JSONDecodeError as error:
            faults.append(Fault(f"is not JSON: {error.msg}", where=shown, line=number))
        except ValueError as error:
            faults.append(Fault(str(error), where=shown, line=number))
    if not lines:
        faults.append(Fault("holds no question", where=shown, fix='write {"prompt": "…", "contains": "…"}'))
    return questions, faults


def write_document(document: object, package: Path) -> None:
    """Write a `GoldenSet.document` into a package."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    (package / _FILE).write_text(text + "\n", encoding="utf-8")


def _fault(error: ErrorDetails, where: str, line: int) -> Fault:
    key, problem, fix, value = ".".join(map(str, error["loc"])), error["msg"], "", error["input"]
    if error["type"] == "extra_forbidden":
        known = list((_ChatTurn if len(error["loc"]) > 1 else GoldenQuestion).model_fields)
        near = get_close_matches(str(error["loc"][-1]), known, n=1)
        problem = "is not a key"
        fix = (f"did you mean {near[0]}? " if near else "") + f"allowed: {', '.join(known)}"
    elif error["type"] == "missing":
        problem, value = "is missing", None
    elif error["type"] != "refused":
        problem = f"is not accepted: {problem}"
    return Fault(problem, where=where, line=line, key=key, value=value if key else None, fix=fix)


def _schema_fault(schema: Mapping[str, Any]) -> str | None:
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"{error.json_path[2:]}: {error.message}".removeprefix(": ")
    return None


def _unlike(answer: str, schema: Mapping[str, Any]) -> str | None:
    """How an answer differs from a JSON schema."""
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
