"""Whatever comes, in whatever order, with whatever settings: each answer is the one that a loop of four lines gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pipeline.runtimes.cpu.engine import (
    EngineRequest,
    EngineSettings,
    FinishReason,
    Guide,
    SamplingParams,
    Vocabulary,
)
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.grammars import Grammars
from pipeline.runtimes.cpu.engine.sampler import SamplingRow, choose
from pipeline.runtimes.cpu.engine.sequence import Sequence
from tests.support.engine import VOCAB, Answer, FakeModel, add, finish_all, matcher_of, next_logits

IDS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([0.0, 0.6, 1.0]),
    top_p_decay=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.4]),
    seed=st.integers(0, 3),
)
GUIDES = (
    Guide("regex", "[a-h]{2,9}"),
    Guide("regex", "(ab|ba|c)*d"),
    Guide("ebnf_grammar", 'root ::= "c" | "a" root "b" | "b" root "a"'),
)
REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.tuples(st.sampled_from([1, 9, 30, 40]), st.lists(st.integers(0, 1), max_size=12)).map(
            lambda parts: (*[7] * parts[0], *parts[1])  # beginnings that coincide
        ),
        "max_new_tokens": st.integers(1, 25),
        "end_id": st.sampled_from([None, 0, 1]),
        "min_new_tokens": st.integers(0, 6),
        "sampling": SAMPLING,
        "stop_words": WORDS,
        "bad_words": WORDS,
        "draft_tokens": st.sampled_from([None, (), (1,), (3, 3, 3)]),
        "log_probs": st.booleans(),
        "context_logits": st.booleans(),
        "speculate": st.booleans(),
        "guide": st.sampled_from([None, None, *GUIDES]),
    }
)
SETTINGS = st.fixed_dictionaries(
    {
        "max_concurrency": st.integers(1, 5),
        "max_batch_tokens": st.sampled_from([1, 7, 40]),
        "kv_blocks": st.sampled_from([20, 24, 60]),  # the largest request needs 20
        "max_draft_tokens": st.integers(3, 5),
        "prefix_caching": st.booleans(),
        "adapt_speculation": st.booleans(),
    }
)


@dataclass
class Joining:
    """A request, and how many steps after the one before it comes, and after how many it is cancelled."""

    fields: dict[str, Any]
    after: int
    cancelled_after: int | None


JOINING = st.builds(Joining, REQUEST, st.integers(0, 4), st.one_of(st.none(), st.none(), st.integers(0, 10)))


def letters(folder: Path) -> Grammars:
    """Of a vocabulary whose tokens are letters, each of one byte."""
    path = folder / "tokenizer.json"
    names = {chr(ord("a") + id) if id < 26 else f"[{id}]": id for id in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return Grammars(Vocabulary(path, VOCAB - 1), VOCAB)


def by_hand(
    core: EngineCore, request: EngineRequest, windows: tuple[int | None, ...]
) -> tuple[list[int], FinishReason]:
    sequence = Sequence(request, print, VOCAB, matcher_of(core, request))
    sequence.drafts = []
    while True:
        (token,) = choose(next_logits(sequence.tokens, windows)[None], [SamplingRow(sequence, 0)]).tokens
        if finish := sequence.append(token):
            return sequence.tokens[sequence.num_prompt_tokens :], finish


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return letters(tmp_path_factory.mktemp("letters"))


@settings(max_examples=80)
@given(
    joining=st.lists(JOINING, min_size=1, max_size=8),
    chosen=SETTINGS,
    noise=st.sampled_from([None, 0.0, 1.0, 30.0]),
    windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (3, None, 9)]),
)
def test_every_answer_is_the_one_made_by_hand(
    grammars: Grammars,
    joining: list[Joining],
    chosen: dict[str, Any],
    noise: float | None,
    windows: tuple[int | None, ...],
) -> None:
    target = cast(Any, FakeModel(windows=windows))
    draft = None if noise is None else cast(Any, FakeModel(noise, 100, windows))
    core = EngineCore(target, draft, EngineSettings(**chosen), grammars)
    requests = [EngineRequest(id=str(at), **planned.fields) for at, planned in enumerate(joining)]
    answers = [Answer() for _ in requests]
    leaving: dict[str, int] = {}
    for planned, request, sink in zip(joining, requests, answers, strict=True):
        for _ in range(planned.after):
            step(core, leaving)
        add(core, request, sink)
        if planned.cancelled_after is not None:
            leaving[request.id] = planned.cancelled_after
    while leaving:
        step(core, leaving)
    finish_all(core)
    for request, got in zip(requests, answers, strict=True):
        tokens, finish = by_hand(core, request, windows)
        if got.finish is FinishReason.CANCELLED:
            assert got.tokens == tokens[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish) == (tokens, finish)
            known = range(1, len(request.prompt) if request.context_logits else 1)
            expected = [next_logits(list(request.prompt[:count]), windows) for count in known]
            np.testing.assert_array_equal(got.context_logits, expected)
    stats = core.stats()
    assert (stats.kv_blocks_used, stats.running, stats.waiting) == (0, 0, 0)
    for blocks in (core._blocks, core._scheduler._draft):
        assert blocks is None or blocks.available == blocks.num_blocks


def step(core: EngineCore, leaving: dict[str, int]) -> None:
    for name in list(leaving):
        leaving[name] -= 1
        if leaving[name] < 0:
            core.cancel(name)
            del leaving[name]
    if not core.idle:
        core.step()
