"""From recipes to arguments of the LLM API: golden files by version, and what holds for any recipe.

`PIPELINE_WRITE_GOLDEN=1 pytest` writes the golden files after a change.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.llm_args import check, decided, versions
from pipeline.errors import UserError
from pipeline.models.adapter import Adapter, AdapterModule
from pipeline.recipe import Recipe
from pipeline.runtimes.pytorch.artifact import draft_tokens, llm_arguments, lora_arguments

GOLDEN = Path(__file__).parent / "golden" / "llm_args"
DRAFT = {"source": "hf:a/draft", "max_draft_tokens": 5}
EAGLE = {"source": "hf:a/head", "method": "eagle3", "max_draft_tokens": 3}
CALIBRATED = {"format": "fp8", "kv_cache": "fp8", "calibration": {"dataset": "support"}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp8-pp2": {"runtime": {"tensor_parallel": 8, "pipeline_parallel": 2}},
    "experts": {"runtime": {"tensor_parallel": 4, "expert_parallel": 2}},
    "fp8-host-memory": {
        "quantization": CALIBRATED,
        "kv_cache": {"memory_fraction": 0.8, "reuse": False, "host_memory_gib": 1.5},
        "scheduler": {"policy": "max_utilization", "chunked_context": False},
        "limits": {"max_input_tokens": 16384, "max_output_tokens": 64, "max_concurrency": 4},
    },
    "no-graphs-no-overlap": {"runtime": {"cuda_graphs": False, "overlap_scheduler": False}},
    "guided": {"guided_decoding": True},
    "draft-target": {"draft": DRAFT},
    "eagle3": {"draft": EAGLE},
    "ngram": {"runtime": {"speculation": {"method": "ngram", "max_draft_tokens": 4, "max_matching_tokens": 3}}},
    "mtp": {"runtime": {"speculation": {"method": "mtp", "layers": 2}}},
    "attention-dp": {
        "runtime": {"tensor_parallel": 8, "expert_parallel": 8, "attention_dp": True, "max_graph_batch": 4},
        "limits": {"max_input_tokens": 8192, "max_output_tokens": 1024, "max_concurrency": 60},
    },
    "own": {"runtime": {"llm_args": {
        "moe_config": {"backend": "TRTLLM"}, "kv_cache_config": {"max_tokens": 65536},
    }}},
}  # fmt: skip


LIMITS = {"max_input_tokens": 8192, "max_output_tokens": 1024, "max_concurrency": 64}


def recipe(version: str, **sections: Any) -> Recipe:
    runtime = {"kind": "pytorch", "version": version, "gpu": "h100-sxm-80g"} | sections.pop("runtime", {})
    content = {"name": "r", "model": {"source": "hf:a/b"}, "limits": LIMITS, "runtime": runtime, **sections}
    return Recipe.model_validate(content)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", versions())
def test_golden(version: str, name: str) -> None:
    made = llm_arguments(recipe(version, **CASES[name]))
    path = GOLDEN / version / f"{name}.yaml"
    text = yaml.safe_dump(made, sort_keys=False)
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_no_golden_file_is_left_over() -> None:
    found = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.yaml")}
    assert found == {f"{version}/{name}.yaml" for version in versions() for name in CASES}


speculations = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"method": st.just("ngram"), "max_draft_tokens": st.integers(1, 16)},
        optional={"max_matching_tokens": st.integers(1, 32)},
    ),
    st.fixed_dictionaries({"method": st.just("mtp")}, optional={"layers": st.integers(1, 4)}),
)
drafts = st.fixed_dictionaries(
    {"source": st.just("hf:a/d"), "max_draft_tokens": st.integers(1, 16)},
    optional={"method": st.sampled_from(["draft_target", "eagle3"])},
)
quantizations = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4"]),
        "calibration": st.just({"dataset": "support"}),
    },
    optional={"kv_cache": st.sampled_from(["auto", "fp8"])},
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any valid recipe of the runtime, over the sizes that machines have."""
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    runtime: dict[str, Any] = {
        "tensor_parallel": tensor,
        "pipeline_parallel": draw(st.sampled_from([1, 2])),
        "cuda_graphs": draw(st.booleans()),
        "overlap_scheduler": draw(st.sampled_from([None, False])),
        "expert_parallel": draw(st.sampled_from([None, *(n for n in (1, 2, 4, 8) if tensor % n == 0)])),
        "attention_dp": draw(st.booleans()),
    }
    sections: dict[str, Any] = {
        "limits": {
            "max_input_tokens": draw(st.integers(1, 200_000)),
            "max_output_tokens": draw(st.integers(17, 8192)),
            "max_concurrency": draw(st.integers(1, 2048)),
        },
        "scheduler": {
            "chunked_context": draw(st.booleans()),
            "policy": draw(st.sampled_from(["guaranteed_no_evict", "max_utilization"])),
        },
        "kv_cache": {
            "memory_fraction": draw(st.none() | st.floats(0.01, 0.99)),
            "reuse": draw(st.booleans()),
            "host_memory_gib": draw(st.sampled_from([0.0, 0.5, 64.0])),
        },
    }
    if draw(st.booleans()):
        sections["quantization"] = draw(quantizations)
    if draw(st.booleans()):
        sections["draft"] = draw(drafts)
    else:
        runtime["speculation"] = draw(speculations)
    return recipe(draw(st.sampled_from(versions())), runtime=runtime, **sections)


@settings(max_examples=100)
@given(recipes())
def test_upstream_would_take_the_arguments_of_any_recipe(some: Recipe) -> None:
    made = llm_arguments(some)
    assert check(some.runtime.version, made) == ()
    assert yaml.safe_load(yaml.safe_dump(made)) == made
    assert not {"quant_config", "build_config", "pytorch_backend_config"} & set(made)
    assert made["max_num_tokens"] >= made["max_batch_size"] * (draft_tokens(some) + 1)
    assert made["enable_chunked_prefill"] or made["max_num_tokens"] >= some.limits.max_input_tokens
    assert made["max_seq_len"] == some.limits.max_input_tokens + some.limits.max_output_tokens
    assert ("speculative_config" in made) is (draft_tokens(some) > 0)
    ranks = made["tensor_parallel_size"] if some.runtime.attention_dp else 1
    assert 0 <= made["max_batch_size"] * ranks - some.limits.max_concurrency < ranks
    experts = made.get("moe_expert_parallel_size", 1) * made.get("moe_tensor_parallel_size", 1)
    assert experts in (1, made["tensor_parallel_size"])


def test_arguments_of_ones_own_propose_tokens_too() -> None:
    own = {"speculative_config": {"decoding_type": "SA", "max_draft_len": 4}}
    some = recipe("1.4.0rc1", runtime={"llm_args": own}, limits=LIMITS | {"max_concurrency": 4096})
    made = llm_arguments(some)
    assert made["speculative_config"] == own["speculative_config"]
    assert draft_tokens(some) == 4
    assert made["max_num_tokens"] == 4096 * 5


@pytest.mark.parametrize(
    ("version", "own", "said"),
    [
        ("1.2.1", {"max_batch_size": 8}, "max_batch_size = 8: may not be given: limits.max_concurrency decides it"),
        ("1.2.1", {"kv_cache_config": {"dtype": "fp8"}}, "dtype = fp8: may not be given: quantization.kv_cache"),
        ("1.2.1", {"enable_attention_dp": True}, "may not be given: runtime.attention_dp decides it"),
        ("1.2.1", {"cuda_graph_config": {"enable_padding": False}}, "enable_padding = False: is True already"),
        ("1.2.1", {"gms_config": {}}, "in TensorRT-LLM 1.2.1 (TensorRT-LLM 1.3.0rc29 and 1.4.0rc1"),
        ("1.4.0rc1", {"sampler_type": "auto"}, "in TensorRT-LLM 1.4.0rc1 (TensorRT-LLM 1.1.0, 1.2.0 and 1.2.1 take"),
        ("1.4.0rc1", {"speculative_config": {"decoding_type": "PARD", "speculative_model": "x"}}, "draft.source"),
    ],
)  # fmt: skip
def test_arguments_of_ones_own_that_are_refused(version: str, own: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=r"runtime\.llm_args\.") as caught:
        llm_arguments(recipe(version, runtime={"llm_args": own}))
    assert said in str(caught.value)


def test_batch_sizes_of_graphs_of_ones_own_stand_alone() -> None:
    own = {"llm_args": {"cuda_graph_config": {"batch_sizes": [1, 2, 8]}}}
    made = llm_arguments(recipe("1.2.1", runtime=own))
    assert made["cuda_graph_config"] == {"enable_padding": True, "batch_sizes": [1, 2, 8]}
    with pytest.raises(
        ValueError, match=r"is given, and runtime\.llm_args\.cuda_graph_config\.batch_sizes too"
    ):
        recipe("1.2.1", runtime=own | {"max_graph_batch": 8})


def test_every_argument_that_the_recipe_makes_is_named_as_decided() -> None:
    made = llm_arguments(recipe("1.2.1", guided_decoding=True, **CASES["fp8-host-memory"]))
    assert "host_cache_size" in made["kv_cache_config"]
    paths = {
        f"{name}.{inner}" if isinstance(value, dict) else name
        for name, value in made.items()
        if name != "cuda_graph_config"  # of which the recipe may set other keys
        for inner in (value if isinstance(value, dict) else ("",))
    }
    assert paths <= set(decided())


def test_arguments_of_adapters() -> None:
    """Room for the largest rank and every kind of layer; CUDA graphs where upstream replays them with adapters."""
    module = AdapterModule("layers.0.self_attn.v_proj", "", 4, 64, 64, 1.0)
    known = {
        "tone": Adapter(modules=(module,)),
        "sql": Adapter(modules=(replace(module, name="layers.3.mlp.down_proj", rank=16),)),
    }
    named = {"adapters": {name: {"source": f"hf:org/{name}"} for name in known}}
    some = recipe("1.2.1", **named)
    made = lora_arguments(some, known)
    assert made == {
        "lora_config": {
            "lora_target_modules": ["attn_k", "attn_q", "attn_v", "mlp_4h_to_h"],
            "max_lora_rank": 16, "max_loras": 2, "max_cpu_loras": 2,
        }
    }  # fmt: skip
    for version in versions():
        assert not [*check(version, {**llm_arguments(recipe(version, **named)), **made})]
    assert llm_arguments(some)["cuda_graph_config"] is None
    assert llm_arguments(recipe("1.4.0rc1", **named))["cuda_graph_config"]["max_batch_size"] == 64
    assert lora_arguments(recipe("1.2.1"), {}) == {}


def test_a_batch_that_is_too_small_for_the_proposals_is_refused() -> None:
    limits = {"max_input_tokens": 64, "max_output_tokens": 64, "max_concurrency": 8, "max_batch_tokens": 16}
    runtime = {"speculation": {"method": "ngram", "max_draft_tokens": 3}}
    with pytest.raises(UserError, match=r"limits\.max_batch_tokens = 16: must be at least 32"):
        llm_arguments(recipe("1.2.1", runtime=runtime, limits=limits))


def test_overlap_that_upstream_has_not_is_refused() -> None:
    runtime = {"overlap_scheduler": True}
    with pytest.raises(UserError, match=r"runtime\.overlap_scheduler = true: TensorRT-LLM 1\.2\.1 cannot"):
        llm_arguments(recipe("1.2.1", runtime=runtime, draft=DRAFT))
    assert not llm_arguments(recipe("1.2.1", runtime=runtime, draft=EAGLE))["disable_overlap_scheduler"]


def test_ranks_share_the_host_memory_and_arrivals_are_awaited() -> None:
    sections: dict[str, Any] = {
        "kv_cache": {"host_memory_gib": 6.0},
        "scheduler": {"max_queue_delay_us": 2500},
        "runtime": {"tensor_parallel": 2, "pipeline_parallel": 2},
    }
    made = llm_arguments(recipe("1.2.1", **copy.deepcopy(sections)))
    assert made["kv_cache_config"]["host_cache_size"] == 6 * 2**30 // 4
    assert made["batch_wait_timeout_ms"] == 2.5
    with pytest.raises(
        UserError, match=r"max_queue_delay_us = 2500: TensorRT-LLM 1\.0\.0 does not wait .* 1\.1\.0, 1\.2\.0"
    ):
        llm_arguments(recipe("1.0.0", **copy.deepcopy(sections)))


def test_a_version_without_the_runtime_is_refused() -> None:
    with pytest.raises(UserError, match="is not supported"):
        llm_arguments(recipe("0.20.0"))


@pytest.mark.parametrize("version", versions())
def test_guided_decoding_goes_with_what_the_version_lets_it(version: str) -> None:
    made = llm_arguments(recipe(version, guided_decoding=True))
    assert made["guided_decoding_backend"] == "xgrammar"
    assert made["disable_overlap_scheduler"] is version.startswith("1.0")
    assert "guided_decoding_backend" not in llm_arguments(recipe(version, guided_decoding=False))
    drafted = {"guided_decoding": True, "draft": EAGLE}
    if version < "1.2":
        with pytest.raises(UserError, match="cannot hold answers to a form where tokens are proposed"):
            llm_arguments(recipe(version, **drafted))
        return
    assert llm_arguments(recipe(version, **drafted))["guided_decoding_backend"] == "xgrammar"
