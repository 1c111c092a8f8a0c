"""Parts that an answer is parsed into, in their order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text outside of all calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Beginning of a call."""

    index: int  # counts the calls of an answer from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """A piece of the arguments of call `index`: JSON, as the model wrote it."""

    index: int
    text: str


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart
