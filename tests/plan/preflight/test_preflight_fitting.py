"""Sizes that can be split: what is proposed is accepted, and what is accepted divides."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.models import known_model, known_models
from pipeline.models.sizes import ModelSizes
from pipeline.plan.model_facts import facts_from_sizes
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.preflight import findings
from pipeline.plan.preflight.splitting import fitting_tensor_sizes, inner_per_rank, kv_heads_split
from pipeline.recipe import load_recipe

FORMATS = {"fp8": (), "int4_awq": ("quantization.kv_cache=auto",)}


@settings(max_examples=50)  # two readings of a recipe each
@given(repo=st.sampled_from(known_models()), form=st.sampled_from(sorted(FORMATS)), tensor=st.integers(1, 64))
def test_proposed_sizes_are_exactly_those_that_are_accepted(repo: str, form: str, tensor: int) -> None:
    sizes = known_model(repo)
    assert sizes is not None
    overrides = (f"quantization.format={form}", *FORMATS[form], f"runtime.tensor_parallel={tensor}")
    taken = replace(sizes, architecture="Qwen2ForCausalLM")  # of a class that is refused nothing else is said
    found = findings(load_recipe("qwen2.5-72b-fp8", overrides), facts_from_sizes({"target": taken}))
    rules = {finding.rule for finding in found if finding.severity == "error"}
    refused = any(rule.startswith("tp.") or rule == "quantization.groups" for rule in rules)
    fits = fitting_tensor_sizes(sizes, 128 if form == "int4_awq" else None, 1)
    assert refused == (tensor not in fits)
    for finding in found:
        if finding.rule.startswith("tp.") and finding.severity == "error" and fits:
            assert finding.fix.endswith("to " + " or ".join(map(str, fits)))


@given(kv_heads=st.integers(1, 64), tensor=st.integers(1, 64))
def test_key_and_value_heads(kv_heads: int, tensor: int) -> None:
    sizes = ModelSizes("X", 64, 1, 64, kv_heads, 64, 64, 64, 64)
    assert kv_heads_split(sizes, tensor) == (max(kv_heads, tensor) % min(kv_heads, tensor) == 0)


def test_experts_share_the_tensor_parallel_ranks() -> None:
    mixtral = known_model("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert mixtral is not None
    assert inner_per_rank(mixtral, Parallelism(tensor=8, expert=8)) == (14336, 0)
    assert inner_per_rank(mixtral, Parallelism(tensor=8, expert=2)) == (14336 // 4, 0)
    assert fitting_tensor_sizes(mixtral, 128, 4) == (4, 8, 16, 32)
