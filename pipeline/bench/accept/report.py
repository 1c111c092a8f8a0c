"""Results of an acceptance run: the one file that is sent back, and the page for people that is made of it.

Nothing private is in it: `scrubbed` takes out the home folder, names of user and machine, and every value that the
environment calls a token, a key, a secret or a password.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, PlainSerializer, TypeAdapter, ValidationError, computed_field
from pydantic.dataclasses import dataclass

from pipeline.errors import Fault, InvalidInput
from pipeline.private_files import make_private
from pipeline.reading import read_text

SCHEMA = 1
Outcome = Literal[
    "passed",
    "failed",
    "measured",  # a figure without a forecast or a bracket to hold it against
    "skipped",  # not possible with this runtime, or not wanted; the note says why
]
_Percent = Annotated[float | None, PlainSerializer(lambda value: None if value is None else round(value, 1))]
# Computed fields are written, and ignored when the file is read again.
_CONFIG = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class AcceptanceCheck:
    """One expectation, and the measurement.

    Attributes:
        name: Name of the check: "first token alone", "KV cache blocks of tensorrt_llm".
        expected: Expectation, for people.
        measured: Measurement, for people.
        value: Measurement as a number; None where it is not a number.
        unit: Unit of value and forecast: "ms", "MiB", "tokens/s", "".
        bracket: Ends of the plan's bracket; None where it has none.
        note: Reason, or how to read it.
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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def deviation_percent(self) -> _Percent:
        """Distance of the measured value from the forecast; above 0: more. None without both."""
        if self.value is None or not self.forecast:
            return None
        return 100 * (self.value / self.forecast - 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def in_bracket(self) -> bool | None:
        """Whether the measured value lies in the plan's bracket; None where there is none."""
        if self.value is None or self.bracket is None:
            return None
        return self.bracket[0] <= self.value <= self.bracket[1]


@dataclass(frozen=True, slots=True, config=_CONFIG)
class AcceptanceStep:
    """A part of the run, with its checks.

    Attributes:
        name: Name as `--skip` takes it: "build", "latency".
        title: Purpose, in a sentence.
        figures: Further measurements, for programs that read the file.
        log: Ends of logs, where something failed.
        resumed: Whether its checks passed in an earlier run, and were not made again.
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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> Outcome:
        """Worst outcome of its checks."""
        outcomes = {check.outcome for check in self.checks}
        order: tuple[Outcome, ...] = ("failed", "passed", "measured")
        return next((outcome for outcome in order if outcome in outcomes), "skipped")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class AcceptanceReport:
    """The whole report.

    Attributes:
        started: Time of the start: ISO 8601, UTC.
        settings: The recipe as it was loaded.
        machine: GPUs, driver, CUDA, container, memory.
        versions: Distribution -> version.
        package: Digest of the package; "" until there is one.
        steps: Steps that were run or skipped so far.
        finished: Whether the run came to its end.
    """

    recipe: str
    command: str
    started: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    package: str
    steps: tuple[AcceptanceStep, ...]
    finished: bool = False
    schema: int = SCHEMA

    @computed_field  # type: ignore[prop-decorator]
    @property
    def accepted(self) -> bool:
        """Whether the run came to its end, and no check failed."""
        return self.finished and not any(step.failed for step in self.steps)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def counts(self) -> dict[Outcome, int]:
        """Outcome -> number of checks."""
        made = [check.outcome for step in self.steps for check in step.checks]
        order: tuple[Outcome, ...] = ("passed", "failed", "measured", "skipped")
        return {outcome: made.count(outcome) for outcome in order}

    def to_json(self) -> dict[str, Any]:
        """Values of the report for `json.dumps`, with nothing private."""
        content: dict[str, Any] = scrubbed(_ADAPTER.dump_python(self, mode="json"), private_texts())
        return content

    def write(self, file: Path) -> None:
        """Write the report and, beside it, the same for people as `.md`; both are readable by their owner alone."""
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
        """Read the `.json` that `write` wrote.

        Raises:
            InvalidInput: It is not such a report.
        """
        try:
            report = _ADAPTER.validate_json(read_text(file))
        except ValidationError:
            raise InvalidInput(str(file), [Fault("is not the report of an acceptance run")]) from None
        if report.schema != SCHEMA:
            raise InvalidInput(str(file), [Fault("was written by another version of pipeline")])
        return report


_ADAPTER = TypeAdapter(AcceptanceReport)


def page(report: Mapping[str, Any]) -> str:
    """Render the values of `AcceptanceReport.to_json` as Markdown."""
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
        lines += [f"- **{step['name']}, {check['name']}**: {_details(check)}" for step, check in failed]
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


def _details(check: Mapping[str, Any]) -> str:
    parts = (f"expected {check['expected']}" if check["expected"] else "", check["measured"], check["note"])
    return "; ".join(part for part in parts if part)


def _cell(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"\s*\n\s*", " / ", text.strip()).replace("|", "\\|")


_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|nvapi-|ghp_)[A-Za-z0-9_-]{8,}")
_PASSWORD_IN_URL = re.compile(r"(://[^/@\s:]*:)[^/@\s]+@")
_LEAST = 6  # characters of a private text: shorter ones occur in every text


def private_texts(
    environment: Mapping[str, str] = os.environ, home: Path | None = None, host: str | None = None
) -> tuple[tuple[re.Pattern[str], str], ...]:
    """List texts that must not leave this machine, with their replacements.

    Args:
        environment: Variables; values of tokens, keys, secrets and passwords are private.
        home: The home folder; None for this user's.
        host: Name of the machine; None for this one's.

    Returns:
        Pairs of a pattern and its replacement, those of the longest texts first.
    """
    patterns = {
        re.escape(value): "…"
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= _LEAST
    }
    folder = str(home or Path.home())
    if folder != "/":
        patterns[f"{re.escape(folder)}(?![\\w.-])"] = "~"
    name = socket.gethostname() if host is None else host
    if len(name) >= _LEAST and name != "localhost":
        patterns[f"(?<![\\w-]){re.escape(name)}(?![\\w-])"] = "HOST"
    with contextlib.suppress(KeyError, OSError):
        # The user of a container may have no name.
        patterns[f"/{re.escape(getpass.getuser())}/"] = "/USER/"
    return tuple(
        (re.compile(text), instead)
        for text, instead in sorted(patterns.items(), key=lambda pair: -len(pair[0]))
    )


def scrubbed(value: Any, private: Sequence[tuple[re.Pattern[str], str]]) -> Any:
    """Replace private texts in a JSON value, keys included; `private` as from `private_texts`."""
    if isinstance(value, dict):
        return {scrubbed(key, private): scrubbed(inner, private) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner, private) for inner in value]
    if not isinstance(value, str):
        return value
    for pattern, instead in private:
        value = pattern.sub(instead, value)
    return _PASSWORD_IN_URL.sub(r"\1…@", _SECRET_VALUE.sub("…", value))
