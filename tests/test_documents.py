"""Files held against a model: every fault with its line and key, and what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from pipeline.document_faults import read_json, read_yaml, validate
from pipeline.documents import read_document
from pipeline.errors import InvalidInput
from pipeline.reading import UnreadableFile


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Shop(_Base):
    kind: Literal["shop"]
    seats: int = Field(ge=1, le=9)


class Bar(_Base):
    kind: Literal["bar"]
    stools: int = 2


class Street(_Base):
    named: dict[str, Shop] = {}
    listed: tuple[Shop, ...] = ()
    mixed: tuple[Shop | Bar, ...] = ()
    made_at: str = Field(default="", alias="made-at", min_length=1)


STREET = """\
named:
  left: {kind: shop, seats: 10}
  right: {kind: shop, seat: 1}
listed:
- {kind: shop, seats: 1}
- {kind: shop, seats: 1, made-at: x}
made_at: x
"""
FAULTS = [
    ("named.left.seats", "must be 1 to 9", ""),
    ("named.right.seats", "is missing", "1 to 9"),
    ("named.right.seat", "is not a key", "did you mean seats? allowed: kind, seats"),
    ("listed[1].made-at", "is not a key", "did you mean made-at? allowed here: kind, seats"),
    ("made_at", "is not a key", "did you mean made-at? allowed: named, listed, mixed, made-at"),
]


def test_names_and_lists_are_followed_to_the_key(tmp_path: Path) -> None:
    file = tmp_path / "street.yaml"
    file.write_text(STREET)
    with pytest.raises(InvalidInput) as refused:
        read_yaml(Street, file)
    assert [(fault.key, fault.problem, fault.fix) for fault in refused.value.faults] == FAULTS
    assert [fault.line for fault in refused.value.faults] == [2, 3, 3, 6, 7]


def test_json_has_the_same_faults_without_lines(tmp_path: Path) -> None:
    file = tmp_path / "street.json"
    file.write_text(json.dumps(read_document(STREET.encode(), "x").data))
    with pytest.raises(InvalidInput) as refused:
        read_json(Street, file)
    assert {(fault.key, fault.problem, fault.fix) for fault in refused.value.faults} == set(FAULTS)
    assert {fault.line for fault in refused.value.faults} == {None}
    assert "named.left.seats = 10: must be 1 to 9" in str(refused.value)
    file.write_text("[")
    with pytest.raises(UnreadableFile, match="is not JSON"):
        read_json(Street, file)


def test_a_secret_document_is_not_quoted() -> None:
    text = "named: {x: {kind: sk-1, seats: sk-2, sk-3: 1}, y: !sk-4 1}\nlisted: [sk-5]\nsk-6: 1\nsk-6: 1\n"
    with pytest.raises(InvalidInput) as refused:
        validate(Street, read_document(text.encode(), "keys.yaml", is_secret=True))
    assert len(refused.value.faults) == 7
    assert "sk-" not in str(refused.value)


def test_a_valid_document_is_its_model(tmp_path: Path) -> None:
    file = tmp_path / "street.yaml"
    file.write_text("named: {left: {kind: shop, seats: 3}}\nmixed: [{kind: bar}]\n")
    street = read_yaml(Street, file)
    assert street.named["left"].seats == 3
    assert street.mixed == (Bar(kind="bar"),)
    (tmp_path / "street.json").write_text(street.model_dump_json(by_alias=True, exclude_defaults=True))
    assert read_json(Street, tmp_path / "street.json") == street
