"""From recipes to the limits of engines: what the rules of upstream ask of any recipe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from pipeline.recipe import Recipe
from pipeline.runtimes.tensorrt.flags import engine_limits
from tests.support.tensorrt import recipe, recipes, roles


@given(recipes)
@settings(max_examples=100)
def test_limits(made: Recipe) -> None:
    for role in roles(made):
        asked, limits = made.limits, engine_limits(made, role)
        batch, tokens, drafted = limits.max_batch_size, limits.max_num_tokens, limits.max_draft_len
        assert batch == asked.max_concurrency
        assert tokens >= batch * (drafted + 1), "build.max_num_tokens_spec, build.batch_le_tokens"
        assert tokens >= limits.tokens_per_block, "build.max_num_tokens_block"
        most = max(limits.max_seq_len * batch, limits.tokens_per_block)
        assert tokens <= most, "build.max_num_tokens_clip"
        assert limits.max_input_len <= limits.max_seq_len, "build.input_lt_seq"
        assert limits.max_seq_len == asked.max_input_tokens + asked.max_output_tokens
        assert limits.tokens_per_block & (limits.tokens_per_block - 1) == 0, "build.tokens_per_block"
        longest = asked.max_input_tokens if made.draft is None else limits.max_seq_len - 1
        assert limits.max_input_len == longest
        if not made.scheduler.chunked_context:
            assert tokens >= longest, "a prompt is one step"
        if tokens % limits.tokens_per_block:
            assert tokens == most, "no whole number of blocks fits"
        if asked.max_batch_tokens is None and tokens > 8192:
            assert tokens - limits.tokens_per_block < max(batch * (drafted + 1), longest + drafted)


@pytest.mark.parametrize(
    ("limits", "chunked", "draft", "tokens"),
    [
        ({}, True, None, 8192),
        ({}, False, None, 8192),
        ({"max_input_tokens": 10_000}, True, None, 8192),
        ({"max_input_tokens": 10_000}, False, None, 10_016),
        ({"max_batch_tokens": 1000}, True, None, 992),
        ({"max_concurrency": 512}, True, {"max_draft_tokens": 16}, 8704),
        ({"max_concurrency": 1, "max_input_tokens": 1000, "max_output_tokens": 100}, True, None, 1088),
        ({"max_concurrency": 1, "max_input_tokens": 1000, "max_output_tokens": 5}, False, None, 1005),
        ({"max_concurrency": 1, "max_input_tokens": 4, "max_output_tokens": 4}, True, None, 32),
        ({"max_concurrency": 2}, False, {}, 9248),
        ({"max_concurrency": 1}, False, {}, 9216),
    ],
)
def test_tokens_of_a_step(limits: dict[str, int], chunked: bool, draft: Any, tokens: int) -> None:
    made = recipe(limits=limits, draft=draft, scheduler={"chunked_context": chunked})
    assert engine_limits(made, "target").max_num_tokens == tokens


def test_target_and_draft_take_the_same_sequences() -> None:
    made = recipe(draft={})
    target, draft = engine_limits(made, "target"), engine_limits(made, "draft")
    assert (target.max_seq_len, target.max_draft_len) == (9216, 5)
    assert (draft.max_seq_len, draft.max_draft_len) == (9216, 0)
    assert target.max_input_len == draft.max_input_len == 9215
    assert target.max_batch_size == draft.max_batch_size
