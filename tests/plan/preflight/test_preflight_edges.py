"""Every rule, both sides of its edge: from one table, which lacks no rule."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.contracts import gpus
from pipeline.contracts.rules import GROUPS, Severity, rule, rules, source
from pipeline.plan.preflight.run_rules import CHECKED, MACHINE_GROUPS, RECIPE_GROUPS
from tests.support.preflight import machines, recipes, written
from tests.support.preflight.case import AWQ, FP8, Case

ROOT = Path(__file__).parents[3]
CASES = [*recipes.CASES, *written.CASES, *machines.CASES]

DECOUPLED = "serving/test_engine_models.py::test_engines_are_decoupled_as_the_bls_that_streams_from_them"
# Rules that are held where something is written -> the tests that hold what is right, and refuse what is wrong.
PROOFS = {
    "ckpt.mapping": (
        "runtimes/test_tensorrt_build.py::test_ranks",
        "runtimes/test_tensorrt_build.py::test_a_checkpoint_for_other_ranks",
    ),
    "checkpoint.qwen_seq_length": (
        "runtimes/test_tensorrt_checkpoint.py::test_what_upstream_reads_without_a_default_is_written_and_asked_for",
        "stages/test_calibrate_exports.py::test_the_tensorrt_llm_configuration_is_repaired",
    ),
    "rt.spec_kv_reuse": (
        "recipe/test_recipe_validators.py::test_sound",
        "recipe/test_recipe_validators.py::test_broken",
    ),
    "rt.decoupled_stream": (DECOUPLED,),
    "rt.spec_decoupled": (DECOUPLED,),
    "rt.spec_exclude_input": ("model_repo/test_draft_calls.py::test_what_each_model_is_asked",),
    "rt.spec_batch": ("serving/test_serving_draft.py::test_what_does_not_go_with_a_draft_is_refused_by_name",),
    "rt.logits_dtype": ("serving/test_engine_models.py::test_types_of_logits_are_the_same_all_the_way",),
    "rt.required_param_keys": (
        "contracts/test_inflight_batcher.py::test_the_least_is_enough_and_each_part_of_it_is_needed",
        "contracts/test_inflight_batcher.py::"
        "test_keys_that_the_backend_reads_without_a_net_must_exist_but_may_be_empty",
    ),
    "llmapi.multi_gpu": ("serving/test_launch_gpu.py::test_what_holds_of_every_plan",),
    "port.models_tree": (
        "serving/test_engine_packaging.py::test_each_model_has_all_that_it_needs",
        "serving/test_engine_packaging.py::test_a_value_that_the_backend_would_not_read_is_refused",
        "model_repo/test_draft_calls.py::test_every_call_has_tensors_of_the_release",
    ),
    "mpi.world_launch": ("serving/test_launch_gpu.py::test_what_holds_of_every_plan",),
    "gpu_ids.count": ("serving/test_launch_gpu.py::test_instances_have_a_gpu_a_rank",),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edges(case: Case) -> None:
    found = case.findings()
    assert (found[0].severity if found else None) == case.says  # the gravest comes first
    for finding in found:
        fields = {finding.keys[0], finding.keys[0].partition(".")[0]} & {*rule(case.rule).fields}
        assert fields or case.rule in ("runtime.refuses", "known.issue")
        assert finding.problem
        assert finding.reason
        assert all(source(name) for name in finding.sources)


def test_every_rule_has_cases_on_both_sides_of_its_edge() -> None:
    sides = {name: {case.says is None for case in CASES if case.rule == name} for name in CHECKED}
    assert {name for name, found in sides.items() if found != {True, False}} == OLD_GPUS
    assert {case.rule for case in CASES} <= CHECKED


def test_every_rule_is_checked_in_the_module_of_its_group_or_held() -> None:
    groups = {**RECIPE_GROUPS, **MACHINE_GROUPS}
    assert set(groups) == set(GROUPS)
    for group, checks in groups.items():
        assert set(checks) == {rule.id for rule in rules() if rule.group == group and not rule.held}, group


def test_what_a_rule_says_of_itself() -> None:
    for each in rules():
        assert all(source(name) for name in each.sources), each.id
        assert set(each.severities) == set(each.runtimes), each.id
        assert all((each.fields, each.when, each.check, each.reason)), each.id
        assert bool(each.held) == bool(each.by), each.id
        assert each.gravest == "error" or not each.never_allowed, each.id


def test_held_rules_are_proved_by_a_test() -> None:
    assert {rule.id for rule in rules() if rule.held} == set(PROOFS)
    for tests in PROOFS.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test
    for each in rules():
        file, _, name = each.by.partition(":")
        assert not each.by or (ROOT / file).is_file(), each.by
        assert not name or f"def {name}(" in (ROOT / file).read_text(), each.by


OLD_GPUS = {"sm.bf16"}  # whose edge is below all GPUs that are known


@pytest.mark.parametrize("sm", [75, 80])
def test_gpus_that_are_older_than_all_that_are_known(monkeypatch: pytest.MonkeyPatch, sm: int) -> None:
    old = tuple(replace(product, sm=sm) if product.name == "a10-24g" else product for product in gpus.gpus())
    monkeypatch.setattr(gpus, "gpus", lambda: old)
    says: Severity | None = "error" if sm < 80 else None
    plain = Case("sm.bf16", says, AWQ, ("quantization={}", "runtime.gpu=a10-24g")).findings()
    drafted = Case("rt.spec_sm", says, FP8, ("quantization={}", "runtime.gpu=a10-24g")).findings()
    assert [recipe.severity for recipe in (*plain, *drafted)] == ([says, says] if says else [])


def test_rules_of_recipes_that_are_rules_of_preflight() -> None:
    named = set(
        re.findall(r'"((?:rt|moe|ckpt|build)\.\w+)"', (ROOT / "pipeline/recipe/validators.py").read_text())
    )
    assert named == {"rt.spec_kv_reuse", "rt.backend_supports_spec", "moe.ep", "ckpt.mapping"}
    assert all(rule(name).never_allowed for name in named)  # such a recipe is not read
