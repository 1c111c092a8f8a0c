"""From a unified Hugging Face checkpoint to openvino_model.xml, openvino_model.bin and engine.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openvino as ov
from safetensors import safe_open

from pipeline.progress import Progress
from pipeline.runtimes.cpu.ir.model import Decoder, Dimensions

MODEL_FILE, FACTS_FILE = "openvino_model.xml", "engine.json"


def build_ir(
    checkpoint_dir: Path,
    into: Path,
    *,
    precision: str = "f32",
    simulate_activations: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Write the model into `into` and return its facts, which also stand in engine.json."""
    config = json.loads((checkpoint_dir / "config.json").read_text())
    files = {}
    for path in sorted(checkpoint_dir.glob("*.safetensors")):
        handle = safe_open(path, framework="numpy")
        files |= dict.fromkeys(handle.keys(), handle)
    dims = _dimensions(config)
    model = Decoder(dims, lambda name: files[name].get_tensor(name), files.__contains__).build()
    model.set_rt_info(precision, ["runtime_options", "KV_CACHE_PRECISION"])
    into.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, into / MODEL_FILE, compress_to_fp16=False)
    facts = {
        "schema": 1,
        "architecture": config["architectures"][0],
        "layers": dims.layers,
        "hidden": dims.hidden,
        "heads": dims.heads,
        "kv_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab,
        "max_position_embeddings": config["max_position_embeddings"],
        "sliding_window": dims.window,
        "tied": dims.tied,
        "precision": precision,
        "simulate_activations": simulate_activations,
        "openvino": ov.get_version(),
    }
    (into / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")
    progress.say(f"OpenVINO model of {dims.layers} layers written to {into}")
    return facts


def _dimensions(config: dict[str, Any]) -> Dimensions:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    heads = config["num_attention_heads"]
    return Dimensions(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        epsilon=config["rms_norm_eps"],
        theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        rope_kind=rope.get("rope_type", rope.get("type", "default")),
        rope_scaling=rope,
        window=window,
        tied=config.get("tie_word_embeddings", False),
    )
