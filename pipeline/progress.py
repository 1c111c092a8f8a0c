"""Progress on long work: what is being done, how far it is, how fast, and how long it will take.

Stages report to a `Progress`; they never print. On a terminal live lines are drawn (rich); elsewhere a plain line is
written every two seconds, also while work does not advance (a library is imported, a model loaded). Everything goes to
standard error: standard output belongs to results.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TextIO

from pipeline.printable import printable


class Task(Protocol):
    """One piece of work that is under way."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""


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
        yield _SilentTask()


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        pass


class Lines:
    """Plain lines, for logs.

    Args:
        stream: Where they go; by default standard error.
        interval_s: A task that lasts longer gets a line after each such time; 0: a line each time it advances.
    """

    def __init__(self, stream: TextIO | None = None, interval_s: float = 2.0) -> None:
        self._stream = stream or sys.stderr
        self._interval_s = interval_s
        self._tasks: list[_LineTask] = []

    def say(self, text: str) -> None:
        """Write one line."""
        print(printable(text), file=self._stream, flush=True)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
        """Write lines about a piece of work until the `with` block ends; of nested ones, about the inner."""
        task = _LineTask(label, total, unit)
        self._tasks.append(task)
        ended = threading.Event()
        beat = threading.Thread(target=self._repeat, args=(task, ended), daemon=True)
        if self._interval_s > 0:
            beat.start()
        else:
            task.on_advance = lambda: self._write(task)
        try:
            yield task
        finally:
            ended.set()
            self._tasks.remove(task)
        if task.lines:
            self.say(f"    {label}: {task.summary()}")

    def _repeat(self, task: _LineTask, ended: threading.Event) -> None:
        while not ended.wait(self._interval_s):
            if self._tasks[-1:] == [task]:
                self._write(task)

    def _write(self, task: _LineTask) -> None:
        task.lines += 1
        self.say(f"    {task.label}: {task.state()}")


class _LineTask:
    def __init__(self, label: str, total: float | None, unit: str) -> None:
        self.label, self._total, self._unit = label, total, unit
        self.lines = 0
        self.on_advance: Callable[[], None] = lambda: None
        self._done, self._start = 0.0, time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self.on_advance()

    def state(self) -> str:
        elapsed_s = time.monotonic() - self._start
        if self._total is None and not self._done:
            return f"{elapsed_s:.0f} s"
        return describe(self._done, self._total, self._unit, elapsed_s)

    def summary(self) -> str:
        elapsed_s = time.monotonic() - self._start
        done = f"{describe(self._done, None, self._unit, elapsed_s)} in " if self._done else ""
        return f"{done}{elapsed_s:.1f} s"


def describe(done: float, total: float | None, unit: str, elapsed_s: float) -> str:
    """Amount, rate and time left.

    >>> describe(64, 128, "samples", 8.0)
    '64/128 samples, 8.0 samples/s, 8 s left'
    """
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    amount, speed = (
        (human_bytes(done), f"{human_bytes(rate)}/s")
        if unit == "B"
        else (f"{done:g}", f"{rate:.1f} {unit}/s")
    )
    if total is None:
        return f"{amount} {unit}".strip() if unit != "B" else amount
    goal = human_bytes(total) if unit == "B" else f"{total:g} {unit}"
    left = f", {max(0.0, total - done) / rate:.0f} s left" if rate > 0 else ""
    return f"{amount}/{goal}, {speed}{left}"


def human_bytes(count: float) -> str:
    """Format a number of bytes for people.

    >>> human_bytes(512), human_bytes(1536), human_bytes(16 * 1024**3)
    ('512 B', '1.5 KiB', '16.0 GiB')
    """
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1024
    return f"{count:.1f} TiB"


class Terminal:
    """A live line for each task, drawn by rich."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: Any = None  # rich's display, while a task is open: there may be only one
        self._open = 0

    def say(self, text: str) -> None:
        """Print one line above the live ones."""
        from rich.console import Console

        with self._lock:
            console = Console(stderr=True) if self._bars is None else self._bars.console
            console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
        """Draw a line until the `with` block ends; tasks may be nested."""
        bars = self._opened()
        added = bars.add_task(label, total=total, state="")
        try:
            yield _BarTask(bars, added, total, unit)
        finally:
            bars.remove_task(added)
            self._closed()

    def _opened(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._bars is None:
                self._bars = Progress(
                    TextColumn("    {task.description}"), BarColumn(), TextColumn("{task.fields[state]}"),
                    TimeElapsedColumn(), console=Console(stderr=True), transient=True,
                )  # fmt: skip
                self._bars.start()
            self._open += 1
            return self._bars

    def _closed(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._bars.stop()
                self._bars = None


class _BarTask:
    def __init__(self, bar: Any, task_id: Any, total: float | None, unit: str) -> None:
        self._bar, self._id, self._total, self._unit = bar, task_id, total, unit
        self._done, self._start = 0.0, time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        state = describe(self._done, self._total, self._unit, time.monotonic() - self._start)
        self._bar.update(self._id, completed=self._done, state=state)


def for_stream(stream: TextIO | None = None) -> Progress:
    """The reporter that suits standard error: live on a terminal, plain lines elsewhere."""
    return Terminal() if (stream or sys.stderr).isatty() else Lines(stream)
