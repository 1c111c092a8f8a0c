"""Reads the arguments of a call as they come, and what ends them, in each form of dialects.yaml.

A reader takes what is left of an answer again and again, as it grows:

    read(text)          -> JSON to pass on, characters that were read, whether the call is over
    finish(text, cut=)  -> the rest of the JSON, when the answer is over; none of what a limit of tokens cut off
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pipeline.gateway.api.tools.dialects import (
    Scanner,
    ToolDialect,
    marks_of,
)
from pipeline.gateway.api.tools.schemas import parameter_schemas, parameters_of, schema_types, typed_value

_SPACE = re.compile(r"\s*")
_JUNK = re.compile(r"[^<{]*")
_KEY = re.compile(r"""\s*["']?([^"'<>\n]{1,256})["']?(?:\s+(?:string|type)=["']?(\w+)["']?)?\s*""")
_MAX_KEY = 400  # characters of a key with all that stands around it
_WORD, _MAX_WORD = re.compile(r"[^\s,:{}\[\]<][^,:{}\[\]<]*"), 1000  # without quotation marks


class Step(NamedTuple):
    """JSON to pass on, characters that were read, and whether the call is over."""

    json: str
    used: int
    over: bool = False


class ArgumentReader(Protocol):
    """Reader of one call."""

    def read(self, text: str) -> Step:
        """Read on; `text` begins where the last step ended."""

    def finish(self, text: str, *, cut: bool) -> str:
        """Return the last JSON, of an answer that is over."""


def argument_reader(dialect: ToolDialect, function: Mapping[str, Any]) -> ArgumentReader:
    """Make the reader of a call whose head was read."""
    if dialect.form == "unquoted":
        return UnquotedArguments(dialect)
    return XmlArguments(dialect, function) if dialect.form == "xml" else JsonArguments(dialect)


class JsonArguments:
    """Arguments in JSON, passed on as they are; malformed ones are passed on up to the end of the call."""

    def __init__(self, dialect: ToolDialect) -> None:
        self._encloses = dialect.form in (
            "json",
            "python",
        )  # an object around the arguments, which has to end, too
        self._hard, self._ends = dialect.hard, dialect.ends
        self._marks = marks_of((*dialect.ends, *dialect.closes, *dialect.opens, dialect.head[0]))
        self._stage = "start"
        self._is_object = True
        self._scanner = Scanner()

    def read(self, text: str) -> Step:
        at = 0
        if self._stage == "start":
            at = _space_end(text, 0)
            if at == len(text):
                return Step("", at)
            self._is_object, self._stage = text[at] == "{", "arguments"
        if self._stage == "rest":
            return self._rest("", text, at)
        start = at
        while True:
            mark = self._marks.search(text, at)
            limit = mark.start() if mark else len(text) - self._marks.partial(text)
            end = self._scanner.end(text[at:limit]) if self._is_object else None
            if end is not None:
                self._stage, self._scanner = "rest", Scanner(depth=1)
                return self._rest(text[start : at + end], text, at + end)
            at = max(at, limit)
            if mark is None:
                return Step(text[start:at], at)
            if self._hard or not self._is_object or not self._scanner.quote:
                return Step(text[start:at], mark.end() if mark[0] in self._ends else at, over=True)
            self._scanner.end(mark[0])
            at = mark.end()

    def _rest(self, read: str, text: str, at: int) -> Step:
        """Skip what stands between the arguments and the end of the call: a brace, or the end of a block of code."""
        if not self._encloses and not self._ends:
            return Step(read, at, over=True)
        mark = self._marks.search(text, at)
        limit = mark.start() if mark else max(at, len(text) - self._marks.partial(text))
        if self._encloses and (end := self._scanner.end(text[at:limit])) is not None:
            return Step(read, at + end, over=True)
        if mark is None:
            return Step(read, limit)
        return Step(read, mark.end() if mark[0] in self._ends else limit, over=True)

    def finish(self, text: str, *, cut: bool) -> str:
        if self._stage != "arguments":
            return ""
        return text[: len(text) - self._marks.partial(text)] if cut else text


class XmlArguments:
    """Parameters in elements of their own. A text is passed on as it comes, all else when it is complete.

    An end of a value counts if a parameter, or the end of the call, follows: so a value may hold what looks like one.
    """

    def __init__(self, dialect: ToolDialect, function: Mapping[str, Any]) -> None:
        self._dialect = dialect
        self._schemas, self._root = parameter_schemas(function), parameters_of(function)
        self._tail, self._inner = dialect.ends[0], JsonArguments(dialect)
        self._outer = tuple(filter(None, (*dialect.closes, *dialect.opens, dialect.head[0])))
        self._after_value = (dialect.key[0], self._tail, *dialect.closes)
        # What else ends a value: the next parameter, or the call, where the end of the value was forgotten.
        self._next = f"\n{dialect.key[0]}" if dialect.trim and not dialect.exact else ""
        tail = self._tail if dialect.closes and not dialect.exact else ""
        self._marks = marks_of((dialect.value[1], self._next, tail))
        self._stage = "between"
        self._empty = True  # whether no parameter was passed on
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._streams = True  # whether the value is a text, and passed on as it comes
        self._begun = False  # whether some of the value was read
        self._pieces: list[str] = []  # of a value that is no text

    def read(self, text: str) -> Step:
        stages = {"between": self._between, "value": self._in_value, "json": self._in_json}
        out, at = list[str](), 0
        while True:
            stage = self._stage
            step = stages[stage](text, at)
            out.append(step.json)
            if step.over or (step.used == at and stage == self._stage):
                return step._replace(json="".join(out))
            at = step.used

    def _in_json(self, text: str, at: int) -> Step:
        step = self._inner.read(text[at:])
        self._empty = self._empty and not step.json
        return step._replace(used=at + step.used)

    def _between(self, text: str, start: int) -> Step:
        """Before a parameter, or the end of the call."""
        at, before = _space_end(text, start), self._dialect.key[0]
        if text.startswith(self._tail, at):
            return Step(self._close(), at + len(self._tail), over=True)
        if text.startswith(before, at):
            return self._read_key(text, at)
        if text.startswith("{", at) and self._empty:
            self._stage = "json"
            return self._in_json(text, at)
        if any(text.startswith(mark, at) for mark in self._outer):
            return Step(self._close(), at, over=True)
        if any(mark.startswith(text[at:]) for mark in (before, self._tail, *self._outer)):
            return Step("", at)
        end = _JUNK.match(text, at + 1)
        return Step("", end.end() if end else at + 1)

    def _read_key(self, text: str, start: int) -> Step:
        before, after = self._dialect.key
        at = start + len(before)
        end, opening = text.find(after, at), self._dialect.value[0]
        if end < 0:
            incomplete = len(text) - at < _MAX_KEY and "\n" not in text[at:]
            return Step("", start if incomplete else at)
        key, at = _KEY.fullmatch(text, at, end), end + len(after)
        if opening:
            value = _space_end(text, at)
            if opening.startswith(text[value : value + len(opening)]) and len(text) < value + len(opening):
                return Step("", start)
            if not text.startswith(opening, value):
                return Step("", at)
            at = value + len(opening)
        if key is None:
            return Step("", at)
        self._key, self._types = key[1], schema_types(self._schemas.get(key[1]), self._root)
        if not self._types:
            self._types = frozenset({"string"} if key[2] in (None, "true", "string") else ())
        self._streams, self._begun, self._pieces, self._stage = self._types == {"string"}, False, [], "value"
        return Step("", at)

    def _in_value(self, text: str, start: int) -> Step:
        at = start
        while True:
            mark = self._marks.search(text, at)
            if mark is None:
                end = max(start, len(text) - self._marks.partial(text))
                if self._dialect.trim and end > start and text[end - 1] == "\n":
                    end -= 1
                return Step(self._take(text[start:end]), end)
            over = mark[0] == self._next or self._dialect.exact or self._ends_here(text, mark)
            if over is None:
                # Nothing is lost by waiting: a few characters tell.
                end = mark.start() - (self._dialect.trim and text[max(start, mark.start() - 1)] == "\n")
                return Step(self._take(text[start : max(start, end)]), max(start, end))
            if over:
                used = mark.end() if mark[0] == self._dialect.value[1] else mark.start()
                return Step(self._close_value(text[start : mark.start()]), used)
            at = mark.end()

    def _ends_here(self, text: str, mark: re.Match[str]) -> bool | None:
        """Whether what may end a value does; None if more text is needed to tell."""
        expected = self._after_value if mark[0] == self._dialect.value[1] else self._outer
        after = _space_end(text, mark.end())
        if any(text.startswith(follows, after) for follows in expected):
            return True
        ahead = text[after : after + 64]
        return None if any(follows.startswith(ahead) for follows in expected) else False

    def _take(self, text: str) -> str:
        if not text:
            return ""
        if not self._begun and self._dialect.trim:
            text = text.removeprefix("\n")
        first, self._begun = not self._begun, True
        if not self._streams:
            self._pieces.append(text)
            return ""
        return (f'{self._open()}"' if first else "") + json.dumps(text, ensure_ascii=False)[1:-1]

    def _close_value(self, text: str) -> str:
        if self._dialect.trim:
            text = text.removesuffix("\n") if self._begun else text.removeprefix("\n").removesuffix("\n")
        self._stage = "between"
        if self._streams:
            begun = self._begun
            self._begun = True
            return ("" if begun else f'{self._open()}"') + json.dumps(text, ensure_ascii=False)[1:]
        return self._open() + typed_value("".join((*self._pieces, text)), self._types)

    def _open(self) -> str:
        first, self._empty = self._empty, False
        return f"{'{' if first else ', '}{json.dumps(self._key, ensure_ascii=False)}: "

    def _close(self) -> str:
        return "{}" if self._empty else "}"

    def finish(self, text: str, *, cut: bool) -> str:
        if self._stage == "json":
            return self._inner.finish(text, cut=cut)
        if self._stage == "between":
            return "" if cut else self._close()
        mark = self._marks.search(text)
        remaining = text[: mark.start() if mark else len(text) - self._marks.partial(text)]
        if cut:
            remaining = remaining.removesuffix("\n") if self._dialect.trim else remaining
            return self._take(remaining) if self._streams else ""
        return self._close_value(remaining) + self._close()


class UnquotedArguments:
    """Arguments like JSON, with keys without quotation marks, and marks of their own around texts.

    {city:<|"|>Oslo<|"|>,days:3}      {"city": "Oslo", "days": 3}
    """

    def __init__(self, dialect: ToolDialect) -> None:
        self._quote, self._quotes = dialect.value[0], marks_of(dialect.value[:1])
        self._ends = dialect.ends
        self._marks = marks_of((*dialect.ends, dialect.head[0]))
        self._open: list[str] = []  # brackets that are to be closed, the innermost last
        self._in_text = self._over = False
        self._needs_value = False  # whether the value of a key is still to come

    def read(self, text: str) -> Step:
        out, at = list[str](), 0
        while at < len(text):
            if self._over:
                mark = self._marks.search(text, at)
                if mark is None:
                    return Step("".join(out), len(text) - self._marks.partial(text[at:]))
                return Step("".join(out), mark.end() if mark[0] in self._ends else mark.start(), over=True)
            if self._in_text:
                end = text.find(self._quote, at)
                stop = end if end >= 0 else max(at, len(text) - self._quotes.partial(text))
                out.append(json.dumps(text[at:stop], ensure_ascii=False)[1:-1])
                if end < 0:
                    return Step("".join(out), stop)
                out.append('"')
                self._in_text, at = False, end + len(self._quote)
                continue
            used = self._outside(out, text, at)
            if not used and not self._over:
                break
            at += used
        return Step("".join(out), at)

    def _outside(self, out: list[str], text: str, at: int) -> int:
        """Read on outside of texts; return how many characters, 0 if more are needed to tell."""
        char, quote = text[at], text[at : at + len(self._quote)]
        if quote == self._quote:
            out.append('"')
            self._in_text, self._needs_value = True, False
            return len(self._quote)
        if any(mark.startswith(text[at:]) for mark in (self._quote, *self._ends)):
            return 0
        if any(text.startswith(mark, at) for mark in self._ends):
            out.append(self._close())
            self._over = True
            return 0
        if word := _WORD.match(text, at):
            if word.end() == len(text) and len(word[0]) < _MAX_WORD:
                return 0
            out.append(self._word(word[0]))
            return len(word[0])
        if char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._needs_value = False
            out.append(char)
        elif char in "}]" and self._open and char == self._open[-1]:
            out.append(('""' if self._needs_value else "") + self._open.pop())
            self._over, self._needs_value = not self._open, False
        elif char in ",:":
            out.append(('"", ' if self._needs_value else ", ") if char == "," else ": ")
            self._needs_value = char == ":"
        return 1

    def _word(self, word: str) -> str:
        """A key, or a value that is no text."""
        is_key = bool(self._open) and self._open[-1] == "}" and not self._needs_value
        self._needs_value = False
        return json.dumps(word.strip(), ensure_ascii=False) if is_key else typed_value(word, frozenset())

    def _close(self) -> str:
        closed = ('"' if self._in_text else '""' if self._needs_value else "") + "".join(reversed(self._open))
        self._open, self._in_text, self._needs_value = [], False, False
        return closed

    def finish(self, text: str, *, cut: bool) -> str:
        if cut or self._over:
            return ""
        if self._in_text:
            return json.dumps(text, ensure_ascii=False)[1:-1] + self._close()
        word = _WORD.match(text)
        return (self._word(word[0]) if word else "") + self._close()


def _space_end(text: str, at: int) -> int:
    """Where white space that begins at a place ends."""
    space = _SPACE.match(text, at)
    return space.end() if space else at
