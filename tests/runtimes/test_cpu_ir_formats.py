"""Formats that are read and not calibrated here, and mixed ones: OpenVINO computes what the dequantized weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.models import CheckpointReader
from pipeline.progress import Silent
from pipeline.runtimes.cpu.ir import build_ir
from tests.support.compressed import SCHEMES, compressed_checkpoint
from tests.support.decoding import Stateful, reference
from tests.support.models import make_checkpoint

SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 128,
    "dtype": "float32",
}
NOISE = 2e-5  # of the largest logit


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", **SIZES, seed=5)


def _cases() -> list[Any]:
    """Weights alone of every scheme, and inputs of those that round them; by default those that differ most."""
    usual = {
        ("w4a16-ordered", False),
        ("w4a16-zeros", False),
        ("nvfp4a16", False),
        ("w8a8", True),
        ("fp8-dynamic", True),
    }
    rounding = [
        name for name, scheme in SCHEMES.items() if scheme["config_groups"]["group_0"]["input_activations"]
    ]
    cases = [(name, False) for name in SCHEMES] + [(name, True) for name in rounding]
    return [pytest.param(*case, marks=[] if case in usual else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize(("scheme", "simulate"), _cases())
def test_compressed_tensors(source: Path, tmp_path: Path, scheme: str, simulate: bool) -> None:
    import torch

    folder = compressed_checkpoint(source, tmp_path / "compressed", scheme)
    build_ir(folder, tmp_path / "ir", simulate_activations=simulate, progress=Silent())
    model, checkpoint = reference(source), CheckpointReader(folder)
    for shape in checkpoint.architecture.linears():
        layer, module = checkpoint.linear(shape.name), model.get_submodule(shape.name)
        module.weight.data = torch.from_numpy(layer.dequantize())
        if simulate:
            module.register_forward_pre_hook(_rounding(layer))
    tokens = np.random.default_rng(3).integers(3, 512, (8, 8))
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)).logits.numpy()
    stateful = Stateful(tmp_path / "ir")
    logits = np.stack([stateful.logits(prompt.tolist()) for prompt in tokens])
    error = np.abs(logits - wanted).max(axis=(1, 2)) / np.abs(wanted).max()
    assert (np.median(error) if simulate else error.max()) < NOISE


def _rounding(layer: Any) -> Any:
    """Inputs of a layer as it rounds them, for torch."""
    import torch

    def hook(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = inputs
        if layer.input_scale is not None:
            scale = float(layer.input_scale.reshape(()))
            return ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)
        largest = x.abs().amax(dim=-1, keepdim=True)
        if layer.dynamic == "int8":
            return ((x / (largest / 127)).round().clamp(-128, 127) * (largest / 127),)
        if layer.dynamic == "fp8":
            return ((x / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448),)
        return (x,)

    return hook
