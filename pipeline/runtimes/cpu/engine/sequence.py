"""One request while it runs: its tokens, its blocks, and what the choice of its next token depends on.

Stop words and bad words are short sequences of token ids. A word matches at the end of the whole sequence, prompt
included, as in TensorRT-LLM's kernels.
"""

from __future__ import annotations

import secrets
import time
from collections import abc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .block_manager import Pages
from .matcher import Matcher
from .request import EngineRequest, FinishReason, RequestMetrics, RequestOutput


class WordList:
    """Stop or bad words, by their last token.

    >>> words = WordList([(7,), (1, 2)])
    >>> words.ends([5, 1, 2]), words.ends([5, 2]), words.completions([5, 1]), words.completions([5])
    (True, False, [7, 2], [7])
    """

    __slots__ = ("_heads", "longest")

    def __init__(self, words: abc.Sequence[abc.Sequence[int]]) -> None:
        self._heads: dict[
            int, list[list[int]]
        ] = {}  # last token -> what must come before it, one list a word
        self.longest = max(map(len, words), default=0)
        for *head, last in words:
            self._heads.setdefault(last, []).append(head)

    def __bool__(self) -> bool:
        return bool(self._heads)

    def ends(self, tokens: list[int]) -> bool:
        """Whether `tokens` end with one of the words."""
        heads = self._heads.get(tokens[-1])
        return heads is not None and any(_ends_with(tokens, head, len(tokens) - 1) for head in heads)

    def completions(self, tokens: list[int]) -> list[int]:
        """Return the tokens that would complete a word."""
        return [
            last
            for last, heads in self._heads.items()
            if any(_ends_with(tokens, head, len(tokens)) for head in heads)
        ]


def _ends_with(tokens: list[int], head: list[int], end: int) -> bool:
    return len(head) <= end and tokens[end - len(head) : end] == head


Sink = Callable[[RequestOutput], None]


class Sequence:
    """The state of one request in the engine."""

    __slots__ = (
        "adapter",
        "arrival_ns",
        "bad_words",
        "counts",
        "cum_log_prob",
        "draft",
        "draft_logits",
        "draft_tokens_accepted",
        "draft_tokens_total",
        "drafts",
        "first_scheduled_ns",
        "first_token_ns",
        "is_plain",
        "last_token_ns",
        "matcher",
        "num_prompt_tokens",
        "request",
        "seed",
        "sink",
        "speculates",
        "stop_words",
        "target",
        "tokens",
        "top_p",
    )

    def __init__(
        self,
        request: EngineRequest,
        sink: Sink,
        vocab_size: int,
        matcher: Matcher | None = None,
        adapter: int = 0,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.sink = sink
        self.adapter = adapter  # its number in the target; 0: the base. The draft model has none.
        self.tokens = list(request.prompt)  # prompt and answer
        self.num_prompt_tokens = len(self.tokens) - request.prior_output_len
        drafts = request.draft_tokens or ()
        self.drafts = list(drafts[: request.max_new_tokens - 1])  # to be verified by the next step
        self.draft_logits = (
            request.draft_logits if self.drafts else None
        )  # [drafts, vocab_size], until they are verified
        self.target: Pages | None = None  # None while it waits
        self.draft: Pages | None = None  # None without a draft model
        self.stop_words = WordList(request.stop_words)
        self.bad_words = WordList(request.bad_words)
        self.counts: npt.NDArray[np.int32] | None = None  # [vocab_size], how often each token was seen
        if sampling.penalized:
            self.counts = np.bincount(request.prompt, minlength=vocab_size).astype(np.int32)
        self.matcher = matcher  # of the form that the answer must have
        self.top_p = sampling.top_p
        for token in self.tokens[self.num_prompt_tokens :]:
            self.top_p = sampling.next_top_p(self.top_p, token)
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.is_plain = (  # the next token is simply that of the greatest logit
            sampling.greedy
            and not sampling.penalized
            and not request.log_probs
            and request.embedding_bias is None
            and not self.bad_words
            and matcher is None
        )
        if sampling.greedy:
            self.draft_logits = None  # what they would be compared with is one token
        self.speculates = request.speculate  # with the draft model
        self.cum_log_prob = 0.0
        self.draft_tokens_total = self.draft_tokens_accepted = 0
        self.arrival_ns = time.monotonic_ns()
        self.first_scheduled_ns = self.first_token_ns = self.last_token_ns = 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def fault(self) -> str | None:
        """Why the answer cannot go on."""
        return None if self.matcher is None else self.matcher.fault

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still get."""
        return self.request.max_new_tokens - self.generated

    @property
    def pending(self) -> int:
        """Tokens the target has not computed yet."""
        return len(self.tokens) - (self.target.filled if self.target else 0)

    @property
    def decodes(self) -> bool:
        """Whether the prompt is done, but for its last token."""
        return self.pending == 1

    @property
    def max_tokens(self) -> int:
        """Tokens the cache may have to hold; drafts never go beyond them."""
        return self.num_prompt_tokens + self.request.max_new_tokens

    def append(self, token: int) -> FinishReason | None:
        """Append a token, and return the reason if it ends the answer.

        Neither `end_id` is kept nor a token that breaks the form that the answer must have: see `fault`.
        """
        if self.matcher is not None:
            self.matcher.append(token)
            if self.matcher.fault:
                return FinishReason.REFUSED
        if token == self.request.end_id:
            return FinishReason.END_ID
        self.tokens.append(token)
        if self.counts is not None:
            self.counts[token] += 1
        self.top_p = self.request.sampling.next_top_p(self.top_p, token)
        if self.stop_words and self.stop_words.ends(self.tokens):
            return FinishReason.STOP_WORDS
        if self.matcher is not None and self.matcher.complete:
            return FinishReason.GUIDE
        return FinishReason.LENGTH if self.remaining == 0 else None

    def output(
        self,
        tokens: abc.Sequence[int],
        log_probs: abc.Sequence[float],
        finish: FinishReason | None = None,
        error: str | None = None,
        logits: npt.NDArray[np.float32] | None = None,
    ) -> RequestOutput:
        """Output of one step for the request's sink; with `finish`, it has the metrics, too."""
        metrics = self._metrics() if finish else None
        return RequestOutput(
            self.request.id,
            tuple(tokens),
            tuple(log_probs),
            self.cum_log_prob,
            finish,
            error,
            metrics,
            logits,
        )

    def _metrics(self) -> RequestMetrics:
        new, reused = (self.target.new, self.target.reused) if self.target else (0, 0)
        return RequestMetrics(
            num_input_tokens=len(self.request.prompt),
            num_output_tokens=self.generated - self.request.prior_output_len,
            draft_tokens_total=self.draft_tokens_total,
            draft_tokens_accepted=self.draft_tokens_accepted,
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            kv_blocks_total=new + reused,
            kv_blocks_new=new,
            kv_blocks_reused=reused,
        )
