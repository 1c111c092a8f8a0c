"""The model in memory: float32 on a CPU, in its own type on a GPU; its attention, its experts; a sample of its text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import StageError, UserError
from pipeline.machine.host import read_memory
from pipeline.models import Architecture, TensorFiles
from pipeline.runtimes.tensorrt.checkpoint import MODEL_TYPES
from pipeline.stages.evaluate.decoder import causal_attention
from pipeline.store import Json

_MOST_TOKENS, _MOST_SECONDS = 64, 60.0
# What ModelOpt calls the families that are calibrated.
_MODEL_TYPES = {**MODEL_TYPES, "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3": "gemma3"}


def check_family(architecture: Architecture) -> None:
    """Raise UserError for a model that is not calibrated, and say what is missing."""
    name = architecture.class_name
    if architecture.stacked:
        raise UserError(
            f"{name} cannot be calibrated: all experts of a layer lie in one tensor. What is cast, in format nvfp4 or "
            "w4a16_nvfp4, is a checkpoint whose experts are in MXFP4"
        )
    if name.endswith("ForConditionalGeneration"):
        raise UserError(f"{name} cannot be calibrated: its decoder is exported with no tower for images")
    if architecture.family not in _MODEL_TYPES:
        raise UserError(f"{name} cannot be calibrated; {', '.join(_MODEL_TYPES)} can")


def check_known(directory: Path, architecture: Architecture) -> None:
    """Build the model without its weights and ask ModelOpt's exporter whether it finds its way in it.

    Seconds, and no memory: better than to find out after hours of calibration.
    """
    from modelopt.torch.export.layer_utils import check_model_compatibility, get_transformer_layers
    from modelopt.torch.export.model_utils import get_model_type
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = auto.from_config(config)
        separate(model)
    kind = get_model_type(model)
    compatible, _, _ = check_model_compatibility(get_transformer_layers(model))
    if kind != _MODEL_TYPES.get(architecture.family) or not compatible:
        raise UserError(
            f"ModelOpt does not know {architecture.class_name} (takes it for {kind!r}): it cannot be exported"
        )


def load(directory: Path, architecture: Architecture, device: str) -> Any:
    """Load a model, ready to be calibrated.

    Args:
        directory: A checkpoint in the Hugging Face layout.
        device: "cpu" (float32) or "cuda" (the checkpoint's own type, spread over GPUs by transformers).

    Raises:
        StageError: A weight is missing or left over.
        UserError: Memory does not hold the weights in float32.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device == "cpu" else getattr(torch, architecture.dtype)
    _check_memory(directory, device)
    _register_attention()
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=_ATTENTION,
        device_map=None if device == "cpu" else "auto",
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = [
        f"{kind.replace('_', ' ')}: {name}"
        for kind in loading
        for name in sorted(map(str, loading[kind] or ()))
    ]
    if wrong:
        raise StageError("\n  ".join([f"{directory} does not fit {architecture.class_name}:", *wrong]))
    separate(model)
    return model.eval().requires_grad_(False)


def _check_memory(directory: Path, device: str) -> None:
    """A process that is killed for its memory says nothing; this does."""
    if device != "cpu":
        return
    needed = 4 * TensorFiles(directory).elements
    available = read_memory().available_bytes
    if needed > available:
        raise UserError(
            f"calibrating {directory} on a CPU needs {needed / 2**30:.1f} GiB for its weights in float32, "
            f"and {available / 2**30:.1f} GiB are free; calibrate on a GPU, or on a larger machine"
        )


def generate_sample(model: Any, dataset_dir: Path, tokenizer: Path) -> dict[str, Json]:
    """Have the fake-quantized model answer a question that was held out: the figure that everybody can read.

    Args:
        dataset_dir: Folder of frozen samples.

    Returns:
        "prompt", "answer" (greedy, at most 64 tokens), and "expected", the answer of the data set.
    """
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
    decoder: Any = Tokenizer.from_file(str(tokenizer))
    text = decoder.decode(generated.tolist(), skip_special_tokens=True)
    return {"prompt": prompt["text"], "answer": text.strip(), "expected": prompt["expected"]}


# Attention within samples

_ATTENTION = "sample_by_sample"


def _register_attention() -> None:
    """Register `attend` with transformers (5.14) as an attention of its own, which ModelOpt finds among its modules.

    A row of 4,000 tokens then costs what its samples cost, and not the square of its length; samples of equal length go
    together. ModelOpt rounds keys and values before it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


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
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sample; samples lie one after the other in the row.

    Args:
        sample_lengths: Tokens of each sample; None: a call of generation, which goes to transformers' `sdpa`, or
            where scores are capped, which that cannot, is a single sample.

    Returns:
        [1, tokens, heads, head_dim], and None in place of attention weights.
    """
    if sample_lengths is None and softcap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"scaling": scaling, "sliding_window": sliding_window, **others}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    limits: Any = {"scale": scaling, "window": sliding_window, "cap": softcap}
    if sample_lengths is None:
        return causal_attention(query, key, value, **limits).transpose(1, 2), None
    outputs, start = [], 0
    for length, run in groupby(sample_lengths):
        count = len(list(run))
        rows = slice(start, start + count * length)
        q, k, v = (_stacked(part[0, :, rows], count) for part in (query, key, value))
        output = causal_attention(q, k, v, **limits).transpose(1, 2)
        outputs.append(output.reshape(1, count * length, *output.shape[2:]))
        start = rows.stop
    return torch.cat(outputs, dim=1), None


def _stacked(part: Tensor, count: int) -> Tensor:
    """[heads, count * length, head_dim] -> [count, heads, length, head_dim]"""
    heads, _, size = part.shape
    return part.reshape(heads, count, -1, size).transpose(0, 1)


# Experts
#
# transformers 5 keeps all experts of a layer in two tensors. ModelOpt 0.47 can measure and write those for the Hugging
# Face export, but not for TensorRT-LLM; and an expert that no sample reaches has no scales. Here each layer's block is
# replaced by one that holds router and experts as linear layers: the layout of transformers 4, of the hub's files, and
# the one that ModelOpt's name-based rules for Mixtral and Qwen are written for. Weights are not copied.


class Expert(nn.Module):
    """One expert: down(silu(gate x) * up x)."""

    def __init__(self, gate_up: Tensor, down: Tensor, names: tuple[str, str, str]) -> None:
        super().__init__()
        self._names = names
        for name, weight in zip(names, (*gate_up.chunk(2), down), strict=True):
            self.add_module(name, _linear(weight))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        gate, up, down = (getattr(self, name) for name in self._names)
        result: Tensor = down(functional.silu(gate(x)) * up(x))
        return result


class SparseMoeBlock(nn.Module):
    """Router and experts. ModelOpt knows it by its name, and by `top_k`, `num_experts`, `gate` and `experts`.

    While `everywhere` is set, each expert sees all tokens, and the result is that of the chosen ones all the same.
    """

    names: tuple[str, str, str]  # of an expert's gate, up and down

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.top_k, self.num_experts = int(fused.gate.top_k), int(fused.experts.num_experts)
        self.gate = _linear(fused.gate.weight)
        self._renormalize = getattr(fused.gate, "norm_topk_prob", True)
        weights = zip(fused.experts.gate_up_proj, fused.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(Expert(upper, lower, self.names) for upper, lower in weights)
        self.everywhere = False

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        x = hidden.reshape(-1, hidden.shape[-1])
        shares = torch.softmax(self.gate(x).float(), dim=-1)
        top, chosen = torch.topk(shares, self.top_k, dim=-1)
        top = (top / top.sum(dim=-1, keepdim=True) if self._renormalize else top).to(x.dtype)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            if self.everywhere:
                result.index_add_(0, tokens, expert(x)[tokens] * top[tokens, place, None])
            elif len(tokens):
                result.index_add_(0, tokens, expert(x[tokens]) * top[tokens, place, None])
        return result.reshape(hidden.shape)


class MixtralSparseMoeBlock(SparseMoeBlock):
    """Under the name by which ModelOpt knows Mixtral's."""

    names = ("w1", "w3", "w2")


class Qwen3MoeSparseMoeBlock(SparseMoeBlock):
    """Under the name by which ModelOpt knows Qwen's."""

    names = ("gate_proj", "up_proj", "down_proj")


def separate(model: Any) -> None:
    """Replace the fused blocks of experts of a model, in place; `model` may be on the meta device."""
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        if type(layer.mlp).__name__ == "Qwen3MoeSparseMoeBlock":
            layer.mlp = Qwen3MoeSparseMoeBlock(layer.mlp)
            continue
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
    blocks = [module for module in model.modules() if isinstance(module, SparseMoeBlock)]
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
