"""Whole evaluations of exported checkpoints; and damaged ones, which are refused or fail the gate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.contracts import engine_memory
from pipeline.errors import CheckpointError, StageError
from pipeline.models import TensorFiles
from pipeline.plan.plan import Plan, Step
from pipeline.plan.preflight import GeneratedConfig
from pipeline.prepare import Prepared
from pipeline.progress import Silent
from pipeline.recipe import Gate, load_recipe
from pipeline.runtimes import AUTO
from pipeline.stages.builder import STAGES, StageInput
from pipeline.stages.evaluate.comparison import evaluate
from pipeline.stages.evaluate.gate import hold_to_gate, judge
from pipeline.stages.evaluate.results import EvaluationMetrics, Export, read_metrics
from pipeline.store import ArtifactKey, Json, Store
from tests.support.calibrated import TRAINED, Calibrations

pytestmark = pytest.mark.models

Tensors = dict[str, np.ndarray]
LAYER = "model.layers.1.mlp.down_proj"
GATE = Gate(max_perplexity_increase=0.02, min_top1_agreement=0.97, max_kl=0.01)


def evaluated(calibrations: Calibrations, exported: Path, into: Path) -> EvaluationMetrics:
    """Of an export of the trained target of the recipes."""
    (metrics,) = compared(calibrations, [Export(exported)], into)
    return metrics


def compared(
    calibrations: Calibrations, exports: Sequence[Export], into: Path
) -> tuple[EvaluationMetrics, ...]:
    """Of several of its exports."""
    into.mkdir(parents=True, exist_ok=True)
    heldout = calibrations.trained_dataset() / "heldout.jsonl"
    evaluate(TRAINED, exports, heldout, into=into, progress=Silent(), device="cpu")
    return read_metrics(into)


def test_bf16_stays_near_f32_of_the_same_files(calibrations: Calibrations, tmp_path: Path) -> None:
    (metrics,) = compared(
        calibrations, [Export(calibrations.trained("fp8") / "hf", precision="bf16")], tmp_path
    )
    assert (metrics.name, metrics.precision) == ("hf in bf16", "bf16")
    assert metrics.beside_f32 is not None
    assert 0 < abs(metrics.beside_f32.perplexity_increase.value) < 0.005
    assert metrics.beside_f32.top1_agreement.value >= 0.99
    assert "; beside f32: perplexity " in judge([metrics], GATE).summary["hf in bf16"]


@pytest.mark.parametrize("form", ["fp8", "int8_sq", "int4_awq"])
def test_auto_is_judged_as_either_kind_of_processor_computes_it(
    calibrations: Calibrations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    export = Export(calibrations.trained(form) / "hf", precision="auto")
    assert (export.computed(256), export.computed(512)) == (("f32",), ("bf16", "f16_cache"))
    monkeypatch.setattr(engine_memory, "cpu_bf16_pays", lambda _hidden: True)
    metrics = compared(calibrations, [export], tmp_path)
    assert [one.name for one in metrics] == ["hf in bf16", "hf in f32 with keys and values in f16"]
    for figures, text in zip(metrics, judge(metrics, GATE).summary.values(), strict=True):
        loss = figures.beside_f32
        assert loss is not None
        assert 0 < abs(loss.perplexity_increase.value) < 0.005
        assert loss.top1_agreement.value >= 0.99
        assert "; beside f32: perplexity " in text


@pytest.mark.parametrize(
    "form",
    ["fp8", "int4_awq", *(pytest.param(text, marks=pytest.mark.slow) for text in ("int8_sq", "w4a8_awq"))],
)
def test_every_format_stays_near_the_original_in_both_exports(
    calibrations: Calibrations, tmp_path: Path, form: str
) -> None:
    lines = (calibrations.trained_dataset() / "heldout.jsonl").read_text().splitlines()
    samples = [json.loads(line)["tokens"] for line in lines]
    folder = calibrations.trained(form)
    both = compared(calibrations, [Export(folder / "hf"), Export(folder / "trtllm-tp2")], tmp_path)
    for metrics in both:
        assert metrics.positions == sum(len(sample) - 1 for sample in samples)
        assert metrics.format == form
        assert metrics.calibration_samples == 24
        assert 0 < metrics.mean_kl.value < 0.2
        assert metrics.mean_kl.value < metrics.p99_kl <= metrics.max_kl
        assert metrics.worst[0].kl == metrics.max_kl
    assert judge(both, GATE).passed, judge(both, GATE)
    # Of AWQ, gate and up have one smoothing in the one, and each its own in the other.
    unified, ranks = (metrics.mean_kl.value for metrics in both)
    assert ranks == pytest.approx(unified, rel=0.5 if "awq" in form else 1e-6)


def test_format_none_is_the_original(calibrations: Calibrations, tmp_path: Path) -> None:
    metrics = evaluated(calibrations, calibrations.trained("none") / "hf", tmp_path)
    assert metrics.top1_agreement.value == 1
    assert metrics.mean_kl.value < 1e-9
    assert metrics.perplexity_increase.value == 0
    assert metrics.worst == ()
    assert judge([metrics], Gate(max_perplexity_increase=0, min_top1_agreement=1)).passed


def test_the_same_files_give_the_same_bytes(calibrations: Calibrations, tmp_path: Path) -> None:
    for name in ("one", "two"):
        evaluated(calibrations, calibrations.trained("fp8") / "hf", tmp_path / name)
    assert (tmp_path / "one/metrics.json").read_bytes() == (tmp_path / "two/metrics.json").read_bytes()


class Spoken(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("runtime", "loaded", "besides"),
    [
        ("{kind: tensorrt, version: 1.2.1, gpu: h100-sxm-80g, tensor_parallel: 2}", "trtllm-tp2", ["hf"]),
        ("{kind: pytorch, version: 1.2.1, gpu: h100-sxm-80g}", "hf", []),
    ],
)
def test_the_stage_judges_and_names_the_files_that_the_runtime_loads(
    calibrations: Calibrations, tmp_path: Path, runtime: str, loaded: str, besides: list[str]
) -> None:
    recipe = load_recipe("tiny-cpu", (f"runtime={runtime}",))
    store, progress = Store(tmp_path), Spoken()
    folders = {
        "checkpoint": TRAINED,
        "calibrated": calibrations.trained("fp8"),
        "dataset": calibrations.trained_dataset(),
    }

    def make(into: Path) -> Mapping[str, Json]:
        work = StageInput(
            prepared=Prepared(Plan(recipe, (step,)), {}, (), GeneratedConfig({}), frozenset()),
            step=step,
            inputs=folders,
            into=into,
            caches=store.caches,
            reports=store.reports,
            executor=AUTO,
            progress=Silent(),
        )
        return STAGES["evaluate"](work)

    step = Step("evaluate", "evaluate", ArtifactKey("evaluate"), {})
    evaluation = store.obtain(step.key, make, recipe=recipe.name, progress=Silent())
    assert [metric.files for metric in read_metrics(evaluation.path)] == [loaded, *besides]
    assert list(evaluation.manifest.facts["exports"]) == [loaded, *besides]  # type: ignore[arg-type]
    hold_to_gate(recipe, evaluation, store, progress)
    first, *others = progress.lines
    assert first.startswith(f"    gate: {loaded}, which {recipe.runtime.kind} loads: perplexity ")
    assert [line.split(": ")[1] for line in others if "gate" in line] == besides
    page = Path(progress.lines[-1].removeprefix("    report: ")).read_text(encoding="utf-8")
    assert " and ".join([loaded, *besides]) in page


def test_ranks_with_a_wrong_scale_fail_although_the_other_export_is_right(
    calibrations: Calibrations, tmp_path: Path
) -> None:
    """They were not looked at, and engines are built from them."""
    ranks = tmp_path / "trtllm-tp2"
    shutil.copytree(calibrations.trained("fp8") / "trtllm-tp2", ranks)
    for file in ranks.glob("*.safetensors"):
        tensors = {name: np.array(value) for name, value in TensorFiles(ranks, file.name).items()}
        tensors["transformer.layers.3.mlp.proj.weights_scaling_factor"] *= np.float32(0.05)
        save_file(tensors, file)
    exports = [Export(ranks), Export(calibrations.trained("fp8") / "hf")]
    verdict = judge(compared(calibrations, exports, tmp_path), GATE)
    assert {check.files for check in verdict.checks if not check.passed} == {"trtllm-tp2"}
    assert "OVER    trtllm-tp2" in str(verdict)


def test_the_scale_of_a_runtime_s_own_cache_takes_the_place_of_the_files(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    def ones(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            tensors[name] = np.ones_like(tensors[name])

    stored, as_ones = calibrations.trained("fp8", "fp8") / "hf", damaged("fp8", ones, "fp8")
    exports = [Export(stored, kv_scale=1.0), Export(as_ones), Export(stored)]
    own, changed, files = compared(calibrations, exports, tmp_path)
    assert (own.kv_scale, files.kv_scale) == (1.0, None)
    assert own.mean_kl == changed.mean_kl
    assert own.mean_kl != files.mean_kl


@pytest.fixture
def damaged(calibrations: Calibrations, tmp_path: Path) -> Callable[..., Path]:
    def make(form: str, damage: Callable[[Tensors], object], kv_cache: str = "auto") -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(calibrations.trained(form, kv_cache) / "hf", folder)
        tensors = {name: np.array(value) for name, value in TensorFiles(folder).items()}
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def test_a_scale_that_is_gone_is_refused(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    folder = damaged("int4_awq", lambda tensors: tensors.pop(LAYER + ".weight_scale"))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale is missing"):
        evaluated(calibrations, folder, tmp_path / "into")


def _swap_nibbles(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = (tensors[name] << 4) | (tensors[name] >> 4)


def _shuffle_groups(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = np.ascontiguousarray(tensors[name][::-1])


def _times(part: str, factor: float) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(part)]:
            tensors[name] = np.array(tensors[name] * np.float32(factor), tensors[name].dtype)

    damage.__name__ = f"{part} times {factor}"
    return damage


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("int4_awq", _swap_nibbles),
        pytest.param("int8_sq", _shuffle_groups, marks=pytest.mark.slow),
        ("int4_awq", _times("pre_quant_scale", 2)),
        ("fp8", _times("weight_scale", 2)),
        ("fp8", _times("input_scale", 0.02)),
        pytest.param("w4a8_awq", _times("weight_scale_2", 0.02), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_scales_and_weights_that_do_not_belong_together_fail_the_gate(
    calibrations: Calibrations,
    damaged: Callable[..., Path],
    tmp_path: Path,
    form: str,
    damage: Callable[[Tensors], object],
) -> None:
    metrics = evaluated(calibrations, damaged(form, damage), tmp_path / "into")
    verdict = judge([metrics], GATE)
    assert not verdict.passed
    assert verdict.advice


@pytest.mark.parametrize("form", ["int8_sq", "int4_awq"])
def test_inputs_of_integers_are_judged_rounded_in_bf16(
    calibrations: Calibrations, tmp_path: Path, form: str
) -> None:
    export = Export(calibrations.trained(form) / "hf", precision="bf16")
    (metrics,) = compared(calibrations, [export], tmp_path)
    loss = metrics.beside_f32
    assert loss is not None
    assert loss.perplexity_increase.value < 0.005
    assert loss.top1_agreement.value >= 0.99


def test_another_group_size_is_refused(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    folder = damaged("int4_awq", len)
    for name in ("config.json", "hf_quant_config.json"):
        text = (folder / name).read_text().replace('"group_size": 64', '"group_size": 128')
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match="weight_scale has shape"):
        evaluated(calibrations, folder, tmp_path / "into")


def test_another_model_is_refused(calibrations: Calibrations, tmp_path: Path) -> None:
    other = calibrations.source("qwen3")
    with pytest.raises(CheckpointError, match=r"is not the model of .*hidden 256 and 128"):
        evaluated(calibrations, other, tmp_path)


def test_values_that_overflow_are_named_with_their_layer(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[LAYER + ".weight_scale"] = np.array(3e38, np.float32)

    with pytest.raises(StageError, match="layer 1 computes values that are not finite"):
        evaluated(calibrations, damaged("fp8", damage), tmp_path / "into")


def test_held_out_text_that_does_not_fit(calibrations: Calibrations, tmp_path: Path) -> None:
    for line in ('{"tokens":[1]}', '{"tokens":[1,600]}', ""):
        (tmp_path / "heldout.jsonl").write_text(line)
        source = calibrations.source()
        with pytest.raises(StageError, match=r"heldout\.jsonl"):
            evaluate(
                source,
                [Export(source)],
                tmp_path / "heldout.jsonl",
                into=tmp_path,
                progress=Silent(),
                device="cpu",
            )
