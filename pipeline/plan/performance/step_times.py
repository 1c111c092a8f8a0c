"""Times of an engine's steps, as its scheduler's simulation and the fit of constants take them."""

from __future__ import annotations

from collections.abc import Callable
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
            work: Seconds of all but attention, from the sequences that generate, the tokens of prompts and those of
                the rank that has the most; all may be arrays.
            read_s: Seconds for each token whose keys and values are read.
            pair_s: Seconds for each pair of a prompt's token with one before it.
            host: Seconds of the host for a step, from the sequences.
            hides_host: Whether the host works beside the step before, so that only what is longer shows.
            prompt_s: Seconds once for prompts that are begun together.
            progress: Tokens that a step brings each sequence; more than one where drafts are verified.
            width: Tokens of the budget that a sequence takes up in a step.
            ranks: Ranks that have requests of their own; a prompt is one rank's.
            bundle: Requests that each sequence and prompt stands for.
        """
        self._work, self._host = work, host
        # (sequences, tokens of prompts, of the busiest rank's) -> seconds of the device and of the host.
        self._known: dict[tuple[int, int, int], tuple[float, float]] = {}
        # Sequences -> the same of a step without prompts.
        self._bare: dict[int, tuple[float, float]] = {}
        self._read_s, self._pair_s = read_s, pair_s
        self._hides_host, self._ranks, self._bundle = hides_host, ranks, bundle
        self.prompt_s, self.progress, self.width = prompt_s, progress, width
        self._bundles: dict[int, StepTimes] = {}

    def bundled(self, bundle: int) -> StepTimes:
        """Make the times of an engine whose sequences and prompts each stand for several; the same ones each time."""
        if bundle not in self._bundles:
            self._bundles[bundle] = self._bundled(bundle)
        return self._bundles[bundle]

    def _bundled(self, bundle: int) -> StepTimes:
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
        found = self._bare.get(sequences)
        if found is None:
            found = self._bare[sequences] = self._work(sequences, 0, 0), self._host(sequences)
        base, host_s = found
        device_s = base + self._read_s * context
        if self._hides_host:
            return device_s if device_s >= host_s else host_s
        return device_s + host_s

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
            longest: Tokens of the rank that has the most of them.
        """
        key = sequences, -(-tokens // _WIDTH) * _WIDTH, -(-longest // _WIDTH) * _WIDTH
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._work(*key), self._host(sequences)
        base, host_s = found
        share = 1.0
        if self._ranks > 1:
            share = max(1 / self._ranks, longest / max(tokens * self._bundle, 1))
        device_s = base + self._read_s * (context + read) + self._pair_s * pairs * share
        if self._hides_host:
            return device_s if device_s >= host_s else host_s
        return device_s + host_s
