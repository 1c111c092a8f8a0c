"""Where a JSON object ends in text that comes piece by piece."""

from __future__ import annotations


class ObjectScan:
    """Fed with the text of an object from its first brace on."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """How much of the next piece belongs to the object; None if all of it does and more is to come.

        >>> scan = ObjectScan()
        >>> scan.end('{"a": "}'), scan.end('"} rest')
        (None, 2)
        """
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a mark, with the white space before them.

    >>> held_back("so <tool", ("<tool_call>",))
    6
    """
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    kept = text[: len(text) - most]
    return most + len(kept) - len(kept.rstrip())
