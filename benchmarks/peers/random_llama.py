"""A Llama of 191 million random weights, of the shapes that small models have, the same for the same seed.

    python benchmarks/peers/random_llama.py FOLDER

Its answers mean nothing, but they vary: logits have a standard deviation of about 4. Its tokenizer is the one of the
checked-in pair, with pairs of its tokens added until there are 32,000, so that each token has a text.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.support.models import make_checkpoint

LIKE = Path(__file__).resolve().parents[2] / "recipes/checkpoints/support-target"
VOCABULARY = 32_000
SIZES = {"hidden": 1024, "layers": 10, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 3072}


def make(folder: Path) -> Path:
    """Write checkpoint and tokenizer into `folder`, where they are not yet there, and return it."""
    if (folder / "tokenizer.json").is_file():
        return folder
    special = json.loads((LIKE / "generation_config.json").read_text(encoding="utf-8"))
    ids = {name: special[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    make_checkpoint(folder, "llama", vocab=VOCABULARY, seed=191, rope_theta=10_000.0, **SIZES, **ids)
    for name in (
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ):
        shutil.copyfile(LIKE / name, folder / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = 2048
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tokenizer = widened(json.loads((LIKE / "tokenizer.json").read_text(encoding="utf-8")))
    # Last, for it says that all is there.
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return folder


def widened(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Add pairs of tokens that are words, the latest merges of all, until there are VOCABULARY tokens."""
    model = tokenizer["model"]
    words = [token for token in model["vocab"] if token.isascii() and token.isalpha()]
    for first, second in itertools.product(words, words):
        if len(model["vocab"]) == VOCABULARY:
            break
        if first + second not in model["vocab"]:
            model["vocab"][first + second] = len(model["vocab"])
            model["merges"].append([first, second])
    return tokenizer


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
