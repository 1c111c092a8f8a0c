"""A first recipe: what is proposed passes the plan, says why, and what fits nowhere is refused with the reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.numpy import save

from pipeline.cli.main import cli
from pipeline.errors import InvalidInput, SourceError, UserError
from pipeline.prepare import check_recipe, report
from pipeline.prepare import initial_recipe as room
from pipeline.prepare.initial_choices import lacking_features, newest_release
from pipeline.prepare.initial_recipe import InitRequest, initial_recipe
from pipeline.recipe import HubSource, LocalSource, PyTorchRuntime, load_recipe
from pipeline.recipe.catalog import annotated_yaml
from pipeline.store import Store
from tests.support import CHECKPOINTS
from tests.support.hub import TOKENIZER, LoopbackHub
from tests.support.machines import h100s

LLAMA_8B, LLAMA_70B = (
    HubSource("meta-llama/Llama-3.1-8B-Instruct"),
    HubSource("meta-llama/Llama-3.3-70B-Instruct"),
)
OWN = "org/My_Model.v2"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["init", *words])


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("request_", "place", "form", "draft"),
    [
        (InitRequest(source=LLAMA_8B, gpu="l4-24g", runtime="tensorrt"), "1 x l4-24g", "fp8", False),
        (
            InitRequest(source=LLAMA_8B, gpu="b300-sxm-288g"),
            "1 x b300-sxm-288g",
            "fp8",
            False,
        ),
        (InitRequest(source=LLAMA_70B, gpu="a100-sxm-80g", gpus=1), "1 x a100-sxm-80g", "int4_awq", False),
        (
            InitRequest(source=HubSource("openai/gpt-oss-20b"), gpu="h100-sxm-80g"),
            "1 x h100-sxm-80g",
            "none",
            False,
        ),
        (InitRequest(source=LocalSource(CHECKPOINTS / "support-target")), "this machine's CPU", "none", True),
    ],
    ids=lambda value: str(value.source) if isinstance(value, InitRequest) else "",
)
def test_what_is_written_is_what_the_plan_lets_pass(
    request_: InitRequest, place: str, form: str, draft: bool, store: Store, tmp_path: Path
) -> None:
    first = initial_recipe(request_, store)
    assert (first.place, first.recipe.quantization.format) == (place, form)
    assert (first.recipe.draft is not None) is draft
    file = tmp_path / "own.yaml"
    file.write_text(annotated_yaml(["of its own"], first.values, first.reasons), encoding="utf-8")
    read = load_recipe(file)
    assert read == first.recipe
    check_recipe(read)
    assert not first.report.refused
    assert first.report.memory is not None
    assert first.report.memory.verdict == "fits"
    if first.report.performance is not None and read.slo.itl_p95_ms is not None:
        assert first.report.meets_slo
    # Every derived value has its reason.
    derived = {"quantization.format", "limits.max_input_tokens", "limits.max_concurrency"}
    derived |= (
        {"runtime.version", "runtime.tensor_parallel"} if read.runtime.kind != "cpu" else {"runtime.kind"}
    )
    assert derived <= set(first.reasons)
    comments = " ".join(line.strip("# \n") for line in file.read_text().splitlines() if "#" in line)
    assert all(" ".join(first.reasons[key].split()) in comments for key in derived)


@pytest.mark.usefixtures("offline")
def test_the_gpus_of_this_machine_are_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "take", lambda **_: h100s(2))
    first = initial_recipe(InitRequest(source=LLAMA_70B, runtime="tensorrt"), store)
    assert first.place == "2 x h100-sxm-80g"
    assert first.reasons["runtime.gpu"] == "what this machine has: 2 x NVIDIA H100 80GB HBM3"
    assert "frozen" in first.reasons["runtime.kind"]


def test_a_recipe_does_without_what_upstream_does_not_have(store: Store, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    text = {
        "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32, "intermediate_size": 128, "vocab_size": 256,
        "max_position_embeddings": 8192, "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "dtype": "bfloat16",
        "tie_word_embeddings": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "enable_moe_block": False, "attention_k_eq_v": False,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(CHECKPOINTS / "support-target" / "tokenizer.json", tmp_path)
    first = initial_recipe(InitRequest(source=LocalSource(tmp_path), gpu="b200-sxm-180g"), store)
    assert isinstance(first.recipe.runtime, PyTorchRuntime)
    assert first.recipe.runtime.version == "1.3.0rc29"
    assert "the first that lists Gemma4ForConditionalGeneration" in first.reasons["runtime.version"]
    assert not first.recipe.kv_cache.reuse
    assert first.recipe.scheduler.chunked_context
    assert "reuse of the KV cache with Gemma4" in first.reasons["kv_cache.reuse"]


@pytest.mark.parametrize("device", ["b200-sxm-180g"])
def test_a_model_that_no_stable_release_lists(device: str) -> None:
    assert newest_release("pytorch", device, "Gemma4ForConditionalGeneration") == "1.3.0rc29"
    assert (
        newest_release("pytorch", device, "LlamaForCausalLM") == newest_release("pytorch", device) == "1.2.1"
    )
    assert newest_release("pytorch", device, "MiniMaxM2ForCausalLM") == "1.2.1"  # the candidates dropped it
    assert newest_release("tensorrt", device, "Gemma4ForConditionalGeneration") == "1.2.1"


def test_what_upstream_does_not_have_for_a_model_is_turned_off() -> None:
    off = lacking_features("Gemma4ForConditionalGeneration", "1.3.0rc29", "b200-sxm-180g")
    assert set(off) == {("kv_cache", "reuse")}
    assert set(lacking_features("DeepseekV3ForCausalLM", "1.2.1", "l40s-48g")) == {
        ("kv_cache", "reuse"), ("scheduler", "chunked_context"),
    }  # fmt: skip
    assert lacking_features("DeepseekV3ForCausalLM", "1.2.1", "h200-sxm-141g") == {}  # untested is no reason


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("offline")
def test_what_fits_nowhere_is_refused_with_what_each_option_lacks(store: Store) -> None:
    with pytest.raises(InvalidInput) as refused:
        initial_recipe(InitRequest(source=LLAMA_70B, gpu="l4-24g", gpus=1, runtime="tensorrt"), store)
    said = str(refused.value)
    for form in ("none", "fp8", "int4_awq"):
        assert f"1 x l4-24g {form}, runtime tensorrt" in said
    assert said.count("not one sequence of 2048 tokens fits") == 1
    assert "--gpus = 1: is not enough (2 x l4-24g" in said or "--gpus = 1: is not enough (4 x l4-24g" in said


@pytest.mark.usefixtures("offline")
def test_what_this_machine_has_no_memory_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "serving_memory_bytes", lambda _: 16 << 30)
    with pytest.raises(
        InvalidInput, match=r"int4_awq: does not fit: .* GiB too much for this machine's memory"
    ):
        initial_recipe(InitRequest(source=LLAMA_70B, runtime="cpu"), store)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            InitRequest(source=LLAMA_8B, gpu="h100-sxm-99g"),
            "GPU h100-sxm-99g is not known; near: h100-sxm-80g",
        ),
        (InitRequest(source=LLAMA_8B, runtime="tensorrt"), "this machine has no GPU"),
        (InitRequest(source=LLAMA_8B, gpu="l4-24g", runtime="cpu"), "leave out --gpu and --gpus"),
        (InitRequest(source=HubSource("org/unknown")), "HF_HUB_OFFLINE forbids"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_what_cannot_be_asked_for(request_: InitRequest, said: str, store: Store) -> None:
    with pytest.raises(UserError, match=said):
        initial_recipe(request_, store)


def test_a_model_of_the_hub_by_its_headers(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = save({"model.embed_tokens.weight": np.zeros((256, 64), np.float16)})
    files = {
        "config.json": json.dumps(CONFIG).encode(), "model.safetensors": weights,
        "tokenizer.json": json.dumps(TOKENIZER).encode() if not isinstance(TOKENIZER, bytes) else TOKENIZER,
    }  # fmt: skip
    commit = hub.add(OWN, files)
    monkeypatch.chdir(tmp_path)
    shelf = ("--store", str(tmp_path / "store"))
    shown = run(f"hf:{OWN}", "--output", "-", "--runtime", "cpu", *shelf)
    assert shown.exit_code == 0, shown.output
    assert not list(tmp_path.glob("*.yaml"))
    said = run(f"hf:{OWN}", "--runtime", "cpu", "--json", *shelf)
    made = json.loads(said.stdout)
    assert made["file"] == str(tmp_path / "my-model.v2.yaml")
    assert made["recipe"]["model"]["revision"] == commit
    assert "repeatable" in made["reasons"]["model.revision"]
    assert yaml.safe_load(Path(made["file"]).read_text()) == yaml.safe_load(shown.stdout)
    assert set(hub.fetched()) <= {"config.json", "model.safetensors"}
    assert all(span.startswith("bytes=0-") for span in hub.ranges("model.safetensors"))
    again = run(f"hf:{OWN}", "--runtime", "cpu", *shelf)
    assert isinstance(again.exception, UserError)
    assert "my-model.v2.yaml exists; give --force" in str(again.exception)
    hub.repos[OWN].gated = True
    refused = run(f"hf:{OWN}", "--runtime", "cpu", "--force", *shelf)
    assert isinstance(refused.exception, SourceError)


def test_a_source_that_is_none() -> None:
    done = run("org/name")
    assert done.exit_code == 2
    assert 'write "hf:organisation/name" or "local:path"' in done.output
