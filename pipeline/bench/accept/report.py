"""What an acceptance run found, as values; the one file that is sent back, and the page for people that is made of it.

Nothing private is in it: `scrubbed` takes out the home folder, names of user and machine, and whatever the environment
calls a token, a key, a secret or a password.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import Fault, InvalidInput
from pipeline.private_files import make_private
from pipeline.reading import read_text

SCHEMA = 1
Outcome = Literal[
    "passed",
    "failed",
    "measured",  # a figure that nothing is held against: there is no forecast, or it has no bracket
    "skipped",  # cannot be asked of this runtime, or was not to be; the note says why
]


@dataclass(frozen=True, slots=True)
class AcceptanceCheck:
    """One thing that was expected, and what was found.

    Attributes:
        name: what is checked: "first token alone", "KV cache blocks of tensorrt_llm".
        outcome: how it ended.
        expected: what should be, for people.
        measured: what is, for people.
        value: what was measured, as a number; None where it is none.
        unit: of value and forecast: "ms", "MiB", "tokens/s", "".
        forecast: what the plan says.
        bracket: the ends of the plan's bracket; None where it has none.
        note: why, or what to make of it.
    """

    name: str
    outcome: Outcome
    expected: str = ""
    measured: str = ""
    value: float | None = None
    unit: str = ""
    forecast: float | None = None
    bracket: tuple[float, float] | None = None
    note: str = ""

    @property
    def deviation_percent(self) -> float | None:
        """How far the measured value is from the forecast; above 0: more. None without both."""
        if self.value is None or not self.forecast:
            return None
        return 100 * (self.value / self.forecast - 1)

    @property
    def in_bracket(self) -> bool | None:
        """Whether the measured value lies in the plan's bracket; None where there is none."""
        if self.value is None or self.bracket is None:
            return None
        return self.bracket[0] <= self.value <= self.bracket[1]


@dataclass(frozen=True, slots=True)
class AcceptanceStep:
    """A part of the run, with its checks.

    Attributes:
        name: as `--skip` takes it: "build", "latency".
        title: what it does, in a sentence.
        checks: in the order in which they were made.
        seconds: that it took.
        figures: what it measured besides, for whoever reads the file by program.
        log: ends of logs, where something failed.
        resumed: its checks passed in an earlier run, and were not made again.
    """

    name: str
    title: str
    checks: tuple[AcceptanceCheck, ...]
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    resumed: bool = False

    @property
    def failed(self) -> bool:
        """Whether one of its checks failed."""
        return any(check.outcome == "failed" for check in self.checks)

    @property
    def outcome(self) -> Outcome:
        """That of its gravest check."""
        found = {check.outcome for check in self.checks}
        order: tuple[Outcome, ...] = ("failed", "passed", "measured")
        return next((one for one in order if one in found), "skipped")


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Everything that is sent back. `package`: digest of the repository; "" until there is one."""

    recipe: str
    command: str
    started: str  # ISO 8601, UTC
    settings: dict[str, Any]  # the recipe, as it was loaded
    machine: dict[str, Any]  # GPUs, driver, CUDA, container, memory
    versions: dict[str, str]
    package: str
    steps: tuple[AcceptanceStep, ...]
    finished: bool = False
    schema: int = SCHEMA

    @property
    def accepted(self) -> bool:
        """Whether the run came to its end, and no check failed."""
        return self.finished and not any(step.failed for step in self.steps)

    @property
    def counts(self) -> dict[Outcome, int]:
        """Outcome -> number of checks."""
        made = [check.outcome for step in self.steps for check in step.checks]
        order: tuple[Outcome, ...] = ("passed", "failed", "measured", "skipped")
        return {outcome: made.count(outcome) for outcome in order}

    def to_json(self) -> dict[str, Any]:
        """The report as values for `json.dumps`, with nothing private."""
        content: dict[str, Any] = _adapter().dump_python(self, mode="json")
        content["accepted"], content["counts"] = self.accepted, dict(self.counts)
        for step, plain in zip(self.steps, content["steps"], strict=True):
            plain["outcome"] = step.outcome
            for check, made in zip(step.checks, plain["checks"], strict=True):
                deviation = check.deviation_percent
                made["deviation_percent"] = None if deviation is None else round(deviation, 1)
                made["in_bracket"] = check.in_bracket
        scrub: dict[str, Any] = scrubbed(content, private_words())
        return scrub

    def write(self, file: Path) -> None:
        """Write the file and, beside it, the same for people as `.md`; both are readable by their owner alone.

        Args:
            file: `accept-….json`; its folder is made if need be.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        content = self.to_json()
        for path, text in (
            (file, json.dumps(content, indent=1, ensure_ascii=False) + "\n"),
            (file.with_suffix(".md"), page(content)),
        ):
            draft = path.with_name(f".{path.name}.new")
            make_private(draft, own=True)
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)

    @classmethod
    def read(cls, file: Path) -> AcceptanceReport:
        """Read what `write` wrote.

        Args:
            file: the `.json` of the two.

        Raises:
            InvalidInput: it is not such a report.
        """
        try:
            content = json.loads(read_text(file))
            for key in ("accepted", "counts"):
                content.pop(key, None)
            for step in content["steps"]:
                step.pop("outcome", None)
                for check in step["checks"]:
                    check.pop("deviation_percent", None)
                    check.pop("in_bracket", None)
            report: AcceptanceReport = _adapter().validate_python(content)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError):
            raise InvalidInput(str(file), [Fault("is not the report of an acceptance run")]) from None
        if report.schema != SCHEMA:
            raise InvalidInput(str(file), [Fault("was written by another version of pipeline")])
        return report


def _adapter() -> TypeAdapter[AcceptanceReport]:
    return TypeAdapter(AcceptanceReport)


def page(report: Mapping[str, Any]) -> str:
    """Render what `AcceptanceReport.to_json` returned as Markdown.

    Args:
        report: the values of the file.
    """
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report["counts"].items() if number)
    verdict = "accepted" if report["accepted"] else "NOT accepted" if report["finished"] else "not finished"
    lines = [
        f"# {report['recipe']}: {verdict}",
        "",
        f"`{report['command']}`, {report['started']}; {counts}.",
        "",
        "| what | |",
        "| --- | --- |",
        *(f"| {name} | {_cell(value)} |" for name, value in report["machine"].items()),
        *(f"| {name} | {_cell(value)} |" for name, value in report["versions"].items()),
        f"| package | {report['package'] or 'none'} |",
    ]
    failed = [
        (step, check) for step in report["steps"] for check in step["checks"] if check["outcome"] == "failed"
    ]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- **{step['name']}, {check['name']}**: {_told(check)}" for step, check in failed]
    for step in report["steps"]:
        lines += ["", f"## {step['name']}: {step['outcome']}", "", _about(step), ""]
        lines += [
            "| check | expected | measured | deviation | in the plan's bracket | verdict |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(check) for check in step["checks"]),
        ]
        notes = [f"- {check['name']}: {check['note']}" for check in step["checks"] if check["note"]]
        lines += ["", *notes] if notes else []
        lines += ["", "```text", *step["log"], "```"] if step["log"] else []
    return "\n".join([*lines, ""])


def _about(step: Mapping[str, Any]) -> str:
    earlier = "; taken over from an earlier run" if step["resumed"] else f" ({step['seconds']:.1f} s)"
    return f"{step['title']}{earlier}."


def _row(check: Mapping[str, Any]) -> str:
    deviation, within = check["deviation_percent"], check["in_bracket"]
    cells = (
        check["name"],
        check["expected"],
        check["measured"],
        "" if deviation is None else f"{deviation:+.1f} %",
        "" if within is None else "yes" if within else "no",
        check["outcome"],
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _told(check: Mapping[str, Any]) -> str:
    parts = (f"expected {check['expected']}" if check["expected"] else "", check["measured"], check["note"])
    return "; ".join(part for part in parts if part)


def _cell(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"\s*\n\s*", " / ", text.strip()).replace("|", "\\|")


_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|nvapi-|ghp_)[A-Za-z0-9_-]{8,}")
_PASSWORD_IN_URL = re.compile(r"(://[^/@\s:]*:)[^/@\s]+@")
_LEAST = 6  # characters of what is looked for: shorter ones are words of every text


def private_words(
    environment: Mapping[str, str] = os.environ, home: Path | None = None, host: str | None = None
) -> tuple[tuple[re.Pattern[str], str], ...]:
    """List what must not leave this machine, and what stands for it.

    Args:
        environment: whose values of tokens, keys, secrets and passwords are private.
        home: the home folder; None for this user's.
        host: name of the machine; None for this one's.

    Returns:
        Pairs of a pattern and its replacement, those of the longest texts first.
    """
    found = {
        re.escape(value): "…"
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= _LEAST
    }
    folder = str(home or Path.home())
    if folder != "/":
        found[f"{re.escape(folder)}(?![\\w.-])"] = "~"
    name = socket.gethostname() if host is None else host
    if len(name) >= _LEAST and name != "localhost":
        found[f"(?<![\\w-]){re.escape(name)}(?![\\w-])"] = "HOST"
    with contextlib.suppress(KeyError, OSError):
        # The user of a container may have no name.
        found[f"/{re.escape(getpass.getuser())}/"] = "/USER/"
    return tuple(
        (re.compile(text), instead) for text, instead in sorted(found.items(), key=lambda one: -len(one[0]))
    )


def scrubbed(value: Any, words: Sequence[tuple[re.Pattern[str], str]]) -> Any:
    """Replace private words in all texts of a JSON value, keys included.

    Args:
        value: what `json.loads` may return.
        words: pairs of a pattern and its replacement.
    """
    if isinstance(value, dict):
        return {scrubbed(key, words): scrubbed(one, words) for key, one in value.items()}
    if isinstance(value, list):
        return [scrubbed(one, words) for one in value]
    if not isinstance(value, str):
        return value
    for pattern, instead in words:
        value = pattern.sub(instead, value)
    return _PASSWORD_IN_URL.sub(r"\1…@", _SECRET_VALUE.sub("…", value))
