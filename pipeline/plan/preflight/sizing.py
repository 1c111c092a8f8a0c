"""Roughly what a model takes on disk and in host memory while it is built; lower bounds, for the rules of a machine.

How GPU memory is used is the matter of the memory model.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.contracts.rules import rule
from pipeline.errors import UserError
from pipeline.models.sizes import ModelSizes
from pipeline.plan.model_facts import with_sizes
from pipeline.plan.preflight.context import Model, Subject
from pipeline.plan.preflight.context import subject as make_subject
from pipeline.recipe import Recipe

_PUBLISHED = "none"  # checkpoints are published in 16 bits


def parameters(sizes: ModelSizes) -> int:
    """Weights of the linear layers and embeddings; norms and biases are left out.

    >>> from pipeline.contracts.models import known_model
    >>> round(parameters(known_model("meta-llama/Llama-3.1-8B-Instruct")) / 1e9, 2)
    8.03
    """
    queries, pairs = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = sizes.hidden * (queries + 2 * pairs) + queries * sizes.hidden
    feed_forward = 3 * sizes.hidden * sizes.intermediate * max(sizes.experts, 1)
    embeddings = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2)
    return sizes.layers * (attention + feed_forward) + embeddings


def published_bytes(model: Model) -> int | None:
    """Of the checkpoint as it is fetched; None: nothing is known of the model."""
    return model.facts.weight_bytes or _bytes(model, _PUBLISHED)


def stored_bytes(model: Model) -> int | None:
    """Of the checkpoint, or the engine, in the recipe's format."""
    return _bytes(model, model.format)


def weight_bytes(recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> int:
    """Of all models of a recipe together, in the recipe's formats.

    Raises:
        UserError: the sizes of a model are not known.
    """
    total = 0
    for model in make_subject(recipe, with_sizes(sizes)).models:
        stored = stored_bytes(model)
        if stored is None:
            raise UserError(
                f"{recipe.name}: how it is served depends on the size of its {model.role}, which is not known here; "
                "ask where the Hub can be reached, or fetch the checkpoint first (build --until fetch.target)"
            )
        total += stored
    return total


def build_bytes(subject: Subject) -> int | None:
    """Of all artifacts of a build; None: nothing is known of one of the models."""
    copies: Mapping[str, int] = rule("host.disk").facts["copies"][subject.kind]
    total = 0
    for model in subject.models:
        fetched, stored = published_bytes(model), stored_bytes(model)
        if fetched is None or stored is None:
            return None
        total += fetched + stored * (copies["calibrated"] if model.format != "none" else copies["plain"])
    return total


def build_memory_bytes(subject: Subject) -> int:
    """Of the host, while an engine is built; 0 where nothing is known of the models, or no engine is built."""
    facts, rank = rule("host.memory").facts, largest_rank_bytes(subject)
    if rank is None or subject.kind != "tensorrt":
        return 0
    return int(rank * facts["copies"] + facts["worker_gib"] * 2**30)


def calibrated_weights(subject: Subject) -> int:
    """Of the largest model that is calibrated, which is loaded whole; 0 where none is, or nothing is known of it."""
    calibrated = (sizes for model, sizes in subject.sized if model.format != "none")
    return max(map(parameters, calibrated), default=0)


def largest_rank_bytes(subject: Subject) -> int | None:
    """Weights of the largest rank, in the recipe's format; None: nothing is known of any model."""
    ranks = [
        -(-size // model.split.world) for model in subject.models if (size := stored_bytes(model)) is not None
    ]
    return max(ranks, default=None)


def _bytes(model: Model, form: str) -> int | None:
    if model.sizes is None:
        return None
    each: float = rule("host.disk").facts["bytes_per_weight"][form]
    return int(parameters(model.sizes) * each)
