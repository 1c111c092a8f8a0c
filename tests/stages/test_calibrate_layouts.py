"""The layouts that our reader believes in, held against ModelOpt's own fake-quantized model.

Packing order, groups, scales and smoothing of each format; and the evaluation's reconstruction, layer by
layer and as a whole. All in float32; where inputs are rounded, a last digit can turn a value to its
neighbour, so there the whole model is compared in the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.models import CheckpointReader, Format
from pipeline.stages.calibrate.model import all_experts
from pipeline.stages.evaluate.decoder import Decoder
from tests.support.calibrated import Calibrations
from tests.support.fake_quantized import Pair, make_pair
from tests.support.models import CLASSES

# Each format and each kind of layer once: biases (Qwen 2), norms of heads (Qwen 3), experts, fused projections.
CASES = [
    ("llama", "fp8", "fp8"), ("llama", "int4_awq", "auto"), ("qwen2", "w4a8_awq", "fp8"), ("qwen3", "int8_sq", "fp8"),
    ("mixtral", "fp8", "auto"), ("phi3", "fp8", "fp8"), ("llama", "w4a16_nvfp4", "auto"), ("qwen2", "nvfp4", "fp8"),
]  # fmt: skip
TEXT = [[(7 * n * n + 3) % 400 + 3 for n in range(60)], [(5 * n + 11) % 400 + 3 for n in range(41)]]
_pairs: dict[tuple[str, ...], Pair] = {}


@pytest.fixture(params=CASES, ids="-".join)
def pair(
    request: pytest.FixtureRequest, calibrations: Calibrations, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    if request.param not in _pairs:
        architecture, form, kv_cache = request.param
        folder = tmp_path_factory.mktemp("pair") / "hf"
        _pairs[request.param] = make_pair(calibrations, folder, architecture, Format(form), kv_cache)
    return _pairs[request.param]


def test_weights_are_unpacked_as_modelopt_rounds_them(pair: Pair) -> None:
    pair.exported.check()
    for shape in pair.exported.architecture.linears():
        layer, theirs = pair.exported.linear(shape.name), pair.model.get_submodule(shape.name)
        with torch.no_grad():
            wanted = theirs.weight_quantizer(theirs.weight).numpy()
        got = layer.dequantize()
        moved = np.abs(got - wanted) > 1e-5 * np.abs(wanted).max()
        # W4A8 and INT8 divide in another order: a tie may fall to the other side. So may one in FP8.
        most = {Format.W4A8_AWQ: 0.003, Format.INT8_SQ: 0.003, Format.FP8: 2e-4}.get(layer.format, 1e-9)
        assert moved.mean() < most, shape.name
        smooth = getattr(theirs.input_quantizer, "_pre_quant_scale", None)
        assert (smooth is None) == (layer.pre_quant_scale is None), shape.name
        if smooth is not None:
            np.testing.assert_array_equal(layer.pre_quant_scale, smooth.numpy())


def test_each_layer_computes_what_modelopt_s_does(pair: Pair) -> None:
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    names = [shape.name for shape in pair.exported.architecture.linears()]
    hooks = [
        pair.model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update(
                {name: (inputs[0].flatten(0, -2), output.flatten(0, -2))}
            )
        )
        for name in names
    ]
    with all_experts(pair.model):
        logits_of(pair.model, TEXT[0])
    for hook in hooks:
        hook.remove()
    decoder = Decoder(pair.exported, TEXT[:1], "cpu")
    for name in names:
        given, wanted = seen[name]
        difference = (decoder.linear(name, given) - wanted).abs()
        # One rounded input that falls to the other side moves a whole row of outputs, a little.
        assert difference.mean() < 2e-3 * wanted.std(), name
        assert difference.median() < 1e-4 * wanted.std(), name


def test_logits_are_modelopt_s(pair: Pair) -> None:
    decoder = Decoder(pair.exported, TEXT, "cpu")
    got = decoder.hidden_states(lambda: None) @ decoder.head().T
    wanted = torch.cat([logits_of(pair.model, text) for text in TEXT])
    original = Decoder(CheckpointReader(pair.source), TEXT, "cpu")
    unquantized = original.hidden_states(lambda: None) @ original.head().T
    difference, effect = (got - wanted).abs(), (unquantized - wanted).abs().mean()
    rounds_inputs = (
        pair.exported.quantization.format is not Format.INT4_AWQ or pair.exported.quantization.kv_cache
    )
    assert effect > 0.1
    if rounds_inputs:
        assert difference.mean() < 0.2 * effect
    else:
        assert difference.max() < 1e-3


@pytest.mark.parametrize("architecture", CLASSES)
def test_unquantized_logits_are_those_of_transformers(calibrations: Calibrations, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    source = calibrations.source(architecture, "float32")
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(source).eval(), TEXT[0])
    decoder = Decoder(CheckpointReader(source), TEXT[:1], "cpu")
    got = decoder.hidden_states(lambda: None) @ decoder.head().T
    assert (got - wanted).abs().max() < 1e-3


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + one for one in range(12)],
}


@pytest.mark.parametrize(
    ("architecture", "seed", "settings"),
    [
        ("mistral", 5, {"sliding_window": 16}),
        ("qwen2", 6, {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
        ("phi3", 7, {
            "rope_parameters": {"rope_theta": 1e4, **LONGROPE}, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
        }),
    ],
)  # fmt: skip
def test_windows_and_rotations_are_those_of_transformers(
    calibrations: Calibrations, architecture: str, seed: int, settings: dict[str, Any]
) -> None:
    import json

    from transformers import AutoModelForCausalLM

    source = calibrations.source(architecture, "float32", seed=seed)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **settings}))
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(source).eval(), TEXT[0])
    decoder = Decoder(CheckpointReader(source), TEXT[:1], "cpu")
    got = decoder.hidden_states(lambda: None) @ decoder.head().T
    assert (got - wanted).abs().max() < 1e-3


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
