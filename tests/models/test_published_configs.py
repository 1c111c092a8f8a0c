"""Whatever a config.json holds: keys in any order, a decoder within, garbage, and what is not known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.sizes import ModelSizes, config_faults
from tests.support.hub_configs import hub_configs, packed, read

REPOSITORIES = sorted(hub_configs())
repositories = st.sampled_from(REPOSITORIES)


SMALL = ("Qwen/Qwen3-8B", "openai/gpt-oss-20b", "Qwen/Qwen3.5-35B-A3B", "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
         "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "deepseek-ai/DeepSeek-V4-Flash", "moonshotai/Kimi-K3",
         "google/gemma-4-26B-A4B", "meta-llama/Llama-4-Scout-17B-16E-Instruct")  # fmt: skip
garbage = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=True), st.text(max_size=5),
    st.lists(st.integers(-3, 3), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def summary(sizes: ModelSizes | None) -> object:
    assert sizes is not None
    return sizes, [(weight.name, weight.parameters, weight.stored) for weight in sizes.weights()]


@given(repo=repositories, order=st.randoms(use_true_random=False))
@settings(max_examples=6, deadline=None)
def test_the_order_of_keys_and_unknown_keys_are_no_matter(repo: str, order: Any) -> None:
    entry = hub_configs()[repo]
    keys = [*entry["config"], "a_key_of_tomorrow"]
    order.shuffle(keys)
    changed = {key: entry["config"].get(key, {"a": [1]}) for key in keys}
    assert summary(ModelSizes.from_config(changed, entry.get("hf_quant_config"))) == summary(read(repo))


@pytest.mark.parametrize("repo", ["Qwen/Qwen3-30B-A3B-FP8", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"])
def test_a_decoder_may_be_described_in_text_config(repo: str) -> None:
    config = hub_configs()[repo]["config"]
    nested = {"architectures": config["architectures"], "text_config": config}
    assert summary(ModelSizes.from_config(nested)) == summary(read(repo))


@given(repo=st.sampled_from(SMALL), data=st.data())
@settings(max_examples=40, deadline=None)
def test_garbage_is_refused_by_key_and_never_fails(repo: str, data: st.DataObject) -> None:
    entry = json.loads(json.dumps(hub_configs()[repo]))
    places: list[dict[str, Any]] = [entry["config"]]
    places += [level for level in entry["config"].values() if isinstance(level, dict)]
    if "hf_quant_config" in entry:
        places.append(entry["hf_quant_config"]["quantization"])
    place = data.draw(st.sampled_from([level for level in places if level]))
    key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(garbage)
    faults = config_faults(entry["config"], entry.get("hf_quant_config"))
    sizes = ModelSizes.from_config(entry["config"], entry.get("hf_quant_config"))
    assert (sizes is None) == bool(faults)
    assert all(fault.problem and fault.key for fault in faults)


@pytest.mark.parametrize(
    ("change", "key", "known"),
    [
        ({"architectures": ["TomorrowForCausalLM"]}, "architectures", "LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config.quant_method", "compressed-tensors"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP2"}}, "quantization_config.quant_algo",
         "NVFP4"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": packed(
            num_bits=3, type="int")}}}, "quantization_config.config_groups.g.weights", "4 or 8 bits"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "encoder.layers.0.mlp": {"quant_algo": "FP8"}}}}, "quantization_config", ""),
        ({"hidden_size": None}, "hidden_size", ""),
        # Parts of other architectures: read as a plain decoder, it would be taken for what it is not.
        ({"n_routed_experts": 64}, "n_routed_experts", "another one"),
        ({"kv_lora_rank": 512}, "kv_lora_rank", "another one"),
        ({"use_sliding_window": True, "layer_types": ["linear_attention"] * 36}, "layer_types", "linear_attention"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(change: Mapping[str, Any], key: str, known: str) -> None:
    config = {**hub_configs()["Qwen/Qwen3-8B"]["config"], **change}
    (fault,) = config_faults(config)
    assert fault.key == key
    assert known in f"{fault.fix} {fault.problem}"
    assert ModelSizes.from_config(config) is None


def test_two_statements_that_disagree_are_refused() -> None:
    entry = hub_configs()["nvidia/GLM-5.1-NVFP4"]
    other = {"quantization": {**entry["hf_quant_config"]["quantization"], "quant_algo": "FP8"}}
    (fault,) = config_faults(entry["config"], other)
    assert fault.key == "quantization_config.quant_algo"
