"""A question that was held out, answered by the quantized model: the figure that everybody can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.store import Json

_MOST_TOKENS, _MOST_SECONDS = 64, 60.0


def answer(model: Any, dataset_dir: Path, tokenizer: Path) -> dict[str, Json]:
    """Prompt, greedy answer of the fake-quantized model, and what the text says there."""
    from tokenizers import Tokenizer

    prompt = json.loads((dataset_dir / "dataset.json").read_text(encoding="utf-8"))["prompt"]
    tokens = torch.tensor([prompt["tokens"]], device=model.device)
    with torch.inference_mode():
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=_MOST_TOKENS,
            max_time=_MOST_SECONDS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
        )[0, tokens.shape[1] :]
    words: Any = Tokenizer.from_file(str(tokenizer))
    text = words.decode(generated.tolist(), skip_special_tokens=True)
    return {"prompt": prompt["text"], "answer": text.strip(), "expected": prompt["expected"]}
