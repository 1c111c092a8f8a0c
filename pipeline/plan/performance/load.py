"""What one model asks of one rank, by the token and by the step: bytes to read and operations to do.

Counted from the same matrices as the memory plan (`planning.memory.tensors`). Not counted: norms and biases, which are
small, and the embedding, of which a step reads a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.contracts import engine_memory
from pipeline.contracts.gpu_rates import Arithmetic, Rates
from pipeline.plan.memory import kv
from pipeline.plan.memory.demand import ModelNeed
from pipeline.plan.memory.tensors import Tensor, layer, output, part
from pipeline.plan.memory.weights import stage_layers

# What a format's products are computed in. INT4 and MXFP4 weights alone are widened to 16 bits first; `auto` mixes
# formats, and is taken for FP8, which all of its mixes contain.
_ARITHMETIC: dict[str, Arithmetic] = {
    "none": "bf16",
    "int4_awq": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "w4a8_awq": "fp8",
    "auto": "fp8",
    "int8_sq": "int8",
    "nvfp4": "fp4",
    "mxfp4": "bf16",
}
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Of the rank in the first stage (with the output projection, which the last has). Operations are two a weight."""

    layers: int  # of the stage
    stages: int
    ranks: int  # that share each layer
    dense_bytes: float  # weights that every step reads
    expert_bytes: float  # weights of all experts there
    experts: int  # of the whole model; 0: none
    experts_per_token: int
    quantized_ops: float  # for each token, in `arithmetic`
    plain_ops: float  # for each token, in bf16
    output_ops: float  # for each sequence: the output projection, in bf16
    arithmetic: Arithmetic
    kv_bytes: float  # keys and values of one token
    pair_ops: float  # attention of one token to another
    activation_bytes: float  # read and written for each token, between matrices
    exchange_bytes: float  # of one all-reduce, for each token
    exchanges: int  # all-reduces in a step

    def expert_share(self, tokens: float) -> float:
        """Of the experts' weights, what a step of so many tokens reads, if tokens choose alike often."""
        if not self.experts:
            return 0.0
        return float(1 - (1 - self.experts_per_token / self.experts) ** tokens)


def model_load(need: ModelNeed, rates: Rates) -> ModelLoad:
    """Counted once; steps are multiples of it."""
    sizes, split = need.sizes, need.split
    held = stage_layers(need, 0)
    matrices = [tensor for index in held for tensor in layer(sizes, index) if tensor.columns > 1]
    dense = [tensor for tensor in matrices if not tensor.is_expert]
    experts = [tensor for tensor in matrices if tensor.is_expert]
    share = sizes.experts_per_token / sizes.experts if sizes.experts else 0.0
    heads = _output(need)
    return ModelLoad(
        layers=len(held),
        stages=split.pipeline,
        ranks=split.tensor,
        dense_bytes=sum(_bytes(tensor, need) for tensor in (*dense, *heads)),
        expert_bytes=sum(_bytes(tensor, need) for tensor in experts),
        experts=sizes.experts,
        experts_per_token=sizes.experts_per_token,
        quantized_ops=sum(_ops(tensor, need) for tensor in dense if tensor.format(need.format) != "none")
        + share * sum(_ops(tensor, need) for tensor in experts),
        plain_ops=sum(_ops(tensor, need) for tensor in dense if tensor.format(need.format) == "none"),
        output_ops=sum(_ops(tensor, need) for tensor in heads),
        arithmetic=_arithmetic(need.format, rates),
        kv_bytes=kv.token_bytes(need),
        pair_ops=4 * sizes.heads * sizes.head_dim * len(held) / split.tensor,
        activation_bytes=sum(_activations(tensor, need, share) for tensor in matrices),
        exchange_bytes=sizes.hidden * _ACTIVATION_BYTES,
        exchanges=2 * len(held) if split.tensor > 1 else 0,
    )


def _arithmetic(form: str, rates: Rates) -> Arithmetic:
    wanted = _ARITHMETIC[form]
    return wanted if wanted in rates.tflops else "bf16"


def _output(need: ModelNeed) -> tuple[Tensor, ...]:
    """The output projection, which a tied model has too: it is its embedding."""
    found = tuple(tensor for tensor in output(need.sizes) if tensor.kind == "lm_head")
    return found or (Tensor("lm_head", need.sizes.vocab, need.sizes.hidden, "vocabulary"),)


def _bytes(tensor: Tensor, need: ModelNeed) -> float:
    held = part(tensor, need.sizes, need.split)
    form = tensor.format(need.format)
    each = engine_memory.linear_bytes(
        held.rows, held.columns, form, awq_block=need.awq_block, dtype=need.sizes.dtype, bits=need.bits
    )
    return each * held.copies


def _ops(tensor: Tensor, need: ModelNeed) -> float:
    return 2.0 * part(tensor, need.sizes, need.split).parameters


def _activations(tensor: Tensor, need: ModelNeed, share: float) -> float:
    held = part(tensor, need.sizes, need.split)
    used = held.copies * share if tensor.is_expert else held.copies
    return _ACTIVATION_BYTES * (held.rows + held.columns) * used
