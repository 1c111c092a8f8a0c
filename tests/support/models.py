"""Tiny random checkpoints in the layout of the Hugging Face hub, written without torch, the same per seed.

The weights are random, but of the right sizes: activations keep about unit variance, and the norms hold a few
loud channels, as trained models do, so that calibration has something to find.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.models.architecture import Architecture as Described

Architecture = Literal[
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss"
]  # fmt: skip
CLASSES = {  # that are calibrated
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
DESCRIBED = {  # that run on `cpu` alone
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
BEGIN, END, TURN = "<|begin|>", "<|end|>", "<|turn|>"
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
CORPUS = (
    "How do I reset my password? Open the settings, choose security and press reset.",
    "I forgot my login. Please check the mail that we sent to you; it holds a link.",
    "Where is my order 4711? It left our house on Monday and should arrive tomorrow.",
    "Can I change the address of a delivery? Yes, until the parcel is handed over.",
    "Größe, Straße, naïve café, 안녕하세요, 😀: text that is not plain ASCII.",
)


def make_checkpoint(
    directory: Path,
    architecture: Architecture = "llama",
    *,
    tied: bool = False,
    hidden: int = 256,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int = 512,
    vocab: int = 512,
    experts: int = 4,
    max_positions: int = 2048,
    rope_theta: float = 500000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_key: Literal["rope_parameters", "rope_theta"] = "rope_parameters",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    seed: int = 0,
    repeated: bool = False,
    **settings: Any,
) -> Path:
    """Write config, weights and tokenizer into `directory` and return it.

    `rope_key` chooses how config.json holds the rotary settings: as transformers 5 writes them (`rope_parameters`), or
    as the checkpoints of the hub have them (`rope_theta` and `rope_scaling`). `settings` are further keys of it.
    `repeated` makes large matrices fast, of few rows that come again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(
        architecture, tied, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, experts
    )
    config |= {"max_position_embeddings": max_positions, "dtype": dtype}
    scaling = dict(rope_scaling) if rope_scaling else None
    if rope_key == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": rope_theta, **(scaling or {"rope_type": "default"})}
    else:
        config |= {"rope_theta": rope_theta, "rope_scaling": scaling}
    config |= settings
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    )
    random = np.random.default_rng(seed)
    weights = _weights(config, _Repeating(random) if repeated else random)
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    tensors = {name: value.astype(kind) for name, value in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(directory, vocab)
    return directory


def make_answering_checkpoint(directory: Path, answer: str, *, max_positions: int) -> Path:
    """Write a checkpoint that gives the same answer to every prompt, however long it is, and return its folder.

    Attention and MLP add nothing, so that the last token alone decides on the next one: the first of the answer, or the
    one that follows in it, or at its end the end of the turn.
    """
    make_checkpoint(
        directory, hidden=64, layers=1, heads=1, kv_heads=1, intermediate=64, max_positions=max_positions
    )
    chain = (
        Tokenizer.from_file(str(directory / "tokenizer.json")).encode(answer, add_special_tokens=False).ids
    )
    assert len(set(chain)) == len(chain) < 64, "each token of the answer has to stand in it once"
    file = directory / "model.safetensors"
    weights = load_file(file)
    embeddings, head = (weights[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"][:] = 0
    weights["model.norm.weight"][:] = 1
    embeddings[:] = head[:] = 0
    embeddings[:, 0] = 1
    for place, token in enumerate(chain, start=1):
        embeddings[token, :] = 0
        embeddings[token, place] = 1
    for place, token in enumerate([*chain, 1]):
        head[token, place] = 8
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def make_tokenizer(directory: Path, vocab: int = 512) -> None:
    """A byte-level BPE with a chat template; token 0 begins a text, 1 ends a turn, 2 opens one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BEGIN, END, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _config(
    architecture: str, tied: bool, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int,
    intermediate: int, vocab: int, experts: int,
) -> dict[str, Any]:  # fmt: skip
    config: dict[str, Any] = {
        "architectures": [CLASSES.get(architecture) or DESCRIBED[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    if architecture in ("llama", "qwen3"):
        config["attention_bias"] = False
    if architecture in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if architecture == "mixtral":
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    if architecture == "phi3":
        del config["head_dim"]  # it has none of its own
    if architecture.startswith("qwen"):
        config["use_sliding_window"] = False
    if architecture == "qwen3_moe":
        config |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": intermediate}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if architecture.startswith("gemma"):
        del config["hidden_act"]
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32}
    if architecture == "gpt_oss":
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    return config


class _Repeating:
    """A source of random numbers whose matrices have 64 different rows."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def standard_normal(self, size: Any) -> Any:
        if not isinstance(size, tuple):
            return self._random.standard_normal(size)
        block = self._random.standard_normal((64, size[1]), np.float32)
        return np.tile(block, (-(-size[0] // 64), 1))[: size[0]]


def _weights(config: Mapping[str, Any], random: Any) -> dict[str, np.ndarray]:
    if config["model_type"] in DESCRIBED:
        return _described_weights(config, random)
    hidden = config["hidden_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, pairs = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def norm(size: int) -> np.ndarray:
        return np.exp(0.5 * random.standard_normal(size))

    weights = {"model.embed_tokens.weight": 0.1 * random.standard_normal((config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        weights[block + "input_layernorm.weight"] = norm(hidden)
        weights[block + "post_attention_layernorm.weight"] = norm(hidden)
        if config["model_type"] == "phi3":
            rows = queries + 2 * pairs
            weights[block + "self_attn.qkv_proj.weight"] = _linear(random, rows, hidden)
        else:
            for name, rows in (("q_proj", queries), ("k_proj", pairs), ("v_proj", pairs)):
                weights[f"{block}self_attn.{name}.weight"] = _linear(random, rows, hidden)
                if config["model_type"] == "qwen2":
                    weights[f"{block}self_attn.{name}.bias"] = 0.1 * random.standard_normal(rows)
        if config["model_type"] == "qwen3":
            weights[block + "self_attn.q_norm.weight"] = norm(dim)
            weights[block + "self_attn.k_norm.weight"] = norm(dim)
        weights[block + "self_attn.o_proj.weight"] = _linear(random, hidden, queries)
        weights |= {block + name: value for name, value in _feed_forward(config, random).items()}
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = 0.1 * random.standard_normal((config["vocab_size"], hidden))
    return weights


def _described_weights(config: Mapping[str, Any], random: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights by the description that checkpoints are read with; that transformers takes them all shows it right."""
    model = Described.from_config(config)
    weights = {model.embedding: 0.1 * random.standard_normal((model.vocab, model.hidden))}
    if not model.tied:
        weights["lm_head.weight"] = 0.1 * random.standard_normal((model.vocab, model.hidden))
    for name, size in model.vectors():
        around = 0 if model.family.startswith("gemma") or name.endswith("sinks") else 1
        weights[name] = around + 0.3 * random.standard_normal(size)
    for shape in model.linears():
        weights[f"{shape.name}.weight"] = _linear(random, shape.rows, shape.columns)
        if shape.bias:
            weights[f"{shape.name}.bias"] = 0.1 * random.standard_normal(shape.rows)
    for shape in model.stacked_experts():
        experts = [_linear(random, shape.columns, shape.rows) for _ in range(model.experts)]
        weights[shape.name] = np.stack(experts)
        weights[f"{shape.name}_bias"] = 0.1 * random.standard_normal((model.experts, shape.rows))
    return weights


def as_mxfp4(source: Path, into: Path, seed: int = 0) -> Path:
    """Write a gpt-oss checkpoint whose experts are random numbers in MXFP4, as it is published."""
    shutil.copytree(source, into, ignore=shutil.ignore_patterns("*.safetensors"))
    random, tensors = np.random.default_rng(seed), load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = random.integers(121, 125, shape, np.uint8)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    _write_json(into / "config.json", config)
    return into


def _feed_forward(config: Mapping[str, Any], random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "mixtral":
        experts = range(config["num_local_experts"])
        weights = {"block_sparse_moe.gate.weight": _linear(random, len(experts), hidden)}
        for expert in (f"block_sparse_moe.experts.{number}." for number in experts):
            weights[expert + "w1.weight"] = _linear(random, inner, hidden)
            weights[expert + "w3.weight"] = _linear(random, inner, hidden)
            weights[expert + "w2.weight"] = _linear(random, hidden, inner)
        return weights
    if config["model_type"] == "phi3":
        upper = {"mlp.gate_up_proj.weight": _linear(random, 2 * inner, hidden)}
    else:
        upper = {f"mlp.{name}.weight": _linear(random, inner, hidden) for name in ("gate_proj", "up_proj")}
    return {**upper, "mlp.down_proj.weight": _linear(random, hidden, inner)}


def _linear(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return random.standard_normal((rows, columns)) / math.sqrt(columns)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


ALGORITHMS = {
    "fp8": "FP8",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
}
INPUT_AMAX = 16.0


def quantize_checkpoint(
    source: Path, into: Path, form: str, *, group_size: int = 64, kv_cache: bool = False, head: bool = False,
    seed: int = 0,
) -> Path:  # fmt: skip
    """Write the checkpoint `source` into `into`, the linear layers of its blocks and perhaps the head quantized."""
    into.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, into / name)
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, value in load_file(source / "model.safetensors").items():
        layer, part = name.rsplit(".", 1)
        if part != "weight" or not (
            layer.endswith(("_proj", ".w1", ".w2", ".w3")) or (head and layer == "lm_head")
        ):
            tensors[name] = value
            continue
        parts = _quantize(value.astype(np.float32), layer, form, group_size, random)
        tensors |= {f"{layer}.{key}": np.array(array, order="C") for key, array in parts.items()}
        if kv_cache and layer.endswith(("k_proj", "v_proj")):
            tensors[f"{layer}.{layer[-6]}_scale"] = np.array(8.0 / 448, np.float32)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_algo": ALGORITHMS[form],
        "kv_cache_quant_algo": "FP8" if kv_cache else None,
        "exclude_modules": ["model.embed_tokens", "*.gate", *([] if head else ["lm_head"])],
    }
    if form in ("int4_awq", "w4a8_awq"):
        quantization |= {"group_size": group_size, "has_zero_point": False, "pre_quant_scale": True}
    described = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (into / "hf_quant_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return into


def _quantize(
    weight: np.ndarray, layer: str, form: str, group_size: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    if form == "fp8":
        scale = np.float32(np.abs(weight).max() / 448)
        return {
            "weight": (weight / scale).astype(ml_dtypes.float8_e4m3fn),
            "weight_scale": scale,
            "input_scale": np.float32(INPUT_AMAX / 448),
        }
    smooth = np.exp(0.2 * random.standard_normal(weight.shape[1])).astype(np.float32)
    if form == "int8_sq":
        weight = weight / smooth
        scale = np.abs(weight).max(axis=1) / 127
        return {
            "weight": np.round(weight / scale[:, None]).astype(np.int8),
            "weight_scale": scale.astype(np.float32),
            "input_scale": np.float32(INPUT_AMAX / 127),
            "pre_quant_scale": smooth,
        }
    smoothed = layer.endswith(("o_proj", "down_proj"))
    weight = weight / smooth if smoothed else weight
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group_size, group_size)
    scale = np.abs(groups).max(axis=2) / 7
    codes = np.clip(np.round(groups / scale[:, :, None]), -8, 7).astype(np.int8).reshape(rows, columns)
    nibbles = codes.view(np.uint8) & 0x0F
    parts = {"weight": nibbles[0::2] | (nibbles[1::2] << 4), "weight_scale": scale.astype(np.float32)}
    if smoothed:
        parts["pre_quant_scale"] = smooth
    if form == "w4a8_awq":
        parts["weight_scale_2"] = np.float32(np.abs(weight).max() / 448)
        parts["input_scale"] = np.float32(INPUT_AMAX / 448)
    return parts
