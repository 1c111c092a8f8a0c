"""From what the engine puts out to responses of `tensorrt_llm`, as TensorRT-LLM's C++ backend shapes them.

Streaming, each response carries new tokens only, never the prompt: those of one step, or of a few where many requests
share the machine and a response for every token would cost more than the token. Otherwise each row of the batch comes
in one response. The last response of the last row carries Triton's final flag.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import engine
import numpy as np
from request_parser import OutputOptions
from shared.cancellation import WatchedSender
from shared.prompt_log_probs import PromptLogProbTable
from shared.refusal import RequestRefused
from shared.tensors import FINAL, Array, failure, response
from shared.token_socket import TokenSender, TokenTarget


class EngineFailed(RuntimeError):
    """The engine could not finish a request."""


class Responder:
    """Everything that goes back for one Triton request. Safe to use from several threads."""

    def __init__(
        self,
        id: str,
        sender: WatchedSender,
        requests: Sequence[engine.EngineRequest],
        options: OutputOptions,
        way: tuple[TokenSender, TokenTarget] | None = None,
    ) -> None:
        """`way`: of tokens that are not the last, where nothing comes with them; None: they are responses of Triton."""
        self.id = id
        self.sender = sender
        self.requests = tuple(requests)
        self._options = options
        self._kept: list[list[engine.RequestOutput]] = [
            [] for _ in requests
        ]  # what came and has not been sent
        self._next_s = [0.0 for _ in requests]  # when a row's next response may go; monotonic
        # Of each row, until its first response.
        self._prompts: dict[int, PromptLogProbTable] = {}
        if options.prompt_log_probs is not None:
            self._prompts = {
                row: PromptLogProbTable(request.prompt, options.prompt_log_probs)
                for row, request in enumerate(requests)
            }
        plain = options.streaming and not options.log_probs and not self._prompts
        self._way = way if plain and len(requests) == 1 and not requests[0].logits else None
        self._open_rows = len(requests)
        self._lock = threading.Lock()

    @property
    def socket(self) -> str | None:
        """Socket that tokens go to which are not the last; None: there is none."""
        return None if self._way is None else self._way[1].socket

    @property
    def waits(self) -> bool:
        """Whether `flush` would send something."""
        return self._options.streaming and any(self._kept)

    def is_done(self) -> bool:
        """Whether nothing more will be sent."""
        return self._open_rows == 0

    def take(self, row: int, output: engine.RequestOutput, pause_s: float = 0.0) -> None:
        """Pass on what the engine says about one row, at least `pause_s` after what went before it; `flush` helps."""
        with self._lock:
            if self.is_done():
                return
            if output.finish in (engine.FinishReason.ERROR, engine.FinishReason.REFUSED):
                kind = RequestRefused if output.finish is engine.FinishReason.REFUSED else EngineFailed
                self._fail(kind(output.error or "no reason was given"))
                return
            self._open_rows -= output.finish is not None
            self._kept[row].append(output)
            now = time.monotonic()
            if output.finish or (self._options.streaming and now >= self._next_s[row]):
                self._next_s[row] = now + pause_s
                self._send(row)

    def read_context_logits(self, row: int, logits: Array) -> None:
        """Reduce the logits of a row's prompt [tokens, vocab_size], before its first token."""
        self._prompts[row].read(logits)

    def flush(self) -> None:
        """Send what waits for its row's next response."""
        with self._lock:
            for row, kept in enumerate(self._kept):
                if kept and self._options.streaming and not self.is_done():
                    self._send(row)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        with self._lock:
            if not self.is_done():
                self._fail(error)

    def break_off(self, error: Exception) -> None:
        """End with an error, even if what failed was the last response."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._open_rows = 0
        self.sender.send(failure(error), flags=FINAL)

    def _send(self, row: int) -> None:
        outputs, self._kept[row] = self._kept[row], []
        tokens = [token for output in outputs for token in output.tokens]
        if self._way is not None:
            sender, target = self._way
            if not self.is_done():
                sender.put(target, tokens)
                return
            tokens = sender.take_back(target) + tokens
        last = outputs[-1]
        if self._options.prompt:
            tokens = [*self.requests[row].prompt, *tokens]
        tensors: dict[str, Array] = {
            "output_ids": np.array([[tokens]], np.int32),  # [1, beams, tokens]
            "sequence_length": np.array([[len(tokens)]], np.int32),  # [1, beams]
        }
        if len(self.requests) > 1:
            tensors["batch_index"] = np.array([[row]], np.int32)
        if self._options.log_probs:
            log_probs = [value for output in outputs for value in output.log_probs]
            tensors["cum_log_probs"] = np.array([[last.cum_log_prob]], np.float32)
            tensors["output_log_probs"] = np.array([[log_probs]], np.float32)
        if rows := [output.logits for output in outputs if output.logits is not None]:
            tensors["generation_logits"] = np.concatenate(rows)[None, None]  # [1, beams, tokens, vocabulary]
        if row in self._prompts and self._prompts[row].complete:
            tensors |= self._prompts.pop(row).tensors()
        if last.metrics is not None:
            tensors |= self._measured(last.metrics)
        self.sender.send(response(**tensors), flags=FINAL if self.is_done() else 0)

    def _measured(self, metrics: engine.RequestMetrics) -> dict[str, Array]:
        """Metrics that a request asked for, sent with its last tokens."""
        counts: dict[str, int] = {}
        if self._options.num_input_tokens:
            counts["num_input_tokens"] = metrics.num_input_tokens
        if self._options.num_output_tokens:
            counts["num_output_tokens"] = metrics.num_output_tokens
        times: dict[str, int] = {}
        rates: dict[str, float] = {}
        if self._options.kv_cache:
            counts |= {
                "kv_cache_alloc_new_blocks": metrics.kv_blocks_new,
                "kv_cache_reused_blocks": metrics.kv_blocks_reused,
                "kv_cache_alloc_total_blocks": metrics.kv_blocks_total,
            }
        if self._options.performance:
            counts |= {
                "total_accepted_draft_tokens": metrics.draft_tokens_accepted,
                "total_draft_tokens": metrics.draft_tokens_total,
            }
            times = {
                "arrival_time_ns": metrics.arrival_ns,
                "first_scheduled_time_ns": metrics.first_scheduled_ns,
                "first_token_time_ns": metrics.first_token_ns,
                "last_token_time_ns": metrics.last_token_ns,
            }
            rates = {"acceptance_rate": metrics.draft_tokens_accepted / max(1, metrics.draft_tokens_total)}
        return (
            {name: np.array([[value]], np.int32) for name, value in counts.items()}
            | {name: np.array([[value]], np.int64) for name, value in times.items()}
            | {name: np.array([[value]], np.float32) for name, value in rates.items()}
        )
