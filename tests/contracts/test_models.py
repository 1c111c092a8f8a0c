"""Sizes of published models, and those that a config.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import resources
from pipeline.contracts.models import known_model, known_models
from pipeline.models import Architecture
from pipeline.models.sizes import ModelSizes
from tests.support.hub_configs import hub_configs


def test_sizes_agree_with_each_other() -> None:
    for repo in known_models():
        sizes = known_model(repo)
        assert sizes is not None
        assert sizes.heads % sizes.kv_heads == 0, repo
        assert sizes.head_dim % 2 == 0, repo
        assert min(sizes.hidden, sizes.layers, sizes.intermediate, sizes.vocab, sizes.max_positions) > 0, repo
        assert {"theta", "kind"} <= set(sizes.rope), repo
        assert sizes.experts > sizes.experts_per_token > 0 or sizes.experts == sizes.experts_per_token == 0


def test_known_models_are_those_published() -> None:
    for repo in {*known_models()} & {*hub_configs()}:
        entry = hub_configs()[repo]
        assert known_model(repo) == ModelSizes.from_config(entry["config"], entry.get("hf_quant_config")), (
            repo
        )


# In thousand millions, with layers for further tokens: what the pages of the models say.
@pytest.mark.parametrize(
    ("repo", "billions"),
    [("google/gemma-3-27b-it", 27.4), ("zai-org/GLM-4.5-Air", 110), ("nvidia/Qwen3-235B-A22B-NVFP4", 235)],
)
def test_models_of_which_no_config_is_kept_have_the_weights_of_their_pages(
    repo: str, billions: float
) -> None:
    sizes = known_model(repo)
    assert sizes is not None
    held = sum(weight.parameters for weight in (*sizes.weights(), *sizes.draft))
    assert held / 1e9 == pytest.approx(billions, rel=0.01)


def test_parameters_are_as_many_as_the_name_says() -> None:
    """Weights counted from the sizes, in thousand millions, against what the models are called."""
    said = {
        "meta-llama/Llama-3.1-8B-Instruct": 8.03, "meta-llama/Llama-3.2-1B-Instruct": 1.24,
        "meta-llama/Llama-3.3-70B-Instruct": 70.6, "Qwen/Qwen2.5-72B-Instruct": 72.7, "Qwen/Qwen3-32B": 32.8,
        "mistralai/Mistral-Small-24B-Instruct-2501": 23.6, "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
        "microsoft/phi-4": 14.7,
    }  # fmt: skip
    for repo, billions in said.items():
        sizes = known_model(repo)
        assert sizes is not None
        assert _parameters(sizes) / 1e9 == pytest.approx(billions, rel=0.005), repo


def _parameters(sizes: ModelSizes) -> int:
    queries, pairs = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = sizes.hidden * (queries + 2 * pairs) + queries * sizes.hidden
    feed_forward = 3 * sizes.hidden * sizes.intermediate * max(sizes.experts, 1)
    embeddings = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2)
    return sizes.layers * (attention + feed_forward) + embeddings


def test_a_config_says_what_the_architecture_says() -> None:
    folder = resources.folder("recipes") / "checkpoints" / "support-target"
    sizes = ModelSizes.from_config(json.loads((folder / "config.json").read_text()))
    read = Architecture.read(Path(folder))
    assert sizes is not None
    for field in (
        "hidden",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "intermediate",
        "vocab",
        "max_positions",
    ):
        assert getattr(sizes, field) == getattr(read, field)
    assert sizes.tied == read.tied
    assert sizes.rope == {"theta": read.rope.theta, "kind": read.rope.kind}


def test_a_config_of_experts() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }  # fmt: skip
    sizes = ModelSizes.from_config(config)
    assert sizes is not None
    assert (sizes.experts, sizes.experts_per_token, sizes.intermediate) == (128, 8, 768)
    assert sizes.rope == {"kind": "yarn", "factor": 4.0, "original_max_positions": 32768, "theta": 1e6}


@pytest.mark.parametrize("config", [{}, {"hidden_size": None}, {"num_attention_heads": 0, "hidden_size": 8}])
def test_what_is_no_decoder_has_no_sizes(config: dict[str, int]) -> None:
    assert ModelSizes.from_config(config) is None
