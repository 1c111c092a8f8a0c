"""What the engine does where the processor has bf16 arithmetic or none, and no exact sums of 8-bit products."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops
import pytest

from pipeline.runtimes.cpu.engine import EngineSettings, processor
from pipeline.runtimes.cpu.engine.paged_model import PagedModel, signal_stack_kept
from pipeline.runtimes.cpu.engine.processor import UnfitProcessor, chosen_precision, integer_options
from pipeline.runtimes.cpu.ir.weights import quantize_int8
from tests.runtimes.conftest import Pair

SIZE = 64


def _model(*, rounded: bool) -> ov.Model:
    given = ops.parameter([-1, SIZE], ov.Type.f32)
    weight = ops.convert(ops.constant(np.full((SIZE, SIZE), 127, np.int8)), ov.Type.f32)
    scaled = ops.multiply(weight, ops.constant(np.ones((SIZE, 1), np.float32)))
    return ov.Model(
        [ops.matmul(quantize_int8(given, 1.0) if rounded else given, scaled, False, True)], [given]
    )


@pytest.fixture
def without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_integers_are_exact", lambda: False)


@pytest.mark.usefixtures("without_vnni")
def test_only_rounded_inputs_need_an_option() -> None:
    assert integer_options(_model(rounded=False)) == {}
    assert integer_options(_model(rounded=True)) == {"LP_TRANSFORMS_MODE": "NO"}


@pytest.mark.usefixtures("without_vnni")
def test_with_the_option_nothing_is_multiplied_as_integers() -> None:
    model = _model(rounded=True)
    assert any("i8" in kind for kind in _kernels(model, {})), "without it, this model is"
    assert not any("i8" in kind for kind in _kernels(model, integer_options(model)))


def _kernels(model: ov.Model, options: Any) -> set[str]:
    with signal_stack_kept():
        compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **options})
        nodes = compiled.get_runtime_model().get_ops()
        return {
            node.get_rt_info()["primitiveType"].astype(str)
            for node in nodes
            if node.get_rt_info()["layerType"].astype(str) in ("FullyConnected", "MatMul")
        }


def test_the_largest_numbers_have_the_sum_that_they_have() -> None:
    """On every processor, with what the engine compiles a model with there."""
    model = _model(rounded=True)
    with signal_stack_kept():
        compiled = ov.Core().compile_model(
            model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **integer_options(model)}
        )
        made = compiled(np.full((3, SIZE), 127, np.float32))[0]
    assert (made == SIZE * 127 * 127).all()


class Processor:
    """In place of `openvino.Core`, on a processor that has, or has not, bf16 arithmetic."""

    def __init__(self, *capabilities: str) -> None:
        self._capabilities = ["FP32", "INT8", *capabilities]

    def get_property(self, device: str, name: str) -> Any:
        return {
            ("CPU", "OPTIMIZATION_CAPABILITIES"): self._capabilities,
            ("CPU", "FULL_DEVICE_NAME"): "Some Processor",
        }[device, name]


@pytest.mark.parametrize(
    ("capabilities", "asked", "gains", "chosen"),
    [
        (("BF16",), "auto", True, ("bf16", "Some Processor has it")),
        (("BF16",), "auto", False, ("f32", "the model is too small to gain by bf16")),
        ((), "auto", True, ("f32", "Some Processor has no bf16 arithmetic")),
        (("BF16",), "bf16", False, ("bf16", "as asked")),
        (("BF16",), "f32", True, ("f32", "as asked")),
    ],
)
def test_precision_follows_the_processor_and_the_model(
    monkeypatch: pytest.MonkeyPatch, capabilities: tuple[str, ...], asked: Any, gains: bool, chosen: Any
) -> None:
    monkeypatch.setattr(ov, "Core", lambda: Processor(*capabilities))
    assert chosen_precision(asked, gains=gains) == chosen


def test_bf16_is_refused_where_there_is_none(cpu_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ov, "Core", Processor)
    with pytest.raises(
        UnfitProcessor, match=r"^Some Processor has no bf16 arithmetic .* runtime.precision to auto"
    ):
        PagedModel(cpu_pair.target, EngineSettings(precision="bf16"))


def test_weights_are_held_once(cpu_pair: Pair, tmp_path: Path) -> None:
    """Neither the converted copy of OpenVINO's joint kernel nor pages of the file are beside what kernels pack."""
    folder = shutil.copytree(cpu_pair.target, tmp_path / "target")
    able = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    model = PagedModel(folder, EngineSettings(precision="bf16" if able else "f32"))
    model.allocate([1])
    nodes = model._request.get_compiled_model().get_runtime_model().get_ops()
    assert "LLMMLP" not in {node.get_rt_info()["layerType"].astype(str) for node in nodes}
    resident, name = 0, ""
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name = line.split(maxsplit=5)[-1] if re.match("[0-9a-f]+-", line) else name
        if line.startswith("Rss:") and name == str(folder / "openvino_model.bin"):
            resident += int(line.split()[1]) << 10
    assert resident < (folder / "openvino_model.bin").stat().st_size / 10
