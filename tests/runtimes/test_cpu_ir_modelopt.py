"""Quantized models: OpenVINO computes what ModelOpt's own fake-quantized model does, from ModelOpt's own export.

Checkpoints are float32 here. In bf16, weights can lie exactly between two e4m3 numbers, and there ModelOpt's
export, which divides by the scale, and its fake quantization, which multiplies by the inverse, part ways.

Rounded inputs make the model a step function: where float32 noise of 1e-7 carries a number over the edge of a
step, one prompt differs by a visible amount, and so do the tokens after it. So prompts are many and short, and
nearly all of them must be equal to within that noise.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.models import CheckpointReader
from pipeline.progress import Silent
from pipeline.runtimes.cpu.ir import build_ir
from tests.support.decoding import Stateful, reference
from tests.support.models import CLASSES, make_checkpoint

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),  # ModelOpt of itself
    pytest.mark.filterwarnings("ignore:lm_head is not calibrated:UserWarning"),
]

FORMATS = ("fp8", "int8_sq", "int4_awq", "w4a8_awq")
PROMPTS, LENGTH = 32, 8
NOISE = 2e-5  # of the largest logit


class Case(NamedTuple):
    checkpoint: Path
    tokens: np.ndarray  # [PROMPTS, LENGTH]
    rounded: np.ndarray  # logits of ModelOpt's model, everything quantized that the format quantizes
    weights_only: np.ndarray  # with the quantizers of inputs, keys and values off


def _case(folder: Path, architecture: Any, form: str) -> Case:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    presets = {
        "fp8": mtq.FP8_DEFAULT_CFG,
        "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
        "int4_awq": mtq.INT4_AWQ_CFG,
        "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
    }
    preset = copy.deepcopy(presets[form])
    preset["quant_cfg"] = [*preset["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    source = make_checkpoint(folder / "source", architecture, dtype="float32", seed=5)
    random = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 512, (4, 16), generator=random) for _ in range(2)]
    tokens = torch.randint(3, 512, (PROMPTS, LENGTH), generator=random)
    with torch.no_grad():
        model = mtq.quantize(reference(source), preset, lambda model: [model(batch) for batch in samples])
        # The export gives layers that read one input one scale, and folds it into the norm before them.
        requantize_resmooth_fused_llm_layers(model)
        export_hf_checkpoint(copy.deepcopy(model), export_dir=folder / "export")
        _take_exported_weights(model, CheckpointReader(folder / "export"))
        rounded = model(tokens).logits.numpy()
        for name, quantizer in model.named_modules():
            # weight_quantizer.1, the second step of w4a8_awq, makes weights that suit e4m3 inputs.
            if name.endswith(("input_quantizer", "bmm_quantizer", "weight_quantizer.1")):
                quantizer.disable()
        weights_only = model(tokens).logits.numpy()
    return Case(folder / "export", tokens.numpy(), rounded, weights_only)


def _take_exported_weights(model: Any, checkpoint: CheckpointReader) -> None:
    """Give `model` the weights of its export, which its quantizers leave as they are.

    The export divides by the scale, fake quantization multiplies by the inverse: a weight that lies within the
    last bit of the middle between two steps goes one way here and the other there. There may be a few of those.
    """
    import torch

    for shape in checkpoint.architecture.linears():
        layer = model.get_submodule(shape.name)
        ours = layer.weight_quantizer(layer.weight)
        layer.weight.copy_(torch.from_numpy(checkpoint.linear(shape.name).dequantize()))
        theirs = layer.weight_quantizer(layer.weight)
        assert (theirs - layer.weight).abs().max() < 1e-6
        assert (ours - theirs).abs().gt(1e-6).float().mean() < 1e-4


def _combinations() -> list[Any]:
    """Every format with every architecture; by default each format once."""
    default = {("llama", "w4a8_awq"), ("qwen2", "int4_awq"), ("qwen3", "fp8"), ("mistral", "int8_sq")}
    return [
        pytest.param(
            (architecture, form),
            id=f"{architecture}-{form}",
            marks=[] if (architecture, form) in default else [pytest.mark.slow],
        )
        for architecture in CLASSES
        if architecture != "mixtral"  # which this runtime refuses
        for form in FORMATS
    ]


@pytest.fixture(scope="module", params=_combinations())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _case(tmp_path_factory.mktemp("case"), *request.param)


def _logits(case: Case, folder: Path, *, simulate: bool) -> np.ndarray:
    build_ir(case.checkpoint, folder, simulate_activations=simulate, progress=Silent())
    model = Stateful(folder)
    return np.stack([model.logits(tokens.tolist()) for tokens in case.tokens])


def test_weights_alone(case: Case, tmp_path: Path) -> None:
    error = np.abs(_logits(case, tmp_path, simulate=False) - case.weights_only)
    assert error.max() < NOISE * np.abs(case.weights_only).max()


def test_weights_inputs_keys_and_values(case: Case, tmp_path: Path) -> None:
    logits = _logits(case, tmp_path, simulate=True)
    error = np.abs(logits - case.rounded).max(axis=(1, 2)) / np.abs(case.rounded).max()  # a prompt
    effect = np.square(case.rounded - case.weights_only).mean()  # of what is compared here
    assert np.median(error) < NOISE
    assert np.square(logits - case.rounded).mean() < 0.03 * effect
