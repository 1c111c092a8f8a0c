"""The cpu engine on processors with and without bf16 arithmetic, and on those that sum 8-bit products inexactly."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov
import openvino.opset15 as ops
import pytest

from pipeline.models import layers
from pipeline.progress import Silent
from pipeline.runtimes.cpu.engine import EngineSettings, paged_model, processor
from pipeline.runtimes.cpu.engine.block_manager import BlockTable
from pipeline.runtimes.cpu.engine.paged_model import (
    INPUT_GROUP,
    SHORT_STEP,
    SLOW_STEP_TOKENS,
    PagedModel,
    TokenSlice,
    signal_stack_kept,
)
from pipeline.runtimes.cpu.engine.processor import UnfitProcessor, chosen_precision, integer_options
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.runtimes.cpu.ir.nodes import quantize_int8
from tests.runtimes.conftest import CHECKPOINTS, Pair
from tests.support.decoding import Paged, prompt
from tests.support.engine import Answer, load, questions, request
from tests.support.models import make_checkpoint, quantize_checkpoint

SIZE = 64


def _model(*, rounded: bool) -> ov.Model:
    given = ops.parameter([-1, SIZE], ov.Type.f32)
    weight = ops.convert(ops.constant(np.full((SIZE, SIZE), 127, np.int8)), ov.Type.f32)
    scaled = ops.multiply(weight, ops.constant(np.ones((SIZE, 1), np.float32)))
    return ov.Model(
        [ops.matmul(quantize_int8(given, 1.0) if rounded else given, scaled, False, True)], [given]
    )


def _with_facts(engine: Path, folder: Path, **facts: bool) -> Path:
    """Copy an engine to a folder, with other facts about it."""
    shutil.copytree(engine, folder)
    file = folder / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))
    return folder


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


needs_bf16 = pytest.mark.skipif(
    "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="no bf16 arithmetic here"
)


@needs_bf16
def test_short_steps_round_inputs_as_the_gate_does() -> None:
    """One layer, with a scale for each row of its weights, or for each group."""
    import torch

    from pipeline.stages.evaluate.decoder import round_groups

    assert layers.INPUT_GROUP == INPUT_GROUP
    numbers = np.random.default_rng(7)
    x = numbers.standard_normal((4, 256)).astype(np.float32)
    codes = numbers.integers(-127, 128, (64, 256)).astype(np.int8)
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(INPUT_GROUP)}
    for size in (256, 128, 32):
        given = ops.parameter([-1, 256], ov.Type.f32)
        scales = numbers.uniform(0.01, 0.02, (64, 256 // size, 1)).astype(np.float32)
        grouped = codes.reshape(64, -1, size)
        weight = ops.multiply(ops.convert(ops.constant(grouped), ov.Type.f32), ops.constant(scales))
        flat = ops.reshape(weight, ops.constant(np.array([64, 256])), special_zero=False)
        with signal_stack_kept():
            model = ov.Model([ops.matmul(given, flat, False, True)], [given])
            made = ov.Core().compile_model(model, "CPU", options)(x)[0]
        rounded = round_groups(torch.from_numpy(x)).numpy()
        expected = [part @ (grouped * scales).reshape(64, 256).T for part in (rounded, x)]
        error, unrounded = (np.abs(made - output).max() / np.abs(made).max() for output in expected)
        assert error < 1e-5 < 1e-3 < unrounded


@needs_bf16
@pytest.mark.parametrize("form", ["int4_awq", "int8_sq"])
def test_short_and_long_steps_share_a_cache_and_stay_near_f32(tmp_path: Path, form: str) -> None:
    plain = make_checkpoint(tmp_path / "plain", hidden=256, heads=4, kv_heads=2, intermediate=512)
    build_ir(quantize_checkpoint(plain, tmp_path / form, form), tmp_path / "ir", progress=Silent())
    tokens, paged = prompt(96), Paged(tmp_path / "ir", precision="bf16")
    exact = Paged(tmp_path / "ir").logits(tokens, [96])
    steps = {"long": [96], "short": [SHORT_STEP] * 3, "mixed": [60, 4, 1, 31]}
    made = {name: paged.logits(tokens, chunks) for name, chunks in steps.items()}
    errors = {name: np.sqrt(((output - exact) ** 2).mean()) / exact.std() for name, output in made.items()}
    assert max(errors.values()) < 0.05, errors
    assert (made["mixed"][:60] == made["long"][:60]).all()
    assert (made["short"] != made["long"]).any()


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO as it is here, but for bf16 among what it says the processor can do."""
    core = ov.Core

    class Core(core):  # type: ignore[misc, valid-type]
        def get_property(self, *names: str) -> Any:
            found = super().get_property(*names)
            return [one for one in found if one != "BF16"] if names[-1].endswith("CAPABILITIES") else found

    monkeypatch.setattr(ov, "Core", Core)


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize(
    ("form", "hidden", "rounds"),
    [("int4_awq", 512, True), ("int8_sq", 512, True), ("int8_sq", 256, False), (None, 512, False)],
)
def test_without_bf16_one_model_computes_all_steps(
    tmp_path: Path, form: str | None, hidden: int, rounds: bool
) -> None:
    """In f32. For `auto`, large models have a cache in f16, and integers an output projection in 8 bits."""
    checkpoint = make_checkpoint(
        tmp_path / "plain", hidden=hidden, heads=4, kv_heads=2, intermediate=512, layers=2
    )
    if form is not None:
        checkpoint = quantize_checkpoint(checkpoint, tmp_path / form, form)
    build_ir(checkpoint, tmp_path / "ir", progress=Silent())
    precisions: tuple[Literal["auto", "f32"], ...] = ("auto", "f32")
    models = {one: PagedModel(tmp_path / "ir", EngineSettings(precision=one)) for one in precisions}
    for precision, model in models.items():
        assert model.precision == "f32"
        assert model.rounds == (rounds and precision == "auto")
        assert model._short is model._long
        group = model._long.request.get_compiled_model().get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")
        assert group == (INPUT_GROUP if model.rounds else 0)
        held = {kind.to_string() for kind, _ in model._caches.values()}
        assert held == {"f16" if precision == "auto" and hidden == 512 else "f32"}
        assert ("in f16" in model.reason) == (held == {"f16"})
    tokens = prompt(64)
    made = {one: Paged(tmp_path / "ir", precision=one).logits(tokens, [60, 4]) for one in precisions}
    error = np.sqrt(((made["auto"] - made["f32"]) ** 2).mean()) / made["f32"].std()
    most = 0.05 if rounds else 0.002 if hidden == 512 else 0.0
    assert 0 < error < most or error == most == 0


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


@pytest.mark.parametrize(
    ("pays", "asked", "first"), [(False, None, 300), (True, None, SLOW_STEP_TOKENS), (True, 200, 200)]
)
def test_steps_are_shorter_where_a_large_model_is_computed_in_f32(
    cpu_pair: Pair, tmp_path: Path, pays: bool, asked: int | None, first: int
) -> None:
    """A stream waits for the steps of a long prompt beside it."""
    folder = _with_facts(cpu_pair.target, tmp_path / "target", bf16_pays=pays)
    core = load(folder, precision="f32", max_batch_tokens=asked)
    core.add(request("long", [9] * 300, 2), Answer())
    core.step()
    assert core.stats().context_tokens == first


def test_weights_are_held_once(cpu_pair: Pair, tmp_path: Path) -> None:
    """Neither converted copies (for OpenVINO's joint kernel, of the embedding) nor pages of the file are beside it."""
    folder = shutil.copytree(cpu_pair.target, tmp_path / "target")
    able = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    model = PagedModel(folder, EngineSettings(precision="bf16" if able else "f32"))
    model.allocate([1])
    nodes = model._long.request.get_compiled_model().get_runtime_model().get_ops()
    assert "LLMMLP" not in {node.get_rt_info()["layerType"].astype(str) for node in nodes}
    types = {node.get_friendly_name(): node.get_rt_info()["runtimePrecision"].astype(str) for node in nodes}
    assert types["model.embed_tokens.weight"] == "bf16"
    resident, name = 0, ""
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name = line.split(maxsplit=5)[-1] if re.match("[0-9a-f]+-", line) else name
        if line.startswith("Rss:") and name == str(folder / "openvino_model.bin"):
            resident += int(line.split()[1]) << 10
    assert resident < (folder / "openvino_model.bin").stat().st_size / 10


def test_the_gate_simulates_bf16_as_the_engine_computes_it(cpu_pair: Pair) -> None:
    """Errors of logits against f32 are as large, and partly the same: sums are rounded in another order."""
    from pipeline.models import CheckpointReader
    from pipeline.stages.evaluate.decoder import Decoder

    if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bf16 arithmetic")
    prompt = questions()[0]

    def simulated(precision: Literal["f32", "bf16"]) -> np.ndarray:
        decoder = Decoder(
            CheckpointReader(CHECKPOINTS / "support-target"), [prompt], "cpu", computed=precision
        )
        states = decoder.hidden_states(lambda: None)
        return np.asarray((states @ decoder.head().T).numpy(), np.float64)

    def computed(precision: Literal["f32", "bf16"]) -> np.ndarray:
        model = PagedModel(cpu_pair.target, EngineSettings(precision=precision))
        model.allocate([4])
        blocks = [BlockTable(np.arange(4, dtype=np.int32))]
        return model.forward([TokenSlice(prompt, 0, blocks, len(prompt))]).astype(np.float64)

    exact = simulated("f32")
    assert np.abs(computed("f32") - exact).max() < 1e-3
    here, there = (values - exact for values in (computed("bf16"), simulated("bf16")))
    assert 0.7 < here.std() / there.std() < 1.4
    assert np.corrcoef(here.ravel(), there.ravel())[0, 1] > 0.2


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize("form", [None, "int8_sq", "int4_awq"])
def test_the_gate_computes_as_the_engine_does_without_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str | None
) -> None:
    """With `auto`, and a model that is large enough, which the checked-in one is made to be."""
    from pipeline.models import CheckpointReader, LinearLayer
    from pipeline.stages.evaluate.decoder import Decoder
    from pipeline.stages.evaluate.results import Computed

    class Reader(CheckpointReader):
        def linear(self, name: str) -> LinearLayer:
            # The gate rounds inputs as GPUs do; this engine does it for `simulate_activations` alone.
            return replace(super().linear(name), input_scale=None)

    # Where the processor has VNNI, inputs would be rounded, too.
    monkeypatch.setattr(paged_model, "INPUT_GROUP", 0)
    checkpoint = CHECKPOINTS / "support-target"
    if form is not None:
        checkpoint = quantize_checkpoint(checkpoint, tmp_path / form, form)
    build_ir(checkpoint, tmp_path / "ir", progress=Silent())
    folder = _with_facts(tmp_path / "ir", tmp_path / "large", bf16_pays=True)
    tokens = questions()[0]

    def simulated(computed: Computed) -> np.ndarray:
        decoder = Decoder(Reader(checkpoint), [tokens], "cpu", computed=computed)
        return np.asarray((decoder.hidden_states(lambda: None) @ decoder.head().T).numpy(), np.float64)

    exact, here = simulated("f32"), Paged(folder, precision="auto").logits(tokens, [len(tokens)])
    there = simulated("f16_cache")
    assert np.abs(there - exact).max() > 0.001
    assert np.abs(here - there).max() < 0.1 * np.abs(there - exact).max()
