"""Four defects known from another engine with the same features. None may appear here."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

from pipeline.runtimes.cpu.engine import Engine, EngineSettings, InvalidRequest, SamplingParams
from pipeline.runtimes.cpu.engine.block_manager import BlockTable
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.paged_model import PagedModel, TokenSlice
from tests.runtimes.conftest import Pair
from tests.support.engine import answer, load, prompts, questions, request

ASKED = [request(name, prompt, 40) for name, prompt in enumerate(prompts(8, longest=100))]


def make(pair: Pair, draft: bool, **settings: int) -> EngineCore:
    return load(pair.target, pair.draft if draft else None, **settings, adapt_speculation=False)


def test_1_a_draft_beside_scarce_kv_blocks_stays_exact(cpu_pair: Pair) -> None:
    expected = [answered.tokens for answered in answer(make(cpu_pair, draft=False), *ASKED)]
    for kv_blocks in (6, 7, 16):
        core = make(cpu_pair, draft=True, kv_blocks=kv_blocks)
        assert [answered.tokens for answered in answer(core, *ASKED)] == expected, kv_blocks
        assert core.stats().kv_blocks_used == 0


@pytest.mark.models
def test_2_a_draft_keeps_the_distribution_of_sampled_tokens(cpu_pair: Pair) -> None:
    """Answers drawn with a draft differ from those drawn without no more than two samples without one do."""
    prompt, count = questions()[0], 150

    def drawn(core: EngineCore, first_seed: int) -> Counter[tuple[int, ...]]:
        asked = [
            request(seed, prompt, 4, sampling=SamplingParams(temperature=1.5, top_k=6, seed=seed))
            for seed in range(first_seed, first_seed + count)
        ]
        return Counter(tuple(answered.tokens) for answered in answer(core, *asked))

    alone, drafted = (make(cpu_pair, draft, max_concurrency=64) for draft in (False, True))
    first = drawn(alone, 0)
    noise = distance(first, drawn(alone, count))
    assert distance(drawn(drafted, 2 * count), drawn(alone, 3 * count)) < noise + 0.07
    assert drawn(drafted, 0) == first  # with the same seeds, even the same tokens
    assert drafted.stats().draft_tokens_accepted > 60


def distance(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Total variation between two equally large samples."""
    return sum(abs(first[key] - second[key]) for key in first | second) / 2 / first.total()


def test_3_a_long_step_does_not_stall_other_threads(cpu_pair: Pair) -> None:
    model = PagedModel(cpu_pair.target, EngineSettings())
    model.allocate([32 * 8])
    tables = np.arange(32 * 8, dtype=np.int32).reshape(8, 32)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    model.forward([TokenSlice([9] * 1000, 0, [BlockTable(table)], 1) for table in tables])
    ended = time.perf_counter()
    done.set()
    thread.join()
    during = [at for at in ticks if started < at < ended]
    assert len(during) >= 5, f"{len(during)} ticks in {ended - started:.3f} s"


def test_3_prompts_are_computed_in_chunks(cpu_pair: Pair) -> None:
    core = make(cpu_pair, draft=True, max_batch_tokens=100)
    sizes: list[int] = []
    forward = PagedModel.forward
    for model in (core._target, core._draft):
        assert model is not None
        model.forward = lambda slices, model=model: (  # type: ignore[method-assign]
            sizes.append(sum(len(piece.tokens) for piece in slices)) or forward(model, slices)
        )
    answer(
        core, *(request(name, prompt, 4) for name, prompt in enumerate(prompts(4, shortest=400, longest=500)))
    )
    assert max(sizes) == 100


def test_4_overlong_prompts_are_refused(cpu_pair: Pair) -> None:
    with Engine(cpu_pair.target, None, EngineSettings(max_sequence_tokens=300, kv_blocks=8)) as engine:
        for tokens, message in (
            (290, "300 tokens a sequence may have"),
            (260, "9 KV cache blocks, there are 8"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                engine.submit(request(1, [9] * tokens, 20), print)
    with (  # the model has no positions beyond these
        Engine(cpu_pair.target, None, EngineSettings(max_sequence_tokens=5000)) as engine,
        pytest.raises(InvalidRequest, match="more than the 1024 tokens"),
    ):
        engine.submit(request(1, [9] * 1024, 1), print)
