"""Sizes of models: of published checkpoints, by their name on the hub, and of any config.json.

With them a recipe is judged, and its memory planned, before anything is downloaded. The facts are data
(`data/models/*.yaml`, each with its source); a model is added by adding data. What a model computes is not said here
(`pipeline.checkpoint.Architecture` knows that, of those that we can convert).

>>> known_model("meta-llama/Llama-3.1-8B-Instruct").kv_heads
8
>>> known_model("somebody/something") is None
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A decoder, by its sizes."""

    architecture: str  # class name: "LlamaForCausalLM"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of one expert, where there are experts
    vocab: int
    max_positions: int
    rope: Mapping[str, float | str] = field(default_factory=dict)  # theta, kind, and what the kind needs
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False  # the output projection is the embedding

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes | None:
        """Of a Hugging Face config.json; None if it is not one of a decoder, as we know them."""
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            experts = config.get("num_local_experts") or config.get("num_experts") or 0
            inner = (
                config["moe_intermediate_size"] if config.get("moe_intermediate_size") and experts else None
            )
            return cls(
                architecture=str((config.get("architectures") or [""])[0]),
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate=int(inner or config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                max_positions=int(config["max_position_embeddings"]),
                rope=_rope(config),
                experts=int(experts),
                experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None


def known_model(repo: str) -> ModelSizes | None:
    """The sizes of a repository of the hub, if they are among the data."""
    entry = _data().get(repo)
    if entry is None:
        return None
    return ModelSizes(**{name: value for name, value in entry.items() if name != "source"})


def known_models() -> tuple[str, ...]:
    """Repositories whose sizes are known."""
    return tuple(sorted(_data()))


_NAMES: Mapping[str, str] = {
    "rope_theta": "theta",
    "rope_type": "kind",
    "type": "kind",
    "original_max_position_embeddings": "original_max_positions",
}


def _rope(config: Mapping[str, Any]) -> Mapping[str, float | str]:
    """Rotary settings of either layout of config.json, under our names."""
    settings: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings.setdefault("rope_theta", config.get("rope_theta") or 10_000)
    plain = {_NAMES.get(name, name): value for name, value in settings.items()}
    kept = {name: value for name, value in plain.items() if isinstance(value, int | float | str)}
    return {"kind": "default", **kept}


def _files() -> Iterator[Mapping[str, Any]]:
    folder = resources.files("pipeline.contracts") / "data" / "models"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            yield yaml.safe_load(file.read_text("utf-8"))


@cache
def _data() -> Mapping[str, Mapping[str, Any]]:
    return {repo: entry for content in _files() for repo, entry in content["models"].items()}
