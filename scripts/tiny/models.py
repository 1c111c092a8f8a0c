"""The shapes of target and draft, and how they are written to disk and read back.

Both are ordinary Llama models with grouped-query attention. Every size is chosen so that what follows fits: split over
two ranks (tensor parallelism), the target still has whole heads, and the inputs of all its matrix products are
multiples of 128, the block size of AWQ.
"""

import json
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tiny import tokenizer

Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")

_SIZES: dict[Role, dict[str, int]] = {
    "target": {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 512},
    "draft": {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 256},
}
_SPECIAL_IDS = {
    "pad_token_id": tokenizer.SPECIAL_TOKENS.index(tokenizer.PAD),
    "bos_token_id": tokenizer.SPECIAL_TOKENS.index(tokenizer.BOS),
    "eos_token_id": [tokenizer.SPECIAL_TOKENS.index(end) for end in (tokenizer.END_OF_TURN, tokenizer.EOS)],
}
_ROPE_THETA = 10000.0


def create(role: Role) -> LlamaForCausalLM:
    """A model with fresh weights in float32, drawn from torch's global generator."""
    config = {
        **_SIZES[role],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.VOCABULARY_SIZE,
        "max_position_embeddings": tokenizer.MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "tie_word_embeddings": True,
        **_SPECIAL_IDS,
    }
    return LlamaForCausalLM(LlamaConfig.from_dict(config))  # type: ignore[no-untyped-call]


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights in bfloat16, and both configurations."""
    model.bfloat16()
    model.generation_config = GenerationConfig(do_sample=False, **_SPECIAL_IDS)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # transformers leaves it readable to its owner only
    # Readers older than transformers 5 look for these two keys, which it no longer writes.
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"rope_theta": _ROPE_THETA, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder: Path) -> LlamaForCausalLM:
    """The model as saved, its bfloat16 weights widened to float32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def parameter_count(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied embeddings count once
