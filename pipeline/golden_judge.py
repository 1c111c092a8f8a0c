"""Judges answers to golden questions, those with an expression or a schema in a process that may be ended.

    python -m pipeline.golden_judge        reads [question, answer] lines of JSON, writes what is wrong or null

Expressions of Python may take time that doubles with each character of the answer (`(a+)+$`), and nothing interrupts
them: the kernel ends the process when it has used its processor time, and the answer counts as wrong.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

from pipeline.golden_questions import GoldenQuestion

_CPU_S = 5.0  # of one answer


class AnswerJudge:
    """A judge of answers, as a context. The process is made for the first answer that needs it."""

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
            what = "expression" if question.regex is not None else "schema"
            shown = "" if question.regex is None else f" {question.regex!r}"
            return f"cannot be judged: its {what}{shown} took more than {self._cpu_s:g} s of processor time"
        return f"cannot be judged: the process that does ended with exit code {process.returncode}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.golden_judge", str(self._cpu_s)],
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
        given = {name: value for name, value in question.items() if value is not None}
        fault = GoldenQuestion.model_validate_json(json.dumps(given)).fault(answer)
        print(json.dumps(fault), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
