"""Random LoRA adapters in peft's layout, written without torch, the same per seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipeline.models import Architecture
from tests.support.models import make_checkpoint

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    ranks: Mapping[str, int] | None = None,
    layers: int | None = None,
    seed: int = 0,
    strength: float = 0.1,
    **settings: Any,
) -> Path:
    """Write an adapter of a checkpoint, and return its folder.

    Args:
        targets: Ends of the names of the layers that it changes; where the base fuses them, of the fused one.
        ranks: Ranks of some of them (`rank_pattern`).
        layers: Changes the first layers of the base only.
        strength: Standard deviation of the numbers in B; those of A keep the size of inputs.
        settings: Further settings in adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, architecture = np.random.default_rng(seed), Architecture.read(base)
    if architecture.fused:
        targets = sorted({_FUSED.get(name, name) for name in targets})
    tensors: dict[str, np.ndarray] = {}
    for shape in architecture.linears():
        end, layer = shape.name.rpartition(".")[2], int(shape.name.split(".")[2])
        if end not in targets or (layers is not None and layer >= layers):
            continue
        inner = (ranks or {}).get(end, rank)
        prefix = f"base_model.model.{shape.name}"
        scale = 1 / np.sqrt(shape.columns)
        tensors[f"{prefix}.lora_A.weight"] = random.normal(0, scale, (inner, shape.columns)).astype(
            np.float32
        )
        tensors[f"{prefix}.lora_B.weight"] = random.normal(0, strength, (shape.rows, inner)).astype(
            np.float32
        )
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.name, "r": rank,
        "lora_alpha": 2 * rank, "target_modules": sorted(targets), "rank_pattern": dict(ranks or {}),
        "bias": "none", "inference_mode": True, **settings,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return folder


# What scripts/record_adapter_logits has peft compute: each adapter on each base.
LOGITS = Path(__file__).parent / "adapter_logits.npz"
BASES = ("llama", "qwen2", "phi3")
PROMPT = [0, 2, 17, 40, 99, 5, 63, 31]
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "all": {"rank": 4, "seed": 1},
    "attention": {"rank": 8, "targets": ("q_proj", "v_proj"), "seed": 2, "use_rslora": True},
    "first-layer": {"rank": 3, "layers": 1, "seed": 3, "lora_alpha": 7, "layers_to_transform": [0]},
    "patterns": {
        "rank": 4,
        "ranks": {"down_proj": 6},
        "seed": 4,
        "alpha_pattern": {"down_proj": 3, "o_proj": 16},
    },
}


def make_base(folder: Path, family: str) -> Path:
    """Write the small base of a family, whose logits are recorded."""
    assert family in ("llama", "qwen2", "phi3")
    return make_checkpoint(
        folder, family, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, vocab=300, dtype="float32"
    )  # fmt: skip
