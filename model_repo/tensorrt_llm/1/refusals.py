"""Inputs of `tensorrt_llm` that this engine cannot honour, each refused by name.

Some clients send the neutral value of everything; that is let through, because it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.refusal import Refused
from shared.tensors import Array

# Input -> (values that ask for nothing, why another one cannot be honoured).
_NEUTRAL: dict[str, tuple[tuple[float, ...], str]] = {
    "beam_width": ((1,), "this engine decodes with one beam"),
    "num_return_sequences": (
        (1,),
        "this engine returns one answer; send the request again with another seed",
    ),
    "len_penalty": ((0, 1), "it acts on beams, and this engine has one"),
    "early_stopping": ((0,), "it acts on beams, and this engine has one"),
    "beam_search_diversity_rate": ((0,), "it acts on beams, and this engine has one"),
    "return_context_logits": ((0,), "this engine returns logits of generated tokens only"),
    "skip_cross_attn_blocks": ((0,), "this engine runs decoder-only models"),
}

_DECODER_ONLY = "this engine runs decoder-only models"
_TEXT_ONLY = "this engine runs text models"
_LORA = "this engine has no LoRA adapters"
_RETENTION = "this engine frees its KV cache by last use alone"
_LOOKAHEAD = "this engine does not decode with lookahead"

# Inputs that may not be there at all, and why.
_ABSENT: dict[str, str] = {
    "encoder_input_features": _DECODER_ONLY,
    "encoder_output_lengths": _DECODER_ONLY,
    "cross_attention_mask": _DECODER_ONLY,
    "prompt_embedding_table": _TEXT_ONLY,
    "prompt_table_extra_ids": _TEXT_ONLY,
    "prompt_vocab_size": _TEXT_ONLY,
    "mrope_rotary_cos_sin": _TEXT_ONLY,
    "mrope_position_deltas": _TEXT_ONLY,
    "lora_task_id": _LORA,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "context_phase_params": "this engine does not take over requests from another",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
}

# `preprocessing` always sends one pad token for a decoder, so only more than that asks for something.
_ONE_TOKEN = ("decoder_input_ids", "decoder_input_lengths")

REFUSED = frozenset(_NEUTRAL) | frozenset(_ABSENT) | frozenset(_ONE_TOKEN)


def refuse(read: Callable[[str], Array | None]) -> None:
    """Refuse a request that asks for what this engine cannot do; `read` gives an input by name.

    Raises:
        Refused: with the name of the first such input.
    """
    for name, why in _ABSENT.items():
        if read(name) is not None:
            raise Refused(f"{name}: {why}")
    for name, (neutral, why) in _NEUTRAL.items():
        array = read(name)
        others = (
            [] if array is None else [value for value in array.reshape(-1).tolist() if value not in neutral]
        )
        if others:
            raise Refused(f"{name} = {_shown(others[0])}: {why}")
    decoder = read("decoder_input_ids")
    if decoder is not None and decoder.shape[-1] > 1:
        raise Refused(f"decoder_input_ids: {_DECODER_ONLY}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
