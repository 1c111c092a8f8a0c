"""What `recipes validate` knows besides the contracts: that the runtime can be told what the recipe asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.errors import InvalidInput, UserError
from pipeline.plan.model_facts import offline_sizes
from pipeline.prepare import check_recipe
from pipeline.recipe import load_recipe, packaged
from pipeline.runtimes import runtime_of


@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_are_compatible_and_their_sizes_known(name: str) -> None:
    recipe = load_recipe(name)
    assert set(offline_sizes(recipe)) == {"target"} | ({"draft"} if recipe.draft else set())
    assert [finding for finding in check_recipe(recipe) if finding.severity != "note"] == []


def test_what_the_contracts_refuse() -> None:
    with pytest.raises(InvalidInput, match="GPU h100 is not known"):
        check_recipe(load_recipe("llama-3.3-70b-fp8", ("runtime.gpu=h100",)))


def test_what_the_runtime_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("llama-3.3-70b-nvfp4")

    def refuse(_runtime: object, _recipe: object) -> None:
        raise UserError("cannot be packaged")

    monkeypatch.setattr(type(runtime_of(recipe)), "package_settings", refuse)
    told = r"llama-3\.3-70b-nvfp4\.yaml: 1 fault\n.*: cannot be packaged \[runtime\.refuses\]"
    with pytest.raises(InvalidInput, match=told):
        check_recipe(recipe)


def test_too_few_batch_tokens_for_speculation() -> None:
    overrides = ("runtime.speculation={method: ngram, max_draft_tokens: 4}", "limits.max_batch_tokens=199")
    with pytest.raises(InvalidInput, match="must be at least 200"):
        check_recipe(load_recipe("llama-3.3-70b-nvfp4", overrides))


def test_it_needs_nothing_heavy() -> None:
    code = (
        "import sys; from pipeline.recipe import load_recipe; "
        "from pipeline.prepare import check_recipe; "
        "[check_recipe(load_recipe(n)) for n in ('tiny-cpu', 'llama-3.3-70b-fp8', 'llama-3.3-70b-nvfp4')]; "
        "print([n for n in ('torch', 'transformers', 'openvino', 'pytriton', 'safetensors') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
