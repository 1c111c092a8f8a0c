"""Draft-target speculation: a small model proposes tokens, the large one checks them, and what it keeps goes out.

The loop only: no Triton, no tensors. Each round is one call of each model with all tokens so far, so both need a cache
that finds the beginning of a prompt again. What comes out is what the target chooses, whatever the draft proposes.

The first token does not wait for the draft: while the target computes it, the draft reads the prompt, too, and proposes
what may follow. If it began with the target's token, the rest is the next proposal.

What the engine models behind it must be and do (C++ backend of TensorRT-LLM 1.0 to 1.2, and the cpu engine):

* both: `enable_kv_cache_reuse` true; prompts up to the longest sequence less one (on the C++ backend: chunked context,
  or max_num_tokens of that size); one tokenizer. `exclude_input_in_output` may be anything: each call says it anew.
* the target: built with `draft_tokens_external`, `max_draft_len` not below the longest proposal. A call with draft
  tokens ends after one step. It does not stream, so that it works whether the model is decoupled or not; a call without
  draft tokens streams if the client does, and then the target must be decoupled. The draft's calls never stream.
* `end_id` is not among the tokens that come back; a stop word is.

So an answer that consists of checked tokens alone has ended: after the last token that is kept, the target adds one of
its own, unless that was `end_id`.

How many tokens to propose next adapts (`DraftLength`): more while all are kept, fewer while some are not. A token that
the target drops costs the draft a step for nothing; a token too few costs a call of the target. Steps of plus two and
minus one come to rest where a proposal is kept as a whole one time in three, which is near the best length for drafts
that cost a tenth of their target, whatever share of their tokens is kept. (The rule is that of Hugging Face
Transformers' assisted generation, `num_assistant_tokens_schedule = "heuristic"`.) Measured with the small pair in
recipes/checkpoints, six tokens at most, 2400 tokens of noise, of which it keeps one in three: 3111 proposed in 1039
rounds, instead of 5066 in 918. In text that it knows it makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Protocol

from shared.stop_words import Words


@dataclass(frozen=True, slots=True)
class DecodePosition:
    """State of an answer when a model is called."""

    tokens: Sequence[int]  # prompt and answer
    made: int  # tokens of the answer
    min_tokens: int  # that the answer must still get


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposal of a draft."""

    tokens: tuple[int, ...] = ()
    logits: Any = None  # [tokens, vocabulary] that they were drawn from; None: the target compares tokens

    def first(self, count: int) -> Proposal:
        """Not more than `count` tokens of it."""
        return Proposal(self.tokens[:count], None if self.logits is None else self.logits[:count])

    def rest(self, count: int) -> Proposal:
        """Rest after its first `count` tokens."""
        return Proposal(self.tokens[count:], None if self.logits is None else self.logits[count:])


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Content of one response of the target."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] = ()  # one a token, if they were asked for
    cum_log_prob: float = 0.0  # of the tokens of this call so far
    checked: int | None = (
        None  # draft tokens that the engine took, if it says; it may drop some for want of room
    )


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """Final tokens, which may go out."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0  # of the whole answer so far
    last: bool = False


class ModelPair(Protocol):
    """The two models. Each call blocks; all raise what their model raises. One of each may be called at once."""

    def propose(self, at: DecodePosition, count: int) -> Proposal:
        """Up to `count` tokens that may come next; fewer where the draft would end the answer."""
        ...

    def verify(self, at: DecodePosition, proposal: Proposal) -> TargetOutput:
        """The tokens of the proposal that the target keeps, and one of its own."""
        ...

    def go_on(self, at: DecodePosition, count: int) -> Iterable[TargetOutput]:
        """The target alone, up to `count` tokens, as they come."""
        ...

    def give_up(self, error: Exception) -> None:
        """The draft failed: the rest of this answer comes from the target alone."""
        ...


class DraftTarget:
    """One answer. `steps` runs in one thread; `stop` may be called from another."""

    def __init__(
        self,
        pair: ModelPair,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        draft_tokens: int,
        adapts: bool = False,
        min_tokens: int = 0,
        stop_words: Words = (),
        prior: int = 0,
    ) -> None:
        """`draft_tokens`: proposed in one round, at most; 0 is the target alone. `adapts`: fewer where few are kept.
        `prior`: tokens at the end of the prompt that belong to the answer, because it began elsewhere.
        """
        self._pair = pair
        self._tokens = list(prompt)
        self._prompt, self._began = len(prompt) - prior, len(prompt)
        self._max_tokens = max_tokens
        self._length = DraftLength(draft_tokens, adapts=adapts)
        self._min_tokens = min_tokens
        self._stop_words = [list(word) for word in stop_words]
        self._over = False
        self._stopped = Event()
        self._cum_log_prob = 0.0
        self.rounds = 0  # calls of the target after a proposal, empty ones included
        self.proposed = self.accepted = 0  # tokens, in the whole answer

    @property
    def made(self) -> int:
        """Tokens of the answer so far."""
        return len(self._tokens) - self._prompt

    @property
    def made_here(self) -> int:
        """Tokens of the answer without those that came before."""
        return len(self._tokens) - self._began

    def stop(self) -> None:
        """No more calls; the one that is under way is ended by whoever made it."""
        self._stopped.set()

    def steps(self) -> Iterator[VerifiedTokens]:
        """The answer as it comes; the last step, which may hold no tokens, says so.

        Raises:
            Exception: Whatever the target raises. What the draft raises ends the speculation, not the answer.
        """
        head_start: Future[Proposal] | None = None
        if self._length.tokens and self._max_tokens > self.made + 1:
            head_start = self._start()
            yield self._take(self._pair.verify(self._position(), Proposal()), Proposal())
        while not self._over and not self._stopped.is_set() and self._length.tokens:
            proposal = self._proposal(head_start)
            head_start = None
            if proposal is not None and not self._stopped.is_set():
                self.rounds += 1
                yield self._take(self._pair.verify(self._position(), proposal), proposal)
        before = self._cum_log_prob  # the target counts from the beginning of its call
        if not self._over and not self._stopped.is_set():
            for made in self._pair.go_on(self._position(), self._max_tokens - self.made):
                self._cum_log_prob = before
                yield self._take(made, None)
                if self._over or self._stopped.is_set():
                    break
        if not self._over:
            yield VerifiedTokens((), (), self._cum_log_prob, last=True)

    def _position(self) -> DecodePosition:
        return DecodePosition(self._tokens.copy(), self.made, max(0, self._min_tokens - self.made))

    def _start(self) -> Future[Proposal]:
        """Ask the draft, in a thread of its own, what follows the prompt."""
        future: Future[Proposal] = Future()
        at, count = self._position(), min(self._length.tokens, self._max_tokens - self.made - 1)

        def run() -> None:
            try:
                future.set_result(self._pair.propose(at, count))
            except Exception as error:
                future.set_exception(error)  # raised where the result is asked for

        Thread(target=copy_context().run, args=(run,), name="head start", daemon=True).start()
        return future

    def _proposal(self, head_start: Future[Proposal] | None) -> Proposal | None:
        """Call the draft for a proposal that leaves room for the target's own token; None if it failed."""
        try:
            proposal = Proposal() if head_start is None else self._after_first(head_start.result())
            count = min(self._length.tokens, self._max_tokens - self.made - 1)
            if proposal.tokens or count == 0:
                return proposal.first(count)
            return self._pair.propose(self._position(), count)
        except Exception as error:
            self._pair.give_up(error)
            self._length.give_up()
            return None

    def _after_first(self, proposal: Proposal) -> Proposal:
        """Rest of a proposal for the whole answer, if the answer began as it does."""
        made = tuple(self._tokens[self._began :])
        return proposal.rest(len(made)) if proposal.tokens[: len(made)] == made else Proposal()

    def _take(self, made: TargetOutput, proposal: Proposal | None) -> VerifiedTokens:
        tokens = self._up_to_stop_word(made.tokens[: self._max_tokens - self.made])
        if proposal is not None:
            self._count(proposal, made, tokens)
        self._over = self._over or self.made == self._max_tokens
        self._cum_log_prob += made.cum_log_prob
        return VerifiedTokens(tokens, made.log_probs[: len(tokens)], self._cum_log_prob, last=self._over)

    def _count(self, proposal: Proposal, made: TargetOutput, tokens: tuple[int, ...]) -> None:
        checked = proposal.tokens if made.checked is None else proposal.tokens[: made.checked]
        self.proposed += len(checked)
        kept = _common(checked, tokens)
        self.accepted += kept
        self._length.learn(len(checked), kept=kept)
        self._over = self._over or _common(checked, made.tokens) == len(
            made.tokens
        )  # see the top of this file

    def _up_to_stop_word(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Add tokens to the answer until a stop word is complete, which may have begun long before."""
        for count, token in enumerate(tokens, 1):
            self._tokens.append(token)
            if any(self._tokens[-len(word) :] == word for word in self._stop_words):
                self._over = True
                return tuple(tokens[:count])
        return tuple(tokens)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


_MORE, _FEWER = 2, 1


class DraftLength:
    """Draft tokens to propose in the next round of one answer; begins with the most.

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
        """Adapt to a round in which the target kept `kept` of `proposed` tokens.

        Fewer than `tokens` may have been proposed for another reason.
        """
        if not self._adapts or not proposed:
            return
        if kept < proposed:
            self.tokens = max(1, self.tokens - _FEWER)
        elif proposed >= self.tokens:
            self.tokens = min(self._most, self.tokens + _MORE)

    def give_up(self) -> None:
        """Propose no more."""
        self.tokens = 0
