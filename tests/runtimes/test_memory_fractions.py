"""Two engines on one GPU: whichever loads first, both caches fit, and both hold the same tokens."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtimes.tensorrt.triton_settings import MemoryShares, ModelMemory, share_memory

GIB = 2**30
models = st.builds(
    ModelMemory,
    weights=st.integers(1, 90 * GIB),
    buffers=st.integers(0, 4 * GIB),
    kv_per_token=st.integers(256, 2**20),
    tokens_per_block=st.sampled_from([16, 32, 64, 128]),
)
shares = st.floats(0.05, 0.99)
gpus = st.integers(4 * GIB, 180 * GIB)


class Gpu:
    """The rule by which an engine sizes its cache when it loads."""

    def __init__(self, size: int) -> None:
        self.free = size

    def hold(self, model: ModelMemory) -> None:
        self.free -= model.weights + model.buffers

    def cache(self, model: ModelMemory, fraction: float, most_tokens: int) -> int:
        """Tokens that the cache holds; it is taken from what is free, in whole blocks."""
        tokens = min(most_tokens, int(self.free * fraction) // model.kv_per_token)
        blocks = math.ceil(tokens / model.tokens_per_block)
        self.free -= blocks * model.tokens_per_block * model.kv_per_token
        return blocks * model.tokens_per_block


def load(size: int, pairs: list[tuple[ModelMemory, float]], tokens: int, *, at_once: bool) -> list[int]:
    """Load the models in order, or hold the weights of both before either sizes its cache; tokens of each cache."""
    gpu, held = Gpu(size), []
    if at_once:
        for model, _ in pairs:
            gpu.hold(model)
    for model, fraction in pairs:
        if not at_once:
            gpu.hold(model)
        held.append(gpu.cache(model, fraction, tokens))
    block = max(model.tokens_per_block * model.kv_per_token for model, _ in pairs)
    assert gpu.free >= (
        0 if all(cache == tokens for cache in held) else -block
    )  # the last block is rounded up
    return held


def orders(
    target: ModelMemory, draft: ModelMemory, solved: MemoryShares
) -> list[list[tuple[ModelMemory, float]]]:
    return [list(order) for order in permutations([(target, solved.target), (draft, solved.draft)])]


@given(gpus, models, models, shares)
def test_in_any_order_both_caches_hold_what_was_solved(
    size: int, target: ModelMemory, draft: ModelMemory, fraction: float
) -> None:
    solved = share_memory(size, target, draft, fraction)
    left = size - sum(model.weights + model.buffers for model in (target, draft))
    assert solved.tokens * (target.kv_per_token + draft.kv_per_token) <= max(0, fraction * left)
    assert 0 < solved.target <= fraction
    assert 0 < solved.draft <= fraction
    if left < 0:
        assert solved.tokens == 0
        return
    for order in orders(target, draft, solved):
        for at_once in (False, True):
            assert load(size, order, solved.tokens, at_once=at_once) == [solved.tokens] * 2


@given(gpus, models, models, shares, st.integers(0, 8 * GIB))
def test_what_was_not_foreseen_makes_caches_smaller_and_breaks_nothing(
    size: int, target: ModelMemory, draft: ModelMemory, fraction: float, more: int
) -> None:
    """`load` asserts that nothing is taken that is not there."""
    solved = share_memory(size, target, draft, fraction)
    left = size - more - sum(model.weights + model.buffers for model in (target, draft))
    largest = solved.tokens * max(target.kv_per_token, draft.kv_per_token)
    if left <= largest:
        return  # the second model finds nothing: no fraction helps
    for order in orders(target, draft, solved):
        held = load(size - more, order, solved.tokens, at_once=False)
        assert all(tokens <= solved.tokens for tokens in held)  # a multiple of all blocks


@given(models, models, shares)
def test_a_larger_gpu_never_holds_less(target: ModelMemory, draft: ModelMemory, fraction: float) -> None:
    held = [share_memory(size * GIB, target, draft, fraction).tokens for size in (40, 80, 141, 180)]
    assert held == sorted(held)


def test_without_the_cap_a_draft_that_loads_first_would_take_too_much() -> None:
    """Why there is a cap: the fraction that is right for the second is too much for the first."""
    target = ModelMemory(weights=40 * GIB, buffers=GIB, kv_per_token=2**17, tokens_per_block=32)
    draft = ModelMemory(weights=2 * GIB, buffers=GIB, kv_per_token=2**14, tokens_per_block=32)
    solved = share_memory(80 * GIB, target, draft, 0.9)
    gpu = Gpu(80 * GIB)
    gpu.hold(draft)
    assert gpu.cache(draft, solved.draft, 10**12) > solved.tokens


def test_the_example_of_one_gpu() -> None:
    """A 70B target of 4 ranks in FP8 with a 1B draft on its first GPU, of 80 GB."""
    target = ModelMemory(weights=18 * GIB, buffers=2 * GIB, kv_per_token=40960, tokens_per_block=32)
    draft = ModelMemory(weights=3 * GIB, buffers=GIB, kv_per_token=32768, tokens_per_block=32)
    solved = share_memory(76 * GIB, target, draft, 0.9)
    assert solved.tokens == pytest.approx(0.9 * 52 * GIB / 73728, rel=1e-3)
    assert (solved.target, solved.draft) == (0.8334, 0.8000)
