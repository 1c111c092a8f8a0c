"""The engine on the checked-in target: right tokens, whatever runs beside it, and everything that shapes an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest

from pipeline.runtimes.cpu.engine import (
    EngineRequest,
    EngineSettings,
    FinishReason,
    InvalidRequest,
    SamplingParams,
)
from pipeline.runtimes.cpu.engine.block_manager import BlockTable
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.paged_model import PagedModel, TokenSlice
from pipeline.runtimes.cpu.engine.processor import UnfitProcessor
from tests.runtimes.conftest import Pair
from tests.support.engine import Answer, answer, finish_all, load, prompts, request

PROMPTS = prompts(16)
LENGTH = 24
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def make_core(cpu_pair: Pair) -> MakeCore:
    def make(**settings: Any) -> EngineCore:
        return load(cpu_pair.target, **settings)

    return make


@pytest.fixture(scope="module")
def core(make_core: MakeCore) -> EngineCore:
    return make_core(max_concurrency=16)


@pytest.fixture(scope="module")
def expected(make_core: MakeCore) -> list[list[int]]:
    """Greedy answers, one request at a time; test_cpu_engine_context_logits.py compares such with transformers."""
    core = make_core()
    return [answer(core, greedy(name))[0].tokens for name in range(16)]


def greedy(name: int, tokens: int = LENGTH) -> EngineRequest:
    return request(name, PROMPTS[name], tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_concurrency": 16},
        {"max_concurrency": 5, "max_batch_tokens": 16, "max_draft_tokens": 0},
        {"max_concurrency": 16, "kv_blocks": 7},
    ],
    ids=["together", "in small chunks", "scarce memory"],
)
def test_sixteen_in_flight_with_joins_and_cancels_equal_transformers(
    make_core: MakeCore, expected: list[list[int]], settings: dict[str, int]
) -> None:
    core = make_core(**settings)
    answers = [Answer() for _ in PROMPTS]
    for name in range(16):
        core.add(greedy(name), answers[name])
        core.step()
        if name == 9:
            core.cancel("3")
            core.cancel("9")
    finish_all(core)
    for name in set(range(16)) - {3, 9}:
        assert answers[name].tokens == expected[name], name
    for name in (3, 9):
        assert answers[name].finish is FinishReason.CANCELLED
        assert answers[name].tokens == expected[name][: len(answers[name].tokens)]
    assert core.stats().kv_blocks_used == 0


def test_tokens_come_as_they_are_made(core: EngineCore) -> None:
    first, second = Answer(), Answer()
    core.add(greedy(0, 12), first)
    for _ in range(5):
        core.step()
    core.add(greedy(1, 12), second)
    core.step()
    assert [len(output.tokens) for output in first.outputs] == [1] * 6
    assert len(second.tokens) == 1
    finish_all(core)


def test_end_id_ends_and_stays_out(core: EngineCore, expected: list[list[int]]) -> None:
    end_id = expected[0][5]
    until = expected[0].index(end_id)
    (answered,) = answer(core, request(1, PROMPTS[0], LENGTH, end_id=end_id))
    assert answered.tokens == expected[0][:until]
    assert answered.finish is FinishReason.END_ID
    assert answered.outputs[-1].tokens == ()
    assert answered.metrics.num_output_tokens == until


def test_stop_words_end_and_are_kept(core: EngineCore, expected: list[list[int]]) -> None:
    word = tuple(expected[0][4:6])
    over_the_border = (PROMPTS[1][-1], expected[1][0])
    answered, other = answer(
        core,
        request(1, PROMPTS[0], LENGTH, stop_words=((2047, 2047), word)),
        request(2, PROMPTS[1], stop_words=(over_the_border,)),
    )
    assert (answered.tokens, answered.finish) == (expected[0][:6], FinishReason.STOP_WORDS)
    assert other.tokens == expected[1][:1], "a word may begin in the prompt"


def test_min_new_tokens(core: EngineCore, expected: list[list[int]]) -> None:
    end_id = expected[0][0]
    (answered,) = answer(core, request(1, PROMPTS[0], LENGTH, end_id=end_id, min_new_tokens=8))
    assert len(answered.tokens) >= 8
    assert end_id not in answered.tokens


def test_bad_words(core: EngineCore, expected: list[list[int]]) -> None:
    single, pair = expected[0][0], tuple(expected[1][2:4])
    first, second = answer(
        core,
        request(1, PROMPTS[0], bad_words=((single,),)),
        request(2, PROMPTS[1], bad_words=(pair,)),
    )
    assert single not in first.tokens
    assert second.tokens[:3] == expected[1][:3]
    assert second.tokens[3] != pair[1]
    assert pair not in zip(second.tokens, second.tokens[1:], strict=False)


def test_embedding_bias(core: EngineCore) -> None:
    bias = np.zeros(2048, np.float32)
    bias[77] = 1000
    (answered,) = answer(core, request(1, PROMPTS[0], 4, embedding_bias=bias))
    assert answered.tokens == [77] * 4


def test_log_probs(core: EngineCore, expected: list[list[int]]) -> None:
    plain, sampled = answer(
        core,
        request(1, PROMPTS[0], 6, log_probs=True),
        request(2, PROMPTS[0], 6, log_probs=True, sampling=SamplingParams(top_k=50, seed=1)),
    )
    assert plain.tokens == expected[0][:6]
    for answered in (plain, sampled):
        assert len(answered.log_probs) == 6
        assert all(-50 < value <= 0 for value in answered.log_probs)
        assert answered.outputs[-1].cum_log_prob == pytest.approx(sum(answered.log_probs))
    assert math.exp(plain.log_probs[0]) >= math.exp(sampled.log_probs[0])


def test_a_seed_gives_the_same_tokens_in_any_company(core: EngineCore) -> None:
    drawn = request(1, PROMPTS[0], sampling=SamplingParams(top_p=0.95, temperature=1.5, seed=42))
    (alone,) = answer(core, drawn)
    together = answer(core, *(greedy(name) for name in range(2, 9)), drawn)[-1]
    assert alone.tokens == together.tokens
    for seed in (43, None):
        sampling = SamplingParams(top_p=0.95, temperature=1.5, seed=seed)
        assert answer(core, request(1, PROMPTS[0], sampling=sampling))[0].tokens != alone.tokens


def test_a_second_turn_reuses_prompt_and_answer(make_core: MakeCore) -> None:
    core = make_core()
    (first,) = answer(core, request(1, PROMPTS[0] * 3, 40))
    prompt = [*(PROMPTS[0] * 3), *first.tokens]
    (second,) = answer(core, request(2, prompt, 8))
    (fresh,) = answer(make_core(prefix_caching=False), request(2, prompt, 8))
    assert second.tokens == fresh.tokens
    assert second.metrics.kv_blocks_reused == (len(prompt) - 1) // 32
    assert fresh.metrics.kv_blocks_reused == 0
    metrics = second.metrics
    assert (
        metrics.kv_blocks_total
        == metrics.kv_blocks_new + metrics.kv_blocks_reused
        == -(-(len(prompt) + 7) // 32)
    )


def test_a_long_prompt_does_not_hold_up_the_others(make_core: MakeCore) -> None:
    core = make_core(max_batch_tokens=64, max_concurrency=4)
    short, long = Answer(), Answer()
    core.add(greedy(0, 30), short)
    core.step()
    core.add(request("long", prompts(1, shortest=700, longest=700)[0], 2), long)
    while not long.tokens:
        before = len(short.tokens)
        core.step()
        assert len(short.tokens) == before + 1
    assert len(short.tokens) > 700 // 64
    finish_all(core)


def test_a_new_length_of_a_prompt_costs_no_memory(cpu_pair: Pair) -> None:
    """OpenVINO keeps the kernels of each size of a step that it meets; up to 128 tokens there are 40 sizes."""
    model = PagedModel(cpu_pair.draft, EngineSettings())
    model.allocate([4])

    def memory_after(lengths: Iterable[int]) -> float:
        """Anonymous memory of this process, MiB."""
        for length in lengths:
            model.forward([TokenSlice([9] * length, 0, [BlockTable(np.arange(4, dtype=np.int32))], length)])
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

    before = memory_after([*range(1, 16), *range(16, 32, 2), *range(32, 64, 4), *range(64, 129, 8)])
    assert memory_after(range(1, 129)) - before < 10


def test_padding_of_a_step_writes_over_no_sequence(cpu_pair: Pair) -> None:
    """771 tokens are padded by 61, beside blocks that are all in use; steps of 256 tokens and of one are not padded."""
    blocks, asked = 9, prompts(3, shortest=258, longest=258)
    model = PagedModel(cpu_pair.target, EngineSettings())
    model.allocate([3 * blocks])
    tables = np.arange(3 * blocks, dtype=np.int32).reshape(3, blocks)

    def part(at: int, begin: int, end: int, rows: int = 0) -> TokenSlice:
        return TokenSlice(asked[at][begin:end], begin, [BlockTable(tables[at])], rows)

    plain = []
    for at in range(3):
        for begin, end in ((0, 256), (256, 257)):
            model.forward([part(at, begin, end)])
        plain.append(model.forward([part(at, 257, 258, rows=1)])[0].copy())
    model.forward([part(at, 0, 257) for at in range(3)])
    np.testing.assert_allclose(
        model.forward([part(at, 257, 258, rows=1) for at in range(3)]), plain, atol=1e-3
    )


def test_draft_tokens_of_the_caller(core: EngineCore, expected: list[list[int]]) -> None:
    """The C++ backend's draft_input_ids: the accepted prefix and one token more."""
    for right in range(5):
        guess = [*expected[0][:right], *([7] * (4 - right))]
        (answered,) = answer(core, request(1, PROMPTS[0], 5, draft_tokens=tuple(guess)))
        assert answered.outputs[0].tokens == tuple(expected[0][: right + 1])
        assert answered.tokens == expected[0][:5]
        assert (answered.metrics.draft_tokens_total, answered.metrics.draft_tokens_accepted) == (4, right)


def test_draft_tokens_beyond_the_answer_are_left_out(core: EngineCore, expected: list[list[int]]) -> None:
    (answered,) = answer(core, request(1, PROMPTS[0], 3, draft_tokens=tuple(expected[0][:5])))
    assert answered.tokens == expected[0][:3]
    assert answered.metrics.draft_tokens_total == 2


def test_draft_tokens_after_a_prompt_in_chunks(make_core: MakeCore, expected: list[list[int]]) -> None:
    core = make_core(max_batch_tokens=13, max_concurrency=1)
    for name in range(4):
        (answered,) = answer(core, request(1, PROMPTS[name], 5, draft_tokens=tuple(expected[name][:4])))
        assert answered.tokens == expected[name][:5]
        assert answered.metrics.draft_tokens_accepted == 4


def test_first_come_first_served_without_starvation(make_core: MakeCore) -> None:
    """A large request that has to wait is not overtaken for ever by small ones that would fit."""
    core = make_core(kv_blocks=8, max_concurrency=8)
    order: list[str] = []

    def sink(output: Any) -> None:
        if output.finish:
            order.append(output.request_id)

    core.add(request("small", PROMPTS[0][:5], 60), sink)
    core.step()
    core.add(request("large", PROMPTS[1][:5], 240), sink)
    core.add(request("later", PROMPTS[2][:5], 5), sink)
    core.step()
    assert core.stats().waiting == 2
    finish_all(core)
    assert order == ["small", "large", "later"]


def test_stats(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=32)
    answer(core, *(greedy(name, 4) for name in range(3)))
    stats = core.stats()
    assert stats.generated_tokens == 12
    assert stats.prompt_tokens == sum(map(len, PROMPTS[:3]))
    assert stats.steps == 4
    assert stats.mean_batch == 3
    assert stats.finished[FinishReason.LENGTH] == 3
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_blocks_free) == (0, 0, 0, 32)


def test_metrics(core: EngineCore) -> None:
    (answered,) = answer(core, greedy(0, 4))
    metrics = answered.metrics
    assert metrics.num_input_tokens == len(PROMPTS[0])
    assert metrics.num_output_tokens == 4
    times = [metrics.arrival_ns, metrics.first_scheduled_ns, metrics.first_token_ns, metrics.last_token_ns]
    assert times == sorted(times)
    assert times[0] > 0
    assert all(output.metrics is None for output in answered.outputs[:-1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": (5, 2048)}, "token ids must be 0 to 2047"),
        ({"bad_words": ((3000,),)}, "token ids must be 0 to 2047"),
        ({"draft_tokens": (1,) * 6}, "draft_tokens = 6 tokens: are more than max_draft_tokens 5"),
        ({"embedding_bias": np.zeros(3, np.float32)}, r"embedding_bias: has shape \(3,\), must be \(2048,\)"),
        ({"max_new_tokens": 1020}, "max_new_tokens = 1020: .*more than the 1024 tokens"),
    ],
)
def test_what_can_never_run_is_refused(core: EngineCore, bad: dict[str, Any], message: str) -> None:
    fields = {"id": "1", "prompt": (1, 2, 3, 4, 5), "max_new_tokens": 4, "end_id": None} | bad
    with pytest.raises(InvalidRequest, match=message):
        core.check(EngineRequest(**fields))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": ()}, "prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop_words": ((),)}, "stop_words"),
        ({"embedding_bias": np.array([0, np.nan])}, "embedding_bias"),
        ({"embedding_bias": np.array([-np.inf, -np.inf])}, "embedding_bias"),
    ],
)
def test_malformed_requests_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineRequest(**({"id": "1", "prompt": (1,), "max_new_tokens": 4, "end_id": None} | bad))


def test_bf16_runs_where_the_processor_has_it(make_core: MakeCore, expected: list[list[int]]) -> None:
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(UnfitProcessor, match="no bf16 arithmetic"):
            make_core(precision="bf16")
        return
    core = make_core(precision="bf16")
    assert (core.stats().precision, core.precisions) == ("bf16", {"target": "bf16: as asked"})
    (answered,) = answer(core, greedy(0))
    assert answered.tokens[:3] == expected[0][:3]  # later ones are nearly as likely as others


def test_small_models_are_exact_on_every_processor(make_core: MakeCore) -> None:
    assert make_core(precision="auto").stats().precision == "f32"


@pytest.mark.parametrize(
    ("settings", "blocks"), [({"kv_blocks": 9}, 9), ({"kv_cache_mib": 1}, 8), ({"max_concurrency": 2}, 64)]
)
def test_size_of_the_cache(make_core: MakeCore, settings: dict[str, int], blocks: int) -> None:
    assert make_core(**settings).stats().kv_blocks_total == blocks
