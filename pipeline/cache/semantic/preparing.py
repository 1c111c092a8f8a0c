"""From a sentence encoder's checkpoint to the folder that `Embedder` reads: the graph, in 8 bits where that agrees."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from pipeline.cache.semantic.bert import write_onnx
from pipeline.cache.semantic.embedder import Embedder

MIN_AGREEMENT = 0.98  # mean cosine between the embeddings of both graphs
_FILES = ("tokenizer.json", "sentence_bert_config.json")
# Enough kinds of sentences to see what rounding does: questions, orders, numbers, other scripts, one word.
SENTENCES = (
    "Where is my parcel?", "How do I reset my password?", "Cancel order 4711, please.", "I did not get $26.99 back.",
    "What is the capital of France?", "Explain the difference between a mutex and a semaphore in two sentences.",
    "Is the flight on May 3 at 14:05 or at 15:04?", "not working", "Thanks!", "¿Dónde está mi paquete?",
    "Write a function that returns the n-th Fibonacci number without recursion, and test it for n = 0, 1 and 10.",
)  # fmt: skip


def prepare(checkpoint: Path, into: Path) -> float | None:
    """Fill the folder `into`; the agreement of the 8-bit graph, which is left out below `MIN_AGREEMENT` (then None).

    Needs the distributions `onnx` and `safetensors`.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    into.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, into / name)
    write_onnx(checkpoint, into / "model.onnx")
    exact = Embedder(into)
    quantize_dynamic(
        into / "model.onnx", into / "model_int8.onnx", weight_type=QuantType.QInt8, per_channel=True
    )
    rounded = Embedder(into)
    agreement = float(np.mean([_cosine(exact, rounded, text) for text in SENTENCES]))
    if agreement < MIN_AGREEMENT:
        (into / "model_int8.onnx").unlink()
        return None
    return agreement


def _cosine(one: Embedder, other: Embedder, text: str) -> float:
    a, b = one(text), other(text)
    assert a is not None, "the sentences are short"
    assert b is not None, "the sentences are short"
    return float(a @ b)
