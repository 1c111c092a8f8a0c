"""The questions of a golden set: the keys of a line of the file, and when an answer is right.

    {"messages": [{"role": "user", "content": "Is there a warranty?"}], "contains": "two years", "max_tokens": 64}
    {"prompt": "1, 2, 3,", "regex": "^ ?4"}

A question has `prompt` (a text, without the chat template) or `messages`, and any of the checks `equals`, `contains`,
`regex` and `json_schema`, all of which must hold; without a check an answer must not be empty.

    python -m pipeline.golden_questions    reads [question, answer] lines of JSON, writes what is wrong or null
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.document_faults import faults_of, refusal
from pipeline.documents import Document
from pipeline.errors import Fault
from pipeline.reading import checked_json, read_text

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
    def input(self) -> str | list[dict[str, str]]:
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


_CPU_S = 5.0  # of one answer


class AnswerJudge:
    """Judges answers, those with an expression or a schema in a process that may be ended; a context.

    Expressions of Python may take time that doubles with each character of the answer (`(a+)+$`), and nothing
    interrupts them: the kernel ends the process when it has used its processor time, and the answer counts as wrong.
    """

    def __init__(self, cpu_s: float = _CPU_S) -> None:
        """
        Args:
            cpu_s: Processor time that judging one answer may take, in seconds.
        """
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[str] | None = None

    def fault(self, question: GoldenQuestion, answer: str) -> str | None:
        """Return why an answer is wrong; None if it is right."""
        if question.regex is None and question.json_schema is None:
            return question.fault(answer)
        process = self._process = self._process or self._start()
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "it was started with pipes"
        try:
            process.stdin.write(json.dumps([question.model_dump(mode="json"), answer]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            fault: str | None = json.loads(line)
            return fault
        self._end()
        if process.returncode == -signal.SIGXCPU:
            kind = "expression" if question.regex is not None else "schema"
            shown = "" if question.regex is None else f" {question.regex!r}"
            return f"cannot be judged: its {kind}{shown} took more than {self._cpu_s:g} s of processor time"
        return f"cannot be judged: the process that does ended with exit code {process.returncode}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.golden_questions", str(self._cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate()


def main(cpu_s: float) -> int:
    """Judge what comes, until the input ends; the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        used = os.times()
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.user + used.system + cpu_s), most))
        question, answer = json.loads(line)
        # As it was read: keys that have no value were left out there.
        fields = {name: value for name, value in question.items() if value is not None}
        fault = GoldenQuestion.model_validate_json(json.dumps(fields)).fault(answer)
        print(json.dumps(fault), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
