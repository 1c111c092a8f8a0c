"""The two engine models of one answer, behind the loop of `draft_target`: its positions as tensors and back.

Calls share one request id, as upstream's do. Seeds: each call begins its random numbers anew, so each round has a seed
of its own, made from the request's; otherwise tokens of different rounds would be drawn with the same numbers. Draft
and target get the same one, so that they draw alike where the target compares tokens; where it compares logits, its
random numbers must not be those of the draft, and they differ.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from draft_figures import Figures
from draft_target import Made, Position, Proposal
from engine_inputs import LOG_PROBS, PERFORMANCE
from engine_model import EngineModel
from retry import DEADLINE_S, with_retries
from shared.refusal import Refused
from shared.tensors import Array
from speculation import Speculation

_TOKENS = ("output_ids", "sequence_length")
_TARGET_ONLY = (
    "lora_task_id",
    "lora_weights",
    "lora_config",
    "return_log_probs",
)  # what a draft knows nothing of
# Inputs that differ from call to call.
_OF_A_CALL = (
    "input_ids", "input_lengths", "request_output_len", "streaming", "exclude_input_in_output",
    "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics", "beam_width", "num_return_sequences",
)  # fmt: skip
_DRAFT, _TARGET = 0, 1  # whose seed it is


class EnginePair:
    """See `draft_target.Pair`. `stop` may be called from another thread."""

    def __init__(
        self,
        target: EngineModel,
        speculation: Speculation,
        inputs: Mapping[str, Array],
        *,
        request_id: str,
        streams: bool,
        log_probs: bool,
        use_logits: bool,
    ) -> None:
        """`inputs`: of the engine, as the request means them."""
        self._target, self._speculation, self._id = target, speculation, request_id
        self._streams, self._use_logits = streams, use_logits
        self._outputs = (*_TOKENS, *PERFORMANCE, *(LOG_PROBS if log_probs else ()))
        dialect = speculation.dialect
        seed = inputs.get(dialect.seed)
        self._seed = secrets.randbits(64) if seed is None else int(seed.flat[0])
        own = (*_OF_A_CALL, dialect.seed, dialect.min_tokens)
        self._inputs = {name: array for name, array in inputs.items() if name not in own}
        self._draft_inputs = {name: array for name, array in self._inputs.items() if name not in _TARGET_ONLY}
        self._lock = threading.Lock()  # guards the one below
        self._running: set[EngineModel] = set()
        self._stopped = threading.Event()
        self.figures = Figures()

    def propose(self, at: Position, count: int) -> Proposal:
        """See `Pair`.

        Raises:
            Exception: the model failed, or its answer is not one.
        """
        draft, timeout_s = self._speculation.draft, self._speculation.timeout_s
        inputs = self._draft_inputs | self._round(at, count, _DRAFT)
        outputs = [*_TOKENS, *PERFORMANCE]
        if self._use_logits:
            inputs["return_generation_logits"] = _true()
            outputs.append("generation_logits")
        response: Mapping[str, Array] = {}
        for response in self._call(draft, inputs, outputs, timeout_s=timeout_s):
            self.figures.add_draft(response)
        tokens = _tokens(response)[:count]
        if not self._use_logits or not tokens:
            return Proposal(tokens)
        logits = response["generation_logits"][0, 0, : len(tokens)]  # of [1, beams, tokens, vocabulary]
        if len(logits) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens came with logits for {len(logits)}")
        return Proposal(tokens, logits.astype(self._speculation.dialect.logits, copy=False))

    def verify(self, at: Position, proposal: Proposal) -> Made:
        """See `Pair`."""
        inputs = self._inputs | self._round(at, len(proposal.tokens) + 1, _TARGET)
        if proposal.tokens:
            inputs["draft_input_ids"] = np.array([proposal.tokens], np.int32)
        if proposal.tokens and proposal.logits is not None:
            inputs["draft_logits"] = proposal.logits[np.newaxis]
            if (threshold := self._speculation.acceptance_threshold) is not None:
                inputs["draft_acceptance_threshold"] = np.array([[threshold]], np.float32)
        response: Mapping[str, Array] = {}
        for response in self._call(self._target, inputs, self._outputs):
            self.figures.add_target(response)
        checked = int(response["total_draft_tokens"].flat[0]) if "total_draft_tokens" in response else 0
        return _made(response, checked or None)  # 0: the engine does not count, or decoded without the draft

    def go_on(self, at: Position, count: int) -> Iterator[Made]:
        """See `Pair`.

        Engines that check drafts end every call after one step in old releases, with draft tokens or without: until
        one has made more, a single token is taken for such an end, and not for that of the answer.
        """
        tokens, cum_log_prob, manner = list(at.tokens), 0.0, self._speculation.manner
        while True:
            added = len(tokens) - len(at.tokens)
            here = Position(tokens, at.made + added, max(0, at.min_tokens - added))
            inputs = (
                self._inputs | self._round(here, count, _TARGET) | {"streaming": np.array([[self._streams]])}
            )
            new, before = 0, cum_log_prob
            for response in self._call(self._target, inputs, self._outputs):
                self.figures.add_target(response)
                made = _made(response)
                new += len(made.tokens)
                tokens += made.tokens
                cum_log_prob = before + made.cum_log_prob
                yield Made(made.tokens, made.log_probs, cum_log_prob)
            count -= new
            manner.goes_on = manner.goes_on or new > 1
            if new != 1 or count == 0 or manner.goes_on:
                return

    def give_up(self, error: Exception) -> None:
        """See `Pair`."""
        self._speculation.health.failed(error)

    def stop(self) -> None:
        """End the calls that are under way; later ones are not made."""
        with self._lock:
            self._stopped.set()
            running = tuple(self._running)
        for model in running:
            self._stop(model)

    def _call(
        self,
        model: EngineModel,
        inputs: Mapping[str, Array],
        outputs: Any,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[dict[str, Array]]:
        with self._lock:
            if self._stopped.is_set():
                return
            self._running.add(model)
        stopping = False
        try:
            call = partial(model.responses, self._id, inputs, outputs, timeout_s=timeout_s)
            for response in with_retries(call, self._stopped, timeout_s or DEADLINE_S):
                yield response
                if self._stopped.is_set() and not stopping:  # `stop` may have come before the call was known
                    stopping = True
                    self._stop(model)
        finally:
            with self._lock:
                self._running.discard(model)

    def _stop(self, model: EngineModel) -> None:
        try:
            model.stop(self._id)
        except (Refused, ConnectionError) as error:
            if model is self._target:
                raise
            self.give_up(error)

    def _round(self, at: Position, count: int, whose: int) -> dict[str, Array]:
        dialect = self._speculation.dialect
        tag = whose if self._use_logits else _DRAFT
        inputs: dict[str, Array] = {
            "input_ids": np.array([at.tokens], np.int32),
            "input_lengths": np.array([[len(at.tokens)]], np.int32),
            "request_output_len": np.array([[count]], np.int32),
            "streaming": np.array([[False]]),
            "exclude_input_in_output": _true(),
            "return_perf_metrics": _true(),  # says how many draft tokens were checked
            dialect.seed: np.array([[round_seed(self._seed, at.made, tag)]], np.uint64),
        }
        if at.min_tokens:
            inputs[dialect.min_tokens] = np.array([[at.min_tokens]], np.int32)
        return inputs


def round_seed(seed: int, made: int, tag: int) -> int:
    """A seed for the call that begins after `made` tokens: 64 bits that look like no other call's.

    The first call has the request's own, so that the target alone answers as if there were no draft. Later ones: the
    finalizer of SplitMix64 (Steele, Lea, Flood 2014), over each part in turn.
    """
    if not made and not tag:
        return seed
    mask, bits = 0xFFFFFFFFFFFFFFFF, seed
    for part in (made, tag):
        bits = (bits + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits ^= bits >> 31
    return bits


def _made(response: Mapping[str, Array], checked: int | None = None) -> Made:
    tokens = _tokens(response)
    if "output_log_probs" not in response:
        return Made(tokens, checked=checked)
    log_probs = tuple(response["output_log_probs"].reshape(-1)[: len(tokens)].tolist())
    return Made(tokens, log_probs, float(response["cum_log_probs"].flat[0]), checked)


def _tokens(response: Mapping[str, Array]) -> tuple[int, ...]:
    """Of the one answer with one beam; none, if the model was stopped or had nothing to say."""
    if "output_ids" not in response:
        return ()
    length = int(response["sequence_length"].flat[0])
    return tuple(response["output_ids"].reshape(-1)[:length].tolist())


def _true() -> Array:
    return np.array([[True]])
