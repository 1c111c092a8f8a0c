"""What a chat template may do, and what it pays for that: operators, outputs, methods of texts, filters.

Everything that takes time or memory is paid for before it is done, in characters (see `sandbox`): a text by its length,
an element of a list or a mapping by `COPIED` where the collection is copied, and by `READ` and its content where all of
it is read, as `tojson` and `==` do. So nothing that grows fast (a list that holds itself twice, say) is ever followed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import Any

from jinja2 import TemplateRuntimeError, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Undefined, markup_join, str_join
from jinja2.sandbox import SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace

STEPS, CHARACTERS = 500_000, 32_000_000
# What the input adds, for each of its values and each of its characters.
STEPS_PER_VALUE, CHARACTERS_PER_CHARACTER = 512, 64
COPIED, READ = 8, 64
# Of a field in a format and of an indentation, in characters; of an integer that is computed, in bits.
MAX_WIDTH, MAX_INDENT, MAX_BITS = 1000, 100, 4096
_MAX_INPUT = 1 << 28


class TooMuch(TemplateRuntimeError):
    """A template has used up its allowance, or asks for something that is too large at once."""


class Metered(Context):
    """The variables of one rendering, and what it may still spend."""

    steps = STEPS
    characters = CHARACTERS
    _granted = False

    def spend(self, characters: int) -> None:
        """Pay. Raises TooMuch if there is not enough left."""
        self.characters -= characters
        if self.characters < 0:
            self.extend()

    def extend(self) -> None:
        """Grant what the size of the input justifies. Raises TooMuch if that is not enough, or was granted before."""
        self.grant()
        if self.steps < 0:
            raise TooMuch("it takes too many steps: its loops or macros go on for too long")
        if self.characters < 0:
            raise TooMuch("it makes or reads too much text")

    def grant(self) -> None:
        """Add, once, to both allowances in proportion to the input."""
        if not self._granted:
            self._granted = True
            given = [value for name, value in self.parent.items() if name not in self.globals_keys]
            values, characters = _size(given, _MAX_INPUT)
            self.steps += STEPS_PER_VALUE * values
            self.characters += CHARACTERS_PER_CHARACTER * characters


def _size(value: Any, most: int) -> tuple[int, int]:
    """Values and characters in all that a value holds, as often as it holds them; counts on to `most` at least."""
    values, characters, waiting = 1, 0, [value]
    while waiting and values * READ + characters <= most:
        one = waiting.pop()
        if isinstance(one, str):
            characters += len(one)
        elif type(one) is dict or isinstance(one, Mapping):
            values += 2 * len(one)
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, Namespace):
            waiting.append(object.__getattribute__(one, "_Namespace__attrs"))
        elif hasattr(one, "__len__") and hasattr(one, "__iter__"):
            values += len(one)
            waiting += one
    return values, characters


def _whole(context: Metered, value: Any) -> int:
    """The price of reading all of a value; if it is more than there is, then as much more as was counted."""
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, int | float | Undefined):
        return 1
    values, characters = _size(value, context.characters)
    if values * READ + characters > context.characters:
        context.grant()
        values, characters = _size(value, context.characters)
    return values * READ + characters


def _shallow(_context: Metered, value: Any) -> int:
    """The price of a copy."""
    if isinstance(value, str):
        return len(value)
    return COPIED * len(value) if hasattr(value, "__len__") else 1


def _visited(_context: Metered, value: Any) -> int:
    """The price of calling something for each element."""
    return READ * len(value) if hasattr(value, "__len__") else 1


def _sorted(context: Metered, value: Any) -> int:
    """The price of comparing each element with some others."""
    return _whole(context, value) * math.ceil(math.log2(2 + _shallow(context, value)))


def read_all(context: Any, values: Iterable[Any]) -> None:
    """Pay for arguments that may be read or compared as a whole."""
    for value in values:
        context.spend(_whole(context, value))


def _collected(context: Metered, value: Any) -> Any:
    """A collection that has a length; what is none as it is."""
    if hasattr(value, "__len__") or not isinstance(value, Iterable):
        return value
    return list(_each(context, value))


def _each(context: Metered, values: Iterable[Any]) -> Iterator[Any]:
    """What a lazy filter yields, paid for as it comes."""
    for value in values:
        context.spend(READ)
        yield value


# Operations: what loops, outputs and operators of a template become.


# What templates do most is written out, without a call of `spend`.


@pass_context
def _count(context: Metered, steps: int) -> bool:
    context.steps = left = context.steps - steps
    if left < 0:
        context.extend()
    return True


@pass_context
def _read(context: Metered, value: Any) -> Any:
    if type(value) is not str:
        context.spend(_whole(context, value))
        return value
    context.characters = left = context.characters - len(value)
    if left < 0:
        context.extend()
    return value


@pass_context
def _search(context: Metered, value: Any) -> Any:
    if not isinstance(value, Mapping):
        context.spend(_whole(context, value))
    return value


@pass_context
def _key(_context: Metered, value: Any) -> Any:
    return checked_key(value)


def checked_key(value: Any) -> Any:
    """To hash a tuple of tuples takes exponential time."""
    if isinstance(value, tuple):
        raise SecurityError("a tuple is no key of a mapping here")
    return value


@pass_context
def _add(context: Metered, *parts: Any) -> Any:
    length = 0
    for part in parts:
        if type(part) is not str:
            return reduce(lambda left, right: _plus(context, left, right), parts)
        length += len(part)
    context.characters = left = context.characters - length
    if left < 0:
        context.extend()
    return "".join(parts)


@pass_context
def _write(context: Metered, *parts: Any) -> Any:
    """`{{ a + b }}`"""
    length = 0
    for part in parts:
        if type(part) is not str:
            return _read(context, _add(context, *parts))
        length += len(part)
    context.characters = left = context.characters - length
    if left < 0:
        context.extend()
    return "".join(parts)


def _plus(context: Metered, left: Any, right: Any) -> Any:
    context.spend(_shallow(context, left) + _shallow(context, right))
    return left + right


@pass_context
def _concat(context: Metered, *parts: Any) -> str:
    read_all(context, parts)
    return markup_join(parts) if context.eval_ctx.autoescape else str_join(parts)


@pass_context
def _mul(context: Metered, left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if hasattr(many, "__len__") and isinstance(times, int):
            context.spend(_shallow(context, many) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


@pass_context
def _pow(_context: Metered, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    return left**right


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuch(f"an integer of more than {MAX_BITS} bits")


@pass_context
def _mod(context: Metered, left: Any, right: Any) -> Any:
    return _printf(context, left, right) if isinstance(left, str) else left % right


@pass_context
def _slice(context: Metered, value: Any, start: Any, stop: Any, step: Any) -> Any:
    context.spend(_shallow(context, value))
    return value[start:stop:step]


# Names that no template can write, because they end in a space.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    f"{function.__name__[1:]} ": function
    for function in (_count, _read, _search, _key, _add, _write, _concat, _mul, _pow, _mod, _slice)
}

# Formats: the width of a field is bounded.

_FIELD = re.compile(r"%[^%a-zA-Z]*")
_WIDE = re.compile(r"\d{4}")


def _printf(context: Metered, form: str, values: Any) -> str:
    """`form % values`"""
    fields = [form] if "%(" in form else _FIELD.findall(form)
    if any("*" in field or _WIDE.search(field) for field in fields):
        raise TooMuch(f"a field that may be wider than {MAX_WIDTH} characters")
    marks = form.count("%")
    repeated = marks if isinstance(values, Mapping) else 1
    context.spend(len(form) + marks * MAX_WIDTH + repeated * _whole(context, values))
    text: str = form % values
    return text


class _Formatter(SandboxedFormatter):
    """`form.format(…)`"""

    def __init__(self, context: Metered) -> None:
        super().__init__(context.environment)
        self._context = context

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._context.spend(_whole(self._context, value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if _WIDE.search(format_spec):
            raise TooMuch(f"a field that may be wider than {MAX_WIDTH} characters")
        self._context.spend(MAX_WIDTH + _whole(self._context, value))
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
        args = tuple(_collected(context, arg) for arg in args)
        context.spend(TEXT_METHODS[name](owner, *args, **kwargs))
    elif isinstance(owner, dict) and name in _DICT_METHODS:
        checked_key(args[0] if args else None)
        context.spend(_shallow(context, owner) if name == "copy" else 1)
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
        value = _collected(context, value)
        context.spend(price(context, value))
        read_all(context, (*args, *kwargs.values()))
        made = function(*leading(context), value, *args, **kwargs)
        if isinstance(made, str):
            context.spend(len(made))
        return _each(context, made) if isinstance(made, Iterator) else made

    return filtered


@pass_context
def _trim(context: Metered, value: Any, chars: str | None = None) -> Any:
    if type(value) is str:
        context.characters -= len(value)
        if context.characters >= 0:
            return value.strip(chars)
    context.spend(_whole(context, value))
    return (value if isinstance(value, str) else str(value)).strip(chars)


@pass_context
def _replace(context: Metered, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    read_all(context, (value, old, new))
    text, old, new = (part if isinstance(part, str) else str(part) for part in (value, old, new))
    context.spend(_replaced(text, old, new, -1 if count is None else count))
    return FILTERS["replace"](context.eval_ctx, value, old, new, count)


@pass_context
def _join(context: Metered, value: Any, d: Any = "", attribute: Any = None) -> Any:
    value = _collected(context, value)
    context.spend(_whole(context, value) + _whole(context, d) * len(value))
    return FILTERS["join"](context.eval_ctx, value, d, attribute)


@pass_context
def _indent(
    context: Metered, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    text = _read(context, value)
    _check_indent(width)
    wide = len(width) if isinstance(width, str) else width
    context.spend(_lines(text) + wide * len(text.splitlines()))
    return FILTERS["indent"](value, width, first, blank)


def _check_indent(width: int | str) -> None:
    if (len(width) if isinstance(width, str) else width) > MAX_INDENT:
        raise TooMuch(f"an indentation of more than {MAX_INDENT} characters")


@pass_context
def _format(context: Metered, value: Any, *args: Any, **kwargs: Any) -> str:
    return _printf(context, str(_read(context, value)), kwargs or args)


@pass_context
def _round(_context: Metered, value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > MAX_WIDTH:
        raise TooMuch(f"a precision of more than {MAX_WIDTH} digits")
    return FILTERS["round"](value, precision, method)


@pass_context
def _sum(context: Metered, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("only numbers are summed up here")
    value = _collected(context, value)
    context.spend(_whole(context, value))
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
    context.spend(_whole(context, value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    _check_indent(indent)
    written, coming = list[str](), encoder.iterencode(value)
    while some := list(islice(coming, 256)):
        context.spend(sum(map(len, some)))
        written += some
    return "".join(written)


_PRICED: Mapping[Callable[[Metered, Any], int], tuple[str, ...]] = {
    _shallow: ("items", "list", "reverse"),
    _visited: ("map", "reject", "rejectattr", "select", "selectattr"),
    _whole: (
        "capitalize", "e", "escape", "float", "int", "lower", "max", "min", "safe", "string", "title", "truncate",
        "unique", "upper",
    ),
    _sorted: ("dictsort", "groupby", "sort"),
}  # fmt: skip
_FREE = ("abs", "count", "d", "default", "first", "last", "length")
ALLOWED_FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: FILTERS[name] for name in _FREE},
    **{name: _priced(FILTERS[name], price) for price, names in _PRICED.items() for name in names},
    **{
        function.__name__[1:]: function
        for function in (_format, _indent, _join, _replace, _round, _sum, _tojson, _trim)
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
