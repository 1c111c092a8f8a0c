"""Memory of large models by rank: held against published figures, and what holds for any split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import (
    DeploymentSpec,
    MemoryPlan,
    ModelSpec,
    alternatives,
    deployment_spec,
    plan_memory,
)
from pipeline.plan.memory.tensors import kv_token_bytes, sequence_state_bytes, tensor_bytes, weight_bytes
from pipeline.plan.parallelism import Parallelism
from pipeline.recipe import Recipe
from tests.support.hub_configs import hub_configs

K3, R1, GPT_OSS = "moonshotai/Kimi-K3", "deepseek-ai/DeepSeek-R1", "openai/gpt-oss-120b"
R1_FP4 = "nvidia/DeepSeek-V3.1-NVFP4"  # of R1's class and sizes
NANO, QWEN35 = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3.5-35B-A3B"


def sizes_of(name: str) -> ModelSizes:
    published = hub_configs()[name]
    sizes = ModelSizes.from_config(published["config"], published.get("hf_quant_config"))
    assert sizes is not None
    return sizes


def model(name: str, **split: Any) -> ModelSpec:
    sizes = sizes_of(name)
    return ModelSpec("target", sizes, Parallelism(**split), sizes.stored, sizes.kv_cache or sizes.dtype)


def recipe(
    gpu: str, *, concurrency: int = 16, length: int = 2048, version: str = "1.2.1", **runtime: Any
) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "model": {"source": "hf:a/b"},
            "runtime": {"kind": "pytorch", "version": version, "gpu": gpu, **runtime},
            "limits": {
                "max_input_tokens": length // 2,
                "max_output_tokens": length // 2,
                "max_concurrency": concurrency,
            },
        }
    )


def demand(name: str, gpu: str, **settings: Any) -> DeploymentSpec:
    spec = deployment_spec(recipe(gpu, **settings), {"target": sizes_of(name)})
    assert spec is not None
    return spec


def plan(name: str, gpu: str, **settings: Any) -> MemoryPlan:
    return plan_memory(demand(name, gpu, **settings))


def experts(spec: ModelSpec) -> int:
    return sum(tensor_bytes(tensor, spec) for tensor in spec.sizes.weights() if tensor.is_expert)


def test_kimi_k3_on_16_gpus() -> None:
    """With attention DP a rank has 90 GB of experts and 114 GB of other weights; without, it needs 115 GB.

    Footnote 15 of NVIDIA/TensorRT-LLM 1.3.0rc29/_sources/models/supported-models.md.txt @bf0ee2fb9e63.
    """
    shared_out, alone = (model(K3, tensor=16, expert=16, attention_dp=on) for on in (False, True))
    assert experts(alone) / 1e9 == pytest.approx(90, rel=0.01)
    assert experts(shared_out) == experts(alone)
    assert (weight_bytes(alone) - experts(alone)) / 1e9 == pytest.approx(114, rel=0.06)
    # "~61 GB/rank" of linear attention, by the comment in modeling_kimi_k3 (file index id 57357616009)
    linear = sum(tensor_bytes(weight, alone) for weight in alone.sizes.weights() if weight.kind == "mixers")
    assert linear / 1e9 == pytest.approx(61, rel=0.01)
    needed = plan(K3, "gb200-186g", tensor_parallel=16, expert_parallel=16)
    buffers = needed.ranks[0].used - needed.ranks[0].group("kv_cache")
    assert buffers / 1e9 == pytest.approx(115, rel=0.06)


def test_kimi_k3_keeps_what_upstream_moves_of_a_request() -> None:
    """454,459,392 bytes of states, and about 27 KB a token; without attention DP, ranks share the states by heads.

    examples/kimi_k3/disagg/README.md (file index id 71650440461).
    """
    alone, shared_out = (model(K3, tensor=16, expert=16, attention_dp=on) for on in (True, False))
    assert sequence_state_bytes(alone) == 454_459_392
    assert sequence_state_bytes(shared_out) == 454_459_392 // 16
    assert kv_token_bytes(alone) == kv_token_bytes(shared_out) == 27_648


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "fits"),
    [
        (R1, "h200-sxm-141g", 8, True),
        (R1, "h100-sxm-80g", 8, False),
        (R1, "h100-sxm-80g", 16, True),
        (R1, "b200-sxm-180g", 8, True),
        (R1_FP4, "b200-sxm-180g", 4, True),
        (R1_FP4, "b200-sxm-180g", 2, False),
    ],
)
def test_deepseek_on_the_gpus_that_upstream_asks_for(name: str, gpu: str, gpus: int, fits: bool) -> None:
    """Table of hardware in examples/models/core/deepseek_v3/README.md: the fewest GPUs for FP8 and FP4."""
    made = plan(name, gpu, tensor_parallel=gpus, expert_parallel=gpus)
    assert (made.verdict != "does not fit") is fits


def test_deepseek_r1_by_the_token_and_by_the_rank() -> None:
    """35,136 bytes of a token in FP8, as a server on H200 logs ("kv size is 35136", file index id 14031891033).

    And 79.41 GiB of weights on each of 8 devices, as another server with the same split logs (HabanaAI/vllm-fork issue
    809).
    """
    split = model(R1, tensor=8)
    assert kv_token_bytes(replace(split, kv_cache="fp8")) == 35_136
    assert weight_bytes(split) / 2**30 == pytest.approx(79.41, rel=0.005)


def test_gpt_oss_120b_on_one_h100() -> None:
    """Upstream tests it there with 512 requests at a time (TestGPTOSS::test_w4_1gpu, pull request 17470)."""
    made = plan(GPT_OSS, "h100-sxm-80g", version="1.4.0rc1", concurrency=512, max_graph_batch=64)
    assert made.verdict != "does not fit"
    assert made.ranks[0].group("weights") / 2**30 == pytest.approx(60.8, rel=0.01)


@pytest.mark.parametrize("name", [R1, GPT_OSS, NANO, QWEN35])
def test_with_attention_dp_a_rank_holds_a_whole_model_but_for_its_experts(name: str) -> None:
    whole, spread = model(name), model(name, tensor=8, expert=8, attention_dp=True)
    assert weight_bytes(spread) - experts(spread) == weight_bytes(whole) - experts(whole)
    assert 8 * experts(spread) == pytest.approx(experts(whole), rel=0.001)
    assert kv_token_bytes(spread) == kv_token_bytes(whole)
    assert sequence_state_bytes(spread) == sequence_state_bytes(whole)
    assert experts(model(name, tensor=8, expert=2)) == pytest.approx(experts(spread), rel=0.03)


def test_ranks_with_requests_of_their_own_hold_as_many_each() -> None:
    settings: dict[str, Any] = {"tensor_parallel": 8, "expert_parallel": 8, "concurrency": 800}
    together, alone = (plan(R1, "h200-sxm-141g", attention_dp=on, **settings) for on in (False, True))
    assert alone.spec.rank_sequences == 100
    assert alone.sequences % 8 == 0
    # Each rank has less room, but the latent cache of a request lies on one of them instead of all eight.
    assert together.sequences < alone.sequences < 8 * together.sequences
    held = plan(
        NANO, "h100-sxm-80g", **settings | {"attention_dp": True, "tensor_parallel": 2, "expert_parallel": 2}
    )
    states = next(line for line in held.ranks[0].lines if line.name == "states")
    assert states.bytes == 400 * sequence_state_bytes(held.spec.models[0])


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_stages_hold_all_layers_once_and_name_the_rank_that_decides(stages: int) -> None:
    made = plan(R1, "b300-sxm-288g", tensor_parallel=8, pipeline_parallel=stages)
    spec = made.spec.models[0]
    assert sum(weight_bytes(spec, stage) for stage in range(stages)) == weight_bytes(model(R1, tensor=8))
    assert made.ranks[0].group("weights", "target") != made.ranks[-1].group("weights", "target")
    least = min(made.ranks, key=lambda rank: rank.headroom / max(1, rank.group("kv_cache")))
    assert least.index in made.fullest
    assert f"of {8 * stages}" in made.fullest_named
    moved = replace(spec, partition=(61 - stages + 1, *([1] * (stages - 1))))
    assert weight_bytes(moved, 0) > weight_bytes(spec, 0)
    assert sum(weight_bytes(moved, stage) for stage in range(stages)) == weight_bytes(model(R1, tensor=8))


def test_windows_bound_the_cache_where_the_server_bounds_it() -> None:
    """gpt-oss: every second layer sees 128 tokens; 1.4.0rc1 keeps no more of them, 1.2.1 if it is told."""
    told = {"kv_cache_config": {"max_attention_window": [128, 131_072]}}
    whole, given, derived = (
        demand(GPT_OSS, "h100-sxm-80g", length=65_536, **settings).models[0]
        for settings in ({}, {"llm_args": told}, {"version": "1.4.0rc1"})
    )
    assert kv_token_bytes(whole, 0, 65_536) == kv_token_bytes(whole) == 36 * 2 * 8 * 64 * 2
    pages = (128 + 32) / 65_536
    assert kv_token_bytes(given, 0, 65_536) == kv_token_bytes(derived, 0, 65_536)
    assert kv_token_bytes(given, 0, 65_536) == pytest.approx(kv_token_bytes(whole) * (1 + pages) / 2, abs=1)
    assert kv_token_bytes(given, 0, 100) == kv_token_bytes(whole)
    off = {"kv_cache_config": {"use_kv_cache_manager_v2": False}}
    assert demand(GPT_OSS, "h100-sxm-80g", version="1.4.0rc1", llm_args=off).models[0].windows == ()


def test_arguments_of_ones_own_that_bound_memory_are_counted() -> None:
    def with_own(name: str, **own: Any) -> MemoryPlan:
        return plan(
            name, "h200-sxm-141g", version="1.3.0rc29", tensor_parallel=2, expert_parallel=2, llm_args=own
        )

    plain = with_own(QWEN35)
    assert with_own(QWEN35, kv_cache_config={"max_tokens": 6400}).tokens == 6400
    bounded = with_own(QWEN35, kv_cache_config={"max_gpu_total_bytes": 2**30})
    assert 0.99 * 2**30 < bounded.tokens * bounded.token_bytes["target"] <= 2**30
    graphs = with_own(QWEN35, cuda_graph_config={"batch_sizes": [1, 2, 4, 8]})
    assert 0 < graphs.ranks[0].group("graphs") < plain.ranks[0].group("graphs")
    blind = with_own(QWEN35, disable_mm_encoder=True)
    assert not any(line.name == "vision" for line in blind.ranks[0].lines)
    assert any(line.name == "vision" for line in plain.ranks[0].lines)
    half = with_own(QWEN35, kv_cache_config={"mamba_ssm_cache_dtype": "bfloat16"})
    halved, full = (sequence_state_bytes(plan.spec.models[0]) for plan in (half, plain))
    assert full / 2 < halved < 0.6 * full
    drafting = with_own(QWEN35, speculative_config={"decoding_type": "MTP", "max_draft_len": 1})
    assert any(line.name == "mtp" for line in drafting.ranks[0].lines)
    assert drafting.token_bytes["target"] > plain.token_bytes["target"]


def test_what_would_hold_more_is_attention_dp_and_windows() -> None:
    """Each as the same change of the recipe is planned."""
    own = {"kv_cache_config": {"max_attention_window": [128, 131_072]}}
    for name, gpus, change, override in [
        (R1, 8, {"attention_dp": True}, "runtime.attention_dp=true"),
        (
            GPT_OSS,
            1,
            {"llm_args": own},
            "runtime.llm_args.kv_cache_config.max_attention_window=[128,131072]",
        ),
    ]:
        many: dict[str, Any] = {"tensor_parallel": gpus, "expert_parallel": gpus, "concurrency": 4000}
        asked, changed = (
            recipe("h200-sxm-141g", length=32_768, cuda_graphs=False, **many, **more) for more in ({}, change)
        )
        before, after = (deployment_spec(spec, {"target": sizes_of(name)}) for spec in (asked, changed))
        assert before is not None
        assert after is not None
        found = {
            alternative.overrides: alternative.plan.sequences for alternative in alternatives(asked, before)
        }
        assert found[(override,)] == plan_memory(after).sequences > plan_memory(before).sequences
