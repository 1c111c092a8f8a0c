"""Documents of Anthropic's Messages API that are text: what of them stands in the prompt.

Written against anthropic-python 2.14 (`types.document_block_param`). Documents in other forms (PDF, files, URLs) and
citations are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FORMS = '{"type": "text", "data": …} or {"type": "content", "content": …} with text'


def document_text(block: Mapping[str, Any], where: str, faults: list[str]) -> str:
    """Return the text of a block of type document: its title, its context and its content, each on lines of their own.

    Args:
        block: of a message, or of the result of a tool.
        where: its place in the request.
        faults: gets what is wrong with it.

    >>> document_text({"title": "Prices", "source": {"type": "text", "data": "Tea: 2"}}, "", [])
    'Prices\\nTea: 2\\n\\n'
    """
    citations = block.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        faults.append(f"{where}.citations: are not supported by this server")
    lines = []
    for name in ("title", "context"):
        text = block.get(name)
        if isinstance(text, str):
            lines.append(text)
        elif text is not None:
            faults.append(f"{where}.{name}: must be a text")
    content = _content(block.get("source"))
    if content is None:
        faults.append(f"{where}.source: this model takes text only: {_FORMS}")
    return "\n".join([*lines, content or ""]) + "\n\n"


def _content(source: Any) -> str | None:
    """The text of a source; None if it is none."""
    if not isinstance(source, Mapping):
        return None
    if source.get("type") == "text":
        return source["data"] if isinstance(source.get("data"), str) else None
    content = source.get("content") if source.get("type") == "content" else None
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        block["text"]
        for block in content
        if isinstance(block, Mapping) and isinstance(block.get("text"), str)
    ]
    return "\n".join(texts) if len(texts) == len(content) else None
