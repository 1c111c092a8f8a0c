"""A name on a command line: a recipe, or a deployment that runs, whatever it was served from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest

from pipeline.cli.gateway import command as gateway
from pipeline.cli.options import complete_deployment, complete_running
from pipeline.documents import dump_yaml
from pipeline.errors import InvalidInput
from pipeline.recipe import load_recipe
from pipeline.serving.deployments import find_deployment, recipe_of
from pipeline.store import Store
from pipeline.triton.deployment import LaunchSpec
from pipeline.triton.running import RunningServer
from tests.support.deployments import ADDRESSES, gpu_deployment

SETS = ("limits.max_concurrency=3", "cache.enabled=true")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def announced(store: Store, name: str, package: Path, *overrides: str, state: str = "ready") -> RunningServer:
    """The record of a deployment, served from packaged tiny-cpu with other values; from a package alone without."""
    settings = None
    if overrides:
        recipe = load_recipe("tiny-cpu", (f"name={name}", *overrides))
        settings = recipe.model_dump(mode="json", exclude={"golden"})
    record = RunningServer.of(ADDRESSES, package, state=state, settings=settings)
    record.write(store.running, name)
    return record


def test_a_running_deployment_is_asked_with_what_it_is_served_with(store: Store, tmp_path: Path) -> None:
    """Its recipe is nowhere any more; values of the command line come on top."""
    record = announced(store, "mine", tmp_path, *SETS)
    found = find_deployment("mine", ("cache.enabled=false",), store)
    assert found.server == record
    assert found.recipe == load_recipe("tiny-cpu", ("name=mine", SETS[0], "golden=null"))
    assert found.argv == ("mine", "--set", "cache.enabled=false", "--store", str(store.root))
    assert find_deployment("mine", (), store).recipe.cache.enabled
    assert recipe_of("mine", (), store).limits.max_concurrency == 3
    with pytest.raises(InvalidInput, match=r"limits.max_concurrency = 0: must be 1 to"):
        find_deployment("mine", ("limits.max_concurrency=0",), store)


def test_what_is_built_again_is_the_file_as_it_is_now(store: Store, tmp_path: Path) -> None:
    """Whatever takes a recipe takes the name, and its file counts, with the values that it was given."""
    file = tmp_path / "own.yaml"
    values = load_recipe("tiny-cpu", ("golden=null", "name=mine")).model_dump(mode="json")
    file.write_text(dump_yaml(values))
    record = announced(store, "mine", tmp_path, "limits.max_concurrency=3")
    replace(record, recipe=(str(file), "--set", "limits.max_concurrency=5", "--store", "x")).write(
        store.running, "mine"
    )
    assert recipe_of("mine", (), store).limits.max_concurrency == 5
    assert find_deployment("mine", (), store).recipe.limits.max_concurrency == 3, "as it is served"
    file.unlink()
    assert recipe_of("mine", (), store).limits.max_concurrency == 3


def test_of_a_package_alone_the_package_says_what_is_known(store: Store, tmp_path: Path) -> None:
    deployment = gpu_deployment(LaunchSpec(engine_models=("tensorrt_llm",)))
    deployment.save(tmp_path)
    announced(store, "llama", tmp_path)
    recipe = find_deployment("llama", (), store).recipe
    assert (recipe.name, recipe.limits.max_input_tokens) == ("llama", deployment.limits.max_input_tokens)
    assert not recipe.cache.enabled


def test_a_running_name_comes_before_a_packaged_one_where_a_server_is_meant(
    store: Store, tmp_path: Path
) -> None:
    announced(store, "tiny-cpu", tmp_path, *SETS)
    assert find_deployment("tiny-cpu", (), store).recipe.limits.max_concurrency == 3
    assert recipe_of("tiny-cpu", (), store) == load_recipe("tiny-cpu"), "what is built is the packaged one"
    file = tmp_path / "tiny-cpu.yaml"
    shutil.copy(load_recipe("tiny-cpu").provenance.file or "", file)
    text = file.read_text().replace("local:checkpoints", "local:/checkpoints")
    file.write_text("\n".join(line for line in text.splitlines() if not line.startswith("golden")))
    by_path = find_deployment(str(file), (), store)
    assert by_path.recipe.limits.max_concurrency == 16, "a path is always a file"
    assert by_path.server is not None


def test_what_is_nothing_is_told_what_runs(store: Store, tmp_path: Path) -> None:
    announced(store, "mine", tmp_path, *SETS)
    announced(store, "starting", tmp_path, *SETS, state="starting")
    with pytest.raises(
        InvalidInput, match=r"nonesuch: is neither a packaged recipe nor a file .running: mine, starting;"
    ):
        find_deployment("nonesuch", (), store)
    with pytest.raises(InvalidInput, match="neither"):
        find_deployment("starting", (), store)
    assert recipe_of("starting", (), store).name == "starting"


def test_running_names_are_completed_first(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(store.root))
    announced(store, "tiny-mine", tmp_path, *SETS)
    announced(store, "tiny-cpu", tmp_path, *SETS)
    context = click.Context(gateway)
    parameter = gateway.params[0]
    assert [item.value for item in complete_running(context, parameter, "t")] == ["tiny-cpu", "tiny-mine"]
    assert [item.value for item in complete_deployment(context, parameter, "t")] == [
        "tiny-cpu",
        "tiny-mine",
        "t",
    ]
    assert "phi-4-fp8" in [item.value for item in complete_deployment(context, parameter, "p")]
