"""What a plan depends on: a key changes with everything that changes its artifact, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import Plan, PlanFacts, evaluated_exports, make_plan, rank_exports
from pipeline.recipe import Recipe, load_recipe

AROUND = PlanFacts(
    sources={"target": {"sha256": "t"}, "draft": {"sha256": "d"}},
    dataset={"sha256": "s"},
    tools={"calibrate": {"nvidia-modelopt": "1"}, "build": {"openvino": "1"}},
    build={"target": {"precision": "f32"}, "draft": {"precision": "f32"}},
    package={"max_concurrency": 4},
)
STEPS = [
    "fetch.target", "fetch.draft", "dataset", "calibrate.target", "evaluate", "build.target", "build.draft", "package",
]  # fmt: skip


def tiny(*overrides: str) -> Recipe:
    return load_recipe("tiny-cpu", overrides)


def changed(before: Plan, after: Plan) -> set[str]:
    return {step.name for step in before if after[step.name].key.digest != step.key.digest}


def test_steps_of_the_tiny_recipe() -> None:
    assert [step.name for step in make_plan(tiny(), AROUND)] == STEPS


def test_inputs_come_before_their_users() -> None:
    seen: set[str] = set()
    for step in make_plan(tiny("draft.quantization=fp8"), AROUND):
        assert set(step.inputs.values()) <= seen
        seen.add(step.name)


def test_a_quantized_draft_is_calibrated_and_built_from_that() -> None:
    plan = make_plan(tiny("draft.quantization=fp8"), AROUND)
    assert plan["build.draft"].inputs == {"checkpoint": "calibrate.draft"}


def test_a_quantized_draft_is_exported_for_the_ranks_of_its_engine() -> None:
    """On tensorrt; elsewhere it is read from the Hugging Face export."""
    trt = "runtime={kind: tensorrt, version: 1.2.1, gpu: h100-sxm-80g, tensor_parallel: 4}"
    draft = ("draft.quantization=fp8", "draft.tensor_parallel=2")
    plan = make_plan(tiny(trt, *draft), AROUND)
    assert plan["calibrate.target"].key.settings["export_tensor_parallel"] == [4]
    assert plan["calibrate.draft"].key.settings["export_tensor_parallel"] == [2]
    assert make_plan(tiny(draft[0]), AROUND)["calibrate.draft"].key.settings["export_tensor_parallel"] == []


def test_pipeline_stages_and_groups_of_experts_are_exported_where_the_engine_has_them() -> None:
    trt = "runtime={kind: tensorrt, version: 1.2.1, gpu: h100-sxm-80g, tensor_parallel: 4, %s}"
    sizes = "quantization.export_tensor_parallel=[2, 4]"
    plain = make_plan(tiny(trt % "pipeline_parallel: 1", sizes), AROUND)["calibrate.target"].key.settings
    assert plain["export_tensor_parallel"] == [2, 4]
    assert not {"export_pipeline_parallel", "export_expert_parallel"} & set(plain)
    spread = tiny(trt % "pipeline_parallel: 2, expert_parallel: 4", sizes)
    settings = make_plan(spread, AROUND)["calibrate.target"].key.settings
    assert settings["export_pipeline_parallel"] == [1, 2]
    assert settings["export_expert_parallel"] == [1, 4]
    assert rank_exports(spread, "target")[1] == parallelism(spread, "target")


GPU = "runtime={kind: %s, version: 1.2.1, gpu: h100-sxm-80g, tensor_parallel: 4}"


@pytest.mark.parametrize(
    ("overrides", "judged"),
    [
        ((), ["hf", "trtllm-tp1"]),
        ((GPU % "tensorrt",), ["trtllm-tp4", "hf"]),
        (
            (GPU % "tensorrt", "quantization.export_tensor_parallel=[2, 4]"),
            ["trtllm-tp4", "trtllm-tp2", "hf"],
        ),
        ((GPU % "pytorch",), ["hf"]),
        ((GPU % "pytorch", "quantization.export_tensor_parallel=[2]"), ["hf", "trtllm-tp2"]),
    ],
)
def test_all_exports_are_judged_and_first_what_the_runtime_loads(
    overrides: tuple[str, ...], judged: list[str]
) -> None:
    recipe = tiny(*overrides)
    assert [export.folder for export in evaluated_exports(recipe)] == judged
    settings: Any = make_plan(recipe, AROUND)["evaluate"].key.settings
    assert [export["folder"] for export in settings["judged"]] == judged


def test_an_export_is_judged_in_the_types_that_the_runtime_may_compute_in() -> None:
    def judged(*overrides: str) -> Any:
        return make_plan(tiny(*overrides), AROUND)["evaluate"].key.settings["judged"]

    assert [export.get("precision") for export in judged()] == ["auto", None]
    assert [export.get("precision") for export in judged("runtime.precision=f32")] == [None, None]
    assert not any("precision" in export for export in judged(GPU % "pytorch"))


def test_a_cache_is_judged_with_the_scale_that_the_runtime_computes_with() -> None:
    """TensorRT-LLM's PyTorch backend reads no scales of an FP8 cache; engines and others do."""
    fp8 = "quantization.kv_cache=fp8"
    assert evaluated_exports(tiny(GPU % "pytorch", fp8))[0].kv_scale == 1.0
    assert evaluated_exports(tiny(GPU % "pytorch"))[0].kv_scale is None
    for others in ((GPU % "tensorrt", fp8), (fp8,)):
        assert {export.kv_scale for export in evaluated_exports(tiny(*others))} == {None}


def test_unquantized_has_no_calibration_and_no_gate() -> None:
    recipe = tiny("quantization={format: none}")
    plan = make_plan(recipe, AROUND)
    assert [step.name for step in plan] == [
        "fetch.target",
        "fetch.draft",
        "build.target",
        "build.draft",
        "package",
    ]
    assert plan["build.target"].inputs == {"checkpoint": "fetch.target"}


AFTER_CALIBRATION = {"calibrate.target", "evaluate", "build.target", "package"}


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("name=other", set()),
        ("slo.ttft_p95_ms=10", set()),
        ("quantization.gate.min_top1_agreement=0.5", set()),
        ("quantization.calibration.seed=7", {"dataset"} | AFTER_CALIBRATION),
        ("quantization.calibration.samples=256", {"dataset"} | AFTER_CALIBRATION),
        ("quantization.format=int8_sq", AFTER_CALIBRATION),
        ("quantization.calibration.batch_size=4", AFTER_CALIBRATION),
        ("quantization.export_tensor_parallel=[1, 2]", AFTER_CALIBRATION),
    ],
)
def test_the_recipe_changes_what_it_should(override: str, steps: set[str]) -> None:
    assert changed(make_plan(tiny(), AROUND), make_plan(tiny(override), AROUND)) == steps


@pytest.mark.parametrize(
    ("around", "steps"),
    [
        (replace(AROUND, sources={"target": {"sha256": "x"}, "draft": {"sha256": "d"}}),
         {"fetch.target", "dataset"} | AFTER_CALIBRATION),
        (replace(AROUND, sources={"target": {"sha256": "t"}, "draft": {"sha256": "x"}}),
         {"fetch.draft", "build.draft", "package"}),
        (replace(AROUND, dataset={"sha256": "x"}), {"dataset"} | AFTER_CALIBRATION),
        (replace(AROUND, tools={"calibrate": {"nvidia-modelopt": "2"}, "build": {"openvino": "1"}}), AFTER_CALIBRATION),
        (replace(AROUND, tools={"calibrate": {"nvidia-modelopt": "1"}, "build": {"openvino": "2"}}),
         {"build.target", "build.draft", "package"}),
        (replace(AROUND, build={role: {"precision": "bf16"} for role in ("target", "draft")}),
            {"build.target", "build.draft", "package"}),
        (replace(AROUND, package={"max_concurrency": 8}), {"package"}),
    ],
)  # fmt: skip
def test_the_surroundings_change_what_they_should(around: PlanFacts, steps: set[str]) -> None:
    assert changed(make_plan(tiny(), AROUND), make_plan(tiny(), around)) == steps


def test_a_sample_count_out_of_bounds_is_recorded() -> None:
    samples = "quantization.calibration.samples=4"
    plan = make_plan(tiny(samples, "quantization.calibration.allow_sample_count=true"), AROUND)
    assert plan["dataset"].key.settings["allow_sample_count"] is True
    assert "allow_sample_count" not in make_plan(tiny(), AROUND)["dataset"].key.settings


def test_the_budget_of_auto_is_part_of_the_calibration() -> None:
    plans = [
        make_plan(tiny("quantization.format=auto", f"quantization.auto.effective_bits={bits}"), AROUND)
        for bits in (5, 6)
    ]
    assert changed(*plans) == AFTER_CALIBRATION
