"""Values of a YAML text are changed in place: the result says just them, and every comment is still there."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.documents import dump_yaml, read_document
from pipeline.recipe import packaged
from pipeline.recipe.editing import edited_yaml

BLOCK = """\
# head

name: x   # its name
limits:
  # above
  a: 1
  b: |
    text

  c: [1, 2]   # list
  # below
runtime: {kind: t, gpu: h}   # flow
empty:
last: {a: {b: 1}, c: 2}
"""


def values(text: str) -> dict[str, Any]:
    return read_document(text.encode(), "").data


def comments(text: str) -> list[str]:
    return [part.strip() for line in text.splitlines() if (part := line.partition("#")[2])]


@pytest.mark.parametrize(
    ("path", "value", "lines"),
    [
        ("runtime.kind", "p", ["runtime: {kind: p, gpu: h}   # flow"]),
        ("runtime.gpu", None, ["runtime: {kind: t}   # flow"]),
        ("runtime.more", [1, "a"], ["runtime: {kind: t, gpu: h, more: [1, a]}   # flow"]),
        ("limits.a", None, ["  # above", "  b: |"]),
        ("limits.b", None, ["  a: 1", "  c: [1, 2]   # list"]),
        ("limits.b", "other", ["  b: other"]),
        ("limits.d", 4, ["  c: [1, 2]   # list", "  d: 4"]),
        ("limits", {"a": 1}, ["  a: 1", "  # below"]),
        ("empty", 3, ["empty: 3"]),
        ("last.a.b", 2, ["last: {a: {b: 2}, c: 2}"]),
        ("last.a.d", True, ["last: {a: {b: 1, d: true}, c: 2}"]),
        ("more", {"k": "on"}, ["more: {k: on}"]),
    ],
)
def test_one_value(path: str, value: object, lines: list[str]) -> None:
    wanted = values(BLOCK)
    section, *inner = path.split(".")
    place, last = wanted, section
    for part in inner:
        place, last = place[last], part
    if value is None:
        del place[last]
    else:
        place[last] = value
    edited = edited_yaml(BLOCK, wanted, {path: "said"})
    assert edited is not None
    assert values(edited) == wanted
    assert "# said\n" in edited
    assert "\n".join(lines) in re.sub(r" *# said\n", "", edited)
    kept = [comment for comment in comments(edited) if comment != "said"]
    assert kept == comments(BLOCK) if value != {"a": 1} else set(kept) < set(comments(BLOCK))


def test_what_cannot_be_changed_in_place() -> None:
    shared = "a: &x {k: 1}\nb: *x\n"
    assert edited_yaml(shared, {"a": {"k": 2}, "b": {"k": 1}}, {}) is None
    assert edited_yaml(shared, {"a": {"k": 2}, "b": {"k": 2}}, {}) is not None
    merged = "a: &x {k: 1}\nb: {<<: *x, l: 2}\n"
    assert edited_yaml(merged, {"a": {"k": 1}, "b": {"k": 5, "l": 2}}, {}) is None
    assert edited_yaml("a: {k: 1, # why\n  l: 2}\n", {"a": {"l": 2}}, {}) is None
    assert edited_yaml("- 1\n", {}, {}) is None


scalars = st.none() | st.booleans() | st.integers(-9, 99) | st.text("ab #:'\"-{", max_size=6)
documents = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}", fullmatch=True),
    st.recursive(
        scalars | st.lists(scalars, max_size=3),
        lambda inner: st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80)
@given(before=documents, after=documents, flow=st.booleans())
def test_any_document_becomes_any_other(before: dict[str, Any], after: dict[str, Any], flow: bool) -> None:
    wanted = copy.deepcopy(before) | after
    edited = edited_yaml(dump_yaml(before, flow=flow), wanted, dict.fromkeys(after, "said"))
    assert edited is not None
    assert values(edited) == wanted


@pytest.mark.parametrize("name", packaged())
def test_a_packaged_recipe_keeps_its_lines(name: str) -> None:
    text = packaged()[name].read_text(encoding="utf-8")
    wanted = values(text)
    assert edited_yaml(text, wanted, {}) == text
    wanted["limits"]["max_concurrency"] += 1
    edited = edited_yaml(text, wanted, {})
    assert edited is not None
    changed = [new for old, new in zip(text.splitlines(), edited.splitlines(), strict=True) if old != new]
    assert len(changed) == 1
    assert comments(edited) == comments(text)
