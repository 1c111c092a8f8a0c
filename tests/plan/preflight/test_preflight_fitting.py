"""Sizes that can be split: what is proposed is accepted, and what is accepted divides."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.models import known_model, known_models
from pipeline.models.sizes import ModelSizes
from pipeline.plan.model_facts import facts_from_sizes
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.preflight import findings
from pipeline.plan.preflight.split_sizes import (
    fitting_tensor_sizes,
    inner_per_rank,
    kv_heads_split,
    padded_features,
)
from pipeline.recipe import load_recipe

FORMATS = {"fp8": (), "int4_awq": ("quantization.kv_cache=auto",), "w4a8_awq": ()}


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
    awq = form != "fp8"
    fits = fitting_tensor_sizes(sizes, 128 if awq else None, 1, multiple=128 if awq else 1)
    assert refused == (tensor not in fits)
    for finding in found:
        if finding.rule.startswith("tp.") and finding.severity == "error" and fits:
            assert finding.fix.endswith("to " + " or ".join(map(str, fits)))


@given(kv_heads=st.integers(1, 64), tensor=st.integers(1, 64))
def test_key_and_value_heads(kv_heads: int, tensor: int) -> None:
    sizes = ModelSizes("X", 64, 1, 64, kv_heads, 64, 64, 64, 64)
    assert kv_heads_split(sizes, tensor) == (max(kv_heads, tensor) % min(kv_heads, tensor) == 0)


@given(
    hidden=st.integers(1, 64),
    inner=st.integers(1, 64),
    heads=st.integers(1, 32),
    kv_heads=st.integers(1, 16),
    tensor=st.integers(1, 16),
    multiple=st.sampled_from([64, 128]),
)
def test_padded_features_are_those_of_upstreams_layers(
    hidden: int, inner: int, heads: int, kv_heads: int, tensor: int, multiple: int
) -> None:
    """Each linear layer is declared as upstream does it: both sizes rounded up to multiples of `multiple` x ranks."""
    sizes = ModelSizes("X", 32 * hidden, 1, heads, kv_heads, 64, 32 * inner, 64, 64)
    kv = tensor * -(-kv_heads // tensor)  # of each rank, rounded up
    layers = (  # inputs, outputs: qkv, dense, fc and gate, proj
        (sizes.hidden, (heads + 2 * kv) * 64), (heads * 64, sizes.hidden),
        (sizes.hidden, sizes.intermediate), (sizes.intermediate, sizes.hidden),
    )  # fmt: skip
    wanted = {
        (size, math.ceil(size / (multiple * tensor)) * multiple * tensor)
        for layer in layers
        for size in layer
        if size % (multiple * tensor) > 0
    }
    assert set(padded_features(sizes, tensor, multiple).values()) == wanted


def test_experts_share_the_tensor_parallel_ranks() -> None:
    mixtral = known_model("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert mixtral is not None
    assert inner_per_rank(mixtral, Parallelism(tensor=8, expert=8)) == (14336, 0)
    assert inner_per_rank(mixtral, Parallelism(tensor=8, expert=2)) == (14336 // 4, 0)
    assert fitting_tensor_sizes(mixtral, 128, 4) == (4, 8, 16, 32)
