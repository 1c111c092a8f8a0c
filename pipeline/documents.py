"""YAML that people write, read to a Document: plain values, the line of each, and the faults of the file's form.

YAML 1.2's core schema: only `true` and `false` are booleans (`on` and `no` are text), `1e-3` is a number,
nothing is a date. Anchors, aliases and merge keys work; a key that stands twice is a fault.
`pipeline.document_faults` holds a document against a pydantic model; YAML that travels with the package is read by
`pipeline.resources`.

libyaml parses, by PyYAML: 90,000 keys in half a second, where parsers in Python (PyYAML's own, ruamel.yaml) take 6 to
12. What libyaml refuses is parsed by PyYAML's own parser, which says better what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from pipeline.errors import Fault
from pipeline.reading import check_text

# ("quantization", "calibration", "samples")
KeyPath = tuple[str | int, ...]

_MAX_DEPTH = 50
# Depth of libyaml's events, checked before anything is made of them.
_MAX_NESTING = 300
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS = (  # tag, pattern, first characters
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
)
_TAG = "tag:yaml.org,2002:"
_HINTS = (  # part of PyYAML's message, what to do
    ("cannot start any token", "a value that begins with @, ` or % needs quotes"),
    (
        "mapping values are not allowed",
        'text that holds ": " needs quotes; keys of one section begin in one column',
    ),
    ("could not find expected ':'", "a key is followed by a colon and a space"),
    ("expected <block end>", "keys of one section begin in one column"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    ("another document", "a file holds one document: remove the second ---"),
    ("undefined alias", "define the anchor (&name) above its use (*name)"),
)
_NOT_QUOTED = "it is not quoted here, because it may be a key"


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a value was given, and how a scalar was written there.

    Attributes:
        where: file, or the option that gave it, such as `--set`.
        line: 1-based.
    """

    where: str
    line: int | None = None
    text: str | None = None


@dataclass(slots=True)
class Document:
    """The content of a file, as far as it could be read.

    Attributes:
        where: name of the file, for faults.
        formless: keys of `faults`, whose values are null in `data`.
        line: place of faults that have no other, 1-based.
        is_mapping: False where nothing else can be said of the file.
        is_secret: faults name lines and fields, and quote nothing else: anything else may be an API key.
        most_values: bound of its values.
    """

    where: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, KeyPlace] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    formless: set[KeyPath] = field(default_factory=set)
    line: int | None = 1
    is_mapping: bool = True
    is_secret: bool = False
    most_values: int = 10_000

    def place(self, path: KeyPath) -> KeyPlace:
        """Return the place of a key, or of the nearest section around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, KeyPlace(self.where, self.line))

    def forget(self, path: KeyPath) -> None:
        """Drop the places of a key and of all below it."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]

    def refuse(
        self, problem: str, *, line: int | None, quoted: str = "", path: KeyPath = (), fix: str = ""
    ) -> None:
        """Add a fault of the form; `quoted` is the part of the message that quotes the file."""
        self.formless.add(path)
        if self.is_secret:
            fix = "; ".join(filter(None, (fix, quoted and _NOT_QUOTED)))
            quoted, path = "", ()
        self.faults.append(Fault(problem + quoted, where=self.where, line=line, key=dotted(path), fix=fix))


def dotted(path: KeyPath) -> str:
    """Write a path as users write it.

    >>> dotted(("quantization", "export_tensor_parallel", 0))
    'quantization.export_tensor_parallel[0]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # The plain and quoted styles lose some control characters.
        style = None if data.isprintable() else '"'
        return self.represent_scalar(_TAG + "str", data, style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _FastLoader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)


def dump_yaml(data: Any, *, flow: bool = False) -> str:
    """Write values as text that `read_document` reads back as the same values.

    Args:
        flow: write one line, `{key: value}`.
    """
    width = 1 << 20 if flow else 110
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=flow
    )
    return text


def read_document(
    raw: bytes, where: str, *, example: str = "", is_secret: bool = False, most_values: int = 10_000
) -> Document:
    """Parse the bytes of a file.

    Args:
        raw: YAML, UTF-8 with or without byte order mark.
        example: advice for a file that is empty, or no mapping.
        is_secret, most_values: see `Document`.

    Returns:
        The document; all faults of its form are in `.faults`.
    """
    document = Document(where, is_secret=is_secret, most_values=most_values)
    node = _compose(raw, document)
    document.is_mapping = isinstance(node, yaml.MappingNode)
    if document.faults:
        return document
    if node is None:
        document.refuse("is empty", line=1, fix=example)
    elif not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "one text"
        document.refuse(f"is {kind}, not a mapping of keys", line=_line(node), fix=example)
    else:
        document.data = _Reader(document).read(node, ())
    return document


def read_value(text: str, where: str, path: KeyPath) -> tuple[Any, Document]:
    """Parse one value that stands for a key; its faults and places are in the document, whose data are empty."""
    document = Document(where)
    node = _compose(text.encode(), document)
    return (None if node is None else _Reader(document).read(node, path)), document


def _compose(raw: bytes, document: Document) -> yaml.Node | None:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        document.refuse(
            "is not UTF-8 text", line=raw.count(b"\n", 0, error.start) + 1, fix="save it as UTF-8"
        )
        return None
    try:
        if _is_small(text, document):
            fast: yaml.Node | None = yaml.compose(text, _FastLoader)
            return fast
        return None
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # of a thousand, for which the parser in Python takes seconds
            document.refuse("is nested too deeply", line=1)
            return None
        return _compose_in_python(text, document)


def _is_small(text: str, document: Document) -> bool:
    """Refuse what holds too many values or is nested too deeply, before memory is spent on it."""
    nodes = depth = 0
    # Each value has at most one key.
    most_nodes = 2 * document.most_values + 1
    for event in yaml.parse(text, _FastLoader):
        nodes += isinstance(event, yaml.events.NodeEvent)
        depth += isinstance(event, yaml.events.CollectionStartEvent)
        depth -= isinstance(event, yaml.events.CollectionEndEvent)
        if nodes > most_nodes:
            line = event.start_mark.line + 1 if event.start_mark else None
            document.refuse(f"holds more than {document.most_values} values", line=line)
            return False
        if depth > _MAX_NESTING:
            document.refuse("is nested too deeply", line=1)
            return False
    return True


def _compose_in_python(text: str, document: Document) -> yaml.Node | None:
    """Parse what libyaml does not take, for the sake of the message."""
    try:
        node: yaml.Node | None = yaml.compose(text, _Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.refuse(
            f"holds the control character #x{ord(text[error.position]):02x}", line=line, fix="remove it"
        )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem, detail, fix = _explain(str(error.problem))
        document.refuse(problem, quoted=detail, line=mark.line + 1 if mark else None, fix=fix)
    except RecursionError:
        document.refuse("is nested too deeply", line=1)
    else:
        return node
    return None


def _explain(problem: str) -> tuple[str, str, str]:
    """Problem, detail and advice for a message of PyYAML."""
    if r"\t" in problem:
        return "is indented with a tab", "", "indent with spaces"
    problem = problem.removeprefix("but ").removeprefix("but ")
    hint = next((hint for part, hint in _HINTS if part in problem), "")
    return "is not YAML", f": {problem}", hint


class _Reader:
    """Turns nodes into values, and notes where each one stands."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()  # ids of the nodes around the present one
        self._count = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        most = self._document.most_values
        if self._count == most:
            self._document.refuse(f"holds more than {most} values", line=_line(node), path=path)
        if self._count >= most:
            return None
        if isinstance(node, yaml.ScalarNode):
            self._note(path, node, node.value)
            return self._scalar(node, path) if self._is_text(node, path) else None
        self._note(path, node)
        if len(path) > _MAX_DEPTH:
            self._document.refuse("is nested too deeply", line=_line(node), path=path[:3])
            return None
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._refuse_tag(node, path)
            return None
        if id(node) in self._open:
            self._document.refuse("contains itself through an alias", line=_line(node), path=path)
            return None
        self._open.add(id(node))
        value = (
            self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        )
        self._open.remove(id(node))
        return value

    def _note(self, path: KeyPath, node: yaml.Node, text: str | None = None) -> None:
        line = self._document.places[path].line if path in self._document.places else _line(node)
        self._document.places[path] = KeyPlace(self._document.where, line, text)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if kind == "float":
                return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
        except (ValueError, KeyError):
            if not node.style and not text.strip("+-0123456789"):  # a number of thousands of digits
                return text
            self._document.refuse(f"is not {kind}", quoted=f": {text[:40]}", line=_line(node), path=path)
            return None
        self._refuse_tag(node, path)
        return None

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        quoted = f": {node.tag.replace(_TAG, '!!')}"
        self._document.refuse("has a tag that means nothing here", quoted=quoted, line=_line(node), path=path)

    def _sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merged += self._merged(value, path)
            elif self._is_key(key, path):
                inner = (*path, key.value)
                if key.value in values:
                    first = self._document.places[inner].line
                    self._document.refuse(
                        f"stands twice; first on line {first}", line=_line(key), path=inner, fix="remove one"
                    )
                    continue
                self._document.places[inner] = KeyPlace(self._document.where, _line(key))
                values[key.value] = self.read(value, inner)
        for key, value in merged:
            if self._is_key(key, path) and key.value not in values:
                self._document.places[(*path, key.value)] = KeyPlace(self._document.where, _line(key))
                values[key.value] = self.read(value, (*path, key.value))
        return values

    def _is_key(self, key: yaml.Node, path: KeyPath) -> bool:
        if isinstance(key, yaml.ScalarNode) and key.tag == _TAG + "str":
            return self._is_text(key, path)
        shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
        quoted = f": {shown or 'nothing'}"
        self._document.refuse("has a key that is not text", quoted=quoted, line=_line(key), path=path)
        return False

    def _is_text(self, node: yaml.ScalarNode, path: KeyPath) -> bool:
        """Whether UTF-8 can encode the text; "\\ud83d" in quotes is half of a character."""
        try:
            check_text(node.value)
        except ValueError as error:
            self._document.refuse(str(error), line=_line(node), path=path)
            return False
        return True

    def _merged(self, value: yaml.Node, path: KeyPath) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                yield from ((k, v) for k, v in part.value if k.tag != _TAG + "merge")
            else:
                self._document.refuse(
                    "merges (<<) something that is not a mapping", line=_line(value), path=path
                )


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
