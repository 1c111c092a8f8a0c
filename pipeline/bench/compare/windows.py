"""One stored run in windows of time, drawn anew to tell how much its figures scatter.

    error = RunWindows(level).error("ttft", 95)

Requests that were under way together saw the same server, so blocks of neighbouring windows are drawn (a circular block
bootstrap), in place of single requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import numpy as np

from pipeline.bench.result import LevelResult, TimeWindow
from pipeline.bench.statistics import BINS, Values, binned, binned_percentile

_DRAWS = 1000
_TINY = 1e-9
_LEAST_WINDOWS = 10  # of a run, fewer of which show nothing

Kept = Literal["ttft", "itl", "tpot", "total", "output_tokens", "output_tokens_per_s", "good_per_s"]


class RunWindows:
    """The windows of one load that count, and what came in each."""

    def __init__(self, level: LevelResult) -> None:
        """Cut a load into the windows of its time line, without those of the warm-up."""
        self._level = level
        self._windows, self._first = list[TimeWindow](), 0
        if level.timeline:
            self._width_s = 2 * level.timeline[0].at_s
            began_s = len(level.timeline) * self._width_s - level.seconds
            self._first = max(0, round(began_s / self._width_s))
            self._windows = list(level.timeline[self._first :])

    @property
    def free(self) -> int:
        """Degrees of freedom: blocks that are drawn independently of each other, less one; 0 with too few windows."""
        count = len(self._windows)
        return 0 if count < _LEAST_WINDOWS else -(-count // self._block) - 1

    @property
    def _block(self) -> int:
        return max(1, round(math.cbrt(len(self._windows))))

    @cached_property
    def _weights(self) -> Values:
        """How often each window counts in each draw, [draws, windows]."""
        count, block = len(self._windows), self._block
        starts = np.random.default_rng(0).integers(0, count, (_DRAWS, -(-count // block)))
        weights, rows = np.zeros((_DRAWS, count)), np.arange(_DRAWS)[:, None]
        for offset in range(block):
            np.add.at(weights, (rows, (starts + offset) % count), 1)
        return weights

    def error(self, kept: Kept, percent: int = 0) -> float | None:
        """Estimate the standard error of the logarithm of a figure.

        Args:
            kept: Values that the figure is made of.
            percent: Percentile of a latency.

        Returns:
            The error, widened for few blocks as Hesterberg does ("What Teachers Should Know About the Bootstrap",
            2015); None where the run does not keep what it takes, or has too few windows.
        """
        if not self.free or (drawn := self._drawn(kept, percent)) is None:
            return None
        scatter = float(np.log(np.maximum(drawn, _TINY)).std())
        return scatter * math.sqrt((self.free + 1) / self.free)

    def _drawn(self, kept: Kept, percent: int) -> Values | None:
        """The figure of each draw, [draws]; None where the run does not keep what it takes."""
        weights = self._weights
        match kept:
            case "output_tokens_per_s" | "good_per_s":
                rates = [getattr(window, kept) for window in self._windows]
                return None if None in rates else weights @ np.array(rates) / weights.sum(axis=1)
            case "output_tokens":
                sums = np.array([(sum(values), len(values)) for values in self._of_requests(kept)], float)
                totals = weights @ sums
                return totals[:, 0] / np.maximum(totals[:, 1], 1) if sums.sum() else None
        counts = np.zeros((len(self._windows), BINS))
        for number, window in enumerate(self._windows if kept == "itl" else ()):
            counts[number, list(window.itl_counts)] = list(window.itl_counts.values())
        for number, values in enumerate(self._of_requests(kept) if kept != "itl" else ()):
            counts[number] = binned(values)
        return binned_percentile(weights @ counts, percent) if counts.any() else None

    def _of_requests(self, name: str) -> Iterator[list[float]]:
        """Yield the values of the requests that were due in each window."""
        values_by_window: list[list[float]] = [[] for _ in self._windows]
        samples = self._level.samples
        for due_s, value in zip(samples.get("due_s", ()), samples.get(name, ()), strict=True):
            if due_s is not None and value is not None and values_by_window:
                values_by_window[
                    min(max(0, int(due_s / self._width_s) - self._first), len(values_by_window) - 1)
                ].append(value)
        yield from values_by_window
