"""What TensorRT-LLM's C++ backend must know of a tokenizer to hold answers to a form: xgrammar_tokenizer_info.json.

    {"encoded_vocab": ["<unk>", …], "tokenizer_str": "{…tokenizer.json…}", "stop_token_ids": [2]}

As upstream's examples/generate_xgrammar_tokenizer_info.py writes it (0.17 to 1.2), from tokenizer.json alone: without
transformers, and without TensorRT-LLM. Two things differ. Every token that ends an answer is a stop token, not only the
first: otherwise the others could never come. And a token has the place of its id even where ids have gaps.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.models.token_ids import TokenIds, read_tokens
from pipeline.reading import MAX_TOKENIZER_BYTES, read_text

FILE = "xgrammar_tokenizer_info.json"


def tokenizer_info(tokenizer: Path, ids: TokenIds) -> str:
    """The file's text, for a folder with tokenizer.json."""
    text = read_text(tokenizer / "tokenizer.json", MAX_TOKENIZER_BYTES)
    by_id = {id: token for token, id in read_tokens(tokenizer / "tokenizer.json")}
    info = {
        "encoded_vocab": [by_id.get(id, "") for id in range(max(by_id) + 1)],
        "tokenizer_str": text,
        "stop_token_ids": [ids.end, *ids.stop],
    }
    return json.dumps(info, ensure_ascii=False)
