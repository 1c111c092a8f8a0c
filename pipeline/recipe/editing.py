"""Change values in the text of a YAML file, and keep its comments, its order and its style everywhere else.

    edited_yaml(text, {**values, "limits": {"max_concurrency": 8}}, {"limits.max_concurrency": "eight fit"})

The values that change are found by their places in the text. What comes out is read again: a file whose values cannot
be changed in place (anchors and merge keys that reach a changed value, comments inside of a changed `{…}`) is not
edited.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from pipeline.documents import dump_yaml, read_document

_WIDTH = 100


def edited_yaml(text: str, values: Mapping[str, Any], comments: Mapping[str, str]) -> str | None:
    """Return the text of a document with other values.

    Args:
        text: The document, a mapping.
        values: All of its values as they shall be.
        comments: Dotted key -> comment above its line, or in its place where it is removed.

    Returns:
        The text; None where the values cannot be changed in place.

    >>> text = "a: {b: 1}  # mine\\nc: 2\\n"
    >>> print(edited_yaml(text, {"a": {"b": 1, "d": True}, "c": 3}, {"c": "was 2"}), end="")
    a: {b: 1, d: true}  # mine
    # was 2
    c: 3
    """
    text = text if text.endswith("\n") else f"{text}\n"
    root, before = yaml.compose(text, yaml.SafeLoader), read_document(text.encode(), "")
    if not isinstance(root, yaml.MappingNode) or before.faults:
        return None
    editor = _Editor(text, comments)
    try:
        editor.change(root, before.data, values, "")
        edited = editor.result()
    except _NotInPlaceError:
        return None
    after = read_document(edited.encode(), "")
    return edited if not after.faults and after.data == dict(values) else None


class _NotInPlaceError(Exception):
    """The text has no one place for a value."""


@dataclass
class _Editor:
    text: str
    comments: Mapping[str, str]
    splices: list[tuple[int, int, str]] = field(default_factory=list)  # start, end, what stands there instead

    def change(
        self, node: yaml.MappingNode, have: Mapping[str, Any], want: Mapping[str, Any], path: str
    ) -> None:
        """Note the splices of one mapping."""
        entries = {key.value: (key, value) for key, value in node.value}
        if set(entries) != set(have):
            # The values of merge keys stand elsewhere.
            raise _NotInPlaceError
        if node.flow_style:
            if not path:
                self.splices.append((0, 0, self._comments("", 0)))
            self._change_flow(node, have, want, path)
            return
        for name, (key, value) in entries.items():
            place, start = f"{path}{name}", self._line_start(key)
            is_block = isinstance(value, yaml.MappingNode) and not value.flow_style
            comments = self._comments(place, key.start_mark.column, below=name not in want or not is_block)
            if name not in want:
                self._cut(start, value, comments)
                continue
            self.splices.append((start, start, comments))
            if have[name] != want[name]:
                self._change_value(key, value, have[name], want[name], place)
        column, end = node.start_mark.column, self._line_end(_end(node))
        for name in [name for name in want if name not in have]:
            comments = self._comments(f"{path}{name}", column)
            self.splices.append((end, end, f"{comments}{' ' * column}{_entry(name, want[name])}\n"))

    def result(self) -> str:
        """The text with all splices."""
        parts, at = [], 0
        # What an anchor names is met once more at each alias.
        for start, end, instead in sorted(dict.fromkeys(self.splices), key=lambda fromkey: fromkey[:1]):
            if start < at:
                raise _NotInPlaceError
            parts += [self.text[at:start], instead]
            at = end
        return "".join((*parts, self.text[at:]))

    def _change_value(self, key: yaml.Node, value: yaml.Node, have: Any, want: Any, path: str) -> None:
        if isinstance(value, yaml.MappingNode) and isinstance(want, dict) and have and want:
            self.change(value, have, want, f"{path}.")
        elif _is_inline(value):
            # A value that is left out (`key:`) has its place behind the colon.
            gap = " " if value.start_mark.index == value.end_mark.index else ""
            self.splices.append(
                (value.start_mark.index, _end(value), f"{gap}{_entry('k', want).removeprefix('k: ')}")
            )
        else:
            indent = " " * key.start_mark.column
            self._cut(self._line_start(key), value, f"{indent}{_entry(path.rpartition('.')[2], want)}\n")

    def _change_flow(
        self, node: yaml.MappingNode, have: Mapping[str, Any], want: Mapping[str, Any], path: str
    ) -> None:
        if set(have) == set(want):
            for key, value in node.value:
                if have[key.value] != want[key.value]:
                    self._change_value(key, value, have[key.value], want[key.value], f"{path}{key.value}")
            return
        start, end = node.start_mark.index, node.end_mark.index
        ends = [start, *(value.end_mark.index for _, value in node.value)]
        starts = [*(key.start_mark.index for key, _ in node.value), end]
        if any("#" in self.text[before:after] for before, after in zip(ends, starts, strict=True)):
            # A comment between values has no place on one line.
            raise _NotInPlaceError
        written = {
            key.value: self.text[key.start_mark.index : value.end_mark.index] for key, value in node.value
        }
        entries = (
            written[name] if name in have and have[name] == value else _entry(name, value)
            for name, value in want.items()
        )
        self.splices.append((start, end, f"{{{', '.join(entries)}}}"))

    def _cut(self, start: int, value: yaml.Node, instead: str) -> None:
        """Put something in the place of whole lines."""
        self.splices.append((start, self._line_end(_end(value)), instead))

    def _comments(self, path: str, column: int, *, below: bool = True) -> str:
        """Lines above a key: its own comment, and those of keys below it that have no lines of their own."""
        chosen = (
            text
            for key, text in self.comments.items()
            if key == path or (below and (not path or key.startswith(f"{path}.")))
        )
        return "".join(f"{' ' * column}# {line}\n" for text in chosen for line in textwrap.wrap(text, _WIDTH))

    def _line_start(self, node: yaml.Node) -> int:
        return self.text.rfind("\n", 0, node.start_mark.index) + 1

    def _line_end(self, index: int) -> int:
        """Index of the line that follows; a block of text (`|`) ends there already."""
        return index if self.text[index - 1] == "\n" else self.text.index("\n", index) + 1


def _is_inline(node: yaml.Node) -> bool:
    if isinstance(node, yaml.ScalarNode):
        return node.style not in ("|", ">")
    return isinstance(node, yaml.CollectionNode) and bool(node.flow_style)


def _end(node: yaml.Node) -> int:
    """Index behind the last character of a value; marks of block collections lie behind comments that follow."""
    if isinstance(node, yaml.ScalarNode) or _is_inline(node) or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _entry(name: str, value: Any) -> str:
    """`name: value` on one line."""
    return dump_yaml({name: value}, flow=True).strip().removeprefix("{").removesuffix("}")
