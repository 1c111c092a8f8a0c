"""Attention among the tokens of each sample, for rows that hold several.

Registered with transformers (5.14) as an attention of its own: a row of 4,000 tokens costs what its samples
cost, and not the square of its length, and samples of equal length go together. ModelOpt finds it where it
looks for any, and rounds keys and values before it. Calls that say nothing of samples (generation) go to
transformers' own `sdpa`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAME = "sample_by_sample"


def register() -> None:
    """Register the attention with transformers; models are loaded with `attn_implementation=NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sample_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sample; samples lie one after the other in the row.

    Args:
        sample_lengths: Tokens of each sample; None: a call of generation, which goes to transformers' `sdpa`.

    Returns:
        [1, tokens, heads, head_dim], and None in place of attention weights.
    """
    if sample_lengths is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = {"scaling": scaling, "sliding_window": sliding_window, **others}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        return output, None
    outputs, start = [], 0
    for length, run in groupby(sample_lengths):
        count = len(list(run))
        rows = slice(start, start + count * length)
        q, k, v = (_stacked(part[0, :, rows], count) for part in (query, key, value))
        outputs.append(_causal(q, k, v, scaling, sliding_window))
        start = rows.stop
    return torch.cat(outputs, dim=1), None


def _stacked(part: Tensor, count: int) -> Tensor:
    """[heads, count * length, head_dim] -> [count, heads, length, head_dim]"""
    heads, _, size = part.shape
    return part.reshape(heads, count, -1, size).transpose(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[count, heads, length, head_dim] each -> [1, count * length, heads, head_dim]"""
    count, heads, length, size = query.shape
    mask = None
    if window is not None and window < length:
        at = torch.arange(length, device=query.device)
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < window)
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).reshape(1, count * length, heads, size)
