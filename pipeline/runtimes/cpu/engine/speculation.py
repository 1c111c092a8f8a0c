"""Draft-model speculation: a small model proposes the next tokens, the large one checks them all in one step.

The rule of acceptance is equality: the target chooses its own token for every position (`sampler.choose`), and
the proposed tokens are kept up to the first that differs. So the answer is exactly that of the target alone, greedy or
sampled; see `sampler` for why sampled tokens still agree often. No draft probabilities are needed, and tokens that a
caller proposes are checked in the same way.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum
from statistics import median

from .block_manager import BlockManager
from .paged_model import PagedModel, StepFailed, TokenSlice
from .sampler import SamplingRow, choose
from .scheduler import BatchScheduler
from .sequence import Sequence

_log = logging.getLogger(__name__)


def accepted(drafts: list[int], chosen: list[int]) -> int:
    """Count the `drafts` that the target accepted.

    >>> accepted([4, 5, 6], [4, 5, 9, 7])
    2
    """
    for at, (draft, token) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != token:
            return at
    return len(drafts)


class Drafter:
    """Keeps the draft model's cache up to date, and proposes drafts."""

    def __init__(
        self, model: PagedModel, blocks: BlockManager, *, max_draft_tokens: int, step_tokens: int, adapt: bool
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._max_draft_tokens = max_draft_tokens
        self._step_tokens = step_tokens
        self._adaptive = AdaptiveDrafting() if adapt else None
        self._read = 0  # tokens read by the first step of the last proposal, 0 if there was none

    def propose(self, scheduler: BatchScheduler) -> None:
        """Set `drafts` of the sequences that decode, if that pays.

        One step of the draft model reads what it has not seen yet (after the first token, that is the prompt: it does
        not delay it), at most `step_tokens`; then one short step for each further token.
        """
        self._read = 0
        sequences = [
            sequence
            for sequence in scheduler.running
            if sequence.draft and sequence.decodes and self._wanted(sequence) and not sequence.drafts
        ]
        if not sequences or not self._pays(scheduler, sequences):
            return
        try:
            proposing = self._read_up(sequences)
            while proposing:
                proposing = self._step([self._slice(sequence, 1, True) for sequence in proposing], proposing)
        except StepFailed:
            _log.exception("draft model failed; %d requests go on without it", len(sequences))
            for sequence in sequences:
                sequence.drafts = []
                scheduler.drop_draft(sequence)

    def settle(self, sequence: Sequence) -> None:
        """After the target's step, drop rejected tokens from the draft's cache, too.

        The draft may have found more of a prompt in its cache than the target.
        """
        if sequence.draft:
            filled = min(sequence.draft.filled, len(sequence.tokens) - 1)
            self._blocks.publish(sequence.draft, sequence.tokens, filled)

    def record(self, batch: int, tokens: int, seconds: float) -> None:
        """Record a pure decoding step: its `tokens`, and its `seconds` with the proposals."""
        if self._adaptive and self._read <= 2 * batch:  # else it had to catch up, which is not the rule
            self._adaptive.record(batch, drafted=self._read > 0, tokens=tokens, seconds=seconds)

    def _pays(self, scheduler: BatchScheduler, sequences: list[Sequence]) -> bool:
        mode = self._adaptive.mode(len(scheduler.running)) if self._adaptive else DraftMode.DRAFT
        if mode is DraftMode.TRIAL:
            return sum(map(_unread, sequences)) <= self._step_tokens
        return mode is DraftMode.DRAFT

    def _read_up(self, sequences: list[Sequence]) -> list[Sequence]:
        """Read what is new, shortest first; the sequences that got their first proposal and want more."""
        slices: list[TokenSlice] = []
        proposing: list[Sequence] = []
        for sequence in sorted(sequences, key=_unread):
            unread = _unread(sequence)
            count = min(unread, self._step_tokens - self._read)
            if count:
                slices.append(self._slice(sequence, count, count == unread))
                self._read += count
            if count == unread:
                proposing.append(sequence)
        return self._step(slices, proposing)

    def _slice(self, sequence: Sequence, count: int, complete: bool) -> TokenSlice:
        """Slice of the next `count` tokens; of a single one also the token before it.

        After a round in which all drafts were accepted two tokens are new, else one, and so in the steps that follow.
        OpenVINO takes longer to change the shape of a step (90 us on a tiny model) than to read a token again.
        """
        pages = sequence.draft
        assert pages is not None
        end = pages.filled + count
        past = max(0, min(pages.filled, end - 2))
        self._blocks.extend(pages, end)
        pages.filled = end
        return TokenSlice(_between(sequence, past, end), past, pages.tables, int(complete))

    def _step(self, slices: list[TokenSlice], proposing: list[Sequence]) -> list[Sequence]:
        logits = self._model.forward(slices)
        rows = [SamplingRow(sequence, len(sequence.drafts)) for sequence in proposing]
        more = []
        for (sequence, _), token in zip(rows, choose(logits, rows).tokens, strict=True):
            if token == sequence.request.end_id:
                continue  # the target finds out by itself, one position after the last draft
            sequence.drafts.append(token)
            if len(sequence.drafts) < self._wanted(sequence):
                more.append(sequence)
        return more

    def _wanted(self, sequence: Sequence) -> int:
        return min(self._max_draft_tokens, sequence.remaining - 1)


def _unread(sequence: Sequence) -> int:
    assert sequence.draft is not None
    return len(sequence.tokens) - sequence.draft.filled


def _between(sequence: Sequence, begin: int, end: int) -> list[int]:
    """Tokens `begin` to `end` of the sequence and its drafts."""
    known = len(sequence.tokens)
    return sequence.tokens[begin:end] + sequence.drafts[max(0, begin - known) : max(0, end - known)]


_TRIAL_STEPS = 8
_WORTH = 1.1  # drafting must be faster by this factor, because its longer steps keep newcomers waiting
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 8192  # steps between trials of the slower way


class DraftMode(Enum):
    """Plan of the next step: decode alone, draft if that is cheap, or draft."""

    PLAIN = "plain"
    TRIAL = "trial"  # draft if the draft model has little to catch up with
    DRAFT = "draft"


class AdaptiveDrafting:
    """Whether drafting pays, decided by measuring tokens a second with and without it.

    What a draft model gains depends on the batch size, the machine and the text. So for each batch size (to a power of
    two) both ways are tried, the faster one is kept, and the other is tried again now and then, ever less often while
    it keeps losing. The answers do not depend on it.
    """

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}  # by bit length of the batch size

    def mode(self, batch: int) -> DraftMode:
        """Decide the next step of `batch` sequences."""
        comparison = self._comparison(batch)
        if not comparison.drafting:
            return DraftMode.PLAIN
        return DraftMode.TRIAL if comparison.on_trial else DraftMode.DRAFT

    def record(self, batch: int, *, drafted: bool, tokens: int, seconds: float) -> None:
        """Learn from one step in which all `batch` sequences decoded `tokens` in `seconds`."""
        self._comparison(batch).record(drafted, tokens / seconds)

    def _comparison(self, batch: int) -> _Comparison:
        return self._comparisons.setdefault(batch.bit_length(), _Comparison())


class _Comparison:
    """Decoding with and without drafts at one batch size, measured in turns."""

    def __init__(self) -> None:
        self.drafting = True  # the way of the current phase
        self.on_trial = True
        self._steps_left = _TRIAL_STEPS  # of the current phase
        self._pause = _FIRST_PAUSE
        self._rates: dict[bool, deque[float]] = {}  # drafting -> tokens a second of the last steps

    def record(self, drafted: bool, rate: float) -> None:
        self._rates.setdefault(drafted, deque(maxlen=2 * _TRIAL_STEPS)).append(rate)
        if drafted is not self.drafting:  # a trial that has to wait until it is cheap
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self._next_phase()

    def _next_phase(self) -> None:
        if not self.on_trial or len(self._rates) < 2:
            self.drafting, self.on_trial, self._steps_left = not self.drafting, True, _TRIAL_STEPS
            return
        best = median(self._rates[True]) > _WORTH * median(self._rates[False])
        self._pause = _FIRST_PAUSE if best is self.drafting else min(2 * self._pause, _LONGEST_PAUSE)
        self.drafting, self.on_trial, self._steps_left = best, False, self._pause
