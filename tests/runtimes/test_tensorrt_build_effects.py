"""Effects of our flags in the builder: every rewrite and refusal on both sides of its edge."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.trtllm_build import versions
from pipeline.runtimes.tensorrt.build_effects import BuildEffects, CheckpointConfig, effects, parse_message
from tests.support.tensorrt import rank_config

LLAMA, MIXTRAL = "LlamaForCausalLM", "MixtralForCausalLM"
SIZES = {"max_batch_size": 64, "max_seq_len": 4096, "max_input_len": 3072, "max_num_tokens": 8192}
PAGED = {"use_paged_context_fmha": "enable", "use_fp8_context_fmha": "disable"}
ON = PAGED | {"use_fp8_context_fmha": "enable"}


def build(
    version: str = "1.2.1",
    sm: int = 90,
    weights: str | None = None,
    kv: str | None = None,
    architecture: str = LLAMA,
    tp: int = 1,
    **values: Any,
) -> BuildEffects:
    argv = [word for name, value in (SIZES | values).items() for word in (f"--{name}", str(value))]
    return effects(version, argv, CheckpointConfig(architecture, weights, kv, tp), sm)


def ids(outcome: BuildEffects) -> set[str]:
    return {message.id for message in outcome.messages}


def changed(outcome: BuildEffects) -> dict[str, Any]:
    return {change.flag: change.built for change in outcome.changes}


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize(
    ("weights", "kv", "sm", "asked", "off", "said"),
    [
        ("FP8", "FP8", 89, ON, set(), set()),
        ("FP8", "FP8", 80, ON, {"paged", "fp8"}, {"fp8_context_old_gpu", "paged_context_off"}),
        ("FP8", None, 80, PAGED, set(), {"fp8_context_old_gpu"}),
        ("NVFP4", "FP8", 100, ON, set(), set()),
        ("W4A16_AWQ", "FP8", 90, ON, {"paged", "fp8"}, {"fp8_context_needs_fp8", "paged_context_off"}),
        ("W4A16_AWQ", None, 90, PAGED, set(), set()),
        (None, "FP8", 90, PAGED, {"paged"}, {"paged_context_off"}),
    ],
)
def test_attention_over_prompts(
    version: str,
    weights: str | None,
    kv: str | None,
    sm: int,
    asked: dict[str, str],
    off: set[str],
    said: set[str],
) -> None:
    outcome = build(version=version, weights=weights, kv=kv, sm=sm, **asked)
    assert ids(outcome) - {"nvfp4_gemm"} == said
    assert changed(outcome) == {f"use_{name}_context_fmha": False for name in off}


def test_optimal_tokens() -> None:
    assert changed(build(opt_num_tokens=8192)) == {}
    clipped = build(opt_num_tokens=9000)
    assert changed(clipped) == {"opt_num_tokens": 8192}
    assert "opt_tokens_clipped" in ids(clipped)


def test_drafts_make_sequences_longer() -> None:
    outcome = build(speculative_decoding_mode="draft_tokens_external", max_draft_len=5)
    assert outcome.values["max_seq_len"] == 4101
    assert outcome.values["speculative_decoding_mode"] == 2
    assert changed(outcome) == {}
    assert build(max_draft_len=5).values["max_seq_len"] == 4096


@pytest.mark.parametrize(
    ("tp", "architecture", "kept"), [(2, LLAMA, True), (1, LLAMA, False), (2, "Qwen2ForCausalLM", False)]
)
def test_reduce_fusion(tp: int, architecture: str, kept: bool) -> None:
    outcome = build(tp=tp, architecture=architecture, reduce_fusion="enable", user_buffer="enable")
    assert changed(outcome) == ({} if kept else {"reduce_fusion": False, "user_buffer": False})


def test_norm_fusion() -> None:
    assert changed(build(norm_quant_fusion="enable", weights="NVFP4", sm=100)) == {}
    assert changed(build(norm_quant_fusion="enable", weights="FP8")) == {"norm_quant_fusion": False}


@pytest.mark.parametrize(("asked", "built"), [({}, "nvfp4"), ({"gemm_plugin": "disable"}, None),
                                              ({"gemm_plugin": "auto"}, "nvfp4")])  # fmt: skip
def test_the_gemm_plugin_of_nvfp4(asked: dict[str, str], built: str | None) -> None:
    outcome = build(weights="NVFP4", sm=100, **asked)
    assert outcome.values["gemm_plugin"] == built
    assert changed(outcome) == ({"gemm_plugin": "nvfp4"} if asked.get("gemm_plugin") == "auto" else {})


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"weights": "W4A16_AWQ"}, None),
        ({"weights": "W4A16_AWQ", "sm": 100}, "RuntimeError: INT8/INT4 quantization"),
        ({"weights": "W4A8_AWQ", "sm": 119}, "RuntimeError: INT8/INT4 quantization"),
        ({"weights": "W4A16_AWQ", "sm": 120}, None),
        ({"weights": "W8A8_SQ_PER_CHANNEL", "sm": 100}, "RuntimeError: SmoothQuant"),
        ({"weights": "FP8", "kv": "FP8", "sm": 100}, None),
        ({"multiple_profiles": "enable", "opt_num_tokens": 8}, "RuntimeError: multiple_profiles is enabled"),
        ({"multiple_profiles": "enable"}, None),
        ({"pp_reduce_scatter": "enable"}, "AssertionError: PP reduce scatter"),
        ({"pp_reduce_scatter": "enable", "architecture": MIXTRAL}, None),
        ({"low_latency_gemm_plugin": "fp8", "sm": 100},
         "NotImplementedError: low_latency_gemm_plugin=fp8 is not supported on SM 100."),
        ({"low_latency_gemm_plugin": "fp8", "sm": 103}, None),
        ({"gemm_swiglu_plugin": "fp8", "use_fused_mlp": "disable"}, "RuntimeError: GemmSwiGLU plugin requires"),
        ({"gemm_swiglu_plugin": "fp8"}, None),
        ({"fuse_fp4_quant": "enable", "weights": "NVFP4"}, "RuntimeError: fuse_fp4_quant only supports"),
        ({"fuse_fp4_quant": "enable", "weights": "NVFP4", "sm": 100}, None),
    ],
)  # fmt: skip
def test_refusals(values: dict[str, Any], refusal: str | None) -> None:
    found = build(**values).refusal
    assert found is None if refusal is None else (found or "").startswith(refusal)


def test_the_model_of_a_checkpoint() -> None:
    config = rank_config(weights="fp8", kv_cache="FP8")
    assert CheckpointConfig.of(config) == CheckpointConfig(LLAMA, "FP8", "FP8", 1)
    del config["quantization"]
    assert CheckpointConfig.of(config).quant_algo is None


@pytest.mark.parametrize(("line", "name"), [
    ("Implicitly setting QWenConfig.moe = {'num_experts': 0}", "implicit_setting"),
    ("Failed to infer cluster info for NVIDIA GB10, treat it as a L40 node with 121 GB memory. "
     "This setting makes no effect if you do not use auto parallel.", "cluster"),
    ("Overriding paged_state to Falsehood", None),
    ("anything else", None),
])  # fmt: skip
def test_lines_that_change_nothing(line: str, name: str | None) -> None:
    message = parse_message(line)
    assert (message and (message.id, message.changes)) == (name and (name, ()))


toggles = st.sampled_from(["enable", "disable"])
commands = st.fixed_dictionaries(
    {},
    optional={
        "opt_num_tokens": st.integers(1, 9000),
        "max_draft_len": st.integers(0, 8),
        "speculative_decoding_mode": st.just("draft_tokens_external"),
        "gemm_plugin": st.sampled_from(["auto", "disable"]),
        **dict.fromkeys(
            ("use_paged_context_fmha", "use_fp8_context_fmha", "reduce_fusion", "user_buffer", "norm_quant_fusion"),
            toggles,
        ),
    },
)  # fmt: skip


@given(
    commands,
    st.sampled_from([None, "FP8", "W4A16_AWQ", "W4A8_AWQ", "NVFP4", "MIXED_PRECISION"]),
    st.sampled_from([None, "FP8"]),
    st.sampled_from([80, 89, 90, 120]),
)
def test_what_is_said_and_what_is_done_agree(
    values: dict[str, Any], weights: str | None, kv: str | None, sm: int
) -> None:
    outcome = build(weights=weights, kv=kv, sm=sm, **values)
    for message in outcome.messages:
        assert parse_message(message.text) == message
    settled = dict(values)
    for change in outcome.changes:
        assert change.reason != "without a word"
        settled[change.flag] = {True: "enable", False: "disable"}.get(change.built, change.built)
    assert build(weights=weights, kv=kv, sm=sm, **settled).changes == (), (
        "asked for what was built, it builds that"
    )
