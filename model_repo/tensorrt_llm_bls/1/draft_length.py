"""How many tokens to propose next: more while all are kept, fewer while some are not.

A token that the target drops costs the draft a step for nothing; a token too few costs a call of the target. Steps of
plus two and minus one come to rest where a proposal is kept as a whole one time in three, which is near the best length
for drafts that cost a tenth of their target, whatever share of their tokens is kept. (The rule is that of Hugging Face
Transformers' assisted generation, `num_assistant_tokens_schedule = "heuristic"`.)

Measured with the small pair in recipes/checkpoints, six tokens at most, 2400 tokens of noise, of which it keeps one in
three: 3111 proposed in 1039 rounds, instead of 5066 in 918. In text that it knows it makes no difference.
"""

from __future__ import annotations

_MORE, _FEWER = 2, 1


class DraftLength:
    """Of one answer; begins with the most.

    >>> length = DraftLength(4, adapts=True)
    >>> length.learn(4, kept=1), length.tokens
    (None, 3)
    >>> length.learn(3, kept=3), length.tokens
    (None, 4)
    """

    def __init__(self, most: int, *, adapts: bool) -> None:
        self._most = most
        self._adapts = adapts
        self.tokens = most

    def learn(self, proposed: int, *, kept: int) -> None:
        """Of `proposed` tokens the target kept so many; fewer than `tokens` were proposed for another reason."""
        if not self._adapts or not proposed:
            return
        if kept < proposed:
            self.tokens = max(1, self.tokens - _FEWER)
        elif proposed >= self.tokens:
            self.tokens = min(self._most, self.tokens + _MORE)

    def give_up(self) -> None:
        """Propose no more."""
        self.tokens = 0
