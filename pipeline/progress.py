"""Progress on long work: what is being done, how far it is, how fast, and how long it will take.

Stages report to a `Progress`; they never print. On a terminal a live line is drawn (rich); elsewhere a plain line is
written every few seconds, so that a log of a build stays readable. Everything goes to standard error: standard output
belongs to results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO


class Task(Protocol):
    """One piece of work that is under way."""

    def advance(self, amount: float = 1) -> None:
        """Say that `amount` more units are done."""


class Progress(Protocol):
    """Where a stage reports to."""

    def say(self, text: str) -> None:
        """Print one line of fact: what a step made, and where."""

    def task(self, label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Task]:
        """Open a piece of work of `total` units; it ends with the `with` block."""


class Silent:
    """Reports nowhere (tests, `--quiet`, `--json`)."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        yield _Nothing()


class _Nothing:
    def advance(self, amount: float = 1) -> None:
        pass


class Lines:
    """Plain lines, at most one every `interval_s` seconds for each task."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = 5.0) -> None:
        self._stream = stream or sys.stderr
        self._interval_s = interval_s

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
        task = _LineTask(self, label, total, unit, self._interval_s)
        yield task
        task.finish()


class _LineTask:
    def __init__(self, out: Lines, label: str, total: float | None, unit: str, interval_s: float) -> None:
        self._out, self._label, self._total, self._unit, self._interval_s = (
            out,
            label,
            total,
            unit,
            interval_s,
        )
        self._done = 0.0
        self._start = self._last = time.monotonic()
        self._spoke = False

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last >= self._interval_s:
            self._last = now
            self._spoke = True
            self._out.say(
                f"    {self._label}: {describe(self._done, self._total, self._unit, now - self._start)}"
            )

    def finish(self) -> None:
        if self._spoke:
            elapsed = time.monotonic() - self._start
            self._out.say(
                f"    {self._label}: {describe(self._done, None, self._unit, elapsed)} in {elapsed:.1f} s"
            )


def describe(done: float, total: float | None, unit: str, elapsed_s: float) -> str:
    """Amount, rate and time left.

    >>> describe(64, 128, "samples", 8.0)
    '64/128 samples, 8.0 samples/s, 8 s left'
    """
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    amount, speed = (
        (_bytes(done), f"{_bytes(rate)}/s") if unit == "B" else (f"{done:g}", f"{rate:.1f} {unit}/s")
    )
    if total is None:
        return f"{amount} {unit}".strip() if unit != "B" else amount
    goal = _bytes(total) if unit == "B" else f"{total:g} {unit}"
    left = f", {max(0.0, total - done) / rate:.0f} s left" if rate > 0 else ""
    return f"{amount}/{goal}, {speed}{left}"


def _bytes(count: float) -> str:
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or suffix == "GiB":
            return f"{count:.0f} {suffix}" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1024
    raise AssertionError("unreachable")


class Terminal:
    """A live line for each task, drawn by rich."""

    def say(self, text: str) -> None:
        from rich.console import Console

        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        bar = Progress(
            TextColumn("    {task.description}"), BarColumn(), TextColumn("{task.fields[state]}"),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        with bar:
            yield _BarTask(bar, bar.add_task(label, total=total, state=""), total, unit)


class _BarTask:
    def __init__(self, bar: object, task_id: object, total: float | None, unit: str) -> None:
        self._bar, self._id, self._total, self._unit = bar, task_id, total, unit
        self._done, self._start = 0.0, time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        state = describe(self._done, self._total, self._unit, time.monotonic() - self._start)
        self._bar.update(self._id, completed=self._done, state=state)  # type: ignore[attr-defined]


def for_stream(stream: TextIO | None = None) -> Progress:
    """The reporter that suits standard error: live on a terminal, plain lines elsewhere."""
    return Terminal() if (stream or sys.stderr).isatty() else Lines(stream)
