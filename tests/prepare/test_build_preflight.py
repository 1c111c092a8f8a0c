"""A model of the hub that nobody knows: it is judged once it is fetched, before anything long is done with it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import resources
from pipeline.errors import InvalidInput
from pipeline.machine.host import read_disk
from pipeline.prepare import facts, prepare
from pipeline.progress import Silent
from pipeline.recipe import Recipe, load_recipe
from pipeline.stages import Builder
from pipeline.store import Store
from tests.support.hub import CONFIG, LoopbackHub, whole

REPO = "org/nobody-knows"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: LoopbackHub) -> Recipe:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    file = tmp_path / "r.yaml"
    file.write_text(
        "name: r\n"
        f"model: {{source: 'hf:{REPO}'}}\n"
        "runtime: {kind: pytorch, version: 1.2.1, gpu: h100-sxm-80g, tensor_parallel: 64}\n"
        "limits: {max_input_tokens: 8, max_output_tokens: 8, max_concurrency: 1}\n"
    )
    return load_recipe(file)


@pytest.fixture
def hub() -> LoopbackHub:
    return LoopbackHub()


def test_judged_once_it_is_fetched(recipe: Recipe, hub: LoopbackHub, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    config = {**json.loads(CONFIG), **sizes}
    with hub:
        hub.add(REPO, whole() | {"config.json": json.dumps(config).encode()})
        store = Store(tmp_path / "store")
        prepared = prepare(recipe, store)  # nothing is known yet
        builder = Builder(prepared, store, Silent())
        with pytest.raises(InvalidInput, match="must divide the 4 attention heads of the target"):
            builder.run()
        assert [artifact.manifest.stage for artifact in store.list()] == ["fetch"]
        with pytest.raises(InvalidInput, match=r"r\.yaml:3: runtime\.tensor_parallel = 64"):
            prepare(recipe, store)  # what is known now is said at once


def test_a_config_that_is_none_is_left_to_the_stages(
    recipe: Recipe, hub: LoopbackHub, tmp_path: Path
) -> None:
    with hub:
        hub.add(REPO, whole())
        store = Store(tmp_path / "store")
        prepared = prepare(recipe, store)
        Builder(prepared, store, Silent()).run("fetch.target")
        prepare(recipe, store)


@pytest.fixture
def pair(tmp_path: Path) -> Recipe:
    """A target, and a draft whose tokenizer gives other ids."""
    for name in ("target", "draft"):
        shutil.copytree(resources.folder("recipes") / "checkpoints" / f"support-{name}", tmp_path / name)
    file = tmp_path / "draft" / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["model"]["merges"].reverse()
    file.write_text(json.dumps(data), encoding="utf-8")
    recipe = tmp_path / "pair.yaml"
    recipe.write_text(
        "name: pair\n"
        "model: {source: 'local:target'}\n"
        "draft: {source: 'local:draft', max_draft_tokens: 4}\n"
        "runtime: {kind: cpu}\n"
        "limits: {max_input_tokens: 8, max_output_tokens: 8, max_concurrency: 1}\n"
    )
    return load_recipe(recipe)


def test_tokenizers_of_draft_and_target_are_compared(pair: Recipe, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(
        InvalidInput,
        match=r"pair\.yaml:3: draft\.source.*gives other ids than the target.*\[tokenizer\.ids\]",
    ):
        prepare(pair, store)
    assert store.list() == ()


@pytest.mark.parametrize("allowed", [frozenset(), frozenset({"host.disk"})])
def test_a_disk_that_is_too_small_stops_a_build_and_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: frozenset[str]
) -> None:
    recipe, store = load_recipe("tiny-cpu"), Store(tmp_path / "store")
    full = replace(read_disk(tmp_path), free_bytes=10)
    monkeypatch.setattr(facts, "read_disk", lambda _: full)
    prepared = prepare(recipe, store, allowed=allowed)
    builder = Builder(prepared, store, Silent())
    if allowed:
        builder.run("fetch.target")
        return
    with pytest.raises(InvalidInput, match=r"it needs .* MiB of disk, 10 B are free .*\[host\.disk\]"):
        builder.run("fetch.target")
    assert store.list() == ()


@pytest.mark.parametrize(
    ("token", "said"),
    [(None, "without a token the hub answers 401"), ("hf_secret", "to this token the hub answers 403")],
)
def test_a_gated_model_is_a_finding_before_anything_is_fetched(
    recipe: Recipe,
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    said: str,
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
        hub.members = ()
    with hub:
        hub.add(REPO, whole(), gated=True)
        store = Store(tmp_path / "store")
        prepared = prepare(recipe, store)
        builder = Builder(prepared, store, Silent())
        with pytest.raises(
            InvalidInput, match=rf"r\.yaml:2: model\.source.*{said}.*HF_TOKEN.*\[source\.gated\]"
        ):
            builder.run()
        assert store.list() == ()
