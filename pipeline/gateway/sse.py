"""Server-sent events, with as little work a token as possible: what is the same in every chunk is encoded once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
_text = json.encoder.encode_basestring  # JSON of a string, UTF-8 as it is
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: Mapping[str, Any]) -> bytes:
    """Any JSON object as one event."""
    return b"data: " + _json(value).encode() + b"\n\n"


class ChunkWriter:
    """Writes the chunks of one completion."""

    def __init__(self, head: Mapping[str, Any], *, chat: bool) -> None:
        """`head`: id, object, created, model, and what else every chunk has."""
        self._head = _json(head)[:-1]
        self._chat = chat
        self._open: dict[int, str] = {}  # by choice
        self._close = ("}" if chat else "") + ',"logprobs":null,"finish_reason":null}]}\n\n'

    @property
    def _text_key(self) -> str:
        return '"delta":{"content":' if self._chat else '"text":'

    def text(self, index: int, text: str) -> bytes:
        """New text of choice `index`."""
        begin = self._open.get(index)
        if begin is None:
            begin = f'data: {self._head},"choices":[{{"index":{index},{self._text_key}'
            self._open[index] = begin
        return f"{begin}{_text(text)}{self._close}".encode()

    def choice(self, index: int, **fields: Any) -> bytes:
        """Any chunk of a choice: the first, the last, one with log probabilities."""
        choice = {"index": index, **fields}
        return f'data: {self._head},"choices":[{_json(choice)}]}}\n\n'.encode()

    def end(self, **fields: Any) -> bytes:
        """A chunk without choices, such as the usage."""
        rest = _json(fields)[1:]
        return f'data: {self._head},"choices":[],{rest}\n\n'.encode()
