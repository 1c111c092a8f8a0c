"""The smallest files that are a checkpoint to `fetch`: real safetensors, and a configuration that nobody
runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 16}).encode()
TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}).encode()


def weights(*names: str, rows: int = 64, seed: int = 0) -> bytes:
    """Safetensors of one [rows, 16] float32 tensor a name."""
    random = np.random.default_rng(seed)
    return bytes(save({name: random.standard_normal((rows, 16), dtype=np.float32) for name in names}))


def whole(rows: int = 64) -> dict[str, bytes]:
    """A checkpoint with one file of weights."""
    return {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": b"{}",
        "model.safetensors": weights("a", "b", rows=rows),
    }


def sharded(rows: int = 64) -> dict[str, bytes]:
    """A checkpoint with two files of weights and their index."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    return {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "model.safetensors.index.json": index({"a": first, "b": second}),
        first: weights("a", rows=rows),
        second: weights("b", rows=rows, seed=1),
    }


def index(placed: Mapping[str, object]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": placed}).encode()
