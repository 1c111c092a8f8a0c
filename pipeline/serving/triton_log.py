"""Reading a server's log: its last lines, its errors, and their likely causes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.contracts.launching import known_causes

# "E1121 03:32:30.466668 8968 server.cc:241] "message"" -> message
_ERROR = re.compile(r"E\d{4} [\d:.]+ \d+ [\w.]+:\d+\] (?P<text>.*)")
# "[TensorRT-LLM][ERROR] message", "[trtllm] Failed to start engine: message", "error: creating server: message"
_ERROR_OF_OTHERS = re.compile(
    r"(?:\[1,\d+\]<std\w+>:\s*)?(?P<text>\[TensorRT-LLM\]\[ERROR\].*|\[trtllm\].*[Ff]ailed.*"
    r"|error: creating server:.*|(?:mpirun|prterun) (?:noticed|has detected|was unable).*"
    r"|There are not enough slots.*|All nodes which are allocated for this job.*)"
)
# Python's traceback follows, in one line.
_TRACE = "\\n\\nAt:"
_REPEATED = (
    "Failed to create instance", "has no loaded version", "that are not available or ambiguous",
    "error: creating server:",
)  # fmt: skip


def tail(path: Path, lines: int = 20) -> list[str]:
    """Return the last lines of a log; none if there is no log."""
    return list(deque(_lines(path), lines))


def errors(path: Path, limit: int = 5, *, noise: Sequence[str] = ()) -> list[str]:
    """List the distinct error messages of a log, in order, without time, place and traceback.

    Args:
        limit: Largest number of messages.
        noise: Words of lines that the log calls errors though nothing is wrong.
    """
    messages: dict[str, None] = {}
    for line in _lines(path):
        match = _ERROR.match(line) or _ERROR_OF_OTHERS.match(line)
        if match and not any(word in match["text"] for word in noise):
            text = match["text"].partition(_TRACE)[0].replace("\\n", " ")
            messages[" ".join(text.strip('"').split())] = None
    own = [text for text in messages if not any(phrase in text for phrase in _REPEATED)]
    return (own or list(messages))[:limit]


def contains(path: Path, phrases: Sequence[str]) -> bool:
    """Tell whether the log holds one of the phrases."""
    return bool(phrases) and any(phrase in line for line in _lines(path) for phrase in phrases)


def causes(path: Path, *, noise: Sequence[str] = ()) -> list[str]:
    """List the likely causes of a failure, by known phrases in a log, each with its remedy."""
    known = known_causes()
    likely: dict[str, None] = {}
    for line in _lines(path):
        if any(word in line for word in noise):
            continue
        for cause in known:
            if cause.pattern.search(line):
                likely[f"{cause.meaning}: {cause.fix}"] = None
    return list(likely)


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip()
