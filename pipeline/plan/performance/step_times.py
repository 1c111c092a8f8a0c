"""Times of an engine's steps, and the replica that has them: for the simulation and the fit of constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.float64]

# Tokens of prompts are rounded up to this, so that the time of a step is computed once for each width.
_WIDTH = 32


class StepTimes:
    """Seconds of a step of an engine."""

    def __init__(
        self,
        work: Callable[[Any, Any, Any], Any],
        *,
        read_s: float = 0.0,
        pair_s: float = 0.0,
        host: Callable[[Any], Any] = lambda _: 0.0,
        hides_host: bool = False,
        prompt_s: float = 0.0,
        progress: float = 1.0,
        width: int = 1,
        ranks: int = 1,
        bundle: int = 1,
    ) -> None:
        """
        Args:
            work: Seconds of all but attention, from the sequences that generate, the tokens of prompts and those of the
                longest piece of one; all may be arrays.
            read_s: Seconds for each token whose keys and values are read.
            pair_s: Seconds for each pair of a prompt's token with one before it.
            host: Seconds of the host for a step, from the sequences.
            hides_host: Whether the host works beside the step before, so that only what is longer shows.
            prompt_s: Seconds once for prompts that are begun together.
            progress: Tokens that a step brings each sequence; more than one where drafts are verified.
            width: Tokens of the budget that a sequence takes up in a step.
            ranks: Ranks that have requests of their own; a piece of a prompt is one rank's.
            bundle: Requests that each sequence and prompt stands for.
        """
        self._work, self._host = work, host
        # (sequences, tokens of prompts, of the longest piece) -> seconds of the device and of the host.
        self._known: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._read_s, self._pair_s = read_s, pair_s
        self._hides_host, self._ranks, self._bundle = hides_host, ranks, bundle
        self.prompt_s, self.progress, self.width = prompt_s, progress, width

    def bundled(self, bundle: int) -> StepTimes:
        """Make the times of an engine whose sequences and prompts each stand for several."""
        return StepTimes(
            lambda sequences, tokens, longest: self._work(sequences * bundle, tokens * bundle, longest),
            read_s=self._read_s * bundle,
            pair_s=self._pair_s * bundle,
            host=lambda sequences: self._host(sequences * bundle),
            hides_host=self._hides_host,
            prompt_s=self.prompt_s,
            progress=self.progress,
            width=self.width,
            ranks=self._ranks,
            bundle=bundle,
        )

    def several(self, steps: Steps) -> Steps:
        """Compute the seconds of many steps at once, from rows as `EngineScheduler.steps` has them."""
        _, _, sequences, context, tokens, read, pairs, begun, longest = steps.T[:9]
        share = np.maximum(1 / self._ranks, longest / np.maximum(tokens * self._bundle, 1))
        device_s = self._work(sequences, tokens, longest) + self._read_s * (context + read)
        device_s = device_s + self._pair_s * pairs * share
        host_s = self._host(sequences)
        seconds = np.maximum(device_s, host_s) if self._hides_host else device_s + host_s
        return np.asarray(seconds + begun * self.prompt_s)

    def decode(self, sequences: int, context: float) -> float:
        """Seconds of a step that only generates; `context` is the tokens that all of them together have behind them."""
        return self.mixed(sequences, context, 0, 0.0, 0.0, 0)

    def mixed(
        self, sequences: int, context: float, tokens: int, read: float, pairs: float, longest: int
    ) -> float:
        """Seconds of a step with pieces of prompts.

        Args:
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
            tokens: Tokens of the prompts' pieces.
            read: Tokens of these prompts that came before the pieces.
            pairs: Pairs of a token of a piece with one before it.
            longest: Tokens of the longest piece.
        """
        key = sequences, -(-tokens // _WIDTH) * _WIDTH, -(-longest // _WIDTH) * _WIDTH
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._work(*key), self._host(sequences)
        base, host_s = found
        share = max(1 / self._ranks, longest / max(tokens * self._bundle, 1))
        device_s = base + self._read_s * (context + read) + self._pair_s * pairs * share
        return max(device_s, host_s) if self._hides_host else device_s + host_s


@dataclass(frozen=True, slots=True)
class PromptBalance:
    """Attention data parallelism with `attention_dp_config.enable_balance`: prompts wait until each rank has one.

    While all ranks generate, prompts are let in when each has one and some steps more have passed, or when a timer ends
    that begins again at each end and each time that prompts are let in (`_balance_adp_requests` in TensorRT-LLM 1.2).

    Attributes:
        ranks: Ranks that have requests of their own.
        timeout_steps: Steps of the timer, `timeout_iters`.
        wait_steps: Steps more when each rank has a prompt, `batching_wait_iters`.
    """

    ranks: int
    timeout_steps: int = 50
    wait_steps: int = 10


@dataclass(frozen=True)
class ServedEngine:
    """One replica of a deployment, as its scheduler sees it.

    Attributes:
        name: Name of the deployment.
        times: Times of its engine's steps.
        slots: Requests that it takes at a time.
        blocks: Pages of its KV cache.
        block_tokens: Tokens of a page.
        step_tokens: Most tokens of a step, of all ranks together.
        piece_tokens: Most tokens of a prompt in a step: those of one rank.
        chunked: Whether a prompt may be split over steps.
        overlaps: Whether a step is scheduled while the one before runs, so that a request that comes during a step
            begins with the next but one.
        balance: Wait for prompts of other ranks; None: prompts begin with the next step.
        max_prompt: Tokens of the longest prompt.
        gpus: GPUs of a replica.
        request_s: Seconds of a request outside the engine: HTTP, tokens, and their way back.
        admit_s: Seconds from one request to the next, in which a front end hands them over one by one.
        weight_bytes: Bytes of weights that it loads before it is ready.
        ttft_s: Target of the recipe's SLO, for the 95th percentile.
    """

    name: str
    times: StepTimes
    slots: int
    blocks: int
    block_tokens: int = 32
    step_tokens: int = 8192
    piece_tokens: float = math.inf
    chunked: bool = True
    overlaps: bool = False
    balance: PromptBalance | None = None
    max_prompt: int = 8192
    gpus: int = 1
    request_s: float = 0.0
    admit_s: float = 0.0
    weight_bytes: float = 0.0
    ttft_s: float = 1.0

    @property
    def progress(self) -> float:
        """Tokens that a step brings a sequence."""
        return self.times.progress

    def bundled(self, bundle: int) -> ServedEngine:
        """Let each request stand for several that are alike, and do everything together."""
        if bundle == 1:
            return self
        return replace(
            self,
            times=self.times.bundled(bundle),
            slots=max(1, self.slots // bundle),
            blocks=max(1, self.blocks // bundle),
            step_tokens=max(1, self.step_tokens // bundle),
            balance=self.balance and replace(self.balance, ranks=max(1, self.balance.ranks // bundle)),
            admit_s=self.admit_s * bundle,
        )

    def prompt_s(self, tokens: int, cached: int = 0, sequences: int = 0, context: float = 0.0) -> float:
        """Seconds of a prompt that shares its steps with sequences that generate.

        Args:
            tokens: Tokens of the prompt.
            cached: Tokens of these that the KV cache has.
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
        """
        seconds, done = self.times.prompt_s, cached
        while done < tokens:
            room = min(self.step_tokens - sequences, self.piece_tokens)
            piece = int(min(tokens - done, room)) if self.chunked else tokens - done
            seconds += self.times.mixed(sequences, context, piece, done, piece * (done + piece / 2), piece)
            done += piece
        return seconds

    def requests_per_s(self, prompt: float, answer: float, cached: float = 0.0) -> float:
        """Requests a second of a replica whose slots are all taken all the time.

        Args:
            prompt: Mean tokens of a prompt.
            answer: Mean tokens of an answer.
            cached: Mean tokens of a prompt that the KV cache has.
        """
        context = self.slots * (prompt + answer / 2)
        steps = answer / self.times.progress * self.times.decode(self.slots, context) / self.slots
        beside = self.prompt_s(round(prompt), round(cached), self.slots, context)
        return 1 / (steps + beside - self.times.decode(self.slots, context))
