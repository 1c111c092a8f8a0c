"""The two engine models of one answer, behind the loop of `draft_target`: its positions as tensors and back.

Calls share one request id, as upstream's do. Seeds: each call begins its random numbers anew, so each round has a seed
of its own, made from the request's; otherwise tokens of different rounds would be drawn with the same numbers. Draft
and target get the same one, so that they draw alike where the target compares tokens; where it compares logits, its
random numbers must not be those of the draft, and they differ.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import Event, Lock
from typing import Any

import numpy as np
from draft_target import DecodePosition, Proposal, TargetOutput
from engine_call import LOG_PROBS, PERFORMANCE
from engine_client import EngineClient
from shared.refusal import RequestRefused
from shared.seeds import call_seed
from shared.tensors import Array
from speculation import DraftSettings

_TOKENS = ("output_ids", "sequence_length")
_TARGET_ONLY = (
    "lora_name",
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
        target: EngineClient,
        speculation: DraftSettings,
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
        seed = inputs.get("seed")
        self._seed = secrets.randbits(64) if seed is None else int(seed.flat[0])
        own = (*_OF_A_CALL, "seed", "min_tokens")
        self._inputs = {name: array for name, array in inputs.items() if name not in own}
        self._draft_inputs = {name: array for name, array in self._inputs.items() if name not in _TARGET_ONLY}
        self._lock = threading.Lock()  # guards the one below
        self._running: set[EngineClient] = set()
        self._stopped = threading.Event()
        self.metrics = AnswerMetrics()

    def propose(self, at: DecodePosition, count: int) -> Proposal:
        """See `ModelPair`.

        Raises:
            Exception: The model failed, or its answer is not one.
        """
        draft, timeout_s = self._speculation.draft, self._speculation.timeout_s
        inputs = self._draft_inputs | self._round(at, count, _DRAFT)
        outputs = [*_TOKENS, *PERFORMANCE]
        if self._use_logits:
            inputs["return_generation_logits"] = _true()
            outputs.append("generation_logits")
        response: Mapping[str, Array] = {}
        for response in self._call(draft, inputs, outputs, timeout_s=timeout_s):
            self.metrics.add_draft(response)
        tokens = _tokens(response)[:count]
        if not self._use_logits or not tokens:
            return Proposal(tokens)
        logits = response["generation_logits"][0, 0, : len(tokens)]  # of [1, beams, tokens, vocabulary]
        if len(logits) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens came with logits for {len(logits)}")
        return Proposal(tokens, logits.astype(self._speculation.logits, copy=False))

    def verify(self, at: DecodePosition, proposal: Proposal) -> TargetOutput:
        """See `ModelPair`."""
        inputs = self._inputs | self._round(at, len(proposal.tokens) + 1, _TARGET)
        if proposal.tokens:
            inputs["draft_input_ids"] = np.array([proposal.tokens], np.int32)
        if proposal.tokens and proposal.logits is not None:
            inputs["draft_logits"] = proposal.logits[np.newaxis]
            if (threshold := self._speculation.acceptance_threshold) is not None:
                inputs["draft_acceptance_threshold"] = np.array([[threshold]], np.float32)
        response: Mapping[str, Array] = {}
        for response in self._call(self._target, inputs, self._outputs):
            self.metrics.add_target(response)
        checked = int(response["total_draft_tokens"].flat[0]) if "total_draft_tokens" in response else 0
        return _made(response, checked or None)  # 0: the engine does not count, or decoded without the draft

    def go_on(self, at: DecodePosition, count: int) -> Iterator[TargetOutput]:
        """See `ModelPair`.

        Engines that check drafts end every call after one step in old releases, with draft tokens or without: until
        one has made more, a single token is taken for such an end, and not for that of the answer.
        """
        tokens, cum_log_prob, behaviour = list(at.tokens), 0.0, self._speculation.behaviour
        while True:
            added = len(tokens) - len(at.tokens)
            here = DecodePosition(tokens, at.made + added, max(0, at.min_tokens - added))
            inputs = (
                self._inputs | self._round(here, count, _TARGET) | {"streaming": np.array([[self._streams]])}
            )
            new, before = 0, cum_log_prob
            for response in self._call(self._target, inputs, self._outputs):
                self.metrics.add_target(response)
                made = _made(response)
                new += len(made.tokens)
                tokens += made.tokens
                cum_log_prob = before + made.cum_log_prob
                yield TargetOutput(made.tokens, made.log_probs, cum_log_prob)
            count -= new
            behaviour.goes_on = behaviour.goes_on or new > 1
            if new != 1 or count == 0 or behaviour.goes_on:
                return

    def give_up(self, error: Exception) -> None:
        """See `ModelPair`."""
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
        model: EngineClient,
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

    def _stop(self, model: EngineClient) -> None:
        try:
            model.stop(self._id)
        except (RequestRefused, ConnectionError) as error:
            if model is self._target:
                raise
            self.give_up(error)

    def _round(self, at: DecodePosition, count: int, whose: int) -> dict[str, Array]:
        tag = whose if self._use_logits else _DRAFT
        inputs: dict[str, Array] = {
            "input_ids": np.array([at.tokens], np.int32),
            "input_lengths": np.array([[len(at.tokens)]], np.int32),
            "request_output_len": np.array([[count]], np.int32),
            "streaming": np.array([[False]]),
            "exclude_input_in_output": _true(),
            "return_perf_metrics": _true(),  # says how many draft tokens were checked
            "seed": np.array([[call_seed(self._seed, at.made, tag)]], np.uint64),
        }
        if at.min_tokens:
            inputs["min_tokens"] = np.array([[at.min_tokens]], np.int32)
        return inputs


def _made(response: Mapping[str, Array], checked: int | None = None) -> TargetOutput:
    tokens = _tokens(response)
    if "output_log_probs" not in response:
        return TargetOutput(tokens, checked=checked)
    log_probs = tuple(response["output_log_probs"].reshape(-1)[: len(tokens)].tolist())
    return TargetOutput(tokens, log_probs, float(response["cum_log_probs"].flat[0]), checked)


def _tokens(response: Mapping[str, Array]) -> tuple[int, ...]:
    """Tokens of the one answer with one beam; none if the model was stopped or generated nothing."""
    if "output_ids" not in response:
        return ()
    length = int(response["sequence_length"].flat[0])
    return tuple(response["output_ids"].reshape(-1)[:length].tolist())


def _true() -> Array:
    return np.array([[True]])


_EARLIEST = ("arrival_time_ns", "first_scheduled_time_ns")
_TARGET_FIRST = ("first_token_time_ns", "kv_cache_reused_blocks")
_TARGET_LAST = ("last_token_time_ns", "kv_cache_alloc_total_blocks")
_TARGET_SUM = "kv_cache_alloc_new_blocks"


class AnswerMetrics:
    """Metrics of an answer of many calls, in the outputs that describe one call.

    Draft tokens are counted over the whole answer. Times run from the arrival of the first call, of either model, to
    the last token of the last. Blocks of the KV cache are the target's: new ones are added up, reused ones are those of
    the first call (later calls find what the answer itself left), and the total is that of the last call, which is the
    longest.
    """

    def __init__(self) -> None:
        self._values: dict[str, Array] = {}
        self._lock = Lock()

    def add_draft(self, outputs: Mapping[str, Array]) -> None:
        """The outputs of a call of the draft."""
        self._keep_earliest(outputs)

    def add_target(self, outputs: Mapping[str, Array]) -> None:
        """The outputs of a call of the target."""
        self._keep_earliest(outputs)
        for name in _TARGET_FIRST:
            if name in outputs:
                self._values.setdefault(name, outputs[name])
        self._values |= {name: outputs[name] for name in _TARGET_LAST if name in outputs}
        if _TARGET_SUM in outputs:
            self._values[_TARGET_SUM] = outputs[_TARGET_SUM] + self._values.get(_TARGET_SUM, 0)

    def outputs(self, *, proposed: int, accepted: int, inputs: int, made: int) -> dict[str, Array]:
        """All that is known, by name: of `inputs` tokens `made` more, with `accepted` of `proposed` draft tokens."""
        counts = {
            "total_draft_tokens": proposed,
            "total_accepted_draft_tokens": accepted,
            "num_input_tokens": inputs,
            "num_output_tokens": made,
        }
        return {
            **self._values,
            **{name: np.array([[count]], np.int32) for name, count in counts.items()},
            "acceptance_rate": np.array([[accepted / max(1, proposed)]], np.float32),
        }

    def _keep_earliest(self, outputs: Mapping[str, Array]) -> None:
        with self._lock:  # the first calls of both models run at once
            for name in _EARLIEST:
                if name in outputs:
                    self._values[name] = np.minimum(outputs[name], self._values.get(name, outputs[name]))


_FULL = re.compile(
    "maximum queue size", re.IGNORECASE
)  # in Triton's words, and in those of TensorRT-LLM's executor
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
DEADLINE_S = 30.0


def with_retries(
    call: Callable[[], Iterator[dict[str, Array]]], stopped: Event, deadline_s: float
) -> Iterator[dict[str, Array]]:
    """Yield the responses to a request, which `call` makes anew while the engine's queue is full.

    The answer has its place among those that the engine has room for (`OpenRequestLimit`), but Triton's queue in front
    of the engine may be full for the moment in which several rounds arrive at once.

    Args:
        call: Sends the request, and yields its responses.
        stopped: Ends the retries.
        deadline_s: Time for retries.

    Raises:
        RequestRefused: The engine refused it for another reason, or still after `deadline_s`.
    """
    until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    while True:
        try:
            yield from call()
        except RequestRefused as error:
            if not _FULL.search(str(error)) or time.monotonic() > until:
                raise
        else:
            return
        if stopped.wait(pause):
            return
        pause = min(2 * pause, _LONGEST_PAUSE_S)
