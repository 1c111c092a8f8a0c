"""Parses an answer while it streams: what the model thinks, what it says, and which tools it calls.

One state machine reads all families of models by their entries in dialects.yaml. However an answer is cut into pieces,
the parts joined are the same. What is no call stays text, character for character, but for special tokens. Arguments
are passed on as they come, JSON as the model wrote it; parameters in elements of their own become JSON one by one. A
call of a tool that the request does not offer is no call. A call that is cut off before its arguments begin is left
out, and is no text either. White space between reasoning and text, and before a call, is part of neither.

Every character is looked at a bounded number of times, and only undecided text is kept.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.gateway.api.tools.arguments import ArgumentReader, argument_reader
from pipeline.gateway.api.tools.dialects import (
    MESSAGE,
    NONE,
    AnswerFormat,
    Incomplete,
    Scanner,
    begins_bare,
    marks_of,
    may_begin_call,
    read_head,
    read_python_arguments,
    read_whole_call,
)
from pipeline.gateway.api.tools.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from pipeline.gateway.api.tools.schemas import tool_by_arguments

_BETWEEN = " \t\r\n,;[]"  # characters between two calls
_START = "<|start|>"
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HEADERS = (_START, MESSAGE, "<|channel|>", "<|constrain|>", "to=")  # how headers begin
_MAX_HEADER = 1000  # characters
_PIECE = 4096  # characters at a time, so that what is left is never long

_State = Callable[[], bool]  # does a step; False if it needs more text


class AnswerParser:
    """Parser of one answer: `feed` it every chunk, then `end` it once.

    Attributes:
        calls: how many calls have begun.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_calls: int | None = None,
        prompt: str = "",
        begun: str = "",
    ) -> None:
        """
        Args:
            format: the model's.
            tools: tools that may be called, as OpenAI writes them.
            max_calls: calls beyond them are left out.
            prompt: text before the answer, which may have opened the reasoning, or a message of a channel.
            begun: beginning of the answer that stands in the prompt; its parts come with the first ones.
        """
        self.calls = 0
        self._format, self._max_calls = format, max_calls
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._dialect = dialect = (format.dialect or NONE) if tools or format.channels else NONE
        self._parts: list[Part] = []
        self._buffer = ""
        self._passed: list[str] = []  # read since a call may have begun; text after all if none comes
        self._begun = self._marked = False  # text has come; these calls stand after a mark
        self._kind: type[TextPart] | type[ReasoningPart] = TextPart
        self._last: type[Part] | None = None  # kind of the last part
        self._fresh = self._reasoned = False  # white space is left out now; the answer has reasoned
        self._empty = True  # whether the call has no arguments yet
        self._reader: ArgumentReader | None = None
        # Of a call that is read when it is complete.
        self._scanner, self._pieces, self._head, self._name = Scanner(), list[str](), "", ""
        reasoning = format.reasoning
        thinks = () if reasoning is None else (reasoning.open, reasoning.close)
        special = tuple(sorted(format.special.union(reasoning.hidden if reasoning else ())))
        self._starts = tuple(filter(None, (*dialect.opens, dialect.head[0])))
        self._special = marks_of(special).pattern
        self._marks = marks_of((*self._starts, *thinks, *special))
        self._ends = marks_of((*dialect.ends, *dialect.closes, *special))
        self._state = self._outer = self._text
        if format.channels:
            self._state = self._outer = self._header
            turn = prompt.rpartition(_START)[2]
            if turn.strip() != "assistant" and _START in prompt:
                self.feed(turn)
        elif reasoning is not None and prompt.rstrip().endswith(reasoning.open):
            self._think()
        if begun:
            self._parts = self.feed(begun)

    def feed(self, text: str) -> list[Part]:
        """Parse a chunk, and return the parts that it completes."""
        for at in range(0, len(text), _PIECE):
            self._buffer += text[at : at + _PIECE]
            while self._state():
                pass
        parts, self._parts = self._parts, []
        return parts

    def end(self, *, cut: bool = False) -> list[Part]:
        """Return what is left when the answer is over; `cut`: by its limit of tokens, so that it begins no call."""
        remaining = "".join([*self._passed, self._buffer])
        if self._state == self._in_arguments and self._reader is not None:
            self._argue(self._reader.finish(self._buffer, cut=cut))
        elif self._state == self._whole_call:
            remaining = self._head + "".join(self._pieces)
            self._say("" if cut and self._begins_call(remaining) else "".join([*self._passed, remaining]))
        elif self._state == self._header:
            self._say(remaining if self._is_plain() else "")
        elif not (self._state == self._between and self.calls and not remaining.strip(_BETWEEN)):
            # A mark alone is held back elsewhere. A single character is more likely text.
            left = self._buffer.strip()
            begins = self._begins_call(left) if self._state == self._between else len(left) > 1
            self._say(
                "" if cut and begins else remaining.rstrip() if self._kind is ReasoningPart else remaining
            )
        self._buffer, self._passed = "", []
        parts, self._parts = self._parts, []
        return parts

    def _begins_call(self, unread: str) -> bool:
        """Whether the unread end of a cut answer begins a call."""
        text, dialect = unread.lstrip(_BETWEEN), self._dialect
        marks = (*dialect.closes, *dialect.opens)
        if self._marked or not dialect.opens or any(mark.startswith(text) for mark in marks):
            return True
        return may_begin_call(dialect, text, self._tools)

    # What the model says and thinks.

    def _say(self, text: str) -> None:
        """Pass text on as the current kind of part, without special tokens."""
        text = self._special.sub("", text)
        if self._fresh:
            text = text.lstrip()
        if not text:
            return
        self._fresh, self._last = False, self._kind
        self._parts.append(self._kind(text))

    def _think(self) -> None:
        self._kind, self._fresh, self._begun, self._reasoned = ReasoningPart, True, True, True
        self._state = self._outer = self._think_on

    def _text(self) -> bool:
        """Parse text outside of calls and reasoning."""
        if not self._begun:
            if not (start := self._buffer.lstrip()):
                self._take(len(self._buffer) if len(self._buffer) > _PIECE else 0)
                return False
            marked = self._marks.search(start)
            if not (marked and marked.start() == 0):
                if self._marks.partial(start) == len(start):
                    return False
                if (bare := begins_bare(self._dialect, start, self._tools)) is not False:
                    if bare:
                        self._begun, self._marked, self._state = True, False, self._between
                    return bool(bare)
        mark = self._marks.search(self._buffer)
        if mark is None:
            end = self._marks.certain(self._buffer)
            self._take(end)
            self._begun = self._begun or end > 0
            return False
        return self._pass(mark)

    def _pass(self, mark: re.Match[str]) -> bool:
        """Take the text before a mark outside of calls."""
        reasoning, text = self._format.reasoning, mark[0]
        before = self._buffer[: mark.start()]
        if text in self._starts:
            return self._may_call(before, text)
        if reasoning and text == reasoning.open and not before.strip() and self._last is not TextPart:
            self._think()
        elif reasoning and text == reasoning.close and self._reasoned:
            self._say(before)
        else:
            shown = before if self._special.search(text) else before + text
            self._say(shown)
            self._begun = self._begun or bool(shown.strip())
        self._buffer = self._buffer[mark.end() :]
        return True

    def _think_on(self) -> bool:
        """Parse reasoning, which ends with its closing mark or a call."""
        reasoning, mark = self._format.reasoning, self._marks.search(self._buffer)
        assert reasoning is not None
        if mark is None:
            self._take(self._marks.certain(self._buffer))
            return False
        before, text = self._buffer[: mark.start()], mark[0]
        if text == reasoning.close:
            self._say(before.rstrip())
            self._kind, self._fresh = TextPart, True
            self._state = self._outer = self._text
        elif text in self._starts:
            return self._may_call(before, text)
        elif text != reasoning.open:
            self._say(before)
        elif before.strip() or self._last is ReasoningPart:
            self._say(before + text)
        self._buffer = self._buffer[mark.end() :]
        return True

    def _may_call(self, before: str, mark: str) -> bool:
        """Go on where a call may begin, after or at a mark."""
        self._say(kept := before.rstrip())
        used = len(before) + (len(mark) if mark in self._dialect.opens else 0)
        self._passed = [self._buffer[len(kept) : used]] if used > len(kept) else []
        self._buffer = self._buffer[used:]
        self._marked, self._begun, self._state = True, True, self._between
        return True

    def _take(self, size: int) -> None:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._say(text)

    # Channels.

    def _header(self) -> bool:
        """Parse the header of a channel's message."""
        if self._is_plain():
            self._kind, self._state, self._outer = TextPart, self._message, self._message
            return True
        at = self._buffer.find(MESSAGE)
        if at > _MAX_HEADER or (at < 0 and len(self._buffer) > _MAX_HEADER + len(MESSAGE)):
            self._buffer = self._buffer[_MAX_HEADER:]
            return True
        if at < 0:
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        header = header[header.rfind(_START) + 1 :]
        channel = _CHANNEL.search(header)
        named = channel.end() if channel else at  # where a call that is held names its tool
        recipient = _RECIPIENT.search(header, named if self._dialect.exact else 0)
        if recipient is not None and recipient[1] in self._tools:
            self._begin_call(recipient[1])
            return True
        self._kind = ReasoningPart if channel and channel[1] == "analysis" else TextPart
        if self._last is self._kind:
            self._parts.append(self._kind("\n"))
        self._fresh, self._state = True, self._message
        return True

    def _is_plain(self) -> bool:
        """Whether the answer goes on without a header: under guided decoding, or because the model left it out."""
        begun = self._buffer.lstrip()
        if "assistant".startswith(begun[:9]):
            begun = begun[9:].lstrip()
        return not any(begun.startswith(header) or header.startswith(begun) for header in _HEADERS)

    def _message(self) -> bool:
        """Parse a message of a channel."""
        mark = self._ends.search(self._buffer)
        if mark is None:
            self._take(self._ends.certain(self._buffer))
            return False
        ends, begins = mark[0] in self._dialect.ends, mark[0] in self._dialect.closes
        before = self._buffer[: mark.start()]
        self._say(before.rstrip() if ends or begins else before)
        self._buffer = self._buffer[mark.start() if begins else mark.end() :]
        self._state = self._header if ends or begins else self._message
        return True

    # Calls.

    def _between(self) -> bool:
        """Parse where a call may begin, or the calls end."""
        marks = (*self._dialect.closes, *self._dialect.opens)
        at = 0
        while at < len(self._buffer) and self._buffer[at] in _BETWEEN:
            if any(self._buffer.startswith(mark[: len(self._buffer) - at], at) for mark in marks):
                break
            at += 1
        text = self._buffer[at:]
        for mark in marks:
            if text.startswith(mark):
                self._pass_mark(mark, at + len(mark))
                return True
        if any(mark.startswith(text) for mark in marks):
            return False
        alone = self.calls and not self._marked and self._dialect.opens_each
        head = None if alone else read_head(self._dialect, text)
        if isinstance(head, Incomplete):
            return False
        if head is None:
            return self._no_call()
        objects = not head.name
        if objects or (self._dialect.form == "python" and text[0] != "{"):
            if head.name not in self._tools and not (objects or self._marked or self.calls):
                return self._no_call()
            self._passed += [self._buffer[:at]] if at else []
            self._buffer, self._head = text[head.used :], text[: head.used]
            self._pieces, self._name, self._state = [], head.name, self._whole_call
            self._scanner = Scanner() if objects else Scanner("\"'", depth=1)
            return True
        if head.name not in self._tools:
            return self._no_call()
        self._buffer = self._buffer[at + head.used :]
        self._begin_call(head.name)
        return True

    def _pass_mark(self, mark: str, end: int) -> None:
        if self._passed or mark in self._dialect.opens:
            self._passed.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if mark in self._dialect.closes:
            text, self._passed, self._state = "".join(self._passed), [], self._outer
            self._say(text)
        else:
            self._marked = True

    def _no_call(self) -> bool:
        """Take the text here as no call, with the marks before it unless a call was parsed after them."""
        text, self._passed, self._state = "".join(self._passed), [], self._outer
        before, at = self._dialect.head[0], len(self._buffer) - len(self._buffer.lstrip(_BETWEEN))
        if not text and before and self._buffer.startswith(before, at):
            size = at + len(before)
            text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._say(text)
        return True

    def _begin_call(self, name: str, arguments: str | None = None) -> None:
        """Begin a call, with its arguments if they are known."""
        index, self.calls = self.calls, self.calls + 1
        self._passed, self._empty, self._kind, self._begun = [], True, TextPart, True
        self._marked = self._marked and not self._dialect.opens_each
        if not self._format.channels:
            self._outer = self._text
        if self._keeps:
            self._parts.append(CallPart(index, f"call_{secrets.token_hex(12)}", name))
        self._last = CallPart
        if arguments is not None:
            self._argue(arguments)
            self._state = self._between
        else:
            self._reader, self._state = argument_reader(self._dialect, self._tools[name]), self._in_arguments

    @property
    def _keeps(self) -> bool:
        """Whether the answer may have one more call."""
        return self._max_calls is None or self.calls <= self._max_calls

    def _argue(self, text: str) -> None:
        """Pass a piece of arguments on."""
        self._empty = self._empty and not text
        if text and self._keeps:
            self._parts.append(ArgumentsPart(self.calls - 1, text))

    def _in_arguments(self) -> bool:
        assert self._reader is not None
        step = self._reader.read(self._buffer)
        self._argue(step.json)
        self._buffer = self._buffer[step.used :]
        if step.over:
            if self._empty:
                self._argue("{}")
            self._state = self._header if self._format.channels else self._between
        return step.over

    def _whole_call(self) -> bool:
        """Collect a call that is parsed once complete: Python, JSON with other order of keys, or unnamed."""
        end = self._scanner.end(self._buffer)
        self._pieces.append(self._buffer if end is None else self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        text = "".join(self._pieces)
        if self._head and not self._name and (name := tool_by_arguments(text, self._tools)):
            self._buffer = text + self._buffer
            self._begin_call(name)
            return True
        call: tuple[str, str | None] | None = (self._name, None)
        if not self._head:
            call = read_whole_call(text)
        elif text.endswith(")"):
            call = self._name, read_python_arguments(text[:-1])
        if call is not None and call[0] in self._tools and call[1] is not None:
            self._begin_call(*call)
            return True
        self._passed.append(self._head + text)
        # Further calls of the same list may follow.
        self._state = self._between
        return bool(self._head) or self._no_call()
