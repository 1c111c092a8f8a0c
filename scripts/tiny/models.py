"""The shapes of target and draft, and how they are written to disk and read back.

Both are ordinary Llama models with grouped-query attention. Every size is chosen so that what follows fits: split over
two ranks (tensor parallelism), the target still has whole heads, and the inputs of all its matrix products are
multiples of 128, the block size of AWQ.
"""

import json
from pathlib import Path
from typing import Literal

import torch
from tiny import tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")

_SHAPES: dict[Role, dict[str, int]] = {
    "target": {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 512},
    "draft": {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 256},
}
_PAD_ID, _BOS_ID, _EOS_ID, _END_OF_TURN_ID = (
    tokenizer.SPECIAL_TOKENS.index(token)
    for token in (tokenizer.PAD, tokenizer.BOS, tokenizer.EOS, tokenizer.END_OF_TURN)
)
_ROPE_THETA = 10000.0


def create(role: Role) -> LlamaForCausalLM:
    """A model with fresh weights in float32, drawn from torch's global generator."""
    config = LlamaConfig(
        **_SHAPES[role],
        vocab_size=tokenizer.VOCABULARY_SIZE,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=_PAD_ID,
        bos_token_id=_BOS_ID,
        eos_token_id=[_END_OF_TURN_ID, _EOS_ID],
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights in bfloat16, and both configurations."""
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=_BOS_ID, eos_token_id=[_END_OF_TURN_ID, _EOS_ID], pad_token_id=_PAD_ID
    )
    model.save_pretrained(folder)
    # Readers older than transformers 5 look for these two keys, which it no longer writes.
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"rope_theta": _ROPE_THETA, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder: Path) -> LlamaForCausalLM:
    """The model as saved, its bfloat16 weights widened to float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def parameter_count(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied embeddings count once
