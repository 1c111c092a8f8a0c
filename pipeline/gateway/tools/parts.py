"""What an answer of a model with tools is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """What is said, outside of all calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of call `index`: a piece of a JSON object, as the model wrote it."""

    index: int
    text: str


Part = Text | Call | Arguments
