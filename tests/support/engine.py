"""Driving the CPU engine without its thread, one step after the other, so that tests are the same every time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.runtimes.cpu.engine import FinishReason, Metrics, Output, Request
from pipeline.runtimes.cpu.engine.core import EngineCore


@dataclass
class Answer:
    """All that came back for one request."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def __call__(self, output: Output) -> None:
        assert not self.finish, "an output after the last one"
        self.tokens += output.tokens
        self.log_probs += output.log_probs
        self.outputs.append(output)

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def metrics(self) -> Metrics:
        metrics = self.outputs[-1].metrics
        assert metrics is not None
        return metrics


def answer(core: EngineCore, *requests: Request) -> list[Answer]:
    """Run the requests together until all are done."""
    answers = [Answer() for _ in requests]
    for request, sink in zip(requests, answers, strict=True):
        core.check(request)
        core.add(request, sink)
    finish_all(core)
    return answers


def finish_all(core: EngineCore, limit: int = 5000) -> None:
    for _ in range(limit):
        if core.idle:
            return
        core.step()
    raise AssertionError(f"not done after {limit} steps")


def request(name: object, prompt: Iterable[int], tokens: int = 32, **more: Any) -> Request:
    return Request(str(name), tuple(prompt), tokens, more.pop("end_id", None), **more)


def prompts(
    count: int, *, shortest: int = 5, longest: int = 60, vocab: int = 2048, seed: int = 0
) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(8, vocab, random.integers(shortest, longest + 1)).tolist() for _ in range(count)]
