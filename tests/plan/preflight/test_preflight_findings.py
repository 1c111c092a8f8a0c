"""What a recipe asks for, held against the contracts: both sides of each rule, everything at once, at its line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from pipeline.contracts import read_facts
from pipeline.contracts.rules import rule
from pipeline.errors import InvalidInput
from pipeline.models.architecture import FAMILIES
from pipeline.plan.model_facts import facts_from_sizes, offline_sizes
from pipeline.plan.preflight import allow, findings, refuse
from pipeline.prepare.facts import read_settings
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.quantization import KvCacheFormat
from pipeline.runtimes.cpu.ir.families import DECODERS
from pipeline.runtimes.tensorrt.checkpoint import FORMATS, MODEL_TYPES, ROPES
from tests.support.preflight.case import (
    AWQ,
    FP8,
    NVFP4,
    PHI,
    PLAIN,
    QWEN72,
    TINY,
    TO_AWQ,
    TP,
    W4A8,
    Case,
    sized,
)


def stop(recipe: Recipe) -> None:
    refuse(recipe, findings(recipe))


def severities(recipe: Recipe, name: str) -> list[str]:
    return [finding.severity for finding in findings(recipe) if finding.rule == name]


def test_awq_pads_the_vocabulary_to_a_multiple_of_64() -> None:
    (found,) = Case("vocab.pad_awq", "note", AWQ, models=sized(vocab=128257)).findings()
    assert "from 128257 to 128320" in found.problem


def test_the_classes_are_those_that_are_read_and_converted() -> None:
    facts = rule("model.class").facts
    engines = {name for name, family in FAMILIES.items() if family in MODEL_TYPES}
    further = {"Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"}
    assert set(facts["calibrated"]) == engines | further
    assert set(facts["cpu"]) == set(FAMILIES)
    assert set(FAMILIES.values()) == set(DECODERS)
    assert rule("model.rope").facts["kinds"] == list(ROPES)
    assert set(facts["converted"]) == set(read_facts("checkpoint.yaml")["architectures"]["names"])
    assert set(rule("calibrate.formats").facts["joined_engine_formats"]) == set(FORMATS)


@pytest.mark.parametrize(
    ("recipe", "overrides", "columns", "fix"),
    [
        (QWEN72, TO_AWQ, 29568, None),
        (QWEN72, TO_AWQ, 29568 + 64, "64"),
        (QWEN72, TO_AWQ, 29568 + 32, "choose a format without groups, such as fp8"),
        (QWEN72, (*W4A8, *PLAIN), 29568 + 64, "choose a format without groups, such as fp8"),
        (QWEN72, (), 29568 + 32, None),
        (NVFP4, (), 16 * 1001, None),
        (NVFP4, (), 16 * 1001 + 8, "choose a format without groups, such as fp8"),
    ],
)
def test_groups(recipe: str, overrides: Sequence[str], columns: int, fix: str | None) -> None:
    loaded = load_recipe(recipe, (*overrides, f"{TP}=1"))
    sizes = {"target": replace(offline_sizes(loaded)["target"], intermediate=columns)}
    found = [
        c
        for c in findings(loaded, facts_from_sizes(sizes))
        if c.rule in ("quantization.groups", "tp.awq_block")
    ]
    assert [c.fix for c in found] == ([fix] if fix else [])


def test_no_fix_advises_blocks_that_w4a8_does_not_have() -> None:
    """Blocks of 64 would let a rank have whole ones, and TensorRT-LLM has no kernels for them."""
    for form, advised in (("int4_awq", True), ("w4a8_awq", False)):
        loaded = load_recipe(QWEN72, (f"quantization.format={form}", *PLAIN, f"{TP}=2"))
        (found,) = (c for c in findings(loaded) if c.rule == "tp.awq_block")
        assert ("set quantization.awq_block_size to 64" in found.fix) is advised
        assert f"set {TP} to 1" in found.fix


def test_w4a8_in_blocks_of_64_is_refused_with_what_is_right() -> None:
    loaded = load_recipe(AWQ, (*W4A8, "quantization.awq_block_size=64"))
    (found,) = (c for c in findings(loaded) if c.rule == "quantization.w4a8_group")
    assert str(found) == (
        "quantization.awq_block_size = 64: must be 128 for w4a8_awq: TensorRT-LLM has no kernels for other groups "
        "(set quantization.awq_block_size to 128, or quantization.format to int4_awq)"
    )


@pytest.mark.parametrize("kv_cache", get_args(KvCacheFormat))
def test_every_kv_cache_that_recipes_offer_can_be_built(kv_cache: str) -> None:
    for kind in ("tensorrt", "pytorch", "cpu"):
        recipe, more = (TINY, ()) if kind == "cpu" else (FP8, (f"runtime.kind={kind}",))
        stop(load_recipe(recipe, (f"quantization.kv_cache={kv_cache}", *more)))


def test_a_mixture_of_formats_is_judged_by_each() -> None:
    auto = (
        "quantization.format=auto",
        "quantization.auto={effective_bits: 6, formats: [int4_awq, fp8]}",
        *PLAIN,
    )
    said = [
        c for c in findings(load_recipe(QWEN72, (*auto, "runtime.gpu=a100-sxm-80g"))) if c.severity == "error"
    ]
    assert [c.rule for c in said] == ["sm.fp8", "calibrate.engines", "tp.awq_block"]
    assert said[0].problem.startswith("fp8: a100-sxm-80g")
    cache = load_recipe(AWQ, (*auto, "quantization.kv_cache=fp8"))
    assert severities(cache, "kvq.weight_combo") == [
        "warning"
    ]  # nobody says what the builder does with a mixture


def test_everything_at_once_at_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        "name: wrong\n"
        "model: {source: 'hf:Qwen/Qwen2.5-72B-Instruct'}\n"
        "quantization:\n"
        "  format: int4_awq\n"
        "  kv_cache: fp8\n"
        "  calibration: {dataset: cnn_dailymail}\n"
        "runtime:\n"
        "  kind: tensorrt\n"
        "  version: 1.2.4\n"
        "  gpu: b200-sxm-180g\n"
        "  tensor_parallel: 4\n"
        "  expert_parallel: 2\n"
        "limits: {max_input_tokens: 4096, max_output_tokens: 512, max_concurrency: 8}\n"
    )
    with pytest.raises(InvalidInput) as caught:
        stop(load_recipe(file, ("runtime.pipeline_parallel=64",)))
    faults = {(fault.key, fault.line, fault.where) for fault in caught.value.faults}
    assert faults == {
        ("quantization.format", 4, str(file)), ("quantization.kv_cache", 5, str(file)),
        ("runtime.version", 9, str(file)), ("runtime.tensor_parallel", 11, str(file)),
        ("runtime.expert_parallel", 12, str(file)), ("runtime.pipeline_parallel", None, "--set"),
    }  # fmt: skip
    assert all(fault.value for fault in caught.value.faults)
    assert caught.value.exit_code == 2
    by_key = {fault.key: fault for fault in caught.value.faults}
    assert "near: " in by_key["runtime.version"].problem
    assert by_key["runtime.tensor_parallel"].fix == "set runtime.tensor_parallel to 1"
    assert by_key["runtime.expert_parallel"].fix == "remove runtime.expert_parallel"


def test_an_override_is_named_as_the_place() -> None:
    with pytest.raises(InvalidInput, match=re.escape("--set: runtime.gpu = h100: GPU h100 is not known")):
        stop(load_recipe(FP8, ("runtime.gpu=h100",)))


def test_a_recipe_made_in_python_has_no_lines() -> None:
    recipe = Recipe.model_validate(load_recipe(FP8).model_dump(mode="json") | {"name": "made"})
    changed = recipe.model_dump(mode="json")
    changed["runtime"]["gpu"] = "h100"
    with pytest.raises(InvalidInput) as caught:
        stop(Recipe.model_validate(changed))
    (fault,) = caught.value.faults
    assert (fault.key, fault.value, fault.line, fault.where) == ("runtime.gpu", "h100", None, "")
    assert str(caught.value).startswith("recipe made: 1 fault")


def test_sizes_of_an_unknown_model_are_not_judged(tmp_path: Path) -> None:
    recipe = load_recipe(FP8, ("model.source=hf:some/model", "model.revision=null", f"{TP}=3"))
    assert "target" not in offline_sizes(recipe)
    assert {c.rule for c in findings(recipe)} == {"release.frozen"}
    here = load_recipe(FP8, (f"model.source=local:{tmp_path}", "model.revision=null"))
    assert "target" not in offline_sizes(here)  # fetching says what is missing
    (tmp_path / "config.json").write_text("[]")
    assert "target" not in offline_sizes(here)


def test_one_that_is_explained_is_not_said_again_by_the_runtime() -> None:
    recipe = load_recipe(AWQ, ("quantization.kv_cache=fp8",))
    written = read_settings(recipe)
    assert written.refusals
    found = findings(recipe, emitted=written)
    assert [finding.rule for finding in found if finding.severity == "error"] == ["kvq.weight_combo"]


def test_a_finding_says_all() -> None:
    (finding,) = Case("tp.attention_heads", "error", PHI, (f"{TP}=16",)).findings()
    assert (finding.rule, finding.keys[0], finding.value, finding.sources) == (
        "tp.attention_heads",
        TP,
        16,
        ("attn",),
    )
    assert finding.problem == "must divide the 40 attention heads of the target"
    assert finding.reason == "each rank computes whole heads"
    assert finding.fix == "set runtime.tensor_parallel to 1 or 2 or 5 or 10 or 20 or 40"


def test_what_may_be_allowed_hides_no_refusal_of_the_runtime() -> None:
    recipe = load_recipe(FP8, ("runtime.gpu=a100-sxm-80g",))  # whose builder would turn attention in FP8 off
    found = allow(findings(recipe, emitted=read_settings(recipe)), frozenset({"sm.fp8"}))
    assert [finding.rule for finding in found if finding.stops] == ["runtime.refuses"]
    with pytest.raises(InvalidInput, match=r"\[runtime\.refuses\]"):
        refuse(recipe, found)
