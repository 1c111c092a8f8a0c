"""Runs chat templates, which come with other people's checkpoints: no way out, no endless work, no endless text.

Jinja's immutable sandbox keeps a template from reaching Python and from changing what it is given. It lets a template
loop for ever and fill the memory: `lipsum(n=10**8)`, `"x" * 10**10`, loops in loops, a text that doubles itself. Here
each rendering has two allowances, which are counted and not timed, so that they mean the same on every machine:

    steps        500,000 nodes of the template's syntax tree; each pass of a loop and each call of a macro pays for all
                 nodes of its body before it begins
    characters   32,000,000, of all texts that are made, written, searched or compared

and more in proportion to the messages. How it is done: the syntax tree is rewritten before Jinja compiles it, so that
loops, outputs and operators call functions that count (`sandbox_operations`), and only the methods and filters of a
list can be called (`sandbox_calls`).

Written against Jinja 3.1. It includes no other templates, and knows nothing of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from pipeline.models.sandbox_calls import ALLOWED_FILTERS, PRICED_TESTS, TEXT_METHODS, call_method
from pipeline.models.sandbox_operations import (
    MAX_WIDTH,
    OPERATIONS,
    READ,
    Metered,
    TooMuch,
    checked_key,
    read_all,
)

MAX_SOURCE = 1 << 17  # characters; long ones of published models have 30,000
_CLASSES = (dict, Namespace, Cycler, Joiner)
_DICT_NAMES = frozenset(dir(dict))


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates; `raise_exception`, `strftime_now`, `tojson`, `generation` are as in transformers 5.

    >>> Sandbox().compiled("{{ messages | length }}").render(messages=[1, 2])
    '2'
    """

    context_class = Metered

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = {**ALLOWED_FILTERS, **OPERATIONS}
        self.tests |= PRICED_TESTS
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compiled(self, source: str) -> Template:
        """The template of a text.

        Raises:
            TemplateSyntaxError: it is none. RecursionError, SyntaxError, MemoryError, ValueError: Jinja or Python gave
            up on it, because it is nested too deeply or holds too large a number.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateSyntaxError(f"it has {len(source)} characters, of at most {MAX_SOURCE}", 1)
        tree = _Metering().visit(self.parse(source))
        template = self.from_string(tree.set_environment(self))
        # Each rendering copies them, which takes long from Jinja's ChainMap.
        template.globals = dict(template.globals)
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja does it, but for the detour over exceptions where templates go most."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is str or type(argument) is int:
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        return super().getitem(obj, checked_key(argument))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """For `map`, which takes the name of a filter as a text. Operations are none."""
        if name in OPERATIONS:
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> None:
        """Nothing: `call_method` bounds what `format` does."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is BuiltinMethodType or isinstance(getattr(__obj, "__self__", None), str):
            # Jinja adds these to every call in a loop, for those that take the context.
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return call_method(__context, __obj, args, kwargs)
        if isinstance(__obj, type) and __obj not in _CLASSES:
            raise SecurityError(f"{__obj.__name__} is not one of {', '.join(c.__name__ for c in _CLASSES)}")
        if isinstance(__obj, type | MethodType):
            read_all(__context, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """`{% generation %}` marks what the model said; the text within is rendered as it is, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: Any) -> None:
    raise TemplateError(message if isinstance(message, str) else type(message).__name__)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_WIDTH:
        raise TooMuch(f"a date of more than {MAX_WIDTH} characters")
    return datetime.now().strftime(pattern)


class _Metering(NodeTransformer):
    """Puts operations in the place of operators, and a count at the beginning of every body."""

    def _counted(self, node: Any) -> nodes.Node:
        weight = 1 + sum(map(_weight, [*node.body, *getattr(node, "defaults", ())]))
        changed = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_count(weight, node.lineno), lineno=node.lineno))
        return changed

    visit_Template = visit_Macro = visit_CallBlock = _counted

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            # It is tried on elements that no body sees.
            count = _count(_weight(node.test), node.lineno)
            node.test = nodes.And(count, node.test, lineno=node.lineno)
        return self._counted(node)

    def _refused(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError(
            f"{{% {type(node).__name__.lower()} %}} has no place in a chat template", node.lineno
        )

    visit_Block = visit_Extends = visit_Include = visit_Import = visit_FromImport = _refused

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_written(part) for part in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """A chain of them is one operation, which for texts takes no longer than the operators."""
        return _operation("add", *map(self.visit, _chain(node)))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _operation("concat", *map(self.visit, node.nodes))

    def _binary(self, node: Any) -> nodes.Node:
        return _operation(type(node).__name__.lower(), self.visit(node.left), self.visit(node.right))

    visit_Mul = visit_Pow = visit_Mod = _binary

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _operation("slice", node.node, *(end or nodes.Const(None) for end in ends))

    def _spread(self, node: Any) -> Any:
        """Arguments that come as a collection, `f(*a, **b)`."""
        self.generic_visit(node)
        for name in ("dyn_args", "dyn_kwargs"):
            if (given := getattr(node, name)) is not None:
                setattr(node, name, _operation("spread", given))
        return node

    visit_Call = visit_Filter = visit_Test = _spread

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _operation("key", node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Where one side is short, the comparison is, too; a search is as long as what is searched."""
        sides: list[Any] = [node, *node.ops]
        short = [_is_short(side.expr) for side in sides]
        searched = [False, *(operand.op in ("in", "notin") for operand in node.ops)]
        self.generic_visit(node)
        for index, side in enumerate(sides):
            if searched[index] and not short[index]:
                side.expr = _operation("search", side.expr)
            elif not short[index] and (any(searched) or len(sides) > 2 or not any(short)):
                side.expr = _operation("read", side.expr)
        return node


def _weight(node: nodes.Node) -> int:
    """Nodes that are evaluated when this one is, at most; bodies of loops and macros count for themselves."""
    if isinstance(node, nodes.TemplateData):
        return 1 + len(node.data) // READ
    if isinstance(node, nodes.Const):
        return 1 + (len(node.value) // READ if isinstance(node.value, str) else 0)
    own = ("body", "test") if isinstance(node, nodes.For) else ("body",)
    counted = own if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock) else ()
    return 1 + sum(map(_weight, node.iter_child_nodes(exclude=counted)))


def _operation(name: str, *parts: nodes.Expr) -> nodes.Filter:
    """A call of one of the operations: as a filter, which Jinja calls without a detour."""
    line = parts[0].lineno
    for part in parts:
        part.lineno = part.lineno or line
    return nodes.Filter(parts[0], f"{name} ", list(parts[1:]), [], None, None, lineno=line)


def _count(steps: int, line: int) -> nodes.Filter:
    return _operation("count", nodes.Const(steps, lineno=line))


def _written(part: nodes.Expr) -> nodes.Expr:
    """An output, which is paid for; a sum and a concatenation are already."""
    if isinstance(part, nodes.TemplateData | nodes.Const):
        return part
    if isinstance(part, nodes.Filter) and part.name == "add ":
        part.name = "write "
    if isinstance(part, nodes.Filter) and part.name in ("write ", "concat "):
        return part
    return _operation("read", part)


def _chain(node: nodes.Expr) -> Iterator[nodes.Expr]:
    """The summands of a + b + c, from the left."""
    parts = []
    while isinstance(node, nodes.Add):
        parts.append(node.right)
        node = node.left
    return reversed([*parts, node])


def _is_short(node: nodes.Node) -> bool:
    """Whether it can be seen that a value is a constant, a number or a truth value."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_short, node.items))
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop"
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count")
    return isinstance(node, nodes.Const | nodes.Compare | nodes.Not | nodes.Test)
