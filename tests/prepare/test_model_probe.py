"""Models probed: of the hub only config.json and headers are asked for; unreadable configs are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from pipeline.errors import CheckpointError, InvalidInput, SourceError
from pipeline.models.header import FIRST_BYTES, read_totals
from pipeline.plan.memory.tensors import parameter_counts
from pipeline.prepare.model_probe import probe_models
from pipeline.prepare.report import make_report
from pipeline.recipe import Recipe, load_recipe
from pipeline.store import Store
from tests.support.hub import TOKENIZER, LoopbackHub, index

REPO = "org/nobody-knows"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPLAINED = 2 * 256 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 3 * 64


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return written(tmp_path, f"hf:{REPO}")


def written(folder: Path, source: str) -> Recipe:
    file = folder / "r.yaml"
    file.write_text(
        f"name: r\nmodel: {{source: '{source}'}}\n"
        "runtime: {kind: pytorch, version: 1.2.1, gpu: l4-24g}\n"
        "limits: {max_input_tokens: 1000, max_output_tokens: 24, max_concurrency: 4}\n"
    )
    return load_recipe(file)


def files(weights: int = EXPLAINED, **config: Any) -> dict[str, bytes]:
    """A checkpoint of so many float16 numbers, in a layout that nobody but its header knows."""
    half = weights // 2
    return {
        "config.json": json.dumps(CONFIG | config).encode(),
        "model.safetensors.index.json": index({"a": FIRST, "b": SECOND}),
        FIRST: save({"a": np.zeros(half, np.float16)}),
        SECOND: save({"b": np.zeros(weights - half, np.float16)}),
        "consolidated.safetensors": save({"again": np.zeros(weights, np.float16)}),
        "tokenizer.json": TOKENIZER,
    }


def test_only_config_and_headers_are_asked_for(hub: LoopbackHub, recipe: Recipe, store: Store) -> None:
    hub.add(REPO, files(100_000))
    seen = probe_models(recipe, store)["target"]
    assert seen.totals is not None
    assert (seen.totals.weights, seen.totals.bytes, seen.totals.dtypes) == (
        100_000,
        200_000,
        {"F16": 100_000},
    )
    assert hub.fetched() == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for name in hub.fetched() - {"config.json"}:
        assert hub.ranges(name) == [f"bytes=0-{FIRST_BYTES - 1}"]


def test_a_hub_that_ignores_ranges_is_read_no_further(hub: LoopbackHub, recipe: Recipe, store: Store) -> None:
    hub.faults.ignore_range = True
    hub.add(REPO, files(2_000_000))
    seen = probe_models(recipe, store)["target"]
    assert seen.totals is not None
    assert seen.totals.weights == 2_000_000


def test_an_outlook_of_a_model_that_only_the_hub_knows(
    hub: LoopbackHub, recipe: Recipe, store: Store
) -> None:
    hub.add(REPO, files())
    outlook = make_report(recipe, store)
    assert outlook.memory is not None
    assert outlook.plan is not None
    assert outlook.memory.verdict == "fits"
    assert outlook.memory.ranks[0].group("weights") == 2 * EXPLAINED
    assert "by the headers in hub" in outlook.model_sources["target"]


def test_weights_that_the_config_does_not_explain_are_counted(
    hub: LoopbackHub, recipe: Recipe, store: Store
) -> None:
    hub.add(REPO, files(EXPLAINED + 5000))
    outlook = make_report(recipe, store)
    assert outlook.memory is not None
    lines = {line.key: line.bytes for line in outlook.memory.ranks[0].lines}
    assert lines["weights.target.others"] == 10_000


def test_what_the_store_has_is_not_asked_for_again(hub: LoopbackHub, recipe: Recipe, store: Store) -> None:
    from pipeline.prepare import prepare
    from pipeline.progress import Silent
    from pipeline.stages import Builder

    hub.add(REPO, files())
    prepared = prepare(recipe, store)
    Builder(prepared, store, Silent()).run("fetch.target")
    hub.requests.clear()
    seen = probe_models(recipe, store, offline=True)["target"]
    assert seen.sizes.hidden == 64
    assert hub.requests == []


@pytest.mark.parametrize("by_environment", [True, False])
def test_offline_nothing_is_asked(
    by_environment: bool, hub: LoopbackHub, recipe: Recipe, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outlook = make_report(recipe, store, offline=not by_environment)
    assert outlook.memory is None
    assert outlook.plan is None
    assert set(outlook.unknown) == {"memory", "plan"}
    assert "not known" in outlook.verdict
    assert hub.requests == []


def test_a_hub_that_refuses_leaves_an_outlook_with_the_reason(
    hub: LoopbackHub, recipe: Recipe, store: Store
) -> None:
    hub.add(REPO, files(), gated=True)
    outlook = make_report(recipe, store)
    assert outlook.memory is None
    assert "HF_TOKEN" in outlook.unknown["memory"]
    (finding,) = [finding for finding in outlook.findings if finding.severity == "error"]
    assert finding.rule == "source.gated"
    assert outlook.refused


def test_every_fault_of_a_config_is_named(hub: LoopbackHub, recipe: Recipe, store: Store) -> None:
    hub.add(REPO, files(hidden_size=None, vocab_size="many"))
    with pytest.raises(InvalidInput) as caught:
        probe_models(recipe, store)
    assert {fault.key for fault in caught.value.faults} == {"hidden_size", "vocab_size"}
    assert all(f"hf:{REPO}/config.json" in fault.where for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"{", "is not JSON"), (b"[1]", "is not an object"), (b"{}", "architectures: is not known")],
)
def test_a_local_config_that_is_none(content: bytes, problem: str, tmp_path: Path, store: Store) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=problem):
        probe_models(written(tmp_path, f"local:{tmp_path}"), store)


def test_a_local_folder_without_a_config(tmp_path: Path, store: Store) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        probe_models(written(tmp_path, f"local:{tmp_path}"), store)


def test_a_damaged_header(hub: LoopbackHub, recipe: Recipe, store: Store) -> None:
    hub.add(REPO, files() | {FIRST: b"\xff" * 100})
    with pytest.raises(SourceError, match="is not a safetensors file"):
        probe_models(recipe, store)


def test_headers_longer_than_the_first_bytes() -> None:
    tensors = {f"layer.{index}.{'x' * 100}": np.zeros(2, np.float16) for index in range(1000)}
    content = save(tensors)
    asked: list[int] = []

    def start_of(_: str, size: int) -> bytes:
        asked.append(size)
        return content[:size]

    assert read_totals(["one"], start_of).weights == 2000
    assert asked[0] == FIRST_BYTES < asked[1] < len(content)


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a": {"dtype": "F16"}}', b'{"a": {"dtype": "F3", "shape": [1]}}', b"\xff\xff"]
)
def test_headers_that_are_none(header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header
    with pytest.raises(CheckpointError):
        read_totals(["one"], lambda _, size: content[:size])


def test_the_explained_weights_are_those_of_the_sizes(hub: LoopbackHub, recipe: Recipe, store: Store) -> None:
    hub.add(REPO, files())
    assert sum(parameter_counts(probe_models(recipe, store)["target"].sizes).values()) == EXPLAINED
