"""Format `auto`: what is measured once, what budgets make of it, and that the files hold what was chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import StageError, UserError
from pipeline.models import CheckpointReader
from pipeline.progress import Silent
from pipeline.recipe import Quantization
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.stages.calibrate import auto
from pipeline.stages.calibrate.calibration import calibrate, measure_sensitivity
from pipeline.stages.evaluate.decoder import Decoder
from tests.support.calibrated import Calibrations, facts
from tests.support.decoding import Stateful

pytestmark = pytest.mark.models

FORMATS = ("int4_awq", "w4a16_nvfp4", "fp8")


def budget(bits: float, kv_cache: str = "auto") -> Quantization:
    calibration = {"dataset": "support", "samples": 12, "max_tokens": 48, "allow_sample_count": True}
    return Quantization.model_validate(
        {
            "format": "auto",
            "auto": {"effective_bits": bits, "formats": list(FORMATS)},
            "kv_cache": kv_cache,
            "awq_block_size": 64,
            "calibration": calibration,
        }
    )


@pytest.fixture(scope="module")
def measured(calibrations: Calibrations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a measurement that was stopped at its first score, and gone on with."""
    into, kept = tmp_path_factory.mktemp("sensitivity"), tmp_path_factory.mktemp("kept") / "search.pt"
    arguments: dict[str, Any] = {"kept": kept, "into": into, "progress": Silent(), "device": "cpu"}
    inputs = (calibrations.source(), calibrations.dataset(), budget(6))
    batches: list[object] = []

    def counted(*given: Any) -> Any:
        batches.append(given)
        return forward(*given)

    def stopped(*_: Any) -> None:
        raise RuntimeError("stopped here")

    forward = auto.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "forward", counted)
        loss = auto._loss
        patch.setattr(auto, "_loss", stopped)
        with pytest.raises(StageError, match="stopped here"):
            measure_sensitivity(*inputs, **arguments)
        patch.setattr(auto, "_loss", loss)
        first, batches[:] = len(batches), []
        told = measure_sensitivity(*inputs, **arguments)
    assert first == 4 * len(batches) + 1  # two passes of AWQ, one each of NVFP4 and FP8
    assert told["groups"] == 2 * 4
    assert not kept.exists()
    return into


def test_every_group_has_a_cost_for_every_format_that_falls_with_its_bits(measured: Path) -> None:
    found = json.loads((measured / auto.SENSITIVITY).read_text(encoding="utf-8"))
    assert found["bits"].keys() == {"none", *FORMATS}
    groups = {tuple(name.split(".", 3)[3] for name in group["layers"]) for group in found["groups"]}
    assert groups == {
        ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    }
    for group in found["groups"]:
        by_bits = sorted(group["scores"], key=found["bits"].__getitem__)
        scores = [group["scores"][form] for form in by_bits]
        assert scores == sorted(scores, reverse=True)
        assert scores[-1] == 0 < scores[0]


@pytest.mark.parametrize(("bits", "kv_cache"), [(5.0, "auto"), (9.0, "fp8")])
def test_a_budget_measures_nothing_and_its_choice_is_in_the_files(
    calibrations: Calibrations,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: float,
    kv_cache: str,
) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a batch went through the model again")

    monkeypatch.setattr(auto._Forward, "__call__", forbidden)
    calibrate(
        calibrations.source(),
        calibrations.dataset(),
        budget(bits, kv_cache),
        exports=(),
        into=tmp_path,
        progress=Silent(),
        device="cpu",
        sensitivity_dir=measured,
    )
    chosen = facts(tmp_path)["auto"]
    assert bits - 1.5 < chosen["effective_bits"] <= bits
    assert not (tmp_path / auto.STATE).exists()
    checkpoint = CheckpointReader(tmp_path / "hf")
    checkpoint.check()
    assert (checkpoint.quantization.kv_cache == "FP8") == (kv_cache == "fp8")
    formats = {
        shape.name: str(checkpoint.quantization.format_of(shape.name))
        for shape in checkpoint.architecture.linears()
    }
    assert {form: list(formats.values()).count(form) for form in set(formats.values())} == chosen["formats"]
    assert len(chosen["formats"]) > 1
    for layer in range(2):
        block = f"model.layers.{layer}."
        assert len({formats[f"{block}self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert len({formats[f"{block}mlp.{part}_proj"] for part in ("gate", "up")}) == 1
    prompts = np.random.default_rng(4).integers(3, 400, (24, 6)).tolist()
    exact = (
        Decoder(CheckpointReader(calibrations.source()), prompts, "cpu").hidden_states(lambda: None).numpy()
    )
    judged = Decoder(checkpoint, prompts, "cpu")
    rounded = judged.hidden_states(lambda: None).numpy()
    assert 1e-4 < np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std() < 0.4
    build_ir(tmp_path / "hf", tmp_path / "ir", simulate_activations=True, progress=Silent())
    engine, wanted = Stateful(tmp_path / "ir"), (rounded @ judged.head().numpy().T).reshape(24, 6, -1)
    logits = np.stack([engine.logits(prompt) for prompt in prompts])
    # Where noise carries a rounded input over the edge of a step, the rest of that prompt differs.
    error = np.abs(logits - wanted).max(axis=(1, 2)) / np.abs(wanted).max()
    assert np.median(error) < 2e-5


# By what engines compute as one, and its part of a layer.
JOINED = {
    "mixtral": ("block_sparse_moe.experts", 5.0),
    "qwen3_moe": ("mlp.experts", 7.0),
    "phi3": ("mlp.gate_up_proj", 6.0),
}


@pytest.mark.parametrize("architecture", JOINED)
def test_models_of_joined_projections_and_experts_are_mixed(
    calibrations: Calibrations, tmp_path: Path, architecture: str
) -> None:
    place, bits = JOINED[architecture]
    asked = budget(bits).model_dump() | {"auto": {"effective_bits": bits, "formats": ["w4a16_nvfp4", "fp8"]}}
    wanted = Quantization.model_validate(asked)
    source, dataset = calibrations.source(architecture), calibrations.dataset()
    measured = tmp_path / "measured"
    measured.mkdir()
    given: dict[str, Any] = {"progress": Silent(), "device": "cpu"}
    measure_sensitivity(source, dataset, wanted, kept=tmp_path / "kept.pt", into=measured, **given)
    found = json.loads((measured / auto.SENSITIVITY).read_text(encoding="utf-8"))
    groups = [group for group in found["groups"] if place in group["layers"][0]]
    assert len(groups) == 2
    assert all(
        0 == group["scores"]["none"] < group["scores"]["fp8"] < group["scores"]["w4a16_nvfp4"]
        for group in found["groups"]
    )
    calibrate(source, dataset, wanted, exports=(), into=tmp_path, sensitivity_dir=measured, **given)
    chosen = facts(tmp_path)["auto"]
    assert bits - 1.5 < chosen["effective_bits"] <= bits
    assert len(chosen["formats"]) > 1
    checkpoint = CheckpointReader(tmp_path / "hf")
    checkpoint.check()
    for group in groups:
        assert len({checkpoint.quantization.format_of(name) for name in group["layers"]}) == 1
    prompts = np.random.default_rng(4).integers(3, 400, (8, 6)).tolist()
    judged = Decoder(checkpoint, prompts, "cpu")
    wanted_logits = (judged.hidden_states(lambda: None) @ judged.head().T).numpy().reshape(8, 6, -1)
    build_ir(tmp_path / "hf", tmp_path / "ir", simulate_activations=architecture == "phi3", progress=Silent())
    engine = Stateful(tmp_path / "ir")
    logits = np.stack([engine.logits(prompt) for prompt in prompts])
    error = np.abs(logits - wanted_logits).max(axis=(1, 2)) / np.abs(wanted_logits).max()
    # Experts are built without the rounding of FP8 inputs, which the gate simulates.
    assert np.median(error) < (2e-5 if architecture == "phi3" else 0.1)


def test_a_budget_without_what_was_measured_is_refused(calibrations: Calibrations, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs measured sensitivity"):
        calibrate(
            calibrations.source(),
            calibrations.dataset(),
            budget(6),
            exports=(),
            into=tmp_path,
            progress=Silent(),
        )
