"""Digests: unchanged by what does not matter, changed by everything that does."""

from __future__ import annotations

import enum
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store import ArtifactKey, canonical, digest_of

NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SETTINGS = st.dictionaries(st.text(min_size=1), VALUES, max_size=5)
HEX = "0123456789abcdef" * 4


def shuffled(value: Any, seed: int) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(item, seed)) for key, item in value.items()]
        random.Random(seed).shuffle(items)
        return dict(items)
    return [shuffled(item, seed) for item in value] if isinstance(value, list) else value


@given(SETTINGS, st.integers())
def test_order_of_keys_does_not_matter(settings: dict[str, Any], seed: int) -> None:
    assert ArtifactKey("fetch", shuffled(settings, seed)).digest == ArtifactKey("fetch", settings).digest


@given(SETTINGS)
def test_a_value_that_went_through_json_has_the_same_digest(settings: dict[str, Any]) -> None:
    assert digest_of(json.loads(json.dumps(settings))) == digest_of(settings)
    assert digest_of(json.loads(canonical(settings))) == digest_of(settings)


@given(SETTINGS, st.text(min_size=1), VALUES, VALUES)
def test_any_change_of_a_value_changes_the_digest(
    settings: dict[str, Any], name: str, one: Any, other: Any
) -> None:
    keys = [ArtifactKey("fetch", {**settings, name: value}) for value in (one, other)]
    same = canonical(one) == canonical(other)
    assert (keys[0].digest == keys[1].digest) is same
    if not _equal_as_json(one, other):
        assert not same


def _equal_as_json(first: Any, second: Any) -> bool:
    return json.loads(json.dumps(first)) == json.loads(json.dumps(second))


@given(SETTINGS)
def test_every_part_of_the_key_counts(settings: dict[str, Any]) -> None:
    keys = [
        ArtifactKey("fetch", settings),
        ArtifactKey("build", settings),
        ArtifactKey("fetch", {**settings, "": 1}),
        ArtifactKey("fetch", settings, inputs={"target": HEX}),
        ArtifactKey("fetch", settings, inputs={"draft": HEX}),
        ArtifactKey("fetch", settings, inputs={"target": HEX[::-1]}),
        ArtifactKey("fetch", settings, tools={"torch": "2.13.0"}),
        ArtifactKey("fetch", settings, tools={"torch": "2.13.1"}),
    ]
    assert len({key.digest for key in keys}) == len(keys)


def test_how_it_is_made_does_not_count() -> None:
    assert ArtifactKey("fetch", {"a": 1}, resumable=True).digest == ArtifactKey("fetch", {"a": 1}).digest


class Size(enum.IntEnum):
    SMALL = 1


def test_whole_floats_are_integers_and_booleans_are_not() -> None:
    assert canonical([1, 1.0, -0.0, Size.SMALL]) == "[1,1,0,1]"
    assert canonical([True, "1", 1.5, 1e300, 0.1]) == '[true,"1",1.5,1e+300,0.1]'
    assert canonical((1, (2,))) == canonical([1, [2]])


@pytest.mark.parametrize("text", ["", "a", "한국어", "😀", "\u0000", "\ud800"])
def test_any_text_has_a_digest(text: str) -> None:
    assert len(digest_of({text: text})) == 64


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [math.nan]}, r"\$\.a\[0\]: nan"),
        ({"a": -math.inf}, r"\$\.a: -inf"),
        ({"a": {1: 2}}, r"\$\.a: the key 1 is not text"),
        ({"a": {"b": {1, 2}}}, r"\$\.a\.b: set is not JSON"),
        ({"a": b"x"}, r"\$\.a: bytes is not JSON"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_place(value: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        canonical(value)


def test_the_name_is_stage_and_twenty_digits() -> None:
    key = ArtifactKey("fetch", {"repo": "org/name"})
    assert key.name == f"fetch-{key.digest[:20]}"
    assert key.name == "fetch-a0606687625223042420", "stored artifacts would no longer be found"


def test_wrong_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        ArtifactKey("../fetch")
    with pytest.raises(ValueError, match="64-digit digest"):
        ArtifactKey("build", inputs={"target": "/some/path"})
