"""config.json in both layouts, and everything that is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import InvalidInput, SourceError
from pipeline.models import Architecture, Rope
from pipeline.reading import UnreadableFile
from tests.support.models import LLAMA3_SCALING, make_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("scaling", [None, LLAMA3_SCALING, {"rope_type": "linear", "factor": 4.0}])
def test_both_layouts_of_the_rotary_settings_mean_the_same(tmp_path: Path, scaling: dict | None) -> None:
    read = [
        Architecture.read(
            make_checkpoint(tmp_path / key, rope_scaling=scaling, rope_key=key, hidden=64, vocab=300)
        )
        for key in ("rope_parameters", "rope_theta")
    ]
    assert read[0] == read[1]
    assert read[0].rope.theta == 500000.0
    assert read[0].rope.kind == (scaling or {}).get("rope_type", "default")


def test_what_the_families_have() -> None:
    def of(name: str, **extra: object) -> Architecture:
        return Architecture.from_config({**CONFIG, "architectures": [name], **extra})

    assert of("LlamaForCausalLM").head_dim == 64
    assert not of("LlamaForCausalLM").qkv_bias
    assert of("LlamaForCausalLM", attention_bias=True).output_bias
    assert of("Qwen2ForCausalLM").qkv_bias
    assert not of("Qwen2ForCausalLM").output_bias
    assert of("Qwen3ForCausalLM").qk_norm
    assert of("Qwen3ForCausalLM", head_dim=128).head_dim == 128
    assert of("MistralForCausalLM", sliding_window=4096).windows == (4096, 4096)
    assert of("Qwen2ForCausalLM", sliding_window=64).windows == (None, None)
    windowed = of("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert windowed.windows == (None, 64)
    assert of("LlamaForCausalLM", eos_token_id=[5, 2]).eos_token_ids == (5, 2)


def test_old_spelling_of_the_rope_type() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    found = Architecture.from_config({**CONFIG, "rope_theta": 1e4, "rope_scaling": scaling}).rope
    assert found == Rope(1e4, "linear", {"factor": 2.0})


def test_everything_that_cannot_be_built_is_named_at_once() -> None:
    config = {
        **CONFIG,
        "vocab_size": 0,
        "hidden_act": "gelu",
        "num_local_experts": 8,
        "swiglu_limit": 5.0,
    }
    with pytest.raises(InvalidInput) as caught:
        Architecture.from_config(config)
    keys = [fault.key for fault in caught.value.faults]
    assert keys == ["vocab_size", "hidden_act", "num_local_experts", "swiglu_limit"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),  # which transformers' Llama does not look at
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "2"}}, "rope_parameters.factor"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": 32 * [1.0]}},
         "rope_parameters.short_factor"),
    ],
)  # fmt: skip
def test_rotary_settings_that_cannot_be_built(settings: dict, key: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Architecture.from_config({**CONFIG, **settings})
    assert [fault.key for fault in caught.value.faults] == [key]


def test_of_another_class_nothing_else_is_said() -> None:
    """Its config has other keys, and that ours are not among them is no news."""
    with pytest.raises(InvalidInput) as caught:
        Architecture.from_config({"architectures": ["GPT2LMHeadModel"], "n_embd": 768})
    (fault,) = caught.value.faults
    assert fault.key == "architectures"
    assert "LlamaForCausalLM" in fault.fix


def test_scaling_without_its_parameters() -> None:
    with pytest.raises(InvalidInput, match=r"rope_parameters\.high_freq_factor"):
        Architecture.from_config({**CONFIG, "rope_parameters": {"rope_type": "llama3", "factor": 8}})


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"config\.json is missing"):
        Architecture.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableFile, match=r"config\.json:1: is not JSON"):
        Architecture.read(tmp_path)


def test_a_decoder_within_a_composed_model_has_the_librarys_defaults() -> None:
    """config.json of google/gemma-3-4b-it leaves out heads, vocabulary and bases; they are those of transformers."""
    tower = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14}
    tower |= {"num_attention_heads": 16, "num_hidden_layers": 27}
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    read = Architecture.from_config({**config, "text_config": text, "vision_config": tower})
    assert (read.heads, read.kv_heads, read.head_dim, read.vocab) == (8, 4, 256, 262208)
    assert (read.rope, read.local_rope) == (Rope(1e6, "linear", {"factor": 8.0}), Rope(1e4))
    assert read.windows[:7] == (*[1024] * 5, None, 1024)
    assert read.attention_scale == 256**-0.5
