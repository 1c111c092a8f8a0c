"""Arithmetic of splitting a model over ranks: what divides, and what an engine pads.

A linear layer is cut along its outputs (q, k, v, gate, up) or its inputs (o, down); each rank takes a whole number of
attention heads. Experts are shared out to `expert` groups, whose tensor-parallel size is then tensor / expert.
"""

from __future__ import annotations

from pipeline.models.sizes import ModelSizes
from pipeline.plan.parallelism import Parallelism

LARGEST = 64  # tensor-parallel size that a recipe may ask for


def heads_split(sizes: ModelSizes, tensor: int) -> bool:
    """Tell whether each rank gets a whole number of attention heads."""
    return sizes.heads % tensor == 0


def kv_heads_split(sizes: ModelSizes, tensor: int) -> bool:
    """Tell whether each rank gets a whole number of key and value heads, or each head goes to a whole number of
    ranks.
    """
    if sizes.kv_heads >= tensor:
        return sizes.kv_heads % tensor == 0
    return tensor % sizes.kv_heads == 0


def inner_per_rank(sizes: ModelSizes, split: Parallelism) -> tuple[int, int]:
    """Divide the inner size of the feed-forward over ranks: quotient and rest."""
    return divmod(sizes.intermediate, split.expert_tensor if sizes.experts else split.shared)


def width_splits(sizes: ModelSizes, split: Parallelism) -> bool:
    """Tell whether hidden size and inner size of the feed-forward divide."""
    return sizes.hidden % split.shared == 0 and inner_per_rank(sizes, split)[1] == 0


def blocks_split(sizes: ModelSizes, split: Parallelism, block: int) -> bool:
    """Tell whether each rank gets whole AWQ blocks of inputs, in the layers that are cut along their inputs (o_proj,
    down_proj).
    """
    attention = sizes.heads * sizes.head_dim
    inner, remainder = inner_per_rank(sizes, split)
    return attention % (split.shared * block) == 0 and remainder == 0 and inner % block == 0


def padded_features(sizes: ModelSizes, tensor: int, multiple: int) -> dict[str, tuple[int, int]]:
    """Find the sizes of linear layers that an engine pads: name of a size -> the size, and the padded one.

    Args:
        multiple: Inputs and outputs of a rank are padded to multiples of it.

    >>> from pipeline.contracts.models import known_model
    >>> padded_features(known_model("Qwen/Qwen2.5-72B-Instruct"), 4, 128)
    {'inner size': (29568, 29696)}
    """
    copied = tensor * -(-sizes.kv_heads // tensor)  # key and value heads, as ranks hold them
    features = {
        "hidden size": sizes.hidden,
        "outputs of q_proj": sizes.heads * sizes.head_dim,
        "outputs of q_proj, k_proj and v_proj": (sizes.heads + 2 * copied) * sizes.head_dim,
        "inner size": sizes.intermediate,
    }
    whole = multiple * tensor
    return {name: (size, -(-size // whole) * whole) for name, size in features.items() if size % whole}


def experts_split(sizes: ModelSizes, expert: int) -> bool:
    """Tell whether each group gets the same number of experts."""
    return sizes.experts % expert == 0


def fitting_tensor_sizes(
    sizes: ModelSizes, block: int | None, expert: int, *, multiple: int = 1, attention_dp: bool = False
) -> tuple[int, ...]:
    """List tensor-parallel sizes that a model can be split by.

    Args:
        block: Block size of AWQ; None for other formats.
        expert: Groups of experts.
        multiple: Features of a rank that are not padded are multiples of it.

    >>> from pipeline.contracts.models import known_model
    >>> fitting_tensor_sizes(known_model("Qwen/Qwen2.5-72B-Instruct"), 128, 1)
    (1,)
    """
    splits = (
        Parallelism(tensor, expert=expert, attention_dp=attention_dp)
        for tensor in range(expert, min(LARGEST, sizes.heads) + 1, expert)
    )
    return tuple(
        split.tensor
        for split in splits
        if heads_split(sizes, split.shared)
        and kv_heads_split(sizes, split.shared)
        and width_splits(sizes, split)
        and (block is None or blocks_split(sizes, split, block))
        and (multiple == 1 or not padded_features(sizes, split.shared, multiple))
    )
