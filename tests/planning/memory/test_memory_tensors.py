"""Weights that are counted from sizes: against published counts, and against the headers of checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import resources
from pipeline.checkpoint.tensors import TensorFiles
from pipeline.contracts.model_config import LatentAttention
from pipeline.contracts.models import ModelSizes, known_model
from pipeline.planning.memory.demand import ModelNeed
from pipeline.planning.memory.tensors import parameters
from pipeline.planning.memory.weights import stage_layers, weight_bytes, weight_lines
from pipeline.planning.parallelism import Parallelism

# As the hub says it of each repository ("safetensors": {"total": …}).
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "microsoft/phi-4": 14_659_507_200,
}
FORMATS = ("fp8", "fp8_block", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")

models = st.builds(
    ModelSizes,
    architecture=st.just("LlamaForCausalLM"),
    hidden=st.sampled_from([1024, 2048, 4096, 5120]),
    layers=st.integers(2, 80),
    heads=st.sampled_from([8, 16, 32, 64]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    intermediate=st.integers(8, 200).map(lambda blocks: 128 * blocks),
    vocab=st.integers(1000, 200_000),
    max_positions=st.just(8192),
    experts=st.sampled_from([0, 0, 8, 64]),
    experts_per_token=st.just(2),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
    latent=st.sampled_from([None, None, LatentAttention(512, 64, 128, 128, 1536)]),
    dense_layers=st.integers(0, 2),
    dense_intermediate=st.just(8192),
)
formats = st.sampled_from(["none", *FORMATS])
ways = st.sampled_from([1, 2, 4, 8])


def known(repo: str) -> ModelSizes:
    sizes = known_model(repo)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("repo", PUBLISHED)
def test_the_kinds_add_up_to_what_is_published(repo: str) -> None:
    assert sum(parameters(known(repo)).values()) == PUBLISHED[repo]


@pytest.mark.parametrize("name", ["support-target", "support-draft"])
def test_the_kinds_are_those_of_the_headers(name: str) -> None:
    folder = resources.folder("recipes") / "checkpoints" / name
    sizes = ModelSizes.from_config(json.loads((folder / "config.json").read_text()))
    assert sizes is not None
    found: Counter[str] = Counter()
    for header in TensorFiles(folder).headers.values():
        found[_kind(header.name)] += prod(header.shape)
    assert {kind: count for kind, count in parameters(sizes).items() if count} == dict(found)


def _kind(name: str) -> str:
    words = {
        "embed_tokens": "embedding",
        "lm_head": "lm_head",
        "norm": "norms",
        "self_attn": "attention",
        "mlp": "mlp",
    }
    return next(kind for word, kind in words.items() if word in name)


def test_latent_attention_and_experts_as_deepseek_v3_has_them() -> None:
    """671 thousand million weights, without the layer that predicts more tokens (11.5, and 671.03 is published)."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
    }  # fmt: skip
    sizes = ModelSizes.from_config(config)
    assert sizes is not None
    assert sum(parameters(sizes).values()) == 671_026_419_200


@given(sizes=models, form=formats, split=ways)
@settings(max_examples=60)
def test_more_gpus_never_hold_more_each_and_together_never_less(
    sizes: ModelSizes, form: str, split: int
) -> None:
    one, many = (
        weight_bytes(ModelNeed("target", sizes, Parallelism(tensor=tensor), form))
        for tensor in (split, 2 * split)
    )
    assert many <= one + 64 * split * sizes.hidden  # a vocabulary is padded for more ranks
    assert 2 * many >= one


@given(sizes=models, form=st.sampled_from(FORMATS), split=ways)
@settings(max_examples=60)
def test_quantized_is_smaller_and_four_bits_are_smaller_than_eight(
    sizes: ModelSizes, form: str, split: int
) -> None:
    sized = {
        one: weight_bytes(ModelNeed("target", sizes, Parallelism(tensor=split), one))
        for one in ("none", "fp8", form)
    }
    # AWQ pads vocabularies to a multiple of 64, of embedding and projection
    padding = 2 * 2 * 64 * sizes.hidden
    assert sized[form] < sized["none"] + padding
    if form in ("int4_awq", "w4a8_awq", "nvfp4"):
        assert sized[form] < sized["fp8"] + padding


@given(sizes=models, stages=st.integers(1, 2))
@settings(max_examples=40)
def test_stages_of_a_pipeline_hold_every_layer_once(sizes: ModelSizes, stages: int) -> None:
    need = ModelNeed("target", sizes, Parallelism(pipeline=stages))
    assert [layer for stage in range(stages) for layer in stage_layers(need, stage)] == list(
        range(sizes.layers)
    )
    together = sum(weight_bytes(need, stage) for stage in range(stages))
    copied = 2 * sizes.vocab * sizes.hidden if sizes.tied and stages > 1 else 0
    assert together == weight_bytes(ModelNeed("target", sizes)) + copied


def test_unquantized_is_two_bytes_a_weight() -> None:
    for repo, count in PUBLISHED.items():
        assert weight_bytes(ModelNeed("target", known(repo))) == 2 * count


def test_a_tied_projection_is_a_weight_of_its_own_in_an_engine() -> None:
    sizes = known("meta-llama/Llama-3.2-1B-Instruct")
    need = ModelNeed("target", sizes)
    more = weight_bytes(replace(need, copies_tied=True)) - weight_bytes(need)
    assert more == 2 * sizes.vocab * sizes.hidden


def test_experts_are_spread_whole_or_split_and_weigh_the_same() -> None:
    sizes = known("mistralai/Mixtral-8x7B-Instruct-v0.1")
    held = [
        {line.name: line.bytes for line in weight_lines(ModelNeed("target", sizes, split), 0)}["experts"]
        for split in (Parallelism(tensor=4, expert=4), Parallelism(tensor=4), Parallelism(tensor=4, expert=2))
    ]
    assert len(set(held)) == 1


def test_what_the_config_does_not_explain_is_a_line_of_its_own() -> None:
    need = ModelNeed("target", known("microsoft/phi-4"), unexplained=1000)
    assert {line.key: line.bytes for line in weight_lines(need, 0)}["weights.target.others"] == 2000
