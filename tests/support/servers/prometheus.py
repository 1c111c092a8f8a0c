"""Prometheus and promtool."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers.install import installed


def prometheus_program(name: str) -> Path:
    """The path of `prometheus` or `promtool`."""
    return installed("prometheus") / "usr/bin" / name


def promtool(*words: str, folder: Path | None = None, page: str | None = None) -> tuple[int, str]:
    """Run promtool on files of a folder, or on a page that it reads.

    Returns:
        Its exit status, and all that it printed.
    """
    command: Sequence[str] = (str(prometheus_program("promtool")), *words)
    done = subprocess.run(
        command, cwd=folder, input=page, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr
