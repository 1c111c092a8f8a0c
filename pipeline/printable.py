"""Text of strangers in logs and on terminals: what could move the cursor, hide text or begin a line of its own is
written out, as Python writes it.

That is control characters (C0, DEL, C1), what changes the direction of text, and separators of lines and paragraphs;
see Unicode's Technical Report 36 and CVE-2021-42574. Joiners, which scripts and emoji need, stay.
"""

from __future__ import annotations

import json
import logging
import re
from textwrap import indent
from typing import Any

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def printable(text: str, *, lines: bool = True, colours: bool = False) -> str:
    """Write out the characters of a text that do not belong on a terminal.

    Args:
        lines: Whether line feeds and tabs stay.
        colours: Whether escape sequences for colours stay, where the text has been made by rich.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    if text.isprintable() and not _CONTROL.search(text):
        return text
    if colours:
        parts = _COLOUR.split(text)
        kept = [*_COLOUR.findall(text), ""]
        return "".join(
            printable(part, lines=lines) + colour for part, colour in zip(parts, kept, strict=True)
        )
    kept_too = "\n\t" if lines else ""
    return _CONTROL.sub(lambda match: match[0] if match[0] in kept_too else _written_out(match[0]), text)


def json_text(value: Any, **options: Any) -> str:
    """Write a value as JSON that may be shown on a terminal, with other letters as they are.

    Args:
        options: Further options of `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    # Line feeds come from `indent`; in strings they are written out already.
    return _CONTROL.sub(lambda match: "\n" if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text)


class PrintableFormatter(logging.Formatter):
    """Formats lines of a log for people: one line a record, and below it the traceback if there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without what follows it."""
        return printable(super().formatMessage(record), lines=False)

    def formatException(self, ei: Any) -> str:
        """Return the traceback."""
        # Below its record, so that no line of it looks like one.
        return indent(printable(super().formatException(ei)), "  ")


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
