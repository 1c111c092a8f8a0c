"""Programs of a test's choice on PATH: they answer, fail or hang as it says."""

from __future__ import annotations

import sys
from pathlib import Path

HANGS = "while True: time.sleep(60)"


def put_tool(
    folder: Path, name: str, says: str = "", *, complains: str = "", code: int = 0, does: str = ""
) -> Path:
    """A program in `folder`. `does`: Python that it runs first, such as HANGS, with `arguments` at hand."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(
        f"#!{sys.executable} -IS\n"
        "import os, subprocess, sys, time\n"
        "arguments = sys.argv[1:]\n"
        f"{does}\n"
        f"sys.stdout.write({says!r})\nsys.stderr.write({complains!r})\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    return program
