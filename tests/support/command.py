"""A long-running command of ours as a process: what it says is read from a file while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.waiting import wait_for


def pasted(line: str) -> list[str]:
    """What a shell runs when a command that was printed is pasted into it: `pipeline …`, by this Python."""
    return ["bash", "-c", f'pipeline() {{ exec "$0" -m pipeline.cli.main "$@"; }}; {line}', sys.executable]


class Command:
    """Ended by `with`, whatever happens."""

    def __init__(
        self, arguments: list[str], log: Path, environment: Mapping[str, str], folder: Path | None = None
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | environment,
            )

    @property
    def said(self) -> str:
        """All that it printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Until it said this."""
        wait_for(lambda: text in self.said or self.process.poll() is not None, text, timeout_s)
        assert text in self.said, self.said

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
