"""What a chat template may call by a name, and what that costs: methods of texts and collections, filters, tests.

Whatever is not listed here is refused: methods that nobody needs (`encode`, `translate`), filters whose time grows
faster than their text (`wordwrap`, `urlize`, `striptags`), and those that look into Python (`attr`, `pprint`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.sandbox import SandboxedFormatter
from jinja2.tests import TESTS

from pipeline.models.sandbox_operations import (
    MAX_INDENT,
    MAX_WIDTH,
    READ,
    WIDE,
    Metered,
    TooMuch,
    check_bits,
    checked_key,
    collected,
    each,
    printf,
    read,
    read_all,
    shallow,
    sorting,
    split_up,
    visited,
    whole,
)


class _Formatter(SandboxedFormatter):
    """`form.format(…)`"""

    def __init__(self, context: Metered) -> None:
        super().__init__(context.environment)
        self._context = context

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._context.spend(whole(self._context, value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if WIDE.search(format_spec):
            raise TooMuch(f"a field that may be wider than {MAX_WIDTH} characters")
        self._context.spend(MAX_WIDTH + whole(self._context, value))
        return str(super().format_field(value, format_spec))


# Methods


def call_method(context: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a text or a collection, if it is one that a chat template may call, and pay for it."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str) and name in TEXT_METHODS:
        if name == "format":
            if type(owner) is not str:
                raise SecurityError("a text that is marked as safe is no format here")
            context.spend(len(owner))
            return _Formatter(context).vformat(owner, args, kwargs)
        args = tuple(collected(context, arg) for arg in args)
        context.spend(TEXT_METHODS[name](owner, *args, **kwargs))
    elif isinstance(owner, dict) and name in _DICT_METHODS:
        checked_key(args[0] if args else None)
        context.spend(shallow(context, owner) if name == "copy" else 1)
    elif isinstance(owner, list | tuple) and name in _LIST_METHODS:
        read_all(context, (owner, *args))
    else:
        raise SecurityError(f"{type(owner).__name__}.{name} is not a method that a chat template may call")
    return method(*args, **kwargs)


def _long(text: str, *_args: Any, **_kwargs: Any) -> int:
    return len(text)


def _wide(text: str, width: int, *_: Any) -> int:
    return max(len(text), width)


def _replaced(text: str, old: str, new: str, count: int = -1) -> int:
    found = text.count(old)
    return len(text) + (found if count < 0 else min(found, count)) * max(0, len(new) - len(old))


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    pieces = len(text) // 2 if sep is None else text.count(sep)
    return len(text) + READ * (1 + (pieces if maxsplit < 0 else min(pieces, maxsplit)))


def _lines(text: str, *_args: Any, **_kwargs: Any) -> int:
    return len(text) * READ // 2


def _joined(separator: str, parts: Iterable[str]) -> int:
    if isinstance(parts, str):
        return len(parts) * (READ + len(separator))
    lengths = [len(part) for part in parts]
    return sum(lengths) + len(lengths) * len(separator)


# Method of a text -> what a call costs, from the text and the arguments.
TEXT_METHODS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(
        (
            "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
            "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
            "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition",
            "rstrip", "startswith", "strip", "swapcase", "title", "upper",
        ),
        _long,
    ),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _wide),
    **dict.fromkeys(("split", "rsplit"), _split),
    "join": _joined,
    "replace": _replaced,
    "splitlines": _lines,
}  # fmt: skip
_DICT_METHODS = ("copy", "get", "items", "keys", "values")
_LIST_METHODS = ("copy", "count", "index")

# Filters: Jinja's own, paid for, and those whose price is more than that of their value.


def _priced(function: Any, price: Callable[[Metered, Any], int]) -> Any:
    passed = getattr(function, "jinja_pass_arg", None)
    leading: Callable[[Metered], tuple[Any, ...]] = {
        None: lambda _: (),
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }[passed.name if passed else None]

    @pass_context
    def filtered(context: Metered, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = collected(context, value)
        context.spend(price(context, value))
        read_all(context, (*args, *kwargs.values()))
        made = function(*leading(context), value, *args, **kwargs)
        if isinstance(made, str):
            context.spend(len(made))
        return each(context, made) if isinstance(made, Iterator) else made

    return filtered


@pass_context
def _trim(context: Metered, value: Any, chars: str | None = None) -> Any:
    value = read(context, value)
    return (value if isinstance(value, str) else str(value)).strip(chars)


@pass_context
def _replace(context: Metered, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    read_all(context, (value, old, new))
    text, old, new = (part if isinstance(part, str) else str(part) for part in (value, old, new))
    context.spend(_replaced(text, old, new, -1 if count is None else count))
    return FILTERS["replace"](context.eval_ctx, value, old, new, count)


@pass_context
def _join(context: Metered, value: Any, d: Any = "", attribute: Any = None) -> Any:
    value = collected(context, value)
    context.spend(whole(context, value) + (READ + whole(context, d)) * len(value))
    return FILTERS["join"](context.eval_ctx, value, d, attribute)


@pass_context
def _indent(
    context: Metered, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    text, wide = read(context, value), _checked_indent(width)
    context.spend(_lines(text))
    context.spend(wide * len(text.splitlines()))
    return FILTERS["indent"](value, width, first, blank)


def _checked_indent(width: int | str) -> int:
    """In characters."""
    wide = len(width) if isinstance(width, str) else max(0, int(width))
    if wide > MAX_INDENT:
        raise TooMuch(f"an indentation of more than {MAX_INDENT} characters")
    return wide


@pass_context
def _format(context: Metered, value: Any, *args: Any, **kwargs: Any) -> str:
    return printf(context, str(read(context, value)), kwargs or args)


@pass_context
def _int(context: Metered, value: Any, default: Any = 0, base: int = 10) -> Any:
    context.spend(whole(context, value))
    made = FILTERS["int"](value, default, base)
    check_bits(made.bit_length() if isinstance(made, int) else 0)
    return made


@pass_context
def _round(_context: Metered, value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > MAX_WIDTH:
        raise TooMuch(f"a precision of more than {MAX_WIDTH} digits")
    return FILTERS["round"](value, precision, method)


@pass_context
def _sum(context: Metered, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("only numbers are summed up here")
    value = collected(context, value)
    context.spend(whole(context, value))
    return FILTERS["sum"](context.environment, value, attribute, start)


@pass_context
def _tojson(
    context: Metered,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: not escaped for HTML."""
    context.spend(whole(context, value))
    if separators is not None and sum(map(len, separators)) > MAX_INDENT:
        raise TooMuch(f"separators of more than {MAX_INDENT} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    _checked_indent(indent)
    written, coming = list[str](), encoder.iterencode(value)
    while some := list(islice(coming, 256)):
        context.spend(sum(map(len, some)))
        written += some
    return "".join(written)


_PRICED: Mapping[Callable[[Metered, Any], int], tuple[str, ...]] = {
    shallow: ("items", "reverse"),
    visited: ("list", "map", "reject", "rejectattr", "select", "selectattr"),
    split_up: ("title",),
    whole: (
        "capitalize", "e", "escape", "float", "lower", "max", "min", "safe", "string", "truncate", "unique", "upper",
    ),
    sorting: ("dictsort", "groupby", "sort"),
}  # fmt: skip
_FREE = ("abs", "count", "d", "default", "first", "last", "length")
ALLOWED_FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: FILTERS[name] for name in _FREE},
    **{name: _priced(FILTERS[name], price) for price, names in _PRICED.items() for name in names},
    **{
        function.__name__[1:]: function
        for function in (_format, _indent, _int, _join, _replace, _round, _sum, _tojson, _trim)
    },
}


def _comparing(test: Any) -> Any:
    @pass_context
    def compare(context: Metered, *values: Any) -> Any:
        read_all(context, values)
        return test(*values)

    return compare


_COMPARING = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower",
    "lt", "ne", "upper",
)  # fmt: skip
PRICED_TESTS: Mapping[str, Callable[..., Any]] = {name: _comparing(TESTS[name]) for name in _COMPARING}
