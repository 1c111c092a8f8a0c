"""Published checkpoints' config.json and hf_quant_config.json, as they are on the Hub.

63 of them, kept compressed in hub_configs.json.xz; from ai-dynamo/aiconfigurator, src/aiconfigurator/model_configs
(Apache-2.0). `python tests/support/hub_configs.py --record` writes hub_counts.yaml anew, which takes minutes.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.resources import parse_yaml

_FOLDER = Path(__file__).parent
# Names of classes and model types where the library has others than the published files.
_CLASSES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
_TYPES = {"deepseek_ref": "deepseek_v4", "kimi_k2": "deepseek_v3"}
_TOWER = re.compile(r"vis|multi_modal|mm_proj|embed_vision")


@cache
def hub_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return repository -> {"config": …, "hf_quant_config": …}, the latter where there is one."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(
        lzma.decompress((_FOLDER / "hub_configs.json.xz").read_bytes())
    )
    return found


def hub_counts() -> Mapping[str, tuple[int, int]]:
    """Return repository -> weights of the decoder and of the tower, as transformers has them."""
    found: Mapping[str, tuple[int, int]] = parse_yaml((_FOLDER / "hub_counts.yaml").read_text())["counts"]
    return found


def library_counts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Build a model on the meta device and count the weights of its decoder and its tower; None: it is not known."""
    import torch
    import transformers

    plain = json.loads(json.dumps(config, default=str))
    for part in (plain, plain.get("text_config") or {}):
        for key in ("quantization_config", "auto_map"):
            part.pop(key, None)
    plain["model_type"] = _TYPES.get(plain["model_type"], plain["model_type"])
    if plain["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    name = plain["architectures"][0]
    with torch.device("meta"):
        built = getattr(transformers, _CLASSES.get(name, name))(
            transformers.CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
        )
    counts = [0, 0]
    kept = built.state_dict().keys()
    buffers = (
        (name, tensor)
        for name, tensor in built.named_buffers()
        if name in kept and tensor.is_floating_point()
    )
    for name, tensor in (*built.named_parameters(), *buffers):
        counts[bool(_TOWER.search(name))] += tensor.numel()
    return counts[0], counts[1]


if __name__ == "__main__" and sys.argv[1:] == ["--record"]:
    path = _FOLDER / "hub_counts.yaml"
    head = path.read_text().partition("counts:")[0]
    found = {repo: library_counts(entry["config"]) for repo, entry in hub_configs().items()}
    rows = [f"  {repo}: [{counts[0]}, {counts[1]}]" for repo, counts in found.items() if counts is not None]
    path.write_text(head + "\n".join(["counts:", *rows, ""]))
