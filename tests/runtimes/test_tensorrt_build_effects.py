"""What the builder makes of its flags: every rewrite and refusal on both sides of its edge."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.trtllm_build import data, versions
from pipeline.runtimes.tensorrt.build_effects import BuildEffects, CheckpointConfig, effects, parse_message
from tests.support.tensorrt import rank_config

LLAMA = "LlamaForCausalLM"
SIZES = {"max_batch_size": 64, "max_seq_len": 4096, "max_input_len": 3072, "max_num_tokens": 8192}


def build(
    *switches: str,
    version: str = "1.2.1",
    sm: int = 90,
    weights: str | None = None,
    kv: str | None = None,
    architecture: str = LLAMA,
    tp: int = 1,
    positions: int | None = None,
    **values: Any,
) -> BuildEffects:
    argv = [word for name, value in (SIZES | values).items() for word in (f"--{name}", str(value))]
    model = CheckpointConfig(architecture, "bfloat16", weights, kv, tp, tp, positions)
    return effects(version, [*argv, *(f"--{name}" for name in switches)], model, sm)


def ids(outcome: BuildEffects) -> set[str]:
    return {message.id for message in outcome.messages}


def changed(outcome: BuildEffects) -> dict[str, Any]:
    return {change.flag: change.built for change in outcome.changes}


ON = {"use_paged_context_fmha": "enable", "use_fp8_context_fmha": "enable"}
PAGED = {"use_paged_context_fmha": "enable", "use_fp8_context_fmha": "disable"}


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize(
    ("weights", "kv", "sm", "asked", "paged", "fp8", "said"),
    [
        ("FP8", "FP8", 90, ON, True, True, set()),
        ("FP8", "FP8", 89, ON, True, True, set()),
        ("FP8", "FP8", 80, ON, False, False, {"fp8_context_old_gpu", "paged_context_off"}),
        ("FP8", None, 80, ON, True, False, {"fp8_context_old_gpu"}),
        ("FP8", "FP8", 90, PAGED, True, True, {"fp8_context_on"}),
        ("FP8", None, 90, ON, True, False, {"fp8_context_needs_cache"}),
        ("FP8", None, 90, PAGED, True, False, set()),
        ("W4A8_AWQ", "FP8", 90, ON, True, True, set()),
        ("NVFP4", "FP8", 100, ON, True, True, set()),
        ("W4A16_AWQ", "FP8", 90, ON, False, False, {"fp8_context_needs_fp8", "paged_context_off"}),
        ("W4A16_AWQ", None, 90, ON, True, False, {"fp8_context_needs_fp8"}),
        ("W4A16_AWQ", None, 90, PAGED, True, False, set()),
        ("MIXED_PRECISION", "FP8", 90, PAGED, False, False, {"paged_context_off"}),
        (None, "FP8", 90, PAGED, False, False, {"paged_context_off"}),
        (None, None, 80, PAGED, True, False, set()),
        ("FP8", "INT8", 90, PAGED, False, False, {"paged_context_int8"}),
        (None, "INT8", 80, PAGED, False, False, {"paged_context_int8"}),
        (
            "FP8", "FP8", 90,
            {"use_paged_context_fmha": "disable", "use_fp8_context_fmha": "enable"}, False, True, set(),
        ),
    ],
)  # fmt: skip
def test_attention_over_prompts(
    version: str,
    weights: str | None,
    kv: str | None,
    sm: int,
    asked: dict[str, str],
    paged: bool,
    fp8: bool,
    said: set[str],
) -> None:
    outcome = build(version=version, weights=weights, kv=kv, sm=sm, **asked)
    assert outcome.values["use_paged_context_fmha"] is paged
    assert outcome.values["use_fp8_context_fmha"] is fp8
    told = ids(outcome) & {"fp8_context_old_gpu", "paged_context_off", "fp8_context_on", "fp8_context_needs_cache",
                           "fp8_context_needs_fp8", "paged_context_int8"}  # fmt: skip
    assert told == said
    kept = {"use_paged_context_fmha": paged, "use_fp8_context_fmha": fp8}
    differing = {flag: value for flag, value in kept.items() if value != (asked[flag] == "enable")}
    assert changed(outcome) == differing


def test_without_context_fmha() -> None:
    outcome = build(weights="FP8", kv="FP8", context_fmha="disable", **ON)
    assert changed(outcome) == {"use_paged_context_fmha": False, "use_fp8_context_fmha": False}
    assert "context_fmha_off" in ids(outcome)
    assert "input_len_ignored" not in ids(outcome)


@pytest.mark.parametrize(
    ("asked", "built", "said"),
    [
        ({"max_num_tokens": 64 * 4096}, 64 * 4096, None),
        ({"max_num_tokens": 64 * 4096 + 1}, 64 * 4096, "tokens_clipped"),
        ({"max_num_tokens": 32}, 32, None),
        ({"max_num_tokens": 31}, 32, "tokens_below_block"),
        ({"max_num_tokens": 63, "tokens_per_block": 64}, 64, "tokens_below_block"),
        ({"max_num_tokens": 3071, "context_fmha": "disable"}, 3072, "tokens_below_input"),
        ({"max_num_tokens": 3072, "context_fmha": "disable"}, 3072, None),
        ({"max_num_tokens": 3071}, 3071, None),
        ({"remove_input_padding": "disable"}, 64 * 4096, "padding_kept"),
    ],
)
def test_tokens_of_a_step(asked: dict[str, Any], built: int, said: str | None) -> None:
    outcome = build(**asked)
    assert outcome.values["max_num_tokens"] == built
    told = ids(outcome) & {"tokens_clipped", "tokens_below_block", "tokens_below_input", "padding_kept"}
    assert told == ({said} if said else set())
    wanted = (SIZES | asked)["max_num_tokens"]
    assert ("max_num_tokens" in changed(outcome)) == (built != wanted)


@pytest.mark.parametrize(("tokens", "warns"), [(16384, False), (16385, True)])
def test_many_tokens(tokens: int, warns: bool) -> None:
    outcome = build(max_num_tokens=tokens)
    assert ("many_tokens" in ids(outcome)) == warns
    assert changed(outcome) == {}


def test_optimal_tokens() -> None:
    assert build().values["opt_num_tokens"] == 64
    assert build(multiple_profiles="enable").values["opt_num_tokens"] is None
    assert build(max_num_tokens=32).values["opt_num_tokens"] == 32
    clipped = build(opt_num_tokens=9000)
    assert changed(clipped) == {"opt_num_tokens": 8192}
    assert "opt_tokens_clipped" in ids(clipped)


def test_lengths() -> None:
    assert changed(build(max_input_len=4096)) == {}
    assert changed(build(max_input_len=4097)) == {"max_input_len": 4096}
    assert "positions" not in ids(build(positions=4096))
    assert "positions" in ids(build(positions=4095))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 131072),
        ({"max_position_embeddings": None}, 2048),
        ({"rotary_scaling": {"type": "linear", "factor": 2.0}}, 262144),
        ({"rotary_scaling": {"rope_type": "yarn", "factor": 4.0}}, 524288),
        ({"rotary_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"rotary_scaling": {"type": "longrope", "factor": 8.0}}, 131072),
    ],
)
def test_a_length_that_is_not_said(config: dict[str, Any], length: int) -> None:
    outcome = effects("1.2.1", [], CheckpointConfig.of(rank_config() | config), 90)
    assert outcome.values["max_seq_len"] == length
    assert ("seq_len_scaled" in ids(outcome)) == (length > 131072)


SPECULATION = {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": 5}


def test_drafts_make_sequences_longer() -> None:
    outcome = build(**SPECULATION)
    assert outcome.values["max_seq_len"] == 4101
    assert changed(outcome) == {}
    assert "seq_len_increased" in ids(outcome)
    assert outcome.values["speculative_decoding_mode"] == 2


def test_a_draft_length_alone_changes_nothing() -> None:
    assert build(max_draft_len=5).values["max_seq_len"] == 4096


def test_tokens_for_drafts() -> None:
    assert changed(build(max_num_tokens=64 * 6, **SPECULATION)) == {}
    outcome = build(max_num_tokens=64 * 6 - 1, **SPECULATION)
    assert changed(outcome) == {"max_num_tokens": 64 * 6}
    assert [m.severity for m in outcome.messages if m.id == "tokens_below_drafts"] == ["I"], (
        "it is no warning"
    )


def test_the_clip_comes_before_the_drafts() -> None:
    outcome = build(max_batch_size=1, max_num_tokens=4101, **SPECULATION)
    assert changed(outcome) == {"max_num_tokens": 4096}


@pytest.mark.parametrize(("tp", "architecture", "kept"), [
    (2, LLAMA, True), (1, LLAMA, False), (2, "Qwen2ForCausalLM", False), (2, "Gemma2ForCausalLM", True),
])  # fmt: skip
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


def test_what_is_left_alone() -> None:
    assert build().values["gemm_plugin"] is None
    assert build(paged_state="disable").values["paged_state"] is False
    assert "paged_state_off" not in ids(build(paged_state="disable"))
    assert changed(build(paged_state="enable")) == {"paged_state": False}
    assert (build().values["nccl_plugin"], build(tp=2).values["nccl_plugin"]) == (None, "bfloat16")
    assert build().values["kv_cache_type"] == "PAGED"


@pytest.mark.parametrize(
    ("sm", "weights", "kv", "refusal"),
    [
        (90, "W4A16_AWQ", None, None),
        (100, "W4A16_AWQ", None, "INT8/INT4 quantization"),
        (103, "W4A8_AWQ", None, "INT8/INT4 quantization"),
        (119, "W8A16", None, "INT8/INT4 quantization"),
        (120, "W4A16_AWQ", None, None),
        (100, "FP8", "INT8", "INT8/INT4 quantization"),
        (100, "W8A8_SQ_PER_CHANNEL", None, "SmoothQuant"),
        (120, "W8A8_SQ_PER_CHANNEL", None, None),
        (100, "FP8_PER_CHANNEL_PER_TOKEN", None, "Per-channel or per-token scaling"),
        (100, "FP8", "FP8", None),
        (100, None, None, None),
    ],
)
def test_formats_that_a_gpu_does_not_have(sm: int, weights: str, kv: str, refusal: str | None) -> None:
    found = build(sm=sm, weights=weights, kv=kv).refusal
    assert found is None if refusal is None else (found or "").startswith(f"RuntimeError: {refusal}")


@pytest.mark.parametrize(
    ("switches", "values", "refusal"),
    [
        (("gather_context_logits",), SPECULATION, "RuntimeError: Gather context logits is not support"),
        (("gather_all_token_logits",), SPECULATION, "RuntimeError: Gather context logits is not support"),
        (("gather_generation_logits",), SPECULATION, None),
        (("gather_context_logits",), {}, None),
        ((), {"multiple_profiles": "enable", "opt_num_tokens": 8}, "RuntimeError: multiple_profiles is enabled"),
        ((), {"multiple_profiles": "enable"}, None),
        ((), {"pp_reduce_scatter": "enable"}, "AssertionError: PP reduce scatter"),
        ((), {"pp_reduce_scatter": "enable", "architecture": "MixtralForCausalLM"}, None),
        ((), {"streamingllm": "enable"}, "AssertionError: StreamingLLM is no longer supported"),
        ((), {"low_latency_gemm_plugin": "fp8", "sm": 100},
         "NotImplementedError: low_latency_gemm_plugin=fp8 is not supported on SM 100."),
        ((), {"low_latency_gemm_plugin": "fp8", "sm": 103}, None),
        ((), {"gemm_swiglu_plugin": "fp8", "use_fused_mlp": "disable"}, "RuntimeError: GemmSwiGLU plugin requires"),
        ((), {"gemm_swiglu_plugin": "fp8"}, None),
        ((), {"fuse_fp4_quant": "enable", "weights": "NVFP4", "sm": 90}, "RuntimeError: fuse_fp4_quant only supports"),
        ((), {"fuse_fp4_quant": "enable", "weights": "NVFP4", "sm": 100}, None),
        ((), {"fuse_fp4_quant": "disable", "sm": 90}, None),
    ],
)  # fmt: skip
def test_refusals(switches: tuple[str, ...], values: dict[str, Any], refusal: str | None) -> None:
    found = build(*switches, **values).refusal
    assert found is None if refusal is None else (found or "").startswith(refusal)


def test_the_model_of_a_checkpoint() -> None:
    config = rank_config(weights="fp8", kv_cache="FP8")
    assert CheckpointConfig.of(config) == CheckpointConfig(LLAMA, "bfloat16", "FP8", "FP8", 1, 1, 131072)
    del config["quantization"]
    assert CheckpointConfig.of(config).quant_algo is None


@pytest.mark.parametrize(("line", "name"), [
    ("Implicitly setting LLaMAConfig.layer_idx_offset = 0", "implicit_setting"),
    ("Implicitly setting QWenConfig.moe = {'num_experts': 0}", "implicit_setting"),
    ("Failed to infer cluster info for NVIDIA GB10, treat it as a L40 node with 121 GB memory. "
     "This setting makes no effect if you do not use auto parallel.", "cluster"),
])  # fmt: skip
def test_lines_that_change_nothing(line: str, name: str) -> None:
    message = parse_message(line)
    assert message is not None
    assert (message.id, message.changes) == (name, ())


@pytest.mark.parametrize("line", ["", "Overriding paged_state to Falsehood", "anything else"])
def test_lines_that_mean_nothing_here(line: str) -> None:
    assert parse_message(line) is None


toggles = st.sampled_from(["enable", "disable"])
commands = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 64),
        "max_seq_len": st.integers(1, 300),
        "max_input_len": st.integers(1, 400),
        "max_num_tokens": st.integers(1, 40_000),
    },
    optional={
        "opt_num_tokens": st.integers(1, 9000),
        "max_draft_len": st.integers(0, 8),
        "speculative_decoding_mode": st.just("draft_tokens_external"),
        "gemm_plugin": st.sampled_from(["auto", "disable"]),
        "paged_kv_cache": st.just("enable"),
        **dict.fromkeys(
            ("context_fmha", "use_paged_context_fmha", "use_fp8_context_fmha", "remove_input_padding",
             "reduce_fusion", "user_buffer", "norm_quant_fusion", "paged_state"),
            toggles,
        ),
    },
)  # fmt: skip


@given(
    commands,
    st.sampled_from([None, "FP8", "W4A16_AWQ", "W4A8_AWQ", "NVFP4", "MIXED_PRECISION"]),
    st.sampled_from([None, "FP8", "INT8"]),
    st.sampled_from([80, 89, 90, 120]),
)
@settings(max_examples=200)
def test_what_is_said_and_what_is_done_agree(
    values: dict[str, Any], weights: str | None, kv: str | None, sm: int
) -> None:
    outcome = build(weights=weights, kv=kv, sm=sm, positions=200, **values)
    for message in outcome.messages:
        assert parse_message(message.text) == message
    for change in outcome.changes:
        assert change.reason != "without a word"
    again = {
        name: value
        for name, value in values.items()
        if name not in {change.flag for change in outcome.changes}
    }
    for change in outcome.changes:
        value = {True: "enable", False: "disable", None: "disable"}.get(change.built, change.built)
        if change.flag == "max_seq_len":
            value -= values.get("max_draft_len", 0)
        again[change.flag] = value
    settled = build(weights=weights, kv=kv, sm=sm, positions=200, **again)
    assert settled.changes == (), "asked for what was built, it builds that"


def test_every_message_can_come() -> None:
    """Those about a timing cache, a checkpoint's settings and the machine are said elsewhere."""
    seen: set[str] = set()
    linear = {"type": "linear", "factor": 2}
    for outcome in (
        build(weights="W4A16_AWQ", kv="FP8", positions=100, **ON),
        build(weights="FP8", kv="FP8", sm=80, max_num_tokens=10**6, max_input_len=10**4, **ON),
        build(weights="FP8", **ON), build(weights="FP8", kv="FP8", **PAGED), build(kv="INT8", **PAGED),
        build(max_num_tokens=8, opt_num_tokens=100), build(context_fmha="disable", max_num_tokens=8),
        build(remove_input_padding="disable"), build(weights="NVFP4", sm=100, max_num_tokens=64, **SPECULATION),
        build(reduce_fusion="enable", user_buffer="enable", norm_quant_fusion="enable", paged_kv_cache="enable"),
        effects("1.2.1", [], CheckpointConfig.of(rank_config() | {"rotary_scaling": linear}), 90),
    ):  # fmt: skip
        seen |= ids(outcome)
    assert seen | {"no_timing_cache", "implicit_setting", "cluster"} == {
        message["id"] for message in data()["messages"]
    }
