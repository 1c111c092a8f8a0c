"""Unquantized models, each architecture with its variants: OpenVINO computes what transformers does in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.errors import UserError
from pipeline.progress import Silent
from pipeline.runtimes.cpu.ir import build_ir
from tests.support.decoding import Paged, Stateful, prompt, reference, reference_logits
from tests.support.models import LLAMA3_SCALING, make_checkpoint

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


LINEAR_SCALING = {"rope_type": "linear", "factor": 2.5}
VARIANTS = {
    "llama-tied": Variant("llama", {"tied": True, "rope_key": "rope_theta"}),
    "llama-float16": Variant("llama", {"dtype": "float16"}),
    "llama-every-head-its-own-keys": Variant("llama", {"kv_heads": 4}),
    "llama-llama3-scaling": Variant("llama", {"rope_scaling": LLAMA3_SCALING}),
    "llama-linear-scaling": Variant("llama", {"rope_scaling": LINEAR_SCALING}),
    "llama-biases": Variant("llama", {}, _with_biases),
    "qwen2-window-in-some-layers": Variant("qwen2", {}, _qwen2_upper_layers_windowed),
    "qwen3": Variant("qwen3", {"tied": True, "head_dim": 32}),
    "phi3": Variant("phi3"),
    "mistral-window": Variant("mistral", {}, _mistral_windowed),
}


def _close(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    """At once, in two calls, token by token, and with paged attention in chunks."""
    variant = VARIANTS[name]
    checkpoint = make_checkpoint(tmp_path / "checkpoint", variant.architecture, seed=3, **variant.options)
    if variant.alter:
        variant.alter(checkpoint)
    facts = build_ir(checkpoint, tmp_path / "ir", progress=Silent())
    assert facts["sliding_window"] == (WINDOW if "window" in name else None)
    model, tokens = reference(checkpoint), prompt(LENGTH)
    expected = reference_logits(model, tokens)
    stateful = Stateful(tmp_path / "ir")
    _close(stateful.logits(tokens), expected)
    first = stateful.logits(tokens[:100])
    _close(np.concatenate([first, stateful.logits(tokens[100:], past=100)]), expected)
    _close(Paged(tmp_path / "ir").logits(tokens, [37, 64, 9, *[1] * 40]), expected)
    # Greedy decoding gives these tokens if each is the likeliest after those before it.
    answer = stateful.greedy(tokens, 32)
    logits = reference_logits(model, tokens + answer[:-1])
    assert logits[LENGTH - 1 :].argmax(-1).tolist() == answer


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "mixtral")
    with pytest.raises(
        UserError, match="MixtralForCausalLM has experts, which the cpu runtime does not take"
    ):
        build_ir(checkpoint, tmp_path / "ir", progress=Silent())
