"""What a rendering of a chat template may spend, what values cost, and the operators and outputs that pay for them.

Everything that takes time or memory is paid for before it is done, in characters (see `sandbox`): a text by its length,
an element of a list or a mapping by `COPIED` where the collection is copied, and by `READ` and its content where all of
it is read, as `tojson` and `==` do. So nothing that grows fast (a list that holds itself twice, say) is ever followed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from jinja2 import TemplateRuntimeError, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined, markup_join, str_join
from jinja2.utils import Namespace

STEPS, CHARACTERS = 500_000, 32_000_000
# What the input adds, for each of its values and each of its characters.
STEPS_PER_VALUE, CHARACTERS_PER_CHARACTER = 512, 64
COPIED, READ = 8, 64
# Of a field in a format and of an indentation, in characters; of an integer that is computed, in bits.
MAX_WIDTH, MAX_INDENT, MAX_BITS = 1000, 100, 4096
_MAX_INPUT = 1 << 28
_PLAIN = frozenset((float, bool, type(None)))


class TooMuch(TemplateRuntimeError):
    """A template has used up its allowance, or asks for something that is too large at once."""


class Metered(Context):
    """The variables of one rendering, and what it may still spend."""

    steps = STEPS
    characters = CHARACTERS
    _granted = False

    def spend(self, characters: int) -> None:
        """Pay. Raises TooMuch if there is not enough left, or the price is no price."""
        if not characters >= 0:
            raise TooMuch(f"a size of {characters}")
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
        if isinstance(one, str | int):
            characters += _length(one)
            continue
        if type(one) is dict or isinstance(one, Mapping):
            parts: Any = (*one.keys(), *one.values())
        elif isinstance(one, Namespace):
            parts = (object.__getattribute__(one, "_Namespace__attrs"),)
        elif hasattr(one, "__len__") and hasattr(one, "__iter__"):
            parts = one
        else:
            continue
        values += len(parts)
        for part in parts:
            if type(part) is str:
                characters += len(part)
            elif type(part) not in _PLAIN:
                waiting.append(part)
    return values, characters


def _length(value: str | int) -> int:
    """Characters of a text, or of a number that is written as one."""
    return len(value) if isinstance(value, str) else 1 + value.bit_length() // 3


def whole(context: Metered, value: Any) -> int:
    """The price of reading all of a value; if it is more than there is, then as much more as was counted."""
    if isinstance(value, str | int):
        return _length(value)
    if value is None or isinstance(value, float | Undefined):
        return 1
    values, characters = _size(value, context.characters)
    if values * READ + characters > context.characters:
        context.grant()
        values, characters = _size(value, context.characters)
    return values * READ + characters


def shallow(_context: Metered, value: Any) -> int:
    """The price of a copy."""
    if isinstance(value, str):
        return len(value)
    return COPIED * len(value) if hasattr(value, "__len__") else 1


def visited(_context: Metered, value: Any) -> int:
    """The price of calling something for each element."""
    return READ * len(value) if hasattr(value, "__len__") else 1


def split_up(context: Metered, value: Any) -> int:
    """The price of making a text of each word."""
    return READ // 2 * whole(context, value)


def sorting(context: Metered, value: Any) -> int:
    """The price of comparing each element with some others."""
    return whole(context, value) * math.ceil(math.log2(2 + shallow(context, value)))


def read_all(context: Any, values: Iterable[Any]) -> None:
    """Pay for arguments that may be read or compared as a whole."""
    for value in values:
        context.spend(whole(context, value))


def collected(context: Metered, value: Any) -> Any:
    """A collection that has a length; what is none as it is."""
    if hasattr(value, "__len__") or not isinstance(value, Iterable):
        return value
    return list(each(context, value))


def each(context: Metered, values: Iterable[Any]) -> Iterator[Any]:
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
def read(context: Metered, value: Any) -> Any:
    if type(value) is not str:
        context.spend(whole(context, value))
        return value
    context.characters = left = context.characters - len(value)
    if left < 0:
        context.extend()
    return value


@pass_context
def _search(context: Metered, value: Any) -> Any:
    if not isinstance(value, Mapping):
        context.spend(whole(context, value))
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
            return read(context, _add(context, *parts))
        length += len(part)
    context.characters = left = context.characters - length
    if left < 0:
        context.extend()
    return "".join(parts)


def _plus(context: Metered, left: Any, right: Any) -> Any:
    context.spend(shallow(context, left) + shallow(context, right))
    return left + right


@pass_context
def _concat(context: Metered, *parts: Any) -> str:
    read_all(context, parts)
    return markup_join(parts) if context.eval_ctx.autoescape else str_join(parts)


@pass_context
def _mul(context: Metered, left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if hasattr(many, "__len__") and isinstance(times, int):
            context.spend(shallow(context, many) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    return left * right


@pass_context
def _pow(_context: Metered, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * right)
    return left**right


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuch(f"an integer of more than {MAX_BITS} bits")


@pass_context
def _mod(context: Metered, left: Any, right: Any) -> Any:
    return printf(context, left, right) if isinstance(left, str) else left % right


@pass_context
def _spread(context: Metered, value: Any) -> Any:
    """`f(*value)`, which makes a tuple of it, and `f(**value)`."""
    value = collected(context, value)
    context.spend(visited(context, value))
    return value


@pass_context
def _slice(context: Metered, value: Any, start: Any, stop: Any, step: Any) -> Any:
    context.spend(shallow(context, value))
    return value[start:stop:step]


# Names that no template can write where it names a filter, because they end in a space.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    f"{function.__name__.lstrip('_')} ": function
    for function in (_count, read, _search, _key, _add, _write, _concat, _mul, _pow, _mod, _spread, _slice)
}


# Formats: the width of a field is bounded.

_FIELD = re.compile(r"%[^%a-zA-Z]*")
WIDE = re.compile(r"\d{4}")


def printf(context: Metered, form: str, values: Any) -> str:
    """`form % values`"""
    fields = [form] if "%(" in form else _FIELD.findall(form)
    if any("*" in field or WIDE.search(field) for field in fields):
        raise TooMuch(f"a field that may be wider than {MAX_WIDTH} characters")
    marks = form.count("%")
    repeated = marks if isinstance(values, Mapping) else 1
    context.spend(len(form) + marks * MAX_WIDTH + repeated * whole(context, values))
    text: str = form % values
    return text
