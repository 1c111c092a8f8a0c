"""Which models a gateway finds: their packages, and the names that requests may have, each of one model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput, UserError
from pipeline.frontend.models import LocatedModel, _faults_of_aliases, load_served_model, locate_models
from pipeline.gateway.settings import GatewayStart, ModelSources
from pipeline.recipe import load_recipe
from pipeline.store import Store
from pipeline.triton.deployment import LaunchSpec
from tests.serving.test_deployments import announced
from tests.support.deployments import gpu_deployment
from tests.support.models import make_tokenizer


def test_a_name_of_two_models_is_refused() -> None:
    recipe = load_recipe("tiny-cpu", ["serving.aliases=[gpt, shared]"])
    other = load_recipe("tiny-cpu", ["name=other", "serving.aliases=[tiny-cpu, shared]"])
    assert _faults_of_aliases([recipe]) == []
    assert _faults_of_aliases([recipe, other]) == [
        "tiny-cpu: is a name of tiny-cpu and of other: change serving.aliases",
        "shared: is a name of tiny-cpu and of other: change serving.aliases",
    ]


@pytest.mark.parametrize("aliases", ["[a, a]", "['']", "['a b']", "gpt"])
def test_what_is_no_alias_is_refused(aliases: str) -> None:
    with pytest.raises(InvalidInput, match=r"serving\.aliases"):
        load_recipe("tiny-cpu", [f"serving.aliases={aliases}"])


def test_the_package_of_a_name_with_servers_elsewhere_is_that_which_is_served(tmp_path: Path) -> None:
    """Its golden questions, which no record has, are part of what a recipe's package is found by."""
    store, package = Store(tmp_path / "store"), tmp_path / "package"
    announced(store, "tiny-cpu", package, "serving.strict=true")
    elsewhere = ModelSources(endpoints=(("", "host:8001"),))
    start = GatewayStart(recipes=("tiny-cpu",), overrides=("serving.aliases=[gpt]",), sources=elsewhere)
    (found,) = locate_models(start, store)
    sets = ("golden=null", "serving.strict=true", "serving.aliases=[gpt]")
    assert found == LocatedModel(load_recipe("tiny-cpu", sets), package, ("host:8001",))
    file = tmp_path / "tiny-cpu.yaml"
    file.write_text("name: tiny-cpu\nmodel: {source: 'local:nowhere'}\n")
    with pytest.raises(UserError):
        locate_models(GatewayStart(recipes=(str(file),), sources=elsewhere), store)


@pytest.mark.parametrize("strict", [False, True])
def test_what_a_deployment_is_served_with_reaches_the_gateway(tmp_path: Path, strict: bool) -> None:
    """By the record of the server: names, and whether requests are held to the fields that are known."""
    store, package = Store(tmp_path / "store"), tmp_path / "package"
    deployment = gpu_deployment(LaunchSpec())
    (package / deployment.tokenizer_dir).mkdir(parents=True)
    make_tokenizer(package / deployment.tokenizer_dir)
    deployment.save(package)
    announced(store, "mine", package, f"serving={{strict: {str(strict).lower()}, aliases: [gpt]}}")

    async def load() -> tuple[bool, tuple[str, ...]]:
        start = GatewayStart(recipes=("mine",))
        (located,) = locate_models(start, store)
        model = load_served_model(located, store=store, start=start)
        try:
            return model.strict, model.names
        finally:
            await model.aclose()

    assert asyncio.run(load()) == (strict, ("mine", "gpt"))
