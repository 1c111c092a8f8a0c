"""The table of keys: every key is one that recipes have, and that the runtimes which it names read."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.bench.tune.search_space import (
    TUNABLE_KEYS,
    Dimension,
    draft_lengths,
    search_space,
    variant,
)
from pipeline.bench.tune.settings import read_lengths
from pipeline.errors import InvalidInput, UserError
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.sections import RecipeValues
from pipeline.runtimes import runtime_of
from tests.support.tensorrt import DRAFTED

NGRAMS = "runtime.speculation={method: ngram, max_draft_tokens: 4}"
RECIPES = {
    "cpu": ("tiny-cpu", ()),
    "tensorrt": ("llama-3.1-8b-fp8", DRAFTED),
    "ngrams": ("llama-3.3-70b-nvfp4", (NGRAMS,)),
}
BASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "cpu": (),
    "tensorrt": (("draft=null",),),
    "ngrams": (("runtime.speculation=null",), ("runtime.version=1.3.0rc29",)),
}


def recipe_of(name: str) -> Recipe:
    file, overrides = RECIPES[name]
    return load_recipe(file, overrides)


def written(recipe: Recipe) -> Any:
    """All that a runtime makes of a recipe."""
    runtime = runtime_of(recipe)
    roles = ("target", "draft") if recipe.draft is not None else ("target",)
    return [runtime.build_settings(recipe, role) for role in roles], runtime.package_settings(recipe)


@pytest.mark.parametrize("name", ["cpu", "tensorrt", "ngrams"])
def test_each_key_is_one_that_the_runtime_reads(name: str) -> None:
    """Some value of it changes what is built or packaged, and the recipe's own value changes nothing."""
    recipe = recipe_of(name)
    # What goes with a draft alone, and what goes without alone.
    bases = [recipe, *(variant(recipe, changes) for changes in BASES[name])]
    for dimension in search_space(recipe).dimensions:
        assert dimension.own == RecipeValues(recipe.model_dump(mode="json"))[dimension.key]
        assert dimension.override(dimension.own) == ""
        changes = [text for value in dimension.values if (text := dimension.override(value))]
        assert any(read_differently(base, text) for base in bases for text in changes), dimension.key


def read_differently(recipe: Recipe, change: str) -> bool:
    try:
        return bool(written(variant(recipe, [change])) != written(recipe))
    except UserError:
        return False


def test_every_key_of_the_table_is_tried_somewhere() -> None:
    tried = {
        dimension.key
        for name in ("cpu", "tensorrt", "ngrams")
        for dimension in search_space(recipe_of(name)).dimensions
    }
    assert tried == {key.key for key in TUNABLE_KEYS}


def test_engines_are_built_again_only_for_what_they_are_built_from() -> None:
    compiled = {
        dimension.key for dimension in search_space(recipe_of("tensorrt")).dimensions if dimension.compiled
    }
    assert {"limits.max_concurrency", "limits.max_batch_tokens", "draft.max_draft_tokens"} <= compiled
    assert not compiled & {"kv_cache.memory_fraction", "scheduler.policy", "scheduler.max_queue_delay_us"}
    assert not any(dimension.compiled for dimension in search_space(recipe_of("cpu")).dimensions)


def test_numbers_stand_in_order_with_the_recipes_own_among_them() -> None:
    space = search_space(
        load_recipe("tiny-cpu", ["limits.max_concurrency=12", "limits.max_batch_tokens=700"])
    )
    found = {dimension.key: dimension for dimension in space.dimensions}
    assert found["limits.max_concurrency"].values == (3, 6, 12, 24, 48)
    assert 700 in found["limits.max_batch_tokens"].values
    for dimension in found.values():
        numbers = [value for value in dimension.values if value is not None]
        assert not dimension.ordered or numbers == sorted(numbers, key=float)


def test_all_wrong_names_are_told_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        search_space(
            recipe_of("cpu"),
            ["limits.max_batch_token", "scheduler.policy", "kv_cache.reuse"],
            ["kv_cache.reuse", "x"],
        )
    told = "\n".join(map(str, caught.value.faults))
    assert "did you mean limits.max_batch_tokens?" in told
    assert "the runtime cpu does not read it" in told
    assert "is in fix, too" in told
    assert "fix = x: is not a key" in told


def test_without_a_draft_nothing_below_its_section_is_set() -> None:
    space = search_space(recipe_of("ngrams"))
    none = {
        **space.own,
        "runtime.speculation.max_draft_tokens": 0,
        "runtime.speculation.max_matching_tokens": 4,
    }
    assert space.overrides(none) == ("runtime.speculation=null",)
    assert variant(recipe_of("ngrams"), space.overrides(none)).runtime.speculation is None  # type: ignore[union-attr]


def test_lengths_of_drafts_are_read_and_bounded() -> None:
    assert read_lengths("0-3,6") == (0, 1, 2, 3, 6)
    with pytest.raises(InvalidInput, match="is not a length of drafts"):
        draft_lengths(recipe_of("cpu"), read_lengths("0-99999999999999"))
    for wrong in ("", "a", "3-1", "-1", "1-"):
        with pytest.raises(ValueError, match="not a list of lengths"):
            read_lengths(wrong)
    (dimension,) = draft_lengths(recipe_of("cpu"), (0, 2)).dimensions
    assert (dimension.values, dimension.own) == ((0, 2), 4)
    assert [dimension.override(value) for value in dimension.values] == [
        "draft=null",
        "draft.max_draft_tokens=2",
    ]
    with pytest.raises(InvalidInput, match="has no draft"):
        draft_lengths(load_recipe("phi-4-fp8"), (0, 1))
    with pytest.raises(InvalidInput, match="write 0 to 64"):
        draft_lengths(recipe_of("cpu"), (0, 65))


def test_values_are_written_as_yaml() -> None:
    switch = Dimension("kv_cache.reuse", "", (True, False), True, compiled=False)
    assert switch.override(False) == "kv_cache.reuse=false"
    unset = Dimension("limits.max_batch_tokens", "", (None, 1), 1, compiled=False)
    assert unset.override(None) == "limits.max_batch_tokens=null"
