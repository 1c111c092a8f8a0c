"""Published checkpoints by their config.json and hf_quant_config.json: weights, formats, and what a sequence keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from pipeline.contracts import engine_memory
from pipeline.models.architecture import FAMILIES as BUILT
from pipeline.models.architecture import Architecture
from pipeline.models.published import ALGORITHMS, read_published
from pipeline.models.sizes import ModelSizes, class_of
from pipeline.plan.memory import ModelSpec
from pipeline.plan.memory.tensors import (
    active_parameters,
    kv_token_bytes,
    parameter_counts,
    published_bytes_by_format,
    sequence_state_bytes,
)
from pipeline.plan.performance import EngineSpeed
from tests.support.hub_configs import hub_configs, hub_counts, library_counts, packed, read

REPOSITORIES = sorted(hub_configs())
repositories = st.sampled_from(REPOSITORIES)


def counted(sizes: ModelSizes) -> tuple[int, int]:
    counts = parameter_counts(sizes)
    return sum(counts.values()) - counts["vision"], counts["vision"]


def formats(sizes: ModelSizes, part: str) -> set[str]:
    """Formats of the weights whose names hold `part`."""
    return {
        weight.stored
        for weight in (*sizes.weights(), *sizes.draft)
        if part in weight.name and weight.quantizable
    }


# Weights


@pytest.mark.parametrize(
    ("repo", "names"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", ["visual.blocks.0.mlp.linear_fc1", "visual.merger.linear_fc2"]),
        ("nvidia/Kimi-K2.6-NVFP4", ["vision_tower.encoder.blocks.0.mlp.fc0", "mm_projector.proj.2"]),
        (
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            [
                "vision_model.class_embedding",
                "vision_model.model.layers.0.self_attn.o_proj",
                "vision_model.model.layers.0.post_attention_layernorm.bias",
            ],
        ),
        (
            "google/gemma-4-26B-A4B",
            [
                "vision_tower.encoder.layers.0.self_attn.q_proj.linear",
                "vision_tower.encoder.layers.0.self_attn.k_norm",
                "vision_tower.encoder.layers.0.mlp.down_proj.linear",
                "vision_tower.encoder.layers.0.post_feedforward_layernorm",
            ],
        ),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", ["embeddings", "norm_f"]),
        ("deepseek-ai/DeepSeek-V4-Pro", ["embed", "head", "layers.9.ffn.gate.bias"]),
        ("MiniMaxAI/MiniMax-M2.5", ["layers.0.block_sparse_moe.e_score_correction_bias"]),
        (
            "Qwen/Qwen3.5-35B-A3B",
            ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.norm", "mtp.layers.0.self_attn.q_norm"],
        ),
        ("zai-org/GLM-5-FP8", ["layers.78.eh_proj", "layers.78.shared_head.norm"]),
    ],
)
def test_names_are_those_of_the_checkpoints(repo: str, names: list[str]) -> None:
    """By transformers 5.14.1 (classes, conversion_mapping.py), and by settings that name layers."""
    sizes = read(repo)
    assert set(names) <= {weight.name for weight in (*sizes.weights(), *sizes.draft)}


@pytest.mark.parametrize("repo", sorted(hub_counts()))
def test_weights_are_those_that_the_library_builds(repo: str) -> None:
    assert counted(read(repo)) == tuple(hub_counts()[repo])


@pytest.mark.slow
@pytest.mark.parametrize("repo", sorted(hub_counts()))
def test_what_is_recorded_is_what_the_library_builds(repo: str) -> None:
    assert library_counts(hub_configs()[repo]["config"]) == tuple(hub_counts()[repo])


# Classes of which no config is kept here, by the library's own defaults.
DEFAULTS = {
    "deepseek_v2": "DeepseekV2ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration", "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM", "mistral3": "Mistral3ForConditionalGeneration", "mistral4": "Mistral4ForCausalLM",
    "olmo3": "Olmo3ForCausalLM", "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM", "smollm3": "SmolLM3ForCausalLM",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEFAULTS)
def test_other_classes_are_those_of_the_library(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    given = {"num_experts_per_tok": 2} if kind == "deepseek_v2" else {}
    config = {**CONFIG_MAPPING[kind](**given).to_dict(), "architectures": [DEFAULTS[kind]]}
    sizes = ModelSizes.from_config(json.loads(json.dumps(config, default=str)))
    assert sizes is not None
    assert counted(sizes) == library_counts(config)


# Of two that the library does not know, in thousand millions, by their names.
@pytest.mark.parametrize(
    ("repo", "billions"),
    [("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 49), ("XiaomiMiMo/MiMo-7B-Base", 7)],
)
def test_weights_of_models_with_code_of_their_own(repo: str, billions: float) -> None:
    sizes = read(repo)
    assert billions <= sum(weight.parameters for weight in sizes.weights()) / 1e9 < billions + 1


# (in all with layers for further tokens, active) in thousand millions: model cards, papers and the names of the models
@pytest.mark.parametrize(
    ("repo", "total", "active"),
    [
        ("Qwen/Qwen3-235B-A22B", 235, 22),
        ("zai-org/GLM-5.1", 754, 40),
        ("deepseek-ai/DeepSeek-V3", 685, 37),
        ("deepseek-ai/DeepSeek-V4-Pro", 1600, 49),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 3.2),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 560, 55),
        ("openai/gpt-oss-120b", 116.8, 5.1),
    ],
)
def test_parameters_in_all_and_active_are_as_published(repo: str, total: float, active: float) -> None:
    sizes = read(repo)
    held = sum(weight.parameters for weight in (*sizes.weights(), *sizes.draft))
    assert held / 1e9 == pytest.approx(total, rel=0.005)
    assert active_parameters(sizes) / 1e9 == pytest.approx(active, rel=0.03)


# Formats


@pytest.mark.parametrize("repo", REPOSITORIES)
def test_none_is_taken_for_another_format(repo: str) -> None:
    sizes, name = read(repo), repo.upper()
    entry = hub_configs()[repo]
    text = entry["config"].get("text_config") or {}
    told = (
        entry["config"].get("quantization_config")
        or text.get("quantization_config")
        or entry.get("hf_quant_config")
    )
    assert (sizes.stored == "none") == (told is None)
    if "NVFP4" in name:
        assert sizes.stored in ("nvfp4", "w4a16_nvfp4")
    elif name.endswith("FP8"):
        assert sizes.stored in ("fp8", "fp8_block")
    elif name.endswith("BF16"):
        assert sizes.stored_formats == ()
    # Whatever the method: norms, routers and embeddings keep their precision.
    kept = [weight for weight in sizes.weights() if not weight.quantizable and weight.kind != "lm_head"]
    assert {weight.stored for weight in kept} == {"none"}


def test_layers_that_are_left_out_keep_their_precision() -> None:
    mixed = read("nvidia/DeepSeek-V3.1-NVFP4")
    assert formats(mixed, ".o_proj") == {"nvfp4", "none"}  # that of the layer for further tokens
    assert formats(mixed, ".kv_b_proj") == {"none"}
    assert formats(mixed, "layers.60.mlp.experts") == {"nvfp4"}
    assert formats(mixed, "layers.61.") == {"none"}
    assert mixed.kv_cache == "fp8"
    assert formats(read("nvidia/Gemma-4-26B-A4B-NVFP4"), "mlp.") == {"none"}
    assert formats(read("nvidia/Gemma-4-26B-A4B-NVFP4"), "experts.") == {"nvfp4"}
    nano = read("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4")
    assert formats(nano, "layers.4.mixer.in_proj") == {"none"}
    assert formats(nano, "layers.0.mixer.in_proj") == {"nvfp4"}


def test_formats_by_layer() -> None:
    sizes = read("nvidia/Qwen3.6-35B-A3B-NVFP4")
    assert formats(sizes, "linear_attn.in_proj_qkv") == {"fp8"}
    assert formats(sizes, "self_attn.q_proj") == {"fp8", "none"}
    assert formats(sizes, "layers.0.mlp.shared_expert") == {"w4a16_nvfp4", "none"}
    assert {weight.stored for weight in sizes.last if weight.kind == "lm_head"} == {"w4a16_nvfp4"}
    v4 = read("nvidia/DeepSeek-V4-Pro-NVFP4")
    assert formats(v4, "layers.3.ffn.experts") == {"nvfp4"}
    assert formats(v4, "layers.3.attn.wq_b") == formats(v4, "layers.3.ffn.shared_experts") == {"fp8_block"}
    assert formats(v4, "mtp.0.ffn.experts") == {"mxfp4"}
    k3 = read("moonshotai/Kimi-K3")
    assert formats(k3, "layers.5.block_sparse_moe.experts") == {"mxfp4"}
    assert formats(k3, "self_attn") == {"none"}


# `total_size` of an index, by repository. Kimi K2 and gpt-oss: as elsewhere in these tests. GLM-5.1's layer for further
# tokens is a file of 19.9 GB in CortexLM/GLM-5.1-NVFP4-MTP.
@pytest.mark.parametrize(
    ("repo", "size"),
    [
        ("moonshotai/Kimi-K2-Instruct", 1_029_173_256_720),
        ("openai/gpt-oss-120b", 65_248_815_744),
        ("openai/gpt-oss-20b", 13_761_264_768),
    ],
)
def test_bytes_are_those_of_the_files(repo: str, size: int) -> None:
    sizes = read(repo)
    found = published_bytes_by_format((*sizes.weights(), *sizes.draft), sizes.dtype)
    assert sum(found.values()) == pytest.approx(size, rel=0.001)


def test_layers_for_further_tokens_are_told_apart() -> None:
    sizes = read("zai-org/GLM-5.1")
    assert sum(published_bytes_by_format(sizes.draft, "bfloat16").values()) / 1e9 == pytest.approx(
        19.9, abs=0.05
    )


def quantized(**settings: Any) -> ModelSizes:
    sizes = ModelSizes.from_config(
        {**hub_configs()["Qwen/Qwen3-30B-A3B"]["config"], "quantization_config": settings}
    )
    assert sizes is not None
    return sizes


def test_compressed_tensors() -> None:
    ignored = ["lm_head", "re:.*self_attn.*"]
    plain = quantized(
        quant_method="compressed-tensors", format="pack-quantized", ignore=ignored,
        config_groups={"group_0": packed(num_bits=4, type="int", group_size=32)},
        kv_cache_scheme={"num_bits": 8, "type": "float"},
    )  # fmt: skip
    assert (plain.stored, plain.kv_cache) == ("int4", "fp8")
    assert {weight.group for weight in plain.weights() if weight.is_expert} == {32}
    assert formats(plain, "self_attn") == {"none"}
    groups = {
        "group_0": packed(num_bits=8, type="float", strategy="channel") | {"targets": ["re:.*self_attn.*"]},
        "group_1": packed(num_bits=4, type="float", group_size=16) | {"input_activations": {"num_bits": 4}},
        "group_2": packed(num_bits=4, type="float", group_size=16) | {"targets": ["re:.*shared_expert.*"]},
    }
    two = quantized(quant_method="compressed-tensors", config_groups=groups, ignore=["lm_head"])
    assert formats(two, "self_attn") == {"fp8_row"}
    assert formats(two, "experts") == {"nvfp4"}


def test_single_experts_come_apart() -> None:
    mixed = quantized(quant_method="fp8", modules_to_not_convert=["model.layers.0.mlp.experts.3"])
    found = [weight for weight in mixed.blocks[0].weights if weight.is_expert or "experts" in weight.name]
    assert (
        sorted((weight.stored, weight.copies) for weight in found) == [("fp8", 127)] * 3 + [("none", 1)] * 3
    )


# What a sequence keeps


@pytest.mark.parametrize(
    ("repo", "token", "state"),
    [
        # two of KV heads * head size in each layer
        ("Qwen/Qwen3-8B", 2 * 36 * 8 * 128 * 2, 0),
        # 512 + 64 numbers for all heads
        ("deepseek-ai/DeepSeek-V3", 61 * 576 * 2, 0),
        # and an index of 128 bytes and a scale
        ("deepseek-ai/DeepSeek-V3.2", 61 * (576 * 2 + 132), 0),
        # which most layers of GLM 5.2 share
        ("zai-org/GLM-5.2", 78 * 576 * 2 + 21 * 132, 0),
        # 6 of 52 layers; the others: 3 inputs of 6144 channels, and 64 heads * 64 * 128 in float32
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            2 * 6 * 2 * 128 * 2,
            23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4),
        ),
        # 10 of 40 layers; the others: 3 inputs of 8192 channels, and 32 heads * 128 * 128 in float32
        ("Qwen/Qwen3.5-35B-A3B", 2 * 10 * 2 * 256 * 2, 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
        # 49 of 80 layers
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 2 * 49 * 8 * 128 * 2, 0),
    ],
)
def test_what_is_kept_of_a_token_and_of_a_sequence(repo: str, token: int, state: int) -> None:
    model = ModelSpec("target", read(repo), kv_cache="bfloat16")
    assert (kv_token_bytes(model), sequence_state_bytes(model)) == (token, state)


def test_windows_and_chunks() -> None:
    assert read("openai/gpt-oss-20b").windows[:3] == (128, 0, 128)
    assert read("google/gemma-4-26B-A4B").windows[4:7] == (1024, 0, 1024)
    assert read("meta-llama/Llama-4-Scout-17B-16E-Instruct").windows[:4] == (8192, 8192, 8192, 0)


def test_the_bytes_of_every_format_are_known() -> None:
    """Also of formats that none of the checkpoints here has, and what their products are computed in."""
    assert set(ALGORITHMS.values()) <= set(engine_memory.formats())
    model = read("Qwen/Qwen3-8B")
    for form in engine_memory.formats():
        assert (
            EngineSpeed.of(ModelSpec("target", model, format=form), "b200-sxm-180g", "pytorch").decode(1, 1)
            > 0
        )


def test_an_algorithm_that_modelopt_writes_in_lower_case_is_known() -> None:
    published, faults = read_published({}, {"quantization": {"quant_algo": "fp8_pb_wo"}})
    assert faults == ()
    assert [rule.format.name for rule in published.rules] == ["fp8_block"]


def test_published_models_of_families_that_are_built_can_be_read() -> None:
    """Sixteen of them, and what of their settings is not among the sizes."""
    configs = {name: held["config"] for name, held in hub_configs().items()}
    read = {
        name: Architecture.from_config(config)
        for name, config in configs.items()
        if class_of(config) in BUILT
    }
    assert len(read) >= 16
    gpt_oss, mixture = read["openai/gpt-oss-20b"], read["Qwen/Qwen3-30B-A3B"]
    assert (gpt_oss.rope.kind, gpt_oss.rope.positions(gpt_oss.max_positions)) == ("yarn", 131072)
    assert gpt_oss.windows[:2] == (128, None)
    assert mixture.renormalize
    assert len(list(mixture.linears())) == 48 * (4 + 1 + 3 * 128)
