"""Docstrings for mkdocstrings: examples that begin with `>>>` become code blocks, wherever in a docstring they stand.

Without it Markdown takes `>>>` for a quotation in a quotation. Written against griffe 2.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# A paragraph that begins with a prompt, up to the next empty line.
_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))(?P<indent> *)(?P<text>>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class FencedExamples(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Called for every object, once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(
                r"\g<indent>```pycon\n\g<indent>\g<text>\n\g<indent>```", obj.docstring.value
            )
