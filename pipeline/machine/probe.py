"""Asking programs that may hang or fail, and several at once, within a time that is kept whatever they do.

A driver that is stuck leaves `nvidia-smi` in a state in which not even SIGKILL ends it. So nothing here waits for a
process that was killed, or for a thread that is late: threads are daemons, and what they would have said is replaced by
a reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_DYING_S = 0.2  # after SIGKILL


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Output of a program, or the reason why there is none."""

    text: str = ""  # standard output
    problem: str = ""  # why the text is not to be had; empty if it is
    late: bool = False  # because it took too long

    @property
    def lines(self) -> list[str]:
        """Standard output, line by line."""
        return self.text.splitlines()


def run_command(
    command: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None
) -> CommandOutput:
    """Run a program that only reads. It and all that it started are gone afterwards, if they can be ended at all."""
    name = command[0].rpartition("/")[2]
    program = shutil.which(command[0])
    if program is None:
        return CommandOutput(problem=f"there is no {name} on PATH")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        return CommandOutput(problem=f"{name} cannot be run: {error.strerror or error}")
    try:
        text, complaint = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return CommandOutput(problem=f"{name} does not answer within {round(deadline_s, 1):g} s", late=True)
    if process.returncode:
        last = _last_words(complaint) or _last_words(text) or f"exit code {process.returncode}"
        return CommandOutput(problem=f"{name} failed: {last}")
    return CommandOutput(text)


def _last_words(text: str) -> str:
    """The last three lines that are not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-3:])


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DYING_S)
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None, "it was started with pipes"
        pipe.close()


@dataclass(frozen=True, slots=True)
class ProbeTimeout:
    """Stands in for the answer of a probe that took too long."""

    reason: str


def at_once(probes: Mapping[str, Callable[[], Any]], deadline_s: float) -> dict[str, Any]:
    """Run all probes at the same time, and map each name to its answer, or to `ProbeTimeout` if it took longer.

    An exception of a probe is raised here: probes put expected failures into their answers.
    """
    return begin(probes, deadline_s)()


def begin(probes: Mapping[str, Callable[[], Any]], deadline_s: float) -> Callable[[], dict[str, Any]]:
    """Start the probes of `at_once`, and return a function that waits for their answers until the deadline."""
    answers: dict[str, Any] = {}
    raised: dict[str, BaseException] = {}
    threads = {
        name: threading.Thread(target=_answer, args=(name, probe, answers, raised), name=name, daemon=True)
        for name, probe in probes.items()
    }
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + deadline_s

    def finish() -> dict[str, Any]:
        for name, thread in threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if name in raised:
                raise raised[name]
        late = ProbeTimeout(f"no answer within {deadline_s:g} s")
        return {name: answers.get(name, late) for name in probes}

    return finish


def _answer(
    name: str, probe: Callable[[], Any], answers: dict[str, Any], raised: dict[str, BaseException]
) -> None:
    try:
        answers[name] = probe()
    except BaseException as error:  # raised again in the thread that waits
        raised[name] = error
