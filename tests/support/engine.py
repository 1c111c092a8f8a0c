"""Driving the CPU engine without its thread, one step after the other, so that tests are the same every time; and a
model whose next token can be computed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from pipeline.runtimes.cpu.engine import (
    EngineRequest,
    EngineSettings,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    Vocabulary,
    paged_model,
)
from pipeline.runtimes.cpu.engine.block_manager import BlockTable
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.grammars import Grammars
from pipeline.runtimes.cpu.engine.matcher import Matcher
from pipeline.runtimes.cpu.engine.paged_model import WEIGHTS_FILE, PagedModel, StepFailed, TokenSlice
from tests.support import CHECKPOINTS

VOCABULARY = Vocabulary(CHECKPOINTS / "support-target/tokenizer.json", end_id=2)
QUESTIONS = (
    "How do I reset my password?",
    "I forgot my login.",
    "Where is my order?",
    "Cancel my subscription please.",
)
TURN = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@dataclass
class Answer:
    """All that came back for one request."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    context_logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def __call__(self, output: RequestOutput) -> None:
        assert not self.finish, "an output after the last one"
        self.tokens += output.tokens
        self.log_probs += output.log_probs
        if output.context_logits is not None:
            assert not self.tokens, "logits of the prompt after the first token"
            self.context_logits += list(output.context_logits.copy())
            return
        self.outputs.append(output)

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def metrics(self) -> RequestMetrics:
        metrics = self.outputs[-1].metrics
        assert metrics is not None
        return metrics


class UnsettledModel(PagedModel):
    """A model whose memory stays where it is: to move all of a process of tests, for each small model, takes long."""

    def allocate(self, num_blocks: Sequence[int]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged_model, "settle_memory", lambda _: None)
            super().allocate(num_blocks)


class SharedModel(UnsettledModel):
    """A model whose compilation is that of the last ones of the same files and settings, in this process.

    Compiling is most of loading, and a compiled model holds nothing of a sequence: each engine has its own request and
    cache. With adapters, or in bf16, constants are the model's own, and so is what is compiled.
    """

    def _compile(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        settings: EngineSettings,
        longest: int,
        *,
        short: bool = False,
    ) -> Any:
        make = partial(super()._compile, folder, facts, settings, longest, short=short)
        if self._stack or self.precision == "bf16":
            return make()
        place = (folder, (folder / WEIGHTS_FILE).stat().st_mtime_ns)
        # A test may take the place of the function that parts the windows.
        key = (*place, self.precision, self.rounds, self._cache_type, settings.threads, longest, short)
        key += (paged_model.part_windows,)
        if key not in _COMPILED:
            if len(_COMPILED) >= 6:
                del _COMPILED[next(iter(_COMPILED))]
            _COMPILED[key] = make()
        return _COMPILED[key]


_COMPILED: dict[Any, Any] = {}


def load(
    target: Path,
    draft: Path | None = None,
    *,
    guides: bool = True,
    adapters: Path | None = None,
    **settings: Any,
) -> EngineCore:
    sizes = EngineSettings(**{"precision": "f32", **settings})
    model = SharedModel(target, sizes, adapters)
    grammars = Grammars(VOCABULARY, model.vocab_size) if guides else None
    return EngineCore(model, SharedModel(draft, sizes) if draft else None, sizes, grammars)


def answer(core: EngineCore, *requests: EngineRequest) -> list[Answer]:
    """Run the requests together until all are done."""
    answers = [Answer() for _ in requests]
    for request, sink in zip(requests, answers, strict=True):
        add(core, request, sink)
    finish_all(core)
    return answers


def add(core: EngineCore, request: EngineRequest, sink: Answer) -> None:
    """Take a request, with its guide compiled, as the engine does in other threads."""
    core.check(request)
    core.add(request, sink, matcher_of(core, request))


def matcher_of(core: EngineCore, request: EngineRequest) -> Matcher | None:
    if request.guide is None:
        return None
    assert core.grammars is not None, "check has seen to it"
    return core.grammars.matcher(request.guide, core.ends(request))


def finish_all(core: EngineCore, limit: int = 5000) -> None:
    for _ in range(limit):
        if core.idle:
            return
        core.step()
    raise AssertionError(f"not done after {limit} steps")


def request(name: object, prompt: Iterable[int], tokens: int = 32, **more: Any) -> EngineRequest:
    return EngineRequest(str(name), tuple(prompt), tokens, more.pop("end_id", None), **more)


def prompts(
    count: int, *, shortest: int = 5, longest: int = 60, vocab: int = 2048, seed: int = 0
) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(8, vocab, random.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def questions() -> list[list[int]]:
    """Prompts of the kind that the checked-in pair was trained on."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "support-target/tokenizer.json"))
    return [tokenizer.encode(TURN.format(text), add_special_tokens=False).ids for text in QUESTIONS]


class Broken:
    """Stands before a model; its `forward` fails as often as told."""

    def __init__(self, model: PagedModel, failures: int) -> None:
        self._model = model
        self.failures = failures

    def forward(self, slices: list[TokenSlice]) -> npt.NDArray[np.float32]:
        if self.failures:
            self.failures -= 1
            raise StepFailed("made to fail")
        return self._model.forward(slices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


VOCAB = 12
Floats = npt.NDArray[np.float32]


def next_logits(tokens: list[int], windows: tuple[int | None, ...] = (None,)) -> Floats:
    """Logits [VOCAB] after `tokens`."""
    states: list[int] = []
    for token in tokens:
        states.append(_state(states, len(states), token))
    return _logits([states[-(window or len(states)) :] for window in windows], 0)


class FakeModel:
    """Computes what `next_logits` does, from what its cache holds."""

    block_size = 4
    precision = "f32"
    step_tokens = 512
    vocab_size = VOCAB

    def __init__(
        self, noise: float = 0.0, max_positions: int = 200, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        """`noise`: how much it differs from one without."""
        self.max_positions, self.windows = max_positions, windows
        self.block_bytes = (1,) * len(windows)
        self._noise = noise
        self._caches: list[npt.NDArray[np.int64]] = []

    def allocate(self, num_blocks: list[int]) -> None:
        self._caches = [np.zeros((count, self.block_size), np.int64) for count in num_blocks]

    def forward(self, slices: list[TokenSlice]) -> Floats:
        for tokens, past, tables, wanted, _ in slices:
            assert wanted <= len(tokens) > 0
            for position, token in enumerate(tokens, start=past):
                seen = self._read(tables, position, itself=1)
                for cache, table, states in zip(self._caches, tables, seen, strict=True):
                    block = table.blocks[position // self.block_size]
                    cache[block, position % self.block_size] = _state(states, position, token)
        rows = [
            _logits(self._read(tables, until), self._noise)
            for tokens, past, tables, wanted, _ in slices
            for until in range(past + len(tokens) - wanted + 1, past + len(tokens) + 1)
        ]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def _read(self, tables: Sequence[BlockTable], until: int, itself: int = 0) -> list[list[int]]:
        """States of each group's window that ends with token `until - 1`, or with that after it, left out."""
        seen = []
        for cache, table, window in zip(self._caches, tables, self.windows, strict=True):
            first = max(0, until + itself - window) if window else 0
            assert first >= table.first * self.block_size, "a block was given back too early"
            seen.append(cache[table.blocks].reshape(-1)[first:until].tolist())
        return seen


def _state(before: list[int], position: int, token: int) -> int:
    return hash((*before[-1:], position, token)) % 2**62


def _logits(seen: list[list[int]], noise: float) -> Floats:
    return _logits_of(hash(tuple(map(tuple, seen))) % 2**62, noise).copy()


@lru_cache(maxsize=100_000)
def _logits_of(seed: int, noise: float) -> Floats:
    logits = 3 * np.random.default_rng(seed).standard_normal(VOCAB)
    if noise:
        logits += noise * np.random.default_rng(seed ^ 1).standard_normal(VOCAB)
    return logits.astype(np.float32)
