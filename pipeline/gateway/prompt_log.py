"""Prompts and answers in the log, for those who ask for them; and without what belongs to somebody.

The judge is the response cache's (`pipeline.cache.redaction`): it finds keys, e-mail addresses, payment cards, bank
accounts, national ids and telephone numbers. Nothing is blacked out within a text: a text that holds one is left out,
and the line says what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.cache.response_cache import Redactor


class PromptLog:
    """What of prompts and answers goes into the log."""

    def __init__(self, redactor: Redactor | None) -> None:
        """
        Args:
            redactor: judges texts; None: all are logged as they are.
        """
        self._redactor = redactor

    def fields(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a request's line.

        Args:
            prompts: as the engine got them.
            answers: of each choice, as far as they came.

        Returns:
            {"prompts": [text], "answers": [text]}
        """
        return {"prompts": list(map(self._shown, prompts)), "answers": list(map(self._shown, answers))}

    def _shown(self, text: str) -> str:
        held = None if self._redactor is None else self._redactor.objection(text, "")
        return text if held is None else f"[left out: holds {held}]"
