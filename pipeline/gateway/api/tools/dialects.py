"""How families of models write reasoning and calls of tools: data (dialects.yaml), and what reads heads and values."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.gateway.api.tools.schemas import MAX_LITERAL, read_object
from pipeline.models.chat_template import ChatTemplate
from pipeline.resources import parse_yaml

MESSAGE = "<|message|>"  # ends the header of a message of a channel
_KEYS = ("name", "type", "arguments", "parameters", "id", "function")
_FIRST_KEY = re.compile(r'\{\s*"(\w+)"')
# What may become the head of a call, or its first key.
_MAY_BE_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'(?:"\w*|"name"\s*(?::\s*(?:"[^"\\]*(?:"\s*(?:,\s*(?:"\w*(?:"\s*(?::\s*)?)?)?)?)?)?)?'
    r'|"type"\s*(?::\s*(?:"\w*(?:"\s*,?\s*)?)?)?)?$'
)
_MAX_HEAD = 600  # characters
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# A name with what may stand around it, in any form.
_RAW = re.compile(r"""[\w.:=/\[\]"'\s-]{0,300}""")
_PYTHON_NAMES = {"true": True, "false": False, "null": None}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reasoning(_Entry):
    """Entry of `reasoning` in dialects.yaml."""

    marks: tuple[str, ...]
    open: str
    close: str
    hidden: tuple[str, ...] = ()


class GuidedCalls(_Entry):
    """Form that guided decoding holds the calls of strict tools to; see dialects.yaml."""

    call: str
    parameter: str | None = None
    opens: str | None = None
    closes: str | None = None
    separator: str | None = None
    others: tuple[str, ...] = ()
    start: bool = False


class ToolDialect(_Entry):
    """Entry of `dialects` in dialects.yaml, which explains the fields."""

    name: str
    marks: tuple[str, ...]
    form: Literal["json", "named", "xml", "python", "channels", "unquoted"]
    source: str
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: str | None = None
    head: tuple[str, ...] = ("", "")
    tool: str = r"\s*([\w.-]+)\s*"
    unnamed: str | None = None
    ends: tuple[str, ...] = ()
    hard: bool = False
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    trim: bool = False
    ids: str | None = None
    section: str | None = None
    begin: str | None = None
    stop: str | None = None
    guided: GuidedCalls | None = None
    exact: bool = False  # answers are held to `guided`: nothing else is a call, and each end is the end

    @property
    def opens_each(self) -> bool:
        """Whether each call has an opening of its own, because nothing else tells it from text."""
        ends = self.closes or (self.guided is not None and self.guided.closes)
        return self.exact and not ends and not self.head[0]

    def as_guided(self) -> ToolDialect:
        """Return the dialect for answers that guided decoding holds to it: they have calls of no other form."""
        start = self.guided is not None and self.guided.start
        bare, opens = (self.bare, ()) if start else (None, self.opens)
        return self.model_copy(update={"exact": True, "hard": False, "bare": bare, "opens": opens})


# For answers that are not parsed for calls.
NONE = ToolDialect(name="none", marks=(), form="json", source="pipeline.gateway.api.tools.parser")
# For an answer that guided decoding forces to be one call and nothing else, or a list of calls.
FORCED = ToolDialect(
    name="forced", marks=(), form="json", bare="{", source="pipeline.gateway.api.tools.choice"
)
FORCED_LIST = FORCED.model_copy(update={"name": "forced-list", "bare": "["})


@cache
def _entries() -> tuple[Sequence[Reasoning], Sequence[ToolDialect]]:
    read = parse_yaml((resources.files("pipeline.gateway.api.tools") / "dialects.yaml").read_text("utf-8"))
    return tuple(Reasoning(**fields) for fields in read["reasoning"].values()), tuple(
        ToolDialect(name=name, **fields) for name, fields in read["dialects"].items()
    )


def dialects() -> Sequence[ToolDialect]:
    """Load all dialects, specific ones before general ones."""
    return _entries()[1]


def written_dialect(source: str) -> ToolDialect | None:
    """Return the dialect in which a chat template writes calls; None if it is not known."""
    return next((dialect for dialect in dialects() if all(mark in source for mark in dialect.marks)), None)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Parts of a model's answers, and the marks between them.

    Attributes:
        dialect: how it writes calls; None if answers are not parsed for calls.
        reasoning: marks around its reasoning; None if it writes none, or in channels.
        special: special tokens of the tokenizer that come as text, and are not shown.
    """

    dialect: ToolDialect | None = None
    reasoning: Reasoning | None = None
    special: frozenset[str] = frozenset()

    @property
    def channels(self) -> bool:
        """Whether all that the model writes is in channels."""
        return self.dialect is not None and self.dialect.form == "channels"

    @property
    def reasons(self) -> bool:
        """Whether answers may have reasoning."""
        return self.channels or self.reasoning is not None

    def needs_special_tokens(self, special: frozenset[str]) -> bool:
        """Whether a mark that answers are parsed by is a special token, which engines leave out by default."""
        marks = [self.reasoning.open, self.reasoning.close] if self.reasoning is not None else []
        if (own := self.dialect) is not None:
            marks += [*own.opens, *own.closes, *own.ends, *own.head, *own.key, *own.value]
        return any(token in mark for mark in marks for token in special if token)


@lru_cache(maxsize=64)
def reasoning_of(template: ChatTemplate) -> Reasoning | None:
    """Return the marks that a chat template knows around reasoning; None if it knows none."""
    sources = template.sources.values()
    known = (
        reasoning
        for reasoning in _entries()[0]
        if any(all(mark in text for mark in reasoning.marks) for text in sources)
    )
    return next(known, None)


class Marks:
    """Finds any of several marks in text that arrives in pieces."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text}, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, known)) if known else r"(?!)")
        self._beginnings = {text[:size] for text in known for size in range(1, len(text))}
        self._longest = max(map(len, known), default=1) - 1

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        """Find the first mark from `at` on; None if it ends the text and may begin a longer mark."""
        mark = self.pattern.search(text, at)
        return None if mark and text[mark.start() :] in self._beginnings else mark

    def partial(self, text: str) -> int:
        """Count the characters at the end of a text that may begin a mark.

        >>> Marks(["<tool_call>", "</think>"]).partial("so <tool")
        5
        """
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)

    def certain(self, text: str) -> int:
        """Count the characters that certainly precede any mark, without white space at their end."""
        return len(text[: len(text) - self.partial(text)].rstrip())


@lru_cache(maxsize=256)
def marks_of(texts: tuple[str, ...]) -> Marks:
    """Return `Marks`, made once."""
    return Marks(texts)


@dataclass(frozen=True, slots=True)
class CallHead:
    """A call at the beginning of a text, up to its arguments.

    Attributes:
        name: name of the tool; "" if the head has an id in its place, and the arguments have to tell.
        used: characters of the head.
        whole: whether the call is a JSON object with its keys in another order, of which nothing was read yet.
    """

    name: str
    used: int
    whole: bool = False


class Incomplete:
    """More text is needed to tell whether a call begins."""


def read_head(dialect: ToolDialect, text: str) -> CallHead | Incomplete | None:
    """Read the head of the call with which a text begins; None if it begins with no call."""
    if dialect.form == "json" or (dialect.form == "python" and text.startswith("{")):
        return _read_json_head(text)
    before, *after = dialect.head
    if before.startswith(text):
        return Incomplete()
    if not text.startswith(before):
        return None
    after_opening = text[len(before) :]
    ends = [(at, end) for end in after if (at := after_opening.find(end)) >= 0]
    if not ends:
        partial = max(Marks([end]).partial(after_opening) for end in after)
        return Incomplete() if _RAW.fullmatch(after_opening[: len(after_opening) - partial]) else None
    at, end = min(ends)
    name = re.fullmatch(dialect.tool, after_opening[:at])
    if name is None:
        unnamed = dialect.unnamed is not None and re.fullmatch(dialect.unnamed, after_opening[:at])
        return CallHead("", len(before) + at + len(end)) if unnamed else None
    return CallHead(name[1], len(before) + at + (0 if end in ("{", "<") else len(end)))


def _read_json_head(text: str) -> CallHead | Incomplete | None:
    if not text.startswith("{"):
        return None if text else Incomplete()
    if head := _HEAD.match(text):
        return CallHead(head[1], head.end())
    key = _FIRST_KEY.match(text)
    if len(text) <= _MAX_HEAD and (key is None or key[1] in _KEYS) and _MAY_BE_HEAD.match(text):
        return Incomplete()
    return CallHead("", 0, whole=True) if key is not None and key[1] in _KEYS else None


def read_whole_call(text: str) -> tuple[str, str] | None:
    """Read a call that is one JSON object, its keys in any order; also as OpenAI writes it, {"type", "function": {…}}.

    Returns:
        Name and arguments, as JSON; None if it is no call.
    """
    if (call := read_object(text)) is None:
        return None
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    # Some models write the arguments as OpenAI does, as text.
    if isinstance(arguments, str) and (arguments := read_object(arguments)) is None:
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def read_python_arguments(text: str) -> str | None:
    """Read keyword arguments as Python writes them; None if they are no literals.

    >>> read_python_arguments("city='Paris', days=3")
    '{"city": "Paris", "days": 3}'
    """
    if len(text) > MAX_LITERAL:
        return None
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        read = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        return None if None in read else json.dumps(read, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    return ast.literal_eval(node)


def begins_bare(dialect: ToolDialect, start: str, tools: Iterable[str]) -> bool | None:
    """Whether an answer begins with a call that has no mark; None if more text is needed to tell."""
    bare = dialect.bare
    if bare is None:
        return False
    if bare != "name":
        return start.startswith(bare) or (None if bare.startswith(start) else False)
    names = [f"{name}{{" for name in tools]
    if any(start.replace(" ", "").startswith(name) for name in names):
        return True
    return None if any(name.startswith(start) for name in names) else False


# How calls in JSON begin, without white space, up to the tool's name.
_JSON_STARTS = ('{"name":"', '{"type":"function","name":"')
_JSON_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)("?)')


def may_begin_call(dialect: ToolDialect, text: str, tools: Iterable[str]) -> bool:
    """Whether the end of an answer that was cut off begins a call without a mark."""
    if dialect.form != "json":
        return any(tool.startswith(text.rstrip("( ")) for tool in tools)
    if (name := _JSON_NAME.search(text)) is not None:
        return any(tool == name[1] if name[2] else tool.startswith(name[1]) for tool in tools)
    compact = "".join(text.split())
    return any(start.startswith(compact) for start in _JSON_STARTS)


class Scanner:
    """Finds the end of brackets in text that comes in pieces, from the first one on; strings may hold any.

    Attributes:
        quote: quotation mark of the string in which the text so far ends; "" outside of strings.
    """

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        """`quotes`: marks around strings; `depth`: brackets that are open."""
        self.quote = ""
        self._quotes, self._depth, self._escaped = quotes, depth, False

    def end(self, text: str) -> int | None:
        """Scan the next piece.

        Returns:
            How many of its characters belong to the brackets, or None if all do and they are still open.

        >>> scanner = Scanner()
        >>> scanner.end('{"a": "}'), scanner.end('"} rest')
        (None, 2)
        """
        for at, char in enumerate(text):
            if self.quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self.quote:
                    self.quote = ""
            elif char in self._quotes:
                self.quote = char
            elif char in "{[(":
                self._depth += 1
            elif char in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None
