"""What a recipe asks for, held against the contracts: both sides of each rule, everything at once, at its line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checkpoint.architecture import FAMILIES
from pipeline.contracts import checkpoint
from pipeline.contracts.models import known_model
from pipeline.contracts.rules import rule, rules
from pipeline.errors import InvalidInput
from pipeline.planning.model_facts import known_sizes, with_sizes
from pipeline.planning.preflight import CHECKS, findings, refuse
from pipeline.recipe import Recipe, load_recipe, packaged
from pipeline.stages.convert import FORMATS

FP8, LLAMA_70B, QWEN72, MIXTRAL = "llama-3.1-8b-fp8", "llama-3.3-70b-fp8", "qwen2.5-72b-fp8", "mixtral-8x7b"
EAGLE, NVFP4, AWQ, QWEN3, PHI = (
    "llama-3.1-8b-eagle3",
    "llama-3.3-70b-nvfp4",
    "llama-3.1-8b-int4-awq",
    "qwen3-32b-fp8",
    "phi-4-fp8",
)
TP, PP, EP = "runtime.tensor_parallel", "runtime.pipeline_parallel", "runtime.expert_parallel"
PLAIN = ("quantization.kv_cache=auto",)
TO_AWQ = ("quantization.format=int4_awq", *PLAIN)
NO_CONTEXT = ("kv_cache.reuse=false", "scheduler.chunked_context=false", "limits.max_batch_tokens=8192")
TO_PYTORCH = ("runtime.kind=pytorch",)
NGRAM = ("runtime.speculation={method: ngram, max_draft_tokens: 4}",)

# recipe, overrides, rule, severity on this side of its edge (None: nothing is said)
EDGES = [
    (FP8, (), "release", None),
    (FP8, ("runtime.version=1.2.2",), "release", "error"),
    (EAGLE, ("runtime.version=0.21.0",), "release", "error"),
    (NVFP4, ("runtime.version=1.3.0rc14",), "release", None),
    (FP8, ("runtime.version=1.3.0rc14",), "release", "error"),
    (FP8, (), "gpu", None),
    (FP8, ("runtime.gpu=h100",), "gpu", "error"),
    (FP8, ("runtime.gpu=a100-sxm-80g",), "gpu", "error"),
    (FP8, ("runtime.gpu=b300-sxm-288g", "draft=null"), "gpu", "warning"),
    (NVFP4, ("runtime.gpu=h200-sxm-141g",), "gpu", "error"),
    (AWQ, ("runtime.gpu=b200-sxm-180g",), "gpu", "error"),
    (QWEN3, (), "model.since", None),
    (QWEN3, ("runtime.version=1.0.0",), "model.since", None),
    (QWEN3, ("runtime.version=0.21.0",), "model.since", "error"),
    (AWQ, (), "kvq.weight_combo", None),
    (AWQ, ("quantization.kv_cache=fp8",), "kvq.weight_combo", "error"),
    (AWQ, ("quantization.kv_cache=fp8", "kv_cache.reuse=false"), "kvq.weight_combo", "error"),
    (AWQ, ("quantization.kv_cache=fp8", *NO_CONTEXT), "kvq.weight_combo", "warning"),
    (AWQ, ("quantization.kv_cache=fp8", "quantization.format=w4a8_awq"), "kvq.weight_combo", None),
    (AWQ, ("quantization.kv_cache=fp8", *TO_PYTORCH), "kvq.weight_combo", None),
    (FP8, (), "kvq.weight_combo", None),  # the draft is not quantized, so its cache is not either
    (FP8, ("draft.quantization=int4_awq",), "kvq.weight_combo", "error"),
    (FP8, ("quantization.kv_cache=int8",), "kvq.int8", "error"),
    (FP8, ("quantization.kv_cache=int8", "draft=null", *NO_CONTEXT), "kvq.int8", "warning"),
    (FP8, (), "kvq.int8", None),
    (FP8, (), "rt.spec_formats", None),
    (FP8, TO_AWQ, "rt.spec_formats", "warning"),
    (FP8, (*TO_AWQ, "draft=null"), "rt.spec_formats", None),
    (FP8, ("draft.max_draft_tokens=4",), "rt.spec_length", None),
    (FP8, ("draft.max_draft_tokens=10",), "rt.spec_length", None),
    (FP8, ("draft.max_draft_tokens=3",), "rt.spec_length", "note"),
    (FP8, ("draft.max_draft_tokens=11",), "rt.spec_length", "note"),
    (AWQ, ("limits.max_batch_tokens=81920",), "build.max_num_tokens_clip", None),  # 16 of 4096 + 1024
    (AWQ, ("limits.max_batch_tokens=81921",), "build.max_num_tokens_clip", "warning"),
    (AWQ, ("limits.max_batch_tokens=16384",), "build.max_num_tokens_large", None),
    (AWQ, ("limits.max_batch_tokens=16385",), "build.max_num_tokens_large", "warning"),
    (LLAMA_70B, ("runtime.version=0.20.0", "runtime.gpu=rtx-pro-6000-96g"), "known.issue", "warning"),
    (LLAMA_70B, ("runtime.version=0.21.0", "runtime.gpu=rtx-pro-6000-96g"), "known.issue", None),
    (LLAMA_70B, ("runtime.version=0.20.0", "runtime.gpu=h200-sxm-141g"), "known.issue", None),
    (FP8, ("runtime.version=0.20.0", "runtime.gpu=rtx-pro-6000-96g"), "known.issue", None),
    (NVFP4, ("runtime.version=1.0.0", f"{PP}=2"), "known.issue", "warning"),
    (NVFP4, ("runtime.version=1.1.0", f"{PP}=2"), "known.issue", None),
    (NVFP4, ("runtime.version=1.0.0",), "known.issue", None),
    (LLAMA_70B, ("runtime.version=1.0.0", f"{PP}=2"), "known.issue", None),
    (QWEN72, ("runtime.version=1.0.0", f"{PP}=2", *TO_PYTORCH), "known.issue", None),
    (NVFP4, NGRAM, "rt.spec_overlap", None),
    (NVFP4, (*NGRAM, "runtime.overlap_scheduler=true"), "rt.spec_overlap", "error"),
    (NVFP4, ("runtime.overlap_scheduler=true",), "rt.spec_overlap", None),
    (EAGLE, ("runtime.overlap_scheduler=true",), "rt.spec_overlap", None),
    (LLAMA_70B, ("draft.tensor_parallel=4",), "draft.ranks", None),
    (LLAMA_70B, ("draft.tensor_parallel=8",), "draft.ranks", "error"),
    (LLAMA_70B, ("draft.tensor_parallel=8", f"{PP}=2"), "draft.ranks", None),
    (NVFP4, ("runtime.instances=2",), "llmapi.instances", "error"),
    (NVFP4, ("runtime.instances=2", "runtime.version=1.3.0rc14"), "llmapi.instances", None),
    (QWEN72, ("runtime.build_flags=[reduce_fusion=enable, opt_num_tokens=32]",), "build.flags", None),
    (QWEN72, ("runtime.build_flags=[reduce_fusion]",), "build.flags", "error"),
    (QWEN72, ("runtime.build_flags=[reduce_fusion=on]",), "build.flags", "error"),
    (QWEN72, ("runtime.build_flags=[max_batch_size=8]",), "build.flags", "error"),
    (QWEN72, ("runtime.build_flags=[opt_num_tokens=many]",), "build.flags", "error"),
    (QWEN72, (f"{TP}=8",), "tp.attention_heads", None),
    (PHI, (f"{TP}=16",), "tp.attention_heads", "error"),
    (FP8, ("draft.tensor_parallel=3", f"{TP}=4"), "tp.attention_heads", "error"),
    (PHI, (f"{TP}=2",), "tp.kv_heads_even", None),
    (PHI, (f"{TP}=4",), "tp.kv_heads_even", "error"),
    (PHI, (f"{TP}=20",), "tp.kv_heads_duplicate", None),
    (PHI, (f"{TP}=16",), "tp.kv_heads_duplicate", "error"),
    (QWEN72, (f"{TP}=8",), "tp.kv_heads_copied", None),
    (QWEN72, (f"{TP}=16",), "tp.kv_heads_copied", "note"),
    (QWEN72, (f"{TP}=8",), "tp.hidden_and_ffn", None),
    (QWEN72, (f"{TP}=64",), "tp.hidden_and_ffn", None),
    (MIXTRAL, (f"{TP}=32", f"{EP}=4"), "tp.hidden_and_ffn", None),
    (MIXTRAL, (f"{TP}=3", f"{EP}=1"), "tp.hidden_and_ffn", "error"),
    (QWEN72, (*TO_AWQ, f"{TP}=1"), "tp.awq_block", None),
    (QWEN72, (*TO_AWQ, f"{TP}=2"), "tp.awq_block", "error"),
    (QWEN72, (*TO_AWQ, f"{TP}=2", "quantization.awq_block_size=64"), "tp.awq_block", None),
    (QWEN72, (*TO_AWQ, f"{TP}=4", "quantization.awq_block_size=64"), "tp.awq_block", "error"),
    (QWEN72, (f"{TP}=4",), "tp.awq_block", None),
    (QWEN72, (*TO_AWQ, f"{TP}=4", *TO_PYTORCH), "tp.awq_block", None),
    (QWEN72, (f"{TP}=8",), "vocab.pad_tp", None),
    (QWEN72, (f"{TP}=5",), "vocab.pad_tp", "note"),
    (AWQ, (), "vocab.pad_awq", None),
    (LLAMA_70B, (f"{PP}=5",), "pp.layers_even", None),
    (LLAMA_70B, (f"{PP}=3",), "pp.layers_even", "error"),
    (NVFP4, (f"{PP}=3",), "pp.layers_even", "warning"),
    (PHI, (f"{PP}=1",), "pp.models", None),
    (PHI, (f"{PP}=2",), "pp.models", "error"),
    (PHI, (f"{PP}=2", *TO_PYTORCH), "pp.models", None),
    (PHI, (), "calibrate.formats", None),
    (PHI, ("quantization.format=int8_sq",), "calibrate.formats", "error"),
    (PHI, TO_AWQ, "calibrate.formats", "error"),
    (FP8, ("quantization.format=int8_sq",), "calibrate.formats", None),
    (FP8, ("quantization.kv_cache=int8",), "calibrate.formats", "error"),
    (FP8, ("quantization.format=auto", "quantization.auto={effective_bits: 6}"), "calibrate.formats", "error"),
    (MIXTRAL, (f"{TP}=8", f"{EP}=8"), "moe.ep", None),
    (MIXTRAL, (f"{TP}=16", f"{EP}=16"), "moe.ep", "error"),
    (QWEN72, (f"{EP}=1",), "moe.dense", None),
    (QWEN72, (f"{EP}=2",), "moe.dense", "error"),
    (PHI, ("limits.max_input_tokens=14336",), "limits.positions", None),
    (PHI, ("limits.max_input_tokens=14337",), "limits.positions", "warning"),
    ("tiny-cpu", ("limits.max_input_tokens=768",), "limits.positions", None),
    ("tiny-cpu", ("limits.max_input_tokens=769",), "limits.positions", "error"),
]  # fmt: skip
BY_SIZES = {
    "rt.spec_same_vocab",
    "pp.layers",
    "vocab.pad_awq",
    "model.class",
    "quantization.groups",
}  # tested below, with sizes that are made up


def stop(recipe: Recipe) -> None:
    refuse(recipe, findings(recipe))


def severities(recipe: Recipe, name: str) -> list[str]:
    return [finding.severity for finding in findings(recipe) if finding.rule == name]


@pytest.mark.parametrize(("recipe", "overrides", "name", "severity"), EDGES)
def test_edges(recipe: str, overrides: Sequence[str], name: str, severity: str | None) -> None:
    found = severities(load_recipe(recipe, overrides), name)
    assert (found[0] if found else None) == severity  # the gravest comes first


def test_every_rule_is_checked_and_tested_on_both_sides() -> None:
    assert {one.id for one in rules()} == set(CHECKS)
    for name in CHECKS:
        sides = {severity is None for _, _, tested, severity in EDGES if tested == name}
        assert sides == {True, False} or name in BY_SIZES, name


def test_every_rule_names_its_sources() -> None:
    for one in rules():
        assert one.sources
        assert set(one.severities) == set(one.runtimes)


def test_layers_of_a_small_model() -> None:
    recipe = load_recipe(AWQ, (f"{PP}=16",))
    small = known_model("meta-llama/Llama-3.2-1B-Instruct")
    assert small is not None
    assert [c.rule for c in findings(recipe, with_sizes({"target": small})) if c.rule.startswith("pp.")] == []
    found = findings(recipe, with_sizes({"target": replace(small, layers=15)}))
    assert [c.rule for c in found if c.rule.startswith("pp.")] == ["pp.layers"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "severity"),
    [(FP8, (), "error"), (FP8, TO_PYTORCH, "warning"), ("tiny-cpu", (), "error")],
)
def test_vocabularies_of_draft_and_target(recipe: str, overrides: Sequence[str], severity: str) -> None:
    loaded = load_recipe(recipe, overrides)
    sizes = known_sizes(loaded)
    assert "rt.spec_same_vocab" not in {c.rule for c in findings(loaded, with_sizes(sizes))}
    sizes["draft"] = replace(sizes["draft"], vocab=sizes["draft"].vocab + 1)
    found = [c for c in findings(loaded, with_sizes(sizes)) if c.rule == "rt.spec_same_vocab"]
    assert [c.severity for c in found] == [severity]
    assert "exchange ids" in found[0].problem


def test_the_vocabulary_of_an_eagle_head_is_its_own_matter() -> None:
    recipe = load_recipe(EAGLE)
    sizes = known_sizes(recipe)
    sizes["draft"] = replace(sizes["draft"], vocab=32000)
    assert "rt.spec_same_vocab" not in {c.rule for c in findings(recipe, with_sizes(sizes))}


def test_awq_pads_the_vocabulary_to_a_multiple_of_64() -> None:
    recipe = load_recipe(AWQ)
    sizes = known_sizes(recipe)
    sizes["target"] = replace(sizes["target"], vocab=128257)
    (found,) = [c for c in findings(recipe, with_sizes(sizes)) if c.rule == "vocab.pad_awq"]
    assert found.severity == "note"
    assert "from 128257 to 128320" in found.problem


@pytest.mark.parametrize(
    ("recipe", "overrides", "architecture", "refused"),
    [
        (FP8, (), "MixtralForCausalLM", False),
        (FP8, (), "GemmaForCausalLM", True),
        (NVFP4, (), "GemmaForCausalLM", True),  # it is calibrated
        ("tiny-cpu", (), "Phi3ForCausalLM", False),
        ("tiny-cpu", (), "MixtralForCausalLM", True),
        (NVFP4, ("quantization={}",), "GemmaForCausalLM", False),  # upstream reads it
    ],
)
def test_classes_of_models(recipe: str, overrides: Sequence[str], architecture: str, refused: bool) -> None:
    loaded = load_recipe(recipe, overrides)
    sizes = {"target": replace(known_sizes(loaded)["target"], architecture=architecture)}
    assert ("model.class" in {c.rule for c in findings(loaded, with_sizes(sizes))}) == refused


def test_the_classes_are_those_that_are_read_and_converted() -> None:
    facts = rule("model.class").facts
    assert set(facts["calibrated"]) == set(FAMILIES)
    assert set(facts["cpu"]) == set(FAMILIES) - {"MixtralForCausalLM"}
    assert set(facts["converted"]) == set(checkpoint.facts()["architectures"]["names"])
    assert set(rule("calibrate.formats").facts["fused_formats"]) == set(FORMATS)


@pytest.mark.parametrize(
    ("recipe", "overrides", "columns", "fix"),
    [
        (QWEN72, TO_AWQ, 29568, None),
        (QWEN72, TO_AWQ, 29568 + 64, "64"),
        (QWEN72, TO_AWQ, 29568 + 32, "choose a format without groups, such as fp8"),
        (QWEN72, (), 29568 + 32, None),
        (NVFP4, (), 16 * 1001, None),
        (NVFP4, (), 16 * 1001 + 8, "choose a format without groups, such as fp8"),
    ],
)
def test_groups(recipe: str, overrides: Sequence[str], columns: int, fix: str | None) -> None:
    loaded = load_recipe(recipe, (*overrides, f"{TP}=1"))
    sizes = {"target": replace(known_sizes(loaded)["target"], intermediate=columns)}
    found = [
        c for c in findings(loaded, with_sizes(sizes)) if c.rule in ("quantization.groups", "tp.awq_block")
    ]
    assert [c.fix for c in found] == ([fix] if fix else [])


def test_a_mixture_of_formats_is_judged_by_each() -> None:
    auto = (
        "quantization.format=auto",
        "quantization.auto={effective_bits: 6, formats: [int4_awq, fp8]}",
        *PLAIN,
    )
    said = [
        c for c in findings(load_recipe(QWEN72, (*auto, "runtime.gpu=a100-sxm-80g"))) if c.severity == "error"
    ]
    assert [c.rule for c in said] == ["gpu", "calibrate.formats", "tp.awq_block"]
    assert said[0].problem.startswith("fp8: a100-sxm-80g")
    cache = load_recipe(AWQ, (*auto, "quantization.kv_cache=fp8"))
    assert severities(cache, "kvq.weight_combo") == [
        "warning"
    ]  # nobody says what the builder does with a mixture


@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_are_compatible_and_their_sizes_known(name: str) -> None:
    recipe = load_recipe(name)
    assert set(known_sizes(recipe)) == {"target"} | ({"draft"} if recipe.draft else set())
    assert refuse(recipe, findings(recipe)) == ()


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
    assert "known: " in by_key["runtime.version"].problem
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
    assert "target" not in known_sizes(recipe)
    assert {c.rule for c in findings(recipe)} == set()
    here = load_recipe(FP8, (f"model.source=local:{tmp_path}", "model.revision=null"))
    assert "target" not in known_sizes(here)  # fetching says what is missing
    (tmp_path / "config.json").write_text("[]")
    assert "target" not in known_sizes(here)


def test_severities_are_data() -> None:
    assert rule("limits.positions").severity("cpu") == "error"
    assert rule("limits.positions").severity("pytorch") == "warning"
