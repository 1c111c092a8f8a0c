"""Recipes beside the configurations by upstream that they follow."""

from __future__ import annotations

import pytest

from pipeline.contracts import llm_args, read_facts
from pipeline.errors import UserError
from pipeline.recipe import PyTorchRuntime, load_recipe, packaged
from pipeline.runtimes.pytorch.upstream import compare_with_upstream, configurations

OF_THE_LLM_API = [name for name in packaged() if isinstance(load_recipe(name).runtime, PyTorchRuntime)]
RECIPES = read_facts("curated.yaml")["recipes"]


@pytest.mark.parametrize("name", OF_THE_LLM_API)
def test_a_packaged_recipe_is_explained(name: str) -> None:
    """Every difference has a reason, and every reason is one of a difference."""
    found = compare_with_upstream(load_recipe(name))
    assert (found.configuration is None) == bool(found.without)
    assert [difference.key for difference in found.differences if not difference.why] == []
    assert {*RECIPES[name].get("why", {})} <= {difference.key for difference in found.differences}


def test_reasons_are_of_packaged_recipes() -> None:
    assert sorted(RECIPES) == sorted(OF_THE_LLM_API)


def test_configurations_have_arguments_of_a_release() -> None:
    names = read_facts("curated.yaml")["names"]
    for configuration in configurations():
        arguments = {key: value for key, value in configuration.arguments.items() if key not in names}
        arguments.pop("backend", None)
        assert llm_args.check("1.2.1", arguments) == (), configuration.name


def test_what_was_changed_since_is_not_explained() -> None:
    changed = compare_with_upstream(load_recipe("gpt-oss-120b", ("limits.max_concurrency=64",)))
    assert {difference.key: difference.here for difference in changed.differences if not difference.why} == {
        "max_batch_size": "32"
    }


def test_another_recipe_follows_the_first_configuration_of_its_model() -> None:
    mine = load_recipe("gpt-oss-120b", ("name=mine",))
    found = compare_with_upstream(mine)
    assert found.configuration is not None
    assert "openai/gpt-oss-120b" in found.configuration.models
    assert [difference.key for difference in found.differences if not difference.why] == [
        "max_batch_size",
        "attention_dp_config.batching_wait_iters",
    ]


def test_there_is_none_for_other_models_and_runtimes() -> None:
    with pytest.raises(UserError, match=r"upstream's configurations that are known are for Qwen/"):
        compare_with_upstream(load_recipe("llama-3.1-8b-eagle3", ("name=mine",)))
    with pytest.raises(UserError, match=r"tiny-cpu: runtime\.kind = cpu"):
        compare_with_upstream(load_recipe("tiny-cpu"))
