"""The server's log: its last lines, and what of it says why something failed."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

# "E1121 03:32:30.466668 8968 server.cc:241] "message"" -> message
_ERROR = re.compile(r"E\d{4} [\d:.]+ \d+ [\w.]+:\d+\] (?P<text>.*)")
_NOISE = ("Cuda", "CUDA")  # a server with CUDA says that this machine has none
_TRACE = "\\n\\nAt:"  # what follows is Python's traceback, in one line
_SAID_AGAIN = ("Failed to create instance", "has no loaded version", "that are not available or ambiguous")


def tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a log; none if there is no log."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, lines)]


def errors(path: Path, limit: int = 5) -> list[str]:
    """What the server called an error, in order: each once, without its time, its place and its traceback."""
    if not path.is_file():
        return []
    found: dict[str, None] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _ERROR.match(line)
        if match and not any(word in match["text"] for word in _NOISE):
            text = match["text"].partition(_TRACE)[0].replace("\\n", " ")
            found[" ".join(text.strip('"').split())] = None
    own = [text for text in found if not any(phrase in text for phrase in _SAID_AGAIN)]
    return (own or list(found))[:limit]
