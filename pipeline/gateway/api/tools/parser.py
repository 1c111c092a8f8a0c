"""Parses tool calls out of an answer while it streams. What is no call stays text, character for character.

Arguments are passed on as they come if the call names the tool first, as models are trained to; otherwise once the call
is complete. A call of a tool that the request does not offer is no call. A call that is cut off before its arguments
begin is left out, and is no text either.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.gateway.api.tools.dialects import (
    Incomplete,
    JsonObjectScanner,
    ParsedCall,
    ToolDialect,
    parse_call,
)

_BETWEEN = " \t\r\n,;[]"  # characters between two calls
# How calls in JSON begin, without white space, up to the tool's name.
_JSON_STARTS = ('{"name":"', '{"type":"function","name":"')
_JSON_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)("?)')


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text outside of all calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Beginning of a call."""

    index: int  # counts the calls of an answer from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """A piece of the arguments of call `index`: JSON, as the model wrote it."""

    index: int
    text: str


Part = TextPart | CallPart | ArgumentsPart


class ToolCallParser:
    """Parser of one answer, a state machine: `feed` it every chunk, then `end` it once."""

    def __init__(
        self, dialect: ToolDialect, tools: Sequence[Mapping[str, Any]], *, max_calls: int | None = None
    ) -> None:
        """`tools` are as OpenAI writes them; calls beyond `max_calls` are left out."""
        self.calls = 0
        self._dialect, self._max_calls = dialect, max_calls
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._buffer = ""
        self._passed = ""  # read since a call may have begun; text after all if none comes
        self._begun = False  # whether anything but white space has come
        self._marked = False  # whether these calls stand after `open`
        self._arguments = self._rest = JsonObjectScanner()
        self._closing = False
        self._state: Callable[[], Iterator[Part] | None] = self._text

    def feed(self, text: str) -> list[Part]:
        """Parse a chunk, and return the parts that it completes."""
        self._buffer += text
        parts: list[Part] = []
        while (step := self._state()) is not None:
            parts += step
        return [part for part in parts if not isinstance(part, TextPart) or part.text]

    def end(self, *, cut: bool = False) -> list[Part]:
        """Return what is left when the answer is over.

        Args:
            cut: whether the answer was cut off at its limit of tokens. The beginning of a call is then left out.
        """
        rest = self._passed + self._buffer if self._state in (self._text, self._between) else ""
        if cut and self._ends_in_beginning():
            rest = ""
        self._buffer = self._passed = ""
        return [TextPart(rest)] if rest and not (self.calls and not rest.strip(_BETWEEN)) else []

    def _ends_in_beginning(self) -> bool:
        """Whether what is left of a cut answer begins a call."""
        if self._state == self._text:
            # Nothing else is held back. A single character is more likely text.
            return len(self._buffer.strip()) > 1
        rest = self._buffer.lstrip(_BETWEEN)
        marks = (self._dialect.close, self._dialect.open)
        if (
            self._marked
            or self._dialect.open is None
            or any(mark and mark.startswith(rest) for mark in marks)
        ):
            return True
        if self._dialect.form != "json":
            return self._dialect.form == "xml" or any(tool.startswith(rest) for tool in self._tools)
        if (name := _JSON_NAME.search(rest)) is not None:
            return any(tool == name[1] if name[2] else tool.startswith(name[1]) for tool in self._tools)
        compact = "".join(rest.split())
        return any(start.startswith(compact) for start in _JSON_STARTS)

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
            before = text.rstrip()
            self._passed, self._marked, self._state = text[len(before) :] + mark, True, self._between
            return iter((TextPart(before),))
        end = len(self._buffer) - (held_back(self._buffer, mark) if mark else 0)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return iter((TextPart(text),)) if text else None

    def _bare(self, start: str) -> bool | None:
        """Whether an answer begins with a call that has no mark; None if more text is needed to tell."""
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
                return self._pass_mark(mark, at + len(mark))
            if mark.startswith(rest):
                return None
        call = parse_call(self._dialect.form, rest, self._tools)
        if isinstance(call, Incomplete):
            return None
        if isinstance(call, ParsedCall) and call.name in self._tools:
            return self._begin_call(call, at)
        return self._no_call()

    def _pass_mark(self, mark: str, end: int) -> Iterator[Part]:
        if self._passed or mark == self._dialect.open:
            self._passed += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if mark == self._dialect.close:
            text, self._passed, self._state = self._passed, "", self._text
            return iter((TextPart(text),))
        self._marked = True
        return iter(())

    def _no_call(self) -> Iterator[Part]:
        """Take what stands here as text, and what led to it, unless a call was parsed from there."""
        text, self._passed, self._state = self._passed, "", self._text
        if text:
            return iter((TextPart(text),))
        size = max(1, len(self._buffer) - len(self._buffer.lstrip()))
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return iter((TextPart(text),))

    def _begin_call(self, call: ParsedCall, start: int) -> Iterator[Part]:
        self._passed = ""
        self._buffer = self._buffer[start + call.used :]
        index, self.calls = self.calls, self.calls + 1
        first = CallPart(index, f"call_{secrets.token_hex(12)}", call.name)
        if call.arguments is not None:
            return self._kept(first, ArgumentsPart(index, call.arguments))
        self._arguments, self._closing = JsonObjectScanner(), call.closing
        self._state = self._in_arguments
        return self._kept(first)

    def _in_arguments(self) -> Iterator[Part] | None:
        if not self._buffer:
            return None
        end = self._arguments.end(self._buffer)
        piece, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = self._after_arguments if self._closing else self._between
            self._rest = JsonObjectScanner()
            self._rest.end("{")
        return self._kept(ArgumentsPart(self.calls - 1, piece))

    def _after_arguments(self) -> Iterator[Part] | None:
        """The rest of the object around the arguments: a brace, as a rule."""
        end = self._rest.end(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return None
        self._state = self._between
        return iter(())

    def _kept(self, *parts: Part) -> Iterator[Part]:
        return iter(() if self._max_calls is not None and self.calls > self._max_calls else parts)


def held_back(text: str, mark: str) -> int:
    """Count the characters at the end of a text that may begin a mark, with the white space before them.

    >>> held_back("so <tool", "<tool_call>")
    6
    """
    size = overlap(text, mark)
    kept = text[: len(text) - size]
    return size + len(kept) - len(kept.rstrip())


def overlap(text: str, sequence: str) -> int:
    """Length of the longest end of a text with which a sequence begins, or that is one.

    >>> overlap("so ST", "STOP"), overlap("so STOP", "STOP")
    (2, 4)
    """
    sizes = range(min(len(sequence), len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(sequence[:size])), 0)
