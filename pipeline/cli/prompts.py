"""The prompts of `pipeline generate`: from the command line, or a line each from a file.

A line is text, or a JSON object: {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, beside it an "id"
of any kind that is repeated with the answer, and sampling parameters such as "max_tokens" and "seed".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import Fault, InvalidInput
from pipeline.reading import check_line, checked_json


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of them."""

    content: str | Sequence[Mapping[str, Any]]  # text, or messages
    id: Any = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(lines: Iterable[str], where: str) -> list[Prompt]:
    """A prompt a line; empty lines are left out. Bytes that are not UTF-8 come as `surrogateescape` has them.

    Raises:
        InvalidInput: with every line that is none, and if there is none at all.
    """
    prompts, faults = list[Prompt](), list[Fault]()
    for number, line in enumerate(lines, 1):
        try:
            if text := check_line(line.strip()):
                prompts.append(_object(text) if text.startswith("{") else Prompt(text))
        except ValueError as error:
            faults.append(Fault(str(error), where=where, line=number))
    if not prompts and not faults:
        faults.append(Fault("holds no prompt", where=where, fix="write one a line"))
    if faults:
        raise InvalidInput(where, faults)
    return prompts


def _object(text: str) -> Prompt:
    try:
        given = checked_json(text)
    except ValueError as error:
        raise ValueError(f"begins like JSON and is not: {error}") from None
    found = [name for name in ("prompt", "messages") if name in given]
    if len(found) != 1:
        raise ValueError('needs "prompt" or "messages", one of them')
    content = given.pop(found[0])
    if found == ["prompt"] and not isinstance(content, str):
        raise ValueError("prompt: must be text")
    if found == ["messages"] and not (
        isinstance(content, list)
        and content
        and all(isinstance(one, dict) and "role" in one for one in content)
    ):
        raise ValueError('messages: must be a list of objects such as {"role": "user", "content": "Hi"}')
    return Prompt(content, given.pop("id", None), given)
