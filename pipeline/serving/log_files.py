"""Logs of what a supervisor runs: private files in a folder a recipe, kept from the starts before.

<store>/logs/<recipe>/triton.log      what Triton prints since it was started last
                      triton.log.1    before its last restart; up to .5
                      gateway.log
                      serve.log       what a detached supervisor says
"""

from __future__ import annotations

from pathlib import Path

KEPT = 5
_MODE = 0o700


def log_folder(logs: Path, name: str) -> Path:
    """Make the folder of a recipe's logs, which only its owner may read."""
    folder = logs / name
    folder.mkdir(parents=True, exist_ok=True, mode=_MODE)
    folder.chmod(_MODE)
    return folder


def rotate(file: Path) -> None:
    """Make way for a new log: `triton.log` becomes `triton.log.1`, and so on; the oldest goes.

    What is no regular file, such as a pipe or a terminal, stays.
    """
    if not file.is_file() or not file.stat().st_size:
        return
    for number in range(KEPT - 1, 0, -1):
        older = file.with_name(f"{file.name}.{number}")
        if older.exists():
            older.replace(file.with_name(f"{file.name}.{number + 1}"))
    file.replace(file.with_name(f"{file.name}.1"))
