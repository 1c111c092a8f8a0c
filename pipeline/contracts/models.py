"""Sizes of models: of published checkpoints, by their name on the hub, and of any config.json.

With them a recipe is judged, and its memory planned, before anything is downloaded. The facts are data
(`data/models/*.yaml`, each with its source); a model is added by adding data. What a model computes is not said here
(`pipeline.models.Architecture` knows that, of those that we can convert).

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

from pipeline.contracts.model_config import NEEDED, LatentAttention, details, dimensions, rope
from pipeline.errors import Fault

# Above every published model; lists as long as a model is deep are made from its config.json.
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1


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
    qkv_bias: bool = False
    output_bias: bool = False  # on o_proj
    mlp_bias: bool = False
    qk_norm: bool = False  # over each head of q and k
    layer_norms: int = 2  # of the hidden size, in each layer
    latent: LatentAttention | None = None
    windows: tuple[int, ...] = ()  # tokens that each layer sees, 0 for all; (): every layer sees all
    shared_intermediate: int = 0  # of the experts that every token passes, together
    shared_gate: bool = False  # ... and which weigh in by a gate
    expert_bias: bool = False  # on the router and on each expert
    sinks: bool = False  # a learned logit for each attention head
    score_bias: bool = False  # a number for each expert, by which the router chooses
    dense_layers: int = 0  # of those with experts, the first ones that have none
    dense_intermediate: int = 0
    draft_vocab: int = 0  # of an Eagle-3 head, which proposes from so many tokens
    dtype: str = "bfloat16"  # of what is not quantized
    # Format of the published weights: a recipe's word, fp8_block, mxfp4, or config.json's own word for another one.
    stored: str = "none"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes | None:
        """Of a Hugging Face config.json; None if it is not one of a decoder, as we know them."""
        if any(_size_problem(config, key) for key in NEEDED):
            return None
        try:
            made = cls(**dimensions(config), **details(config), rope=rope(config))
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
            return None
        counts = [value for value in map(made.__getattribute__, cls.__slots__) if isinstance(value, int)]
        return made if all(0 <= count <= MAX_SIZE for count in counts) else None


def known_model(repo: str) -> ModelSizes | None:
    """The sizes of a repository of the hub, if they are among the data."""
    entry = _data().get(repo)
    if entry is None:
        return None
    named = {name: value for name, value in entry.items() if name != "source"}
    return ModelSizes(**{**named, "windows": tuple(named.get("windows", ()))})


def config_faults(config: object) -> tuple[Fault, ...]:
    """Why a config.json is not one of a decoder as we know them; nothing if it is."""
    if not isinstance(config, Mapping):
        return (Fault("is not an object", key="config.json"),)
    found = [
        Fault(problem, key=key, value=config.get(key))
        for key in NEEDED
        if (problem := _size_problem(config, key))
    ]
    if not found and ModelSizes.from_config(config) is None:
        return (Fault("has values that we cannot read", key="config.json"),)
    return tuple(found)


def _size_problem(config: Mapping[str, Any], key: str) -> str:
    """What is wrong with one of the sizes of a config.json; empty if nothing is."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return "must be a positive number"
    most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
    return f"must be at most {most}" if value > most else ""


def known_models() -> tuple[str, ...]:
    """Repositories whose sizes are known."""
    return tuple(sorted(_data()))


def _files() -> Iterator[Mapping[str, Any]]:
    folder = resources.files("pipeline.contracts") / "data" / "models"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            yield yaml.safe_load(file.read_text("utf-8"))


@cache
def _data() -> Mapping[str, Mapping[str, Any]]:
    return {repo: entry for content in _files() for repo, entry in content["models"].items()}
