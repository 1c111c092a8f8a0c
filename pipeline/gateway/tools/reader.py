"""Reads calls of tools out of an answer, while it comes. What is no call stays text, character for character.

Arguments are handed on as they come where the call names the tool first, as models are taught to; otherwise when the
call is complete. After `open` every well-formed call is one; without it, only that of a tool that the request names.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.gateway.tools.call_parsers import Found, NotYet, find
from pipeline.gateway.tools.dialect import Dialect
from pipeline.gateway.tools.parts import Arguments, Call, Part, Text
from pipeline.gateway.tools.scanning import ObjectScan, held_back

_BETWEEN = " \t\r\n,;[]"  # what stands between two calls


class CallReader:
    """One answer. `feed` it with each chunk, and `end` it once."""

    def __init__(
        self, dialect: Dialect, tools: Sequence[Mapping[str, Any]], *, most: int | None = None
    ) -> None:
        """`most`: calls that are read; further ones are left out."""
        self.calls = 0
        self._dialect, self._most = dialect, most
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._buffer = ""
        self._passed = ""  # since calls may have begun: text after all if none comes
        self._begun = False  # something but white space has come
        self._marked = False  # these calls stand after `open`
        self._arguments = self._rest = ObjectScan()
        self._closing = False
        self._state: Callable[[], Iterator[Part] | None] = self._text

    def feed(self, text: str) -> list[Part]:
        """What a chunk makes certain."""
        self._buffer += text
        parts: list[Part] = []
        while (step := self._state()) is not None:
            parts += step
        return [part for part in parts if not isinstance(part, Text) or part.text]

    def end(self) -> list[Part]:
        """What is left when nothing more comes."""
        rest = self._passed + self._buffer if self._state in (self._text, self._between) else ""
        self._buffer = self._passed = ""
        return [Text(rest)] if rest and not (self.calls and not rest.strip(_BETWEEN)) else []

    def _text(self) -> Iterator[Part] | None:
        """Outside of calls."""
        mark = self._dialect.open
        if not self._begun:
            start = self._buffer.lstrip()
            if not start:
                return None
            if mark and len(start) < len(mark) and mark.startswith(start):
                return None
            if not (mark and start.startswith(mark)) and (bare := self._bare(start)) is not False:
                if bare is None:
                    return None
                self._begun, self._marked, self._state = True, False, self._between
                return iter(())
            self._begun = True
        at = self._buffer.find(mark) if mark else -1
        if mark and at >= 0:
            text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            said = text.rstrip()
            self._passed, self._marked, self._state = text[len(said) :] + mark, True, self._between
            return iter((Text(said),))
        kept = held_back(self._buffer, (mark,)) if mark else 0
        text, self._buffer = (
            self._buffer[: len(self._buffer) - kept],
            self._buffer[len(self._buffer) - kept :],
        )
        return iter((Text(text),)) if text else None

    def _bare(self, start: str) -> bool | None:
        """Whether an answer begins with a call that has no mark; None if that cannot be told yet."""
        bare = self._dialect.bare
        if bare is None:
            return False
        if bare != "name":
            return start.startswith(bare) or (None if bare.startswith(start) else False)
        names = [f"{name}{{" for name in self._tools]
        if any(start.replace(" ", "").startswith(name) for name in names):
            return True
        return None if any(name.startswith(start) for name in names) else False

    def _between(self) -> Iterator[Part] | None:
        """Where a call may begin, or the calls end."""
        marks = [mark for mark in (self._dialect.close, self._dialect.open) if mark]
        at = 0
        while at < len(self._buffer) and self._buffer[at] in _BETWEEN:
            if any(self._buffer.startswith(mark[: len(self._buffer) - at], at) for mark in marks):
                break
            at += 1
        rest = self._buffer[at:]
        for mark in marks:
            if rest.startswith(mark):
                return self._mark(mark, at + len(mark))
            if mark.startswith(rest):
                return None
        found = find(self._dialect.form, rest, self._tools)
        if isinstance(found, NotYet):
            return None
        if isinstance(found, Found) and (self._marked or found.name in self._tools):
            return self._call(found, at)
        return self._no_call()

    def _mark(self, mark: str, end: int) -> Iterator[Part]:
        if self._passed or mark == self._dialect.open:
            self._passed += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if mark == self._dialect.close:
            text, self._passed, self._state = self._passed, "", self._text
            return iter((Text(text),))
        self._marked = True
        return iter(())

    def _no_call(self) -> Iterator[Part]:
        """What stands here is text; so is what led to it, unless a call was read from there."""
        text, self._passed, self._state = self._passed, "", self._text
        if text:
            return iter((Text(text),))
        size = max(1, len(self._buffer) - len(self._buffer.lstrip()))
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return iter((Text(text),))

    def _call(self, found: Found, start: int) -> Iterator[Part]:
        self._passed = ""
        self._buffer = self._buffer[start + found.used :]
        index, self.calls = self.calls, self.calls + 1
        first = Call(index, f"call_{secrets.token_hex(12)}", found.name)
        if found.arguments is not None:
            return self._kept(first, Arguments(index, found.arguments))
        self._arguments, self._closing = ObjectScan(), found.closing
        self._state = self._in_arguments
        return self._kept(first)

    def _in_arguments(self) -> Iterator[Part] | None:
        if not self._buffer:
            return None
        end = self._arguments.end(self._buffer)
        piece, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = self._after_arguments if self._closing else self._between
            self._rest = ObjectScan()
            self._rest.end("{")
        return self._kept(Arguments(self.calls - 1, piece))

    def _after_arguments(self) -> Iterator[Part] | None:
        """What is left of the object around the arguments: nothing, as a rule."""
        end = self._rest.end(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return None
        self._state = self._between
        return iter(())

    def _kept(self, *parts: Part) -> Iterator[Part]:
        return iter(() if self._most is not None and self.calls > self._most else parts)
