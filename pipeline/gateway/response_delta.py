"""What one choice says: text, or calls of tools, as deltas of a stream or as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.client import Chunk
from pipeline.gateway.generation import Job
from pipeline.gateway.schema import ChatRequest, CompletionRequest
from pipeline.gateway.tools.parts import Arguments, Call, Part, Text


class Said:
    """The state of one choice. A stream asks for `deltas`, a whole answer for `whole`; never both."""

    def __init__(self, job: Job, index: int) -> None:
        self.chat = isinstance(job.request, ChatRequest)
        self.begun = False
        self.reader = job.toolbox.reader()
        echo = isinstance(job.request, CompletionRequest) and job.request.echo
        prompt = job.prompt_of(index).content
        self._echoed = prompt if echo and isinstance(prompt, str) else ""

    def deltas(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What the chunk adds; before the first, what every answer begins with."""
        deltas: list[dict[str, Any]] = []
        if not self.begun:
            self.begun = True
            if self.chat:
                deltas.append({"role": "assistant", "content": None if self.reader else ""})
            elif self._echoed:
                deltas.append({"text": self._echoed})
        key = "content" if self.chat else "text"
        return deltas + [
            {key: part.text} if isinstance(part, Text) else {"tool_calls": [_delta(part)]}
            for part in self._parts([chunk])
        ]

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The message of a chat; {"text"} of a completion."""
        parts = self._parts(chunks)
        text = "".join(part.text for part in parts if isinstance(part, Text))
        if not self.chat:
            return {"text": self._echoed + text}
        message = {"role": "assistant", "content": text, "refusal": None}
        calls = [part for part in parts if isinstance(part, Call)]
        if not calls:
            return message
        arguments = ["" for _ in calls]
        for part in parts:
            if isinstance(part, Arguments):
                arguments[part.index] += part.text
        packed = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments[call.index]},
            }
            for call in calls
        ]
        return {**message, "content": text or None, "tool_calls": packed}

    def reason(self, chunk: Chunk) -> str | None:
        """As OpenAI has it, which knows no "unknown"."""
        if chunk.finish_reason in (None, "length"):
            return chunk.finish_reason
        return "tool_calls" if self.reader is not None and self.reader.calls else "stop"

    def _parts(self, chunks: Sequence[Chunk]) -> list[Part]:
        if self.reader is None:
            return [Text(text)] if (text := "".join(chunk.text for chunk in chunks)) else []
        parts = [part for chunk in chunks for part in self.reader.feed(chunk.text)]
        return parts + self.reader.end() if chunks[-1].finish_reason else parts


def _delta(part: Call | Arguments) -> dict[str, Any]:
    if isinstance(part, Call):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    return {"index": part.index, "function": {"arguments": part.text}}
