"""The layouts that our reader believes in, held against ModelOpt's own fake-quantized model.

Packing order, groups, scales and smoothing of each format; and the evaluation's reconstruction, layer by
layer and as a whole. All in float32; where inputs are rounded, a last digit can turn a value to its
neighbour, so there the whole model is compared in the mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.models import CheckpointReader, Format
from pipeline.stages.calibrate.model import all_experts
from pipeline.stages.evaluate.decoder import Decoder, log_probs
from tests.support.calibrated import SIZES, Calibrations
from tests.support.fake_quantized import Pair, make_pair
from tests.support.models import CLASSES, DESCRIBED, make_checkpoint

pytestmark = pytest.mark.models

# Each format and each kind of layer once: biases (Qwen 2), norms of heads (Qwen 3), experts, fused projections, norms
# by 1 + weight and capped scores (Gemma).
CASES = [
    ("llama", "fp8", "fp8"), ("llama", "int4_awq", "auto"), ("qwen2", "w4a8_awq", "fp8"), ("qwen3", "int8_sq", "fp8"),
    ("mixtral", "w4a16_nvfp4", "auto"), ("phi3", "nvfp4", "fp8"), ("qwen2", "nvfp4", "fp8"),
    ("qwen3_moe", "fp8", "auto"), ("gemma2", "int4_awq", "auto"), ("gemma3_text", "fp8", "fp8"),
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
    cap = pair.exported.architecture.logits_cap
    got = _capped(decoder.hidden_states(lambda: None) @ decoder.head().T, cap)
    wanted = torch.cat([logits_of(pair.model, text) for text in TEXT])
    original = Decoder(CheckpointReader(pair.source), TEXT, "cpu")
    unquantized = _capped(original.hidden_states(lambda: None) @ original.head().T, cap)
    difference, effect = (got - wanted).abs(), (unquantized - wanted).abs().mean()
    rounds_inputs = (
        pair.exported.quantization.format is not Format.INT4_AWQ or pair.exported.quantization.kv_cache
    )
    assert effect > 0.05
    if rounds_inputs:
        assert difference.mean() < 0.2 * effect
    else:
        assert difference.max() < 1e-3


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Windows that are shorter than the text; caps, experts whose shares do not sum up to 1, and sinks.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
    "gemma3_text": {
        "sliding_window": 16,
        "rope_key": "rope_theta",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"norm_topk_prob": False},
    "gpt_oss": {"sliding_window": 16, "attention_bias": True, "rope_scaling": YARN},
}


@pytest.mark.parametrize("architecture", [*CLASSES, *DESCRIBED])
def test_unquantized_logits_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    source: Path = make_checkpoint(
        tmp_path, architecture, **SIZES, dtype="float32", **SETTINGS.get(architecture, {})
    )
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    wanted = logits_of(model, TEXT[0])
    reader = CheckpointReader(source)
    decoder, cap = Decoder(reader, TEXT[:1], "cpu"), reader.architecture.logits_cap
    got = log_probs(decoder.hidden_states(lambda: None), decoder.head(), cap)
    assert (got - wanted.log_softmax(dim=-1)).abs().max() < 1e-3


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + number for number in range(12)],
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


def _capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
