"""Scheduler: which sequences run, and what each step computes.

Requests start in the order they came, each as soon as its worst case fits the cache. A step computes one token (and
the drafts) for every sequence that decodes, then spends what is left of its tokens on prompts, oldest first. So a long
prompt is computed in chunks between which the others go on, and a request never waits for another to finish decoding
unless memory or `max_concurrency` says so.
"""

from __future__ import annotations

import time
from collections import deque
from hashlib import blake2b
from typing import NamedTuple

from .block_manager import BlockManager
from .sequence import Sequence

# Context logits in one step: with a vocabulary of 128 thousand tokens they take 64 MiB. Longer prompts take more steps.
MAX_CONTEXT_ROWS = 128


class ScheduledTokens(NamedTuple):
    """Work of one step for a sequence: its next `length` tokens, then `drafts`."""

    sequence: Sequence
    length: int
    drafts: list[int]
    rows: int  # logits wanted: 0 if the prompt is not done with this step, else 1 + len(drafts)
    context_rows: int = (
        0  # logits wanted of the tokens before those, because the next tokens of the prompt are known
    )


class BatchScheduler:
    """Admits requests, and plans each step of the engine."""

    def __init__(
        self, *, max_concurrency: int, step_tokens: int, target: BlockManager, draft: BlockManager | None
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_concurrency = max_concurrency
        self._step_tokens = step_tokens
        self._target = target
        self._draft = draft
        self._stuck = False  # the first that waits does not fit; nothing changes that but a release

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Start the waiting sequences that fit, oldest first, and return them."""
        admitted = []
        while self.waiting and not self._stuck and len(self.running) < self._max_concurrency:
            if not self._reserve(self.waiting[0]):
                self._stuck = True
                break
            sequence = self.waiting.popleft()
            sequence.first_scheduled_ns = time.monotonic_ns()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[ScheduledTokens]:
        """Decide what the next step computes: at most `step_tokens` tokens, decoding sequences first."""
        work: list[ScheduledTokens] = []
        prompts: list[Sequence] = []
        budget = self._step_tokens
        for sequence in self.running:
            if not sequence.decodes:
                prompts.append(sequence)
                continue
            work.append(ScheduledTokens(sequence, 1, sequence.drafts, 1 + len(sequence.drafts)))
            budget -= 1 + len(sequence.drafts)
        context_rows = MAX_CONTEXT_ROWS
        for sequence in prompts:
            drafts, most = sequence.drafts, budget
            if sequence.request.context_logits:
                most = min(most, context_rows)
            if most <= 0:
                continue
            if sequence.pending + len(drafts) <= most:
                piece = ScheduledTokens(sequence, sequence.pending, drafts, 1 + len(drafts))
            else:  # its last token and the drafts go together, in a later step
                piece = ScheduledTokens(sequence, min(sequence.pending - 1, most), [], 0)
            if sequence.request.context_logits:
                piece = piece._replace(context_rows=piece.length - min(piece.rows, 1))
                context_rows -= piece.context_rows
            work.append(piece)
            budget -= piece.length + len(piece.drafts)
        return work

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence, and free its blocks."""
        if sequence.target is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._target.release(sequence.target)
        self.drop_draft(sequence)
        self._stuck = False

    def drop_draft(self, sequence: Sequence) -> None:
        """Continue a sequence without the draft model."""
        if sequence.draft is not None and self._draft is not None:
            self._draft.release(sequence.draft)
        sequence.draft = None

    def _reserve(self, sequence: Sequence) -> bool:
        computes_all = sequence.request.context_logits
        salt = (
            blake2b(sequence.request.adapter.encode(), digest_size=16).digest() if sequence.adapter else b""
        )
        pages = self._target.admit(sequence.tokens, sequence.max_tokens, reuse=not computes_all, salt=salt)
        if pages is None:
            return False
        if self._draft is not None and sequence.speculates:
            sequence.draft = self._draft.admit(sequence.tokens, sequence.max_tokens)
            if sequence.draft is None:
                self._target.release(pages)
                return False
        sequence.target = pages
        return True
