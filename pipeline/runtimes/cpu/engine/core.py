"""The engine without its thread: requests in, one `step()` at a time, outputs out through each request's sink.

A step admits, lets the draft model propose, computes the target once for all sequences, chooses tokens, and says what
came of it. If OpenVINO fails on a step, the requests in that step end with an error and the others go on.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import abc

import numpy as np
import numpy.typing as npt

from .block_manager import BlockManager, CacheLayout
from .grammars import Grammars
from .matcher import Matcher
from .paged_model import PagedModel, StepFailed, TokenSlice
from .request import EngineRequest, FinishReason, InvalidRequest, RequestOutput
from .sampler import SamplingRow, choose, returned_logits
from .scheduler import BatchScheduler, ScheduledTokens
from .sequence import Sequence, Sink
from .settings import EngineSettings
from .speculation import Drafter, accepted
from .stats import EngineCounters, EngineStats

_log = logging.getLogger(__name__)
_FAILURES_IN_A_ROW = 3  # steps that may fail before the engine gives up
_DEFAULT_CACHE_BYTES = 2**30


class EngineCore:
    """The engine of one target model and, if there is one, its draft. For one thread."""

    def __init__(
        self,
        target: PagedModel,
        draft: PagedModel | None,
        settings: EngineSettings,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: what guides are read with; None: requests with guides are refused."""
        if draft and draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {draft.vocab_size}, the target of {target.vocab_size}"
            )
        self._target = target
        self._draft = draft if settings.max_draft_tokens else None
        self._settings = settings
        self.grammars = grammars
        self.max_sequence_tokens = min(
            target.max_positions, settings.max_sequence_tokens or target.max_positions
        )
        self._longest = -(-self.max_sequence_tokens // target.block_size)
        # More than asked for if decoding all sequences at once needs it.
        self._step_tokens = max(
            settings.max_batch_tokens or target.step_tokens,
            settings.max_concurrency * (1 + settings.max_draft_tokens),
        )
        num_blocks = self._num_blocks()
        self._blocks = self._allocate(self._target, num_blocks)
        draft_blocks = self._allocate(self._draft, num_blocks) if self._draft else None
        self._scheduler = BatchScheduler(
            max_concurrency=settings.max_concurrency,
            step_tokens=self._step_tokens,
            target=self._blocks,
            draft=draft_blocks,
        )
        self._drafter: Drafter | None = None
        if self._draft and draft_blocks:
            self._drafter = Drafter(
                self._draft,
                draft_blocks,
                max_draft_tokens=settings.max_draft_tokens,
                step_tokens=self._step_tokens,
                adapt=settings.adapt_speculation,
            )
        self._sequences: dict[str, Sequence] = {}
        self._counters = EngineCounters()
        self._failures = 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the target's LoRA adapters."""
        return self._target.adapters

    @property
    def precisions(self) -> dict[str, str]:
        """Model -> type that it computes in, and why."""
        models = {"target": self._target, "draft": self._draft}
        return {name: f"{model.precision}: {model.reason}" for name, model in models.items() if model}

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest if the request could never run."""
        vocab = self._target.vocab_size
        ids = [*request.prompt, *(request.draft_tokens or ())]
        ids += [token for word in (*request.stop_words, *request.bad_words) for token in word]
        if not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(token for token in ids if not 0 <= token < vocab)
            raise InvalidRequest(f"token_id = {wrong}: token ids must be 0 to {vocab - 1}")
        total = len(request.prompt) - request.prior_output_len + request.max_new_tokens
        if total > self.max_sequence_tokens:
            raise InvalidRequest(
                f"max_new_tokens = {request.max_new_tokens}: with {len(request.prompt)} prompt tokens these are more "
                f"than the {self.max_sequence_tokens} tokens a sequence may have"
            )
        for needed, most in self._blocks.needs(total):
            if needed > most:
                raise InvalidRequest(
                    f"max_new_tokens = {request.max_new_tokens}: with {len(request.prompt)} prompt tokens these need "
                    f"{needed} KV cache blocks, there are {most}"
                )
        if len(request.draft_tokens or ()) > self._settings.max_draft_tokens:
            raise InvalidRequest(
                f"draft_tokens = {len(request.draft_tokens or ())} tokens: are more than max_draft_tokens "
                f"{self._settings.max_draft_tokens}"
            )
        draft_logits = request.draft_logits
        if draft_logits is not None and draft_logits.shape[-1] != vocab:
            raise InvalidRequest(
                f"draft_logits: has rows of {draft_logits.shape[-1]} numbers, must have {vocab}"
            )
        bias = request.embedding_bias
        if bias is not None and bias.shape != (vocab,):
            raise InvalidRequest(f"embedding_bias: has shape {bias.shape}, must be ({vocab},)")
        if request.adapter and request.adapter not in self._target.adapters:
            names = ", ".join(self._target.adapters)
            known = f"there are {names}" if names else "this engine has no adapters"
            raise InvalidRequest(f"adapter = {request.adapter[:64]!r}: is unknown; {known}")
        if request.guide is not None and self.grammars is None:
            raise InvalidRequest(
                "guided_decoding_guide_type: this engine was started without guided decoding"
            )

    def ends(self, request: EngineRequest) -> set[int]:
        """Tokens that may end an answer of a form: `end_id`, and stop words of one token that is no text."""
        special = self.grammars.is_special if self.grammars else (lambda _: False)
        ends = {word[0] for word in request.stop_words if len(word) == 1 and special(word[0])}
        return ends if request.end_id is None else {request.end_id, *ends}

    def add(self, request: EngineRequest, sink: Sink, matcher: Matcher | None = None) -> None:
        """Take a request.

        Args:
            request: Prompt, sampling parameters and guide.
            sink: Called with each of its outputs.
            matcher: Holds the answer to the request's guide; None if it has none.
        """
        adapter = self._target.adapters.index(request.adapter) + 1 if request.adapter else 0
        sequence = Sequence(request, sink, self._target.vocab_size, matcher, adapter)
        if self._draft is None or sequence.max_tokens > self._draft.max_positions:
            sequence.speculates = False
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request now and free its blocks; one that is not in flight is ignored."""
        if sequence := self._sequences.get(request_id):
            self._finish(sequence, FinishReason.CANCELLED)

    def end_all(self, finish: FinishReason, error: str) -> None:
        """End every request."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, finish, error)

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        return not self._sequences

    def stats(self) -> EngineStats:
        """A snapshot of counters and queues."""
        return self._counters.snapshot(self._scheduler, self._blocks, self._target.precision)

    def step(self) -> None:
        """Admit, propose drafts, compute the target once for all sequences, choose tokens, send outputs."""
        started = time.perf_counter()
        for sequence in self._scheduler.admit():
            self._counters.admit(sequence)
        if self._drafter:
            self._drafter.propose(self._scheduler)
        work = self._scheduler.plan()
        context_tokens = [piece.length for piece in work if not piece.sequence.decodes]
        try:
            logits = self._target.forward([self._slice(piece) for piece in work])
        except StepFailed as error:
            self._fail(work, error)
            return
        self._failures = 0
        if any(piece.context_rows for piece in work):
            logits = self._send_context_logits(work, logits)
        rows = [SamplingRow(piece.sequence, ahead) for piece in work for ahead in range(piece.rows)]
        choice = choose(logits, rows)
        made = at = 0
        for piece in work:
            until = at + piece.rows
            made += self._advance(
                piece, choice.tokens[at:until], choice.log_probs[at:until], logits[at:until]
            )
            at = until
        self._counters.step(context_tokens, len(work), made)
        if self._drafter and all(piece.length == 1 for piece in work):
            self._drafter.record(len(work), made, time.perf_counter() - started)

    def _slice(self, piece: ScheduledTokens) -> TokenSlice:
        sequence, pages = piece.sequence, piece.sequence.target
        assert pages is not None
        past, end = pages.filled, pages.filled + piece.length
        self._blocks.extend(pages, end + len(piece.drafts))
        rows = piece.context_rows + piece.rows
        tokens = sequence.tokens[past:end] + piece.drafts
        return TokenSlice(tokens, past, pages.tables, rows, sequence.adapter)

    def _send_context_logits(
        self, work: list[ScheduledTokens], logits: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Send the logits of prompts to their sinks; return those that tokens are chosen from."""
        others: list[npt.NDArray[np.float32]] = []
        at = 0
        for piece in work:
            until = at + piece.context_rows
            others.append(logits[until : until + piece.rows])
            if piece.context_rows:
                output = RequestOutput(piece.sequence.request.id, (), context_logits=logits[at:until])
                self._send(piece.sequence, output)
            at = until + piece.rows
        return np.concatenate(others)

    def _advance(
        self,
        piece: ScheduledTokens,
        chosen: list[int],
        log_probs: list[float],
        logits: npt.NDArray[np.float32],
    ) -> int:
        """Apply the result of a step to one sequence, and return how many tokens it gained."""
        sequence, pages = piece.sequence, piece.sequence.target
        if pages is None or not pages.tables:
            return 0  # its sink failed on context logits
        kept = accepted(piece.drafts, chosen)
        filled = pages.filled + piece.length + kept
        new: list[int] = []
        finish = None
        rows = returned_logits(sequence, logits[: kept + 1]) if sequence.request.logits else None
        for token in chosen[: kept + 1]:
            finish = sequence.append(token)
            if finish not in (FinishReason.END_ID, FinishReason.REFUSED):
                new.append(token)
            if finish:
                break
        self._blocks.publish(pages, sequence.tokens, min(filled, len(sequence.tokens)))
        if self._drafter:
            self._drafter.settle(sequence)
        if not chosen:
            return 0
        if piece.drafts:
            self._count_drafts(sequence, len(piece.drafts), min(kept, len(new)))
        log_probs = log_probs[: len(new)] if sequence.request.log_probs else []
        sequence.cum_log_prob += sum(log_probs)
        sequence.last_token_ns = time.monotonic_ns()
        sequence.first_token_ns = sequence.first_token_ns or sequence.last_token_ns
        rows = None if rows is None else rows[: len(new)]
        if finish:
            self._finish(sequence, finish, sequence.fault, tokens=new, log_probs=log_probs, logits=rows)
        else:
            self._send(sequence, sequence.output(new, log_probs, logits=rows))
        return len(new)

    def _count_drafts(self, sequence: Sequence, total: int, kept: int) -> None:
        sequence.drafts, sequence.draft_logits = [], None
        sequence.draft_tokens_total += total
        sequence.draft_tokens_accepted += kept
        self._counters.draft_tokens_total += total
        self._counters.draft_tokens_accepted += kept

    def _finish(
        self,
        sequence: Sequence,
        finish: FinishReason,
        error: str | None = None,
        *,
        tokens: abc.Sequence[int] = (),
        log_probs: abc.Sequence[float] = (),
        logits: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Free the blocks of a sequence, then send its last output."""
        output = sequence.output(tokens, log_probs, finish, error, logits)
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.id]
        self._counters.finished[finish] += 1
        self._send(sequence, output)

    def _send(self, sequence: Sequence, output: RequestOutput) -> None:
        try:
            sequence.sink(output)
        except Exception:
            _log.exception("request %s: its sink failed, so it is cancelled", output.request_id)
            if not output.finish:
                self._finish(sequence, FinishReason.CANCELLED)

    def _fail(self, work: list[ScheduledTokens], error: StepFailed) -> None:
        _log.error("%s", error)
        self._failures += 1
        for piece in work:
            self._finish(piece.sequence, FinishReason.ERROR, str(error))
        if self._failures == _FAILURES_IN_A_ROW:
            raise error

    def _num_blocks(self) -> int:
        """Blocks for layers that keep all tokens, of each model; its other layers have blocks in proportion."""
        settings = self._settings
        if settings.kv_blocks:
            return settings.kv_blocks
        models = [model for model in (self._target, self._draft) if model]

        def size(num_blocks: int) -> int:
            return sum(
                count * each
                for model in models
                for count, each in zip(self._pools(model, num_blocks), model.block_bytes, strict=True)
            )

        if settings.kv_cache_mib and settings.kv_cache_mib * 2**20 < size(1):
            raise ValueError(f"kv_cache_mib is {settings.kv_cache_mib}, one block has {size(1)} bytes")
        room = settings.kv_cache_mib * 2**20 if settings.kv_cache_mib else _DEFAULT_CACHE_BYTES
        # Memory that is asked for is filled up, which caches more.
        most = (room if settings.kv_cache_mib else settings.max_concurrency) * self._longest
        return max(1, bisect_right(range(1, most + 1), room, key=size))

    def _layout(self, model: PagedModel) -> CacheLayout:
        settings = self._settings
        return CacheLayout(
            model.block_size, model.windows, self._step_tokens, draft_tokens=settings.max_draft_tokens
        )

    def _pools(self, model: PagedModel, num_blocks: int) -> list[int]:
        return self._layout(model).pools(num_blocks, self._longest)

    def _allocate(self, model: PagedModel, num_blocks: int) -> BlockManager:
        pools = self._pools(model, num_blocks)
        model.allocate(pools)
        return BlockManager(pools, self._layout(model), caching=self._settings.prefix_caching)
