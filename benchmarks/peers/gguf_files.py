"""A Llama checkpoint in GGUF: its weights as they are (BF16, F16), and as llama.cpp quantizes them by default.

    python gguf_files.py CHECKPOINT FOLDER        writes FOLDER/{BF16,F16,Q8_0,Q4_0}.gguf

Queries and keys are permuted, because llama.cpp turns neighbours where Hugging Face's Llama turns halves.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUANTIZED = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def tensors(checkpoint: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors in bfloat16, as their 16 bits, by their names in GGUF."""
    file = checkpoint / "model.safetensors"
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", name
        begin, end = entry["data_offsets"]
        values = np.memmap(file, np.uint16, "r", 8 + size + begin, (end - begin) // 2).reshape(entry["shape"])
        layer, _, part = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        inner = NAMES.get(name.removesuffix(".weight"))
        if inner is None:
            inner = f"blk.{layer}.{NAMES[part]}"
            if part.endswith(("q_proj", "k_proj")):
                count = heads[part[-6]]
                halves = values.reshape(count, 2, -1, values.shape[1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        found[f"{inner}.weight"] = values
    return found


def write(checkpoint: Path, into: Path, form: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(into, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{token["content"]: token["id"] for token in tokenizer["added_tokens"]},
    }
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [
        gguf.TokenType.CONTROL if at in special else gguf.TokenType.NORMAL for at in range(len(vocabulary))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"][0])
    for name, bits in tensors(checkpoint, config).items():
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
        if bits.ndim == 1:
            writer.add_tensor(name, wide)
        elif form == "F16":
            writer.add_tensor(name, wide.astype(np.float16))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, into: Path, form: str) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = QUANTIZED[form]
    failed = llama_cpp.llama_model_quantize(bytes(source), bytes(into), ctypes.byref(settings))
    assert not failed, f"llama_model_quantize gave {failed}"


def main() -> None:
    checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    llama_cpp.llama_backend_init()
    for form in ("BF16", "F16", *QUANTIZED):
        file, part = folder / f"{form}.gguf", folder / f"{form}.part"
        if not file.is_file():
            if form in QUANTIZED:
                quantize(folder / "F16.gguf", part, form)
            else:
                write(checkpoint, part, form)
            part.rename(file)


if __name__ == "__main__":
    main()
