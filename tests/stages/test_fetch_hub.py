"""Fetching from a hub on loopback: the way that works, and without a network what was fetched before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import SourceError
from pipeline.models import TensorFiles
from pipeline.progress import Silent
from pipeline.recipe import LocalSource
from pipeline.sources import HubCheckpoint, resolve_checkpoint
from pipeline.stages.fetch import fetch
from pipeline.store import ArtifactKey, Store
from tests.support.adapters import make_adapter
from tests.support.fetching import REPO, SHARDS, Asked, Recorder, get, held
from tests.support.hub import LoopbackHub, sharded, whole
from tests.support.models import make_checkpoint, quantize_checkpoint


def test_revisions_become_commits(hub: LoopbackHub) -> None:
    old = hub.add(REPO, whole(rows=1), branch="v1.0")
    new = hub.add(REPO, whole(rows=2))
    assert resolve_checkpoint(Asked()) == HubCheckpoint(REPO, new)
    assert resolve_checkpoint(Asked(revision="main")) == HubCheckpoint(REPO, new)
    assert resolve_checkpoint(Asked(revision="v1.0")).identity == {"source": "hf:org/name", "commit": old}
    assert resolve_checkpoint(Asked(allow_pickle=True)).identity["allow_pickle"] is True


def test_a_full_commit_is_taken_without_asking(hub: LoopbackHub) -> None:
    assert resolve_checkpoint(Asked(revision="a" * 40)) == HubCheckpoint(REPO, "a" * 40)
    assert hub.requests == []


def test_only_what_is_needed_is_fetched(hub: LoopbackHub, into: Path) -> None:
    wanted = whole() | {
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b"{}",
        "merges.txt": b"a b",
    }
    others = {
        "README.md": b"#",
        "modeling_llama.py": b"import os",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"another copy",
        "adapter_model.safetensors": b"not the model",
        "model.gguf": b"gguf",
        "original/params.json": b"{}",
        "onnx/model.safetensors": b"nested",
    }
    commit = hub.add(REPO, wanted | others)
    facts = get(into)
    assert held(into) == wanted
    assert hub.fetched() == set(wanted)
    others_asked = [request.path for request in hub.requests if "/resolve/" not in request.path]
    assert others_asked == ["/api/models/org/name", f"/api/models/org/name/tree/{commit}"]
    assert facts == {
        "source": "hf:org/name",
        "revision": None,
        "commit": commit,
        "pickled": False,
        "architectures": ["LlamaForCausalLM"],
        "tensors": 2,
        "parameters": 2048,
        "dtypes": {"F32": 2},
    }


def test_shards_follow_their_index_and_lists_come_in_pages(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, sharded() | {"model-00003-of-00002.safetensors": b"left over"})
    hub.faults.page_size = 2
    get(into)
    assert held(into) == sharded()


def test_large_files_come_from_another_host_which_gets_no_token(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.add(REPO, sharded(), gated=True)
    hub.faults.redirect = True
    get(into)
    assert held(into) == sharded()
    at = {server: [r for r in hub.requests if r.server == server] for server in ("hub", "cdn")}
    assert {request.authorization for request in at["hub"]} == {"Bearer hf_secret"}
    assert [request.authorization for request in at["cdn"]] == ["", ""]


def test_without_a_token_none_is_sent(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    get(into)
    assert {request.authorization for request in hub.requests} == {""}


def test_progress_counts_bytes(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, sharded())
    hub.faults.break_once = {SHARDS[0]: 1000}
    progress = Recorder()
    get(into, progress=progress)
    small, large = progress.tasks
    assert large.label == "download org/name"
    assert large.total == large.done == sum(len(sharded()[name]) for name in SHARDS)
    assert small.done == small.total


def test_offline_a_branch_is_what_it_was(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(REPO, whole())
    store = Store(tmp_path / "store")
    for revision in (None, "main"):
        resolved = resolve_checkpoint(Asked(revision=revision), store=store)
        key = ArtifactKey("fetch", resolved.identity, resumable=True)
        store.obtain(key, lambda into, r=resolved: fetch(r, into, progress=Silent()), recipe="tiny")  # type: ignore[misc]
    hub.add(REPO, whole(rows=3))
    hub.requests.clear()
    assert resolve_checkpoint(Asked(), store=store, offline=True) == HubCheckpoint(REPO, commit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = resolve_checkpoint(Asked(), store=store)
    assert store.find(ArtifactKey("fetch", again.identity)) is not None
    for revision, store_of in (("v2", store), (None, None)):
        with pytest.raises(
            SourceError, match=r"offline, .* cannot be resolved; set revision to a full commit"
        ) as caught:
            resolve_checkpoint(Asked(revision=revision), store=store_of)
        assert (commit in str(caught.value)) is (store_of is not None)
    assert hub.requests == []
    store.close()


def test_offline_nothing_is_downloaded(hub: LoopbackHub, into: Path) -> None:
    commit = hub.add(REPO, whole())
    resolved = resolve_checkpoint(Asked(revision=commit), offline=True)
    with pytest.raises(SourceError, match="not in the store, and the Hub is not asked in offline mode"):
        fetch(resolved, into, progress=Silent())
    assert hub.requests == []


def test_a_damaged_quantized_checkpoint_is_refused_before_its_weights_come(
    hub: LoopbackHub, into: Path, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    folder = quantize_checkpoint(source, tmp_path / "fp8", "fp8", kv_cache=True)
    tensors = {name: np.array(value) for name, value in TensorFiles(folder).items()}
    lost, zero = "model.layers.1.mlp.up_proj.input_scale", "model.layers.0.self_attn.o_proj.weight_scale"
    del tensors[lost]
    tensors[zero] = np.array(0, np.float32)
    save_file(tensors, folder / "model.safetensors")
    hub.add(REPO, {path.name: path.read_bytes() for path in folder.iterdir()})
    with pytest.raises(
        SourceError, match=r"weights are not brought:\n(.*\n)+.*--allow source\.weights"
    ) as caught:
        get(into)
    assert lost in str(caught.value)
    assert f"is zero: {zero}" in str(caught.value)
    header, *scales = hub.ranges("model.safetensors")
    assert header == "bytes=0-65535"
    assert 1 <= len(scales) <= 8
    assert "" not in scales
    assert not (into / "model.safetensors").exists()
    other = tmp_path / "copy"
    other.mkdir()
    with pytest.raises(SourceError) as of_folder:
        get(other, Asked(LocalSource(folder)))  # type: ignore[arg-type]
    assert str(of_folder.value) == str(caught.value).replace("hf:org/name", f"local:{folder}")
    recorder = Recorder()
    get(into, progress=recorder, allow_faults=True)
    assert sum(": error: " in line for line in recorder.lines) == 2
    assert (into / "model.safetensors").exists()


def test_an_adapter_is_its_two_files(hub: LoopbackHub, into: Path, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    folder = make_adapter(tmp_path / "adapter", base, rank=2)
    wanted = held(folder)
    others = {
        "README.md": b"#",
        "adapter_model.bin": b"pickle",
        "tokenizer.json": b"{}",
        "checkpoint-9/optimizer.pt": b"x",
    }
    commit = hub.add(REPO, wanted | others)
    resolved = resolve_checkpoint(Asked(), adapter=True)
    assert resolved == HubCheckpoint(REPO, commit, adapter=True)
    facts = fetch(resolved, into, progress=Silent())
    assert held(into) == wanted
    assert hub.fetched() == set(wanted)
    assert (facts["commit"], facts["rank"]) == (commit, 2)
    # The same commit as a checkpoint is another thing.
    assert resolved.identity != resolve_checkpoint(Asked()).identity


def test_what_is_no_adapter_is_refused_as_one(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    with pytest.raises(
        SourceError, match=r"org/name.* has no adapter_config\.json and no adapter_model\.safetensors"
    ):
        fetch(resolve_checkpoint(Asked(), adapter=True), into, progress=Silent())


def test_an_adapter_that_cannot_be_served_is_refused_when_it_is_here(
    hub: LoopbackHub, into: Path, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "adapter", make_checkpoint(tmp_path / "base"), use_dora=True)
    hub.add(REPO, held(folder))
    with pytest.raises(SourceError, match="use_dora"):
        fetch(resolve_checkpoint(Asked(), adapter=True), into, progress=Silent())
