"""Mixtral's experts as layers of their own, under the names of its checkpoint, all of them shown every token.

transformers 5 keeps all experts of a layer in two tensors. ModelOpt 0.47 can measure and write those for the Hugging
Face export (under other names), but not for TensorRT-LLM; and an expert that no sample reaches has no scales. Here each
layer's block is replaced by one that holds router and experts as linear layers: the layout of transformers 4, of the
hub's files, and the one that ModelOpt's name-based rules for Mixtral are written for. The weights are not copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class MixtralExpert(nn.Module):
    """One expert: w2(silu(w1 x) * w3 x)."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.w1, self.w2, self.w3 = _linear(gate), _linear(down), _linear(up)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class MixtralSparseMoeBlock(nn.Module):
    """Router and experts. ModelOpt knows it by its name, and by `top_k`, `num_experts`, `gate` and `experts`.

    While `everywhere` is set, each expert sees all tokens, and the result is that of the chosen ones all the same.
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.top_k, self.num_experts = int(fused.top_k), int(fused.experts.num_experts)
        self.gate = _linear(fused.gate.weight)
        weights = zip(fused.experts.gate_up_proj, fused.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(MixtralExpert(upper, lower) for upper, lower in weights)
        self.everywhere = False

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        x = hidden.reshape(-1, hidden.shape[-1])
        shares = torch.softmax(self.gate(x).float(), dim=-1)
        top, chosen = torch.topk(shares, self.top_k, dim=-1)
        top = (top / top.sum(dim=-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            if self.everywhere:
                result.index_add_(0, tokens, expert(x)[tokens] * top[tokens, place, None])
            elif len(tokens):
                result.index_add_(0, tokens, expert(x[tokens]) * top[tokens, place, None])
        return result.reshape(hidden.shape)


def separate(model: Any) -> None:
    """Replace the fused blocks of a Mixtral model, in place; `model` may be on the meta device."""
    for layer in model.model.layers:
        block = MixtralSparseMoeBlock(layer.mlp)
        del layer.mlp
        layer.block_sparse_moe = block
        # transformers calls `mlp`; as a submodule of that name, too, the block would be saved twice.
        kind = type(layer)
        layer.__class__ = type(
            kind.__name__, (kind,), {"mlp": property(lambda layer: layer.block_sparse_moe)}
        )


@contextlib.contextmanager
def all_experts(model: Any) -> Iterator[None]:
    """Show every token to every expert; does nothing where there are none."""
    blocks = [module for module in model.modules() if isinstance(module, MixtralSparseMoeBlock)]
    for block in blocks:
        block.everywhere = True
    try:
        yield
    finally:
        for block in blocks:
            block.everywhere = False


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return layer
