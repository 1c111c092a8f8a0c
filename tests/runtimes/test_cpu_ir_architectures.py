"""Unquantized models, each architecture with its variants: OpenVINO computes what transformers does in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.errors import CheckpointError
from pipeline.models import CheckpointReader
from pipeline.progress import Silent
from pipeline.runtimes.cpu.engine import paged_model
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.paged_model import part_windows
from pipeline.runtimes.cpu.ir import build_ir
from tests.support.decoding import Paged, Stateful, prompt, reference, reference_logits
from tests.support.engine import answer, load, request
from tests.support.models import LLAMA3_SCALING, as_mxfp4, make_checkpoint, quantize_checkpoint

pytestmark = pytest.mark.models

LENGTH = 150  # several times the window, and more than four blocks of the paged cache
WINDOW = 24


def _configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def _with_biases(folder: Path) -> None:
    _configure(folder, attention_bias=True, mlp_bias=True)
    tensors = load_file(folder / "model.safetensors")
    random = np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bias = 0.1 * random.standard_normal(tensors[name].shape[0])
        tensors[name.replace(".weight", ".bias")] = bias.astype(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _mistral_windowed(folder: Path) -> None:
    _configure(folder, sliding_window=WINDOW)


def _qwen2_upper_layers_windowed(folder: Path) -> None:
    _configure(folder, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


class Variant(NamedTuple):
    architecture: Any
    options: dict[str, Any] = {}  # noqa: RUF012 - never written
    alter: Callable[[Path], None] | None = None
    longest: int | None = None  # tokens of a sequence that the engine is told
    serve: bool = False  # several prompts, by the engine


LINEAR_SCALING = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_UNEVEN = {**YARN, "truncate": False, "beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5}
# As the hub's Phi-4-mini has it: two factors for each pair of channels that turn, which are not all.
LONGROPE = {"type": "longrope", "short_factor": [1.0 + pair / 8 for pair in range(12)]}
LONGROPE |= {"long_factor": [2.0 + pair for pair in range(12)]}
PHI4_MINI: dict[str, Any] = {
    "rope_key": "rope_theta",
    "rope_scaling": LONGROPE,
    "partial_rotary_factor": 0.75,
}
PHI4_MINI |= {"heads": 2, "kv_heads": 1}  # heads of 32 channels
SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "heads": 4, "kv_heads": 2, "head_dim": 32}
GPT_OSS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "experts": 8,
    "rope_scaling": YARN_UNEVEN,
    "attention_bias": True,
}
GEMMA2: dict[str, Any] = {
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.0,
}
GEMMA3: dict[str, Any] = {
    "layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA3 |= {"sliding_window": WINDOW, "rope_key": "rope_theta", "rope_scaling": LINEAR_SCALING, "tied": True}
QWEN3_MOE: dict[str, Any] = {"experts": 8, "layers": 3, "mlp_only_layers": [1], "rope_scaling": YARN}
VARIANTS = {
    "llama-tied": Variant("llama", {"tied": True, "rope_key": "rope_theta"}),
    "llama-llama3-scaling": Variant("llama", {"rope_scaling": LLAMA3_SCALING}),
    "llama-float16-linear-scaling-biases-and-every-head-its-own-keys": Variant(
        "llama", {"dtype": "float16", "rope_scaling": LINEAR_SCALING, "kv_heads": 4}, _with_biases
    ),
    "qwen2-window-in-some-layers": Variant("qwen2", {}, _qwen2_upper_layers_windowed),
    "phi3": Variant("phi3", {"heads": 2}),
    "mistral-window": Variant("mistral", {}, _mistral_windowed),
    "qwen3-tied-yarn": Variant("qwen3", {"tied": True, "head_dim": 32, "rope_scaling": YARN}),
    "phi3-short-factors": Variant(
        "phi3", {**PHI4_MINI, "original_max_position_embeddings": 1024}, longest=200
    ),
    "phi3-long-factors": Variant("phi3", {**PHI4_MINI, "original_max_position_embeddings": 64}),
    "mixtral": Variant("mixtral", serve=True),
    "qwen3-moe": Variant("qwen3_moe", QWEN3_MOE, serve=True),
    "qwen3-moe-shares-as-they-are": Variant("qwen3_moe", {"norm_topk_prob": False}),
    "gemma2-window": Variant("gemma2", GEMMA2, serve=True),
    "gemma3-window": Variant("gemma3_text", GEMMA3, serve=True),
    "gpt-oss-window": Variant("gpt_oss", GPT_OSS, serve=True),
}


def _close(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def _serves_the_same(folder: Path, model: Any, longest: int | None) -> None:
    """Prompts together, in chunks and over blocks that others have filled, are answered as transformers would."""
    core = load(
        folder,
        guides=False,
        max_batch_tokens=48,
        kv_blocks=32,
        max_sequence_tokens=longest,
        max_draft_tokens=0,
    )
    shared = prompt(70, seed=1)
    prompts = [shared + prompt(count, seed=2 + count) for count in (1, 40, 20)] + [prompt(9, seed=9)]
    answers = answer(core, request("first", prompts[0], 12))
    answers += answer(core, *(request(number, tokens, 12) for number, tokens in enumerate(prompts[1:])))
    # Of 64 tokens, windows need the last 24 alone.
    shared_blocks = 3 if core.stats().kv_blocks_total > 32 else 2
    assert [got.metrics.kv_blocks_reused for got in answers] == [0, shared_blocks, shared_blocks, 0]
    for tokens, got in zip(prompts, answers, strict=True):
        logits = reference_logits(model, tokens + got.tokens[:-1])
        assert logits[len(tokens) - 1 :].argmax(-1).tolist() == got.tokens


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    """At once, in two calls, token by token, and with paged attention in chunks."""
    variant = VARIANTS[name]
    options = {**SMALL, **variant.options}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", variant.architecture, seed=3, **options)
    if variant.alter:
        variant.alter(checkpoint)
    facts = build_ir(checkpoint, tmp_path / "ir", progress=Silent())
    assert facts["sliding_window"] == (WINDOW if "window" in name else None)
    model, tokens = reference(checkpoint), prompt(LENGTH)
    expected = reference_logits(model, tokens)
    stateful = Stateful(tmp_path / "ir", long=name == "phi3-long-factors")
    _close(stateful.logits(tokens), expected)
    first = stateful.logits(tokens[:100])
    _close(np.concatenate([first, stateful.logits(tokens[100:], past=100)]), expected)
    _close(Paged(tmp_path / "ir", variant.longest).logits(tokens, [37, 64, 9, *[1] * 40]), expected)
    # Greedy decoding gives these tokens if each is the likeliest after those before it.
    greedy = stateful.greedy(tokens, 32)
    logits = reference_logits(model, tokens + greedy[:-1])
    assert logits[LENGTH - 1 :].argmax(-1).tolist() == greedy
    if variant.serve:
        _serves_the_same(tmp_path / "ir", model, variant.longest)


def test_windows_save_memory_and_change_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers of six with a window, beside an engine whose layers all keep all tokens, and transformers."""
    window, longest, step = 40, 640, 48
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    options = {**SMALL, **GEMMA3, "layers": 6, "layer_types": kinds, "sliding_window": window}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "gemma3_text", seed=3, **options)
    build_ir(checkpoint, tmp_path / "ir", progress=Silent())
    sizes = {"max_batch_tokens": step, "max_concurrency": 3, "max_sequence_tokens": longest}

    def engine() -> EngineCore:
        return load(tmp_path / "ir", guides=False, max_draft_tokens=2, **sizes)

    core = engine()
    # A full sequence has 20 blocks; a window of 40 with two drafts lies in 4, and 48 tokens of a step in 2 more.
    assert core.stats().kv_blocks_total == 3 * 20 + 3 * 4 + 2
    assert core._target.block_bytes[1] in (core._target.block_bytes[0] * 5, core._target.block_bytes[0] / 5)
    monkeypatch.setattr(paged_model, "part_windows", lambda model, _: part_windows(model, 1))
    whole = engine()
    assert whole.stats().kv_blocks_total == 3 * 20
    model = reference(checkpoint)
    long = prompt(600, seed=1)
    rounds = [
        [request("whole", long, 20, context_logits=True)],
        [
            # The first left this window behind, and it is cached.
            request("again", [*long[:300], *prompt(200, seed=2)], 20),
            request("drafted", [*long, *prompt(9, seed=4)], 20, draft_tokens=(3, 4)),
            request("short", long[:30], 9),
        ],
        [request("other", prompt(500, seed=3), 30), request("cut", long[:90], 30)],
    ]
    for requests in rounds:
        pairs = zip(answer(core, *requests), answer(whole, *requests), requests, strict=True)
        for got, expected, asked in pairs:
            assert got.tokens == expected.tokens
            logits = reference_logits(model, [*asked.prompt, *got.tokens[:-1]])
            assert logits[len(asked.prompt) - 1 :].argmax(-1).tolist() == got.tokens
            if asked.context_logits:
                _close(np.stack(got.context_logits), logits[: len(asked.prompt) - 1])
        assert core.stats().prompt_tokens_reused >= 288 + 576 if requests is not rounds[0] else True
    assert core.stats().kv_blocks_used == 0


def test_the_decoder_of_a_checkpoint_with_a_tower_is_run_alone(tmp_path: Path) -> None:
    """Gemma 3 from 4B on is published so; transformers writes its files here, and the tower's weights are left out."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = {**sizes, "head_dim": 32, "num_hidden_layers": 3, "vocab_size": 512, "sliding_window": WINDOW}
    tower = {**sizes, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=tower)).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 0, 0.3 if "norm" in name else 0.2)
    model.save_pretrained(tmp_path / "checkpoint")
    build_ir(tmp_path / "checkpoint", tmp_path / "ir", progress=Silent())
    tokens = prompt(60)
    _close(Paged(tmp_path / "ir").logits(tokens, [33, *[1] * 27]), reference_logits(model, tokens))


def _gathered(folder: Path) -> int:
    """Products of the compiled model that read the chosen experts alone."""
    nodes = Stateful(folder).compiled.get_runtime_model().get_ops()
    return sum(node.get_rt_info()["layerType"].astype(str) == "GatherMatmul" for node in nodes)


def test_experts_in_mxfp4_are_decoded_exactly(tmp_path: Path) -> None:
    """As the hub's gpt-oss has them; the reference computes with what transformers makes of the same bits."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", **SMALL, **GPT_OSS)
    packed = as_mxfp4(plain, tmp_path / "packed")
    facts = build_ir(packed, tmp_path / "ir", progress=Silent())
    assert facts["quantization"]["format"] == "mxfp4"
    assert facts["weights"]["gate_up_proj"]["precision"] == "i8"
    assert _gathered(tmp_path / "ir") == 4
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        bits = [torch.from_numpy(tensors.pop(name.replace("blocks", part))) for part in ("blocks", "scales")]
        values = convert_moe_packed_tensors(*bits).float().numpy()
        tensors[name.removesuffix("_blocks")] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
        layer = name.removesuffix("_blocks")
        experts = [CheckpointReader(packed).expert(layer, index).dequantize() for index in range(len(values))]
        assert (np.stack(experts).swapaxes(1, 2) == values).all()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = prompt(40)
    expected = reference_logits(reference(plain), tokens)
    _close(Paged(tmp_path / "ir").logits(tokens, [33, *[1] * 7]), expected)


@pytest.mark.parametrize("form", ["fp8", "int4_awq", "int8_sq"])
def test_experts_of_a_quantized_mixtral_are_their_codes_and_scales(tmp_path: Path, form: str) -> None:
    plain = make_checkpoint(tmp_path / "plain", "mixtral", **SMALL, dtype="float32")
    packed = quantize_checkpoint(plain, tmp_path / "packed", form, group_size=32)
    build_ir(packed, tmp_path / "ir", progress=Silent())
    assert _gathered(tmp_path / "ir") == 6
    checkpoint, tensors = CheckpointReader(packed), load_file(plain / "model.safetensors")
    for shape in checkpoint.architecture.linears():
        layer = checkpoint.linear(shape.name)
        smooth = np.float32(1) if layer.pre_quant_scale is None else layer.pre_quant_scale
        tensors[f"{shape.name}.weight"] = layer.dequantize() * smooth
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = prompt(40)
    _close(Paged(tmp_path / "ir").logits(tokens, [33, *[1] * 7]), reference_logits(reference(plain), tokens))


def test_faults_of_stacked_experts_are_named_at_once(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", **SMALL, **GPT_OSS)
    packed = as_mxfp4(plain, tmp_path / "packed")
    tensors = load_file(packed / "model.safetensors")
    place = "model.layers.0.mlp.experts."
    tensors[f"{place}down_proj_scales"][0, 0, 0] = 255
    tensors[f"{place}gate_up_proj_blocks"] = tensors[f"{place}gate_up_proj_blocks"][:, :-1].copy()
    del tensors["model.layers.1.self_attn.sinks"]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        build_ir(packed, tmp_path / "ir", progress=Silent())
    for fault in (
        f"{place}down_proj_scales holds scales beyond those of float32",
        f"{place}gate_up_proj_blocks has shape [8, 127, 2, 16], not [8, 128, 2, 16]",
        "model.layers.1.self_attn.sinks is missing",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_only_the_chosen_experts_are_computed(tmp_path: Path, architecture: Any) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", architecture, **SMALL)
    build_ir(checkpoint, tmp_path / "ir", progress=Silent())
    assert _gathered(tmp_path / "ir") == 2 * (3 if architecture == "mixtral" else 2)
