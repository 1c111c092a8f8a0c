"""Kernels of experts, how often experts are chosen, and exchanges between machines, as properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.llm_args import expert_kernels
from pipeline.contracts.models import known_model
from pipeline.plan.memory import ModelSpec, deployment_spec
from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance import EngineSpeed
from pipeline.plan.performance.calibration import engine_options
from pipeline.plan.performance.constants import efficiency
from pipeline.plan.performance.roofline import EngineStep
from pipeline.recipe import load_recipe

LATENT, DENSE = "deepseek-ai/DeepSeek-R1-0528", "meta-llama/Llama-3.3-70B-Instruct"
STEPS = (EngineStep(1, 1000), EngineStep(64, 1000), EngineStep(prompt=8192, longest=8192))


def engine(
    device: str, split: Parallelism, *, name: str = LATENT, form: str = "fp8_block", kernels: str = "CUTLASS"
) -> EngineSpeed:
    sizes = known_model(name)
    assert sizes is not None
    need = ModelSpec("target", sizes, split, form, "fp8", expert_kernels=kernels)
    return EngineSpeed.of(need, device, "pytorch")


def ways(gpus: int, *, attention_dp: bool = False) -> Parallelism:
    return Parallelism(gpus, expert=gpus, attention_dp=attention_dp)


@pytest.mark.parametrize("attention_dp", [False, True])
@pytest.mark.parametrize("kernels", ["CUTLASS", "WIDEEP"])
def test_exchanges_between_machines_take_longer_than_within_one(attention_dp: bool, kernels: str) -> None:
    """The same ranks in two machines, and in one that NVLink joins."""
    apart = engine("h100-sxm-80g", ways(16, attention_dp=attention_dp), kernels=kernels)
    together = replace(apart, rates=replace(apart.rates, nvlink_gpus=16))
    for step in STEPS:
        assert apart.step(step).exchange > together.step(step).exchange
        assert apart.step(step).matrices == together.step(step).matrices


@given(st.floats(1.0, 20.0), st.sampled_from((16, 32, 64)), st.booleans(), st.integers(1, 4096))
def test_a_quicker_network_is_never_slower(factor: float, gpus: int, attention_dp: bool, tokens: int) -> None:
    slow = engine("h100-sxm-80g", ways(gpus, attention_dp=attention_dp), kernels="WIDEEP")
    quick = replace(slow, rates=replace(slow.rates, network_gb_s=slow.rates.network_gb_s * factor))
    step = EngineStep(tokens, 1000)
    assert quick.step(step).exchange <= slow.step(step).exchange


@pytest.mark.parametrize(("gpus", "matters"), [(8, False), (16, True)])
@pytest.mark.parametrize("attention_dp", [False, True])
def test_a_slow_network_decides_between_machines_alone(gpus: int, matters: bool, attention_dp: bool) -> None:
    base = engine("h100-sxm-80g", ways(gpus, attention_dp=attention_dp))
    cable = replace(base, rates=replace(base.rates, network_gb_s=0.1))
    assert (cable.step(STEPS[2]).exchange > 2 * base.step(STEPS[2]).exchange) == matters


def test_more_machines_wait_longer_for_each_other() -> None:
    """Before the first byte, trees of machines grow by a level each time that their number doubles."""
    begun = [
        engine("h100-sxm-80g", Parallelism(gpus), name=DENSE, form="fp8").step(EngineStep(1, 1)).exchange
        for gpus in (8, 16, 32, 64)
    ]
    assert all(after > before for before, after in pairwise(begun))


def test_tokens_go_to_their_own_experts_only_where_there_is_a_way() -> None:
    """Sixteen ranks, eight experts a token: all to all over NVLink or with WIDEEP, else gathered by all."""

    def sent(device: str, kernels: str, gpus: int = 16) -> float:
        return engine(device, ways(gpus, attention_dp=True), kernels=kernels).load.exchange_bytes

    gathered = sent("h100-sxm-80g", "CUTLASS")
    assert sent("gb200-186g", "CUTLASS") == sent("h100-sxm-80g", "WIDEEP") == gathered / 2
    assert sent("h100-sxm-80g", "WIDEEP", 8) == sent("h100-sxm-80g", "CUTLASS", 8)


def test_rings_share_the_network_cards_of_a_machine() -> None:
    load = engine("h100-sxm-80g", ways(16)).load
    assert load.network_bytes == load.exchange_bytes / 8
    scattered = engine("h100-sxm-80g", ways(16, attention_dp=True), kernels="WIDEEP").load
    assert scattered.network_bytes == pytest.approx(scattered.exchange_bytes * 8 / 15)


def test_kernels_for_blackwell_are_quicker_there_and_the_same_elsewhere() -> None:
    def seconds(device: str, kernels: str) -> float:
        return engine(device, ways(4), kernels=kernels).decode(16, 1000)

    assert seconds("b200-sxm-180g", "TRTLLM") < seconds("b200-sxm-180g", "CUTLASS")
    for device in ("h200-sxm-141g", "rtx-pro-6000-96g"):
        assert seconds(device, "TRTLLM") == seconds(device, "CUTLASS")


@given(st.floats(0.0, 2.0), st.integers(1, 4096), st.sampled_from((1, 4, 8, 32)))
def test_uneven_experts_keep_the_busiest_rank_longer(skew: float, tokens: int, gpus: int) -> None:
    load = engine("b200-sxm-180g", ways(gpus)).load
    if gpus == 1:
        assert load.expert_share(tokens, skew) <= load.expert_share(tokens) + 1e-9
    assert 0 < load.expert_share(tokens, skew) <= 1
    assert 1 <= load.expert_work(tokens) <= load.expert_work(tokens, skew) <= gpus


def test_experts_are_read_as_often_as_they_are_chosen() -> None:
    load = engine("b200-sxm-180g", Parallelism()).load
    assert load.expert_share(1, 0.0) == pytest.approx(8 / 256, rel=1e-4)
    assert load.expert_share(32, 0.0) == pytest.approx(1 - (1 - 8 / 256) ** 32, rel=1e-4)
    # One token reads as many experts as it chooses, whichever they are.
    assert load.expert_share(1, 1.0) == pytest.approx(8 / 256, rel=0.05)
    shares = [load.expert_share(32, skew / 4) for skew in range(8)]
    assert all(after < before for before, after in pairwise(shares))


def test_kernels_that_wait_for_each_other_take_longer() -> None:
    early, late = (efficiency("b200-sxm-180g", "pytorch", pdl=pdl) for pdl in (True, False))
    assert late.layer_s > early.layer_s
    assert late.memory == early.memory
    # Neither engines nor GPUs before Hopper have it, whatever a release does.
    assert efficiency("b200-sxm-180g", "tensorrt", pdl=False) == efficiency("b200-sxm-180g", "tensorrt")
    assert efficiency("l40s-48g", "pytorch", pdl=False) == efficiency("l40s-48g", "pytorch")


def test_inputs_of_products_are_scaled_once() -> None:
    """Queries, keys and values share theirs; latent attention has four, a shared expert two."""
    assert engine("b200-sxm-180g", Parallelism(8)).load.block_products == 61 * 6
    assert engine("b200-sxm-180g", Parallelism(8), form="nvfp4").load.block_products == 0
    for name, products in (("mistralai/Mixtral-8x7B-Instruct-v0.1", 2), (DENSE, 4)):
        load = engine("h100-sxm-80g", Parallelism(4), name=name).load
        assert load.block_products == products * load.layers


@pytest.mark.parametrize(
    ("version", "asked", "architecture", "sm", "kernels"),
    [
        ("1.2.1", None, "DeepseekV3ForCausalLM", 100, "CUTLASS"),
        ("1.2.1", "TRTLLM", "DeepseekV3ForCausalLM", 100, "TRTLLM"),
        ("1.3.0rc29", "AUTO", "DeepseekV3ForCausalLM", 100, "CUTLASS"),
        ("1.3.0rc29", "auto", "GptOssForCausalLM", 103, "TRTLLM"),
        ("1.3.0rc29", None, "GptOssForCausalLM", 90, "TRITON"),
        ("1.4.0rc1", None, "GptOssForCausalLM", 120, "CUTLASS"),
    ],
)
def test_kernels_are_those_that_upstream_takes(
    version: str, asked: str | None, architecture: str, sm: int, kernels: str
) -> None:
    assert expert_kernels(version, asked, architecture, sm) == kernels


def test_a_recipe_says_which_kernels_and_which_release() -> None:
    recipe = load_recipe("gpt-oss-120b")
    spec = deployment_spec(recipe, offline_sizes(recipe))
    assert spec.models[0].expert_kernels == "TRTLLM"
    assert engine_options(recipe).pdl
    older = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"version": "1.1.0"})})
    assert not engine_options(older).pdl
