"""Weights that are counted from sizes: against published counts, and against the headers of checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import resources
from pipeline.contracts.models import known_model
from pipeline.models.families import FAMILIES
from pipeline.models.sizes import ModelSizes
from pipeline.models.tensors import TensorFiles
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.memory.tensors import (
    mxfp4_padding,
    parameter_counts,
    stage_layers,
    weight_bytes,
    weight_lines,
)
from pipeline.plan.parallelism import Parallelism

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
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
}
# Tensors of the published files, in bytes (`total_size` of their index).
FILES = {"openai/gpt-oss-120b": 65_248_815_744, "openai/gpt-oss-20b": 13_761_264_768}
FORMATS = ("fp8", "fp8_block", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")

LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 1024, "n_routed_experts": 16,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLM"]},
    {"architectures": ["Qwen2ForCausalLM"]},
    {"architectures": ["Qwen3ForCausalLM"]},
    {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
    {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "moe_intermediate_size": 768},
    {**LATENT, "first_k_dense_replace": 1},
]


def _sizes(kind: dict[str, Any], **given: Any) -> ModelSizes:
    sizes = ModelSizes.from_config(
        {**given, "max_position_embeddings": 8192, "num_experts_per_tok": 2, **kind}
    )
    assert sizes is not None
    return sizes


models = st.builds(
    _sizes,
    kind=st.sampled_from(KINDS),
    hidden_size=st.sampled_from([1024, 2048, 4096, 5120]),
    num_hidden_layers=st.integers(2, 80),
    num_attention_heads=st.sampled_from([8, 16, 32, 64]),
    num_key_value_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    intermediate_size=st.integers(8, 200).map(lambda blocks: 128 * blocks),
    vocab_size=st.integers(1000, 200_000),
    tie_word_embeddings=st.booleans(),
)
formats = st.sampled_from(["none", *FORMATS])
ways = st.sampled_from([1, 2, 4, 8])


def known(repo: str) -> ModelSizes:
    sizes = known_model(repo)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("repo", PUBLISHED)
def test_the_kinds_add_up_to_what_is_published(repo: str) -> None:
    assert sum(parameter_counts(known(repo)).values()) == PUBLISHED[repo]


@pytest.mark.parametrize("name", ["support-target", "support-draft"])
def test_the_kinds_are_those_of_the_headers(name: str) -> None:
    folder = resources.folder("recipes") / "checkpoints" / name
    sizes = ModelSizes.from_config(json.loads((folder / "config.json").read_text()))
    assert sizes is not None
    found: Counter[str] = Counter()
    for header in TensorFiles(folder).headers.values():
        found[_kind(header.name)] += prod(header.shape)
    assert {kind: count for kind, count in parameter_counts(sizes).items() if count} == dict(found)


def _kind(name: str) -> str:
    words = {
        "embed_tokens": "embedding",
        "lm_head": "lm_head",
        "norm": "norms",
        "self_attn": "attention",
        "mlp": "mlp",
    }
    return next(kind for word, kind in words.items() if word in name)


@pytest.mark.parametrize("repo", FILES)
def test_experts_in_four_bits_are_as_large_as_their_files(repo: str) -> None:
    """MXFP4: blocks of 32 with a scale of eight bits, of experts alone; attention, router and biases are bfloat16."""
    sizes = known(repo)
    assert weight_bytes(ModelSpec("target", sizes, format=sizes.stored)) == FILES[repo]
    assert 0.05 < mxfp4_padding(ModelSpec("target", sizes, format="mxfp4")) / FILES[repo] < 0.1
    assert mxfp4_padding(ModelSpec("target", sizes, format="fp8")) == 0


# As the hub says it of each repository, and what their config.json says.
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    }),
    "google/gemma-2-9b": (9_241_705_984, {
        "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 42, "head_dim": 256,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 256000,
    }),
    "google/gemma-3-1b-it": (999_885_952, {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "num_hidden_layers": 26, "head_dim": 256,
        "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 6912, "vocab_size": 262144,
    }),
    "deepseek-ai/DeepSeek-V2-Lite": (15_706_484_224, {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944, "vocab_size": 102400,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    }),
    "moonshotai/Kimi-K2-Instruct": (1_026_408_232_448, {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432, "vocab_size": 163840,
        "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }),
}  # fmt: skip


@pytest.mark.parametrize("repo", OTHERS)
def test_other_classes_that_are_counted_add_up_to_what_is_published(repo: str) -> None:
    count, config = OTHERS[repo]
    sizes = ModelSizes.from_config(config | {"max_position_embeddings": 4096})
    assert sizes is not None
    assert sum(parameter_counts(sizes).values()) == count
    if (
        sizes.stored == "fp8_block"
    ):  # of 1029.17 thousand million bytes of tensors; scales are 32 bits there, 16 elsewhere
        need = ModelSpec("target", sizes, format=sizes.stored)
        assert weight_bytes(need) == pytest.approx(1_029_173_256_720, rel=2e-4)


def test_every_class_that_is_counted_was_compared() -> None:
    compared = {known(repo).architecture for repo in PUBLISHED}
    compared |= {config["architectures"][0] for _, config in OTHERS.values()}
    assert compared <= set(FAMILIES)


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
    assert sum(parameter_counts(sizes).values()) == 671_026_419_200


@given(sizes=models, form=formats, split=ways)
@settings(max_examples=60)
def test_more_gpus_never_hold_more_each_and_together_never_less(
    sizes: ModelSizes, form: str, split: int
) -> None:
    single, many = (
        weight_bytes(ModelSpec("target", sizes, Parallelism(tensor=tensor), form))
        for tensor in (split, 2 * split)
    )
    assert many <= single + 64 * split * sizes.hidden  # a vocabulary is padded for more ranks
    assert 2 * many >= single


@given(sizes=models, form=st.sampled_from(FORMATS), split=ways)
@settings(max_examples=60)
def test_quantized_is_smaller_and_four_bits_are_smaller_than_eight(
    sizes: ModelSizes, form: str, split: int
) -> None:
    sized = {
        weights: weight_bytes(ModelSpec("target", sizes, Parallelism(tensor=split), weights))
        for weights in ("none", "fp8", form)
    }
    # AWQ pads vocabularies to a multiple of 64, of embedding and projection
    padding = 2 * 2 * 64 * sizes.hidden
    assert sized[form] < sized["none"] + padding
    if form in ("int4_awq", "w4a8_awq", "nvfp4"):
        assert sized[form] < sized["fp8"] + padding


@given(sizes=models, stages=st.integers(1, 2))
@settings(max_examples=40)
def test_stages_of_a_pipeline_hold_every_layer_once(sizes: ModelSizes, stages: int) -> None:
    need = ModelSpec("target", sizes, Parallelism(pipeline=stages))
    assert [layer for stage in range(stages) for layer in stage_layers(need, stage)] == list(
        range(sizes.layers)
    )
    together = sum(weight_bytes(need, stage) for stage in range(stages))
    copied = 2 * sizes.vocab * sizes.hidden if sizes.tied and stages > 1 else 0
    assert together == weight_bytes(ModelSpec("target", sizes)) + copied


def test_unquantized_is_two_bytes_a_weight() -> None:
    for repo, count in PUBLISHED.items():
        assert weight_bytes(ModelSpec("target", known(repo))) == 2 * count


def test_a_tied_projection_is_a_weight_of_its_own_in_an_engine() -> None:
    sizes = known("meta-llama/Llama-3.2-1B-Instruct")
    need = ModelSpec("target", sizes)
    more = weight_bytes(replace(need, copies_tied=True)) - weight_bytes(need)
    assert more == 2 * sizes.vocab * sizes.hidden


def test_experts_are_spread_whole_or_split_and_weigh_the_same() -> None:
    sizes = known("mistralai/Mixtral-8x7B-Instruct-v0.1")
    held = [
        {line.name: line.bytes for line in weight_lines(ModelSpec("target", sizes, split), 0)}["experts"]
        for split in (Parallelism(tensor=4, expert=4), Parallelism(tensor=4), Parallelism(tensor=4, expert=2))
    ]
    assert len(set(held)) == 1


def test_what_the_config_does_not_explain_is_a_line_of_its_own() -> None:
    need = ModelSpec("target", known("microsoft/phi-4"), unexplained=1000)
    assert {line.key: line.bytes for line in weight_lines(need, 0)}["weights.target.others"] == 2000
