"""From a BERT checkpoint to the folder that `Embedder` or `CrossEncoder` reads: ONNX graphs, in 8 bits if that agrees.

Done once, so that serving needs no torch.

Inputs input_ids, attention_mask and token_type_ids, int64 [batch, tokens]; output last_hidden_state, float32 [batch,
tokens, hidden]: the graph that sentence-transformers publishes. Of a checkpoint that classifies pairs of texts, the
output is logits, float32 [batch, labels]. Needs the distributions `onnx` and `safetensors`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.semantic.cross_encoder import GRAPHS, CrossEncoder
from pipeline.cache.semantic.embedder import OUTPUT, Embedder

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OPSET = 17  # LayerNormalization as one operation
_MASKED = -1e9
_CLASSIFIER = "classifier.weight"


def write_onnx(checkpoint: Path, into: Path) -> None:
    """Write the ONNX graph of a checkpoint (config.json, model.safetensors) to the file `into`.

    Raises:
        ValueError: this is not a BERT encoder with GELU and absolute positions.
    """
    import onnx
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    # The default of transformers.
    config.setdefault("position_embedding_type", "absolute")
    wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    faults = [
        f"{key} = {config.get(key)}, not {value}" for key, value in wanted.items() if config.get(key) != value
    ]
    if faults:
        raise ValueError(f"{checkpoint}/config.json: {'; '.join(faults)}")
    weights = load_file(checkpoint / "model.safetensors")
    # Under the head of a classifier, the encoder's tensors have its name before theirs.
    named = {name.removeprefix("bert."): weight for name, weight in weights.items()}
    onnx.save(_Encoder(config, named).model(), into)


class _Encoder:
    """The graph while it is put together."""

    def __init__(self, config: dict[str, Any], weights: dict[str, NDArray[Any]]) -> None:
        self._config, self._weights = config, weights
        self._nodes: list[Any] = []
        self._constants: dict[str, NDArray[Any]] = {}

    def model(self) -> Any:
        from onnx import TensorProto, checker, helper, numpy_helper

        last = self._embeddings()
        mask = self._mask()
        for layer in range(self._config["num_hidden_layers"]):
            last = self._layer(f"encoder.layer.{layer}", last, mask)
        shape: list[str | int] = ["batch", "tokens"]
        name, made, of = OUTPUT, last, [*shape, self._config["hidden_size"]]
        if _CLASSIFIER in self._weights:
            name, made, of = "logits", self._logits(last), ["batch", len(self._weights[_CLASSIFIER])]
        self._nodes.append(helper.make_node("Identity", [made], [name]))
        graph = helper.make_graph(
            self._nodes,
            "bert",
            [helper.make_tensor_value_info(input_name, TensorProto.INT64, shape) for input_name in INPUTS],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, of)],
            [numpy_helper.from_array(array, name) for name, array in self._constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
        checker.check_model(model, full_check=True)
        return model

    def _logits(self, states: str) -> str:
        """[batch, labels], of what the mark at the beginning has become."""
        mark = self._node("Gather", states, self._constant("zero", np.int64(0)), axis=1)
        return self._linear("classifier", self._node("Tanh", self._linear("pooler.dense", mark)))

    def _embeddings(self) -> str:
        words = self._node("Gather", self._weight("embeddings.word_embeddings.weight"), "input_ids")
        kinds = self._node(
            "Gather", self._weight("embeddings.token_type_embeddings.weight"), "token_type_ids"
        )
        length = self._node("Gather", self._node("Shape", "input_ids"), self._constant("one", np.int64(1)))
        positions = self._node(
            "Range", self._constant("zero", np.int64(0)), length, self._constant("one", np.int64(1))
        )
        places = self._node("Gather", self._weight("embeddings.position_embeddings.weight"), positions)
        total = self._node("Add", self._node("Add", words, kinds), places)
        return self._norm("embeddings.LayerNorm", total)

    def _mask(self) -> str:
        """0 where there is a token, a large negative number where there is padding; [batch, 1, 1, tokens]."""
        wide = self._node("Unsqueeze", "attention_mask", self._constant("middle", np.array([1, 2])))
        floats = self._node("Cast", wide, to=1)
        missing = self._node("Sub", self._constant("full", np.float32(1)), floats)
        return self._node("Mul", missing, self._constant("masked", np.float32(_MASKED)))

    def _layer(self, name: str, states: str, mask: str) -> str:
        heads = self._config["num_attention_heads"]
        size = self._config["hidden_size"] // heads
        split = self._constant("split", np.array([0, 0, heads, size]))
        query, key, value = (
            self._node("Reshape", self._linear(f"{name}.attention.self.{part}", states), split)
            for part in ("query", "key", "value")
        )
        scores = self._node(
            "MatMul",
            self._node("Transpose", query, perm=[0, 2, 1, 3]),
            self._node("Transpose", key, perm=[0, 2, 3, 1]),
        )
        scaled = self._node("Mul", scores, self._constant("scale", np.float32(size**-0.5)))
        shares = self._node("Softmax", self._node("Add", scaled, mask), axis=-1)
        mixed = self._node("MatMul", shares, self._node("Transpose", value, perm=[0, 2, 1, 3]))
        rows = self._node("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = self._node("Reshape", rows, self._constant("join", np.array([0, 0, heads * size])))
        attended = self._node("Add", self._linear(f"{name}.attention.output.dense", joined), states)
        states = self._norm(f"{name}.attention.output.LayerNorm", attended)
        inner = self._gelu(self._linear(f"{name}.intermediate.dense", states))
        return self._norm(
            f"{name}.output.LayerNorm", self._node("Add", self._linear(f"{name}.output.dense", inner), states)
        )

    def _linear(self, name: str, states: str) -> str:
        weight = self._constant(f"{name}.weight", np.ascontiguousarray(self._weights[f"{name}.weight"].T))
        return self._node("Add", self._node("MatMul", states, weight), self._weight(f"{name}.bias"))

    def _norm(self, name: str, states: str) -> str:
        epsilon = self._config["layer_norm_eps"]
        weight, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._node("LayerNormalization", states, weight, bias, axis=-1, epsilon=epsilon)

    def _gelu(self, states: str) -> str:
        """x/2 * (1 + erf(x / sqrt 2))"""
        inside = self._node("Erf", self._node("Mul", states, self._constant("root", np.float32(2**-0.5))))
        upper = self._node("Add", inside, self._constant("full", np.float32(1)))
        return self._node("Mul", self._node("Mul", states, upper), self._constant("half", np.float32(0.5)))

    def _weight(self, name: str) -> str:
        return self._constant(name, self._weights[name])

    def _constant(self, name: str, value: Any) -> str:
        self._constants.setdefault(name, np.asarray(value))
        return name

    def _node(self, operation: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        output = f"{operation}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operation, list(inputs), [output], name=output, **attributes))
        return output


MIN_AGREEMENT = 0.98  # mean cosine between the embeddings of both graphs
_FILES = ("tokenizer.json", "sentence_bert_config.json")
# Enough kinds of sentences to see what rounding does: questions, orders, numbers, other scripts, one word.
SENTENCES = (
    "Where is my parcel?", "How do I reset my password?", "Cancel order 4711, please.", "I did not get $26.99 back.",
    "What is the capital of France?", "Explain the difference between a mutex and a semaphore in two sentences.",
    "Is the flight on May 3 at 14:05 or at 15:04?", "not working", "Thanks!", "¿Dónde está mi paquete?",
    "Write a function that returns the n-th Fibonacci number without recursion, and test it for n = 0, 1 and 10.",
)  # fmt: skip


def export_encoder(checkpoint: Path, into: Path) -> float | None:
    """Write tokenizer and graphs of an encoder.

    Args:
        checkpoint: folder with config.json, model.safetensors and tokenizer.json.
        into: folder that is filled.

    Returns:
        The mean cosine between the embeddings of the 8-bit and the 32-bit graph; None if it is below `MIN_AGREEMENT`,
        and the 8-bit graph was left out.

    Raises:
        ValueError: this is not a BERT encoder with GELU and absolute positions.
    """
    into.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, into / name)
    write_onnx(checkpoint, into / "model.onnx")
    exact = Embedder(into)
    _quantize(into)
    rounded = Embedder(into)
    pairs = ((exact(text), rounded(text)) for text in SENTENCES)
    # Texts that the tokenizer knows whole.
    cosines = [float(first @ second) for first, second in pairs if first is not None and second is not None]
    agreement = float(np.mean(cosines)) if cosines else 0.0
    if agreement < MIN_AGREEMENT:
        (into / "model_int8.onnx").unlink()
        return None
    return agreement


MAX_DIFFERENCE = 0.05  # mean distance between the probabilities of both graphs


def export_cross_encoder(checkpoint: Path, into: Path) -> float | None:
    """Write tokenizer, configuration and graphs of a cross-encoder: its published graph, or one of its weights.

    Args:
        checkpoint: folder with config.json, tokenizer.json, and model.onnx or a BERT classifier's model.safetensors.
        into: folder that is filled.

    Returns:
        The mean distance between the probabilities of the 8-bit and the 32-bit graph; None if it is above
        `MAX_DIFFERENCE`, and the 8-bit graph was left out.

    Raises:
        ValueError: the graph, or the exported one, is not that of a cross-encoder for two texts.
    """
    into.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        shutil.copyfile(checkpoint / name, into / name)
    published = next((checkpoint / name for name in GRAPHS if (checkpoint / name).is_file()), None)
    if published is None:
        write_onnx(checkpoint, into / "model.onnx")
    else:
        shutil.copyfile(published, into / "model.onnx")
    exact = CrossEncoder(into)
    pairs = [(sentence, other) for sentence in SENTENCES for other in SENTENCES[::3]]
    expected = np.array([exact(first, second) for first, second in pairs])
    _quantize(into)
    rounded = CrossEncoder(into)
    difference = float(
        np.mean(np.abs(np.array([rounded(first, second) for first, second in pairs]) - expected))
    )
    if difference > MAX_DIFFERENCE:
        (into / "model_int8.onnx").unlink()
        return None
    return difference


def _quantize(folder: Path) -> None:
    """Write the 8-bit graph beside the exact one."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        folder / "model.onnx", folder / "model_int8.onnx", weight_type=QuantType.QInt8, per_channel=True
    )
