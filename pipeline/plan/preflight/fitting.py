"""Whether the sizes of a model can be split over ranks: pure arithmetic, one function a rule.

A linear layer is cut along its outputs (q, k, v, gate, up) or its inputs (o, down); each rank takes a whole number of
attention heads. Experts are shared out to `expert` groups, whose tensor-parallel size is then tensor / expert.
"""

from __future__ import annotations

from pipeline.models.sizes import ModelSizes
from pipeline.plan.parallelism import Parallelism

LARGEST = 64  # tensor-parallel size that a recipe may ask for


def heads_split(sizes: ModelSizes, tensor: int) -> bool:
    """Attention heads: a whole number a rank."""
    return sizes.heads % tensor == 0


def kv_heads_split(sizes: ModelSizes, tensor: int) -> bool:
    """Key and value heads: a whole number a rank, or each copied to a whole number of ranks."""
    if sizes.kv_heads >= tensor:
        return sizes.kv_heads % tensor == 0
    return tensor % sizes.kv_heads == 0


def expert_tensor(split: Parallelism) -> int:
    """GPUs that share each expert.

    >>> expert_tensor(Parallelism(tensor=4, expert=2))
    2
    """
    return max(1, split.tensor // split.expert)


def inner_per_rank(sizes: ModelSizes, split: Parallelism) -> tuple[int, int]:
    """Inner size of the feed-forward on a rank, and what is left over."""
    return divmod(sizes.intermediate, expert_tensor(split) if sizes.experts else split.tensor)


def width_splits(sizes: ModelSizes, split: Parallelism) -> bool:
    """Hidden size and inner size of the feed-forward."""
    return sizes.hidden % split.tensor == 0 and inner_per_rank(sizes, split)[1] == 0


def blocks_split(sizes: ModelSizes, split: Parallelism, block: int) -> bool:
    """AWQ: whole blocks of inputs on each rank, in the layers that are cut along their inputs (o_proj, down_proj)."""
    attention = sizes.heads * sizes.head_dim
    inner, rest = inner_per_rank(sizes, split)
    return attention % (split.tensor * block) == 0 and rest == 0 and inner % block == 0


def experts_split(sizes: ModelSizes, expert: int) -> bool:
    """Experts: the same number in each group."""
    return sizes.experts % expert == 0


def fitting_tensor_sizes(sizes: ModelSizes, block: int | None, expert: int) -> tuple[int, ...]:
    """Tensor-parallel sizes that the model can be split by; `block`: of AWQ, None for other formats.

    >>> from pipeline.contracts.models import known_model
    >>> fitting_tensor_sizes(known_model("Qwen/Qwen2.5-72B-Instruct"), 128, 1)
    (1,)
    """
    return tuple(
        tensor
        for tensor in range(1, min(LARGEST, sizes.heads) + 1)
        if tensor % expert == 0
        and heads_split(sizes, tensor)
        and kv_heads_split(sizes, tensor)
        and width_splits(sizes, Parallelism(tensor, expert=expert))
        and (block is None or blocks_split(sizes, Parallelism(tensor, expert=expert), block))
    )
