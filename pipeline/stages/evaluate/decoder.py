"""The hidden states that a checkpoint computes, layer by layer, from its files.

One layer is in memory at a time, so a model larger than memory can be judged. All tokens of all samples go
through a layer together (only attention looks at samples), so nothing is padded. Everything is float32; what
quantization does to weights, inputs, keys and values is simulated with the scales that the files hold. So is bf16, on
any processor: what one operation hands to the next is rounded as in the `cpu` runtime (OpenVINO 2026.4), which sums in
float32 and returns logits in it.

Roundings of inputs are simulated in float32 with the scales of the checkpoint, as ModelOpt 0.47's fake quantization
does; NVFP4's after its description (two levels of scales, blocks of 16 scaled as they come), for ModelOpt's own needs a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.errors import StageError, UserError
from pipeline.models import Architecture, CheckpointReader, Format
from pipeline.runtimes.tensorrt.checkpoint import MODEL_TYPES

_LOGITS = 1 << 24  # of each model, held at once
_ROWS = 4096  # tokens that go through a linear layer together
E4M3_MAX, E2M1_MAX, BLOCK = 448.0, 6.0, 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Decoder:
    """The layers of one checkpoint, applied to fixed samples.

    Args:
        samples: Tokens of each sample.
        device: "cpu" or "cuda".
        kv_scale: Scale of an FP8 cache, in place of those that the checkpoint holds.
        bf16: Whether weights, activations, keys and values are rounded to bf16.

    Raises:
        UserError: The family is not one that is calibrated.
    """

    def __init__(
        self,
        checkpoint: CheckpointReader,
        samples: Sequence[Sequence[int]],
        device: str,
        kv_scale: float | None = None,
        *,
        bf16: bool = False,
    ) -> None:
        self._bf16 = bf16
        self._checkpoint, self._device, self._kv_scale = checkpoint, device, kv_scale
        self._architecture: Architecture = checkpoint.architecture
        if self._architecture.family not in MODEL_TYPES:
            raise UserError(f"{self._architecture.class_name} cannot be judged; {', '.join(MODEL_TYPES)} can")
        self._lengths = [len(sample) for sample in samples]
        self._tokens = torch.tensor([token for sample in samples for token in sample], device=device)
        self._cosine, self._sine = self._rotations()

    @property
    def layers(self) -> int:
        return self._architecture.layers

    @torch.inference_mode()
    def hidden_states(self, after_layer: Callable[[], None]) -> Tensor:
        """Compute the hidden states after the last norm.

        Args:
            after_layer: Called once for each layer.

        Returns:
            float32 [tokens, hidden], samples one after the other.
        """
        model = self._architecture
        table = self._array(model.embedding)
        x = table[self._tokens]
        del table
        for layer in range(model.layers):
            block = f"model.layers.{layer}."
            x = self._held(x + self._attention(layer, self._norm(x, block + "input_layernorm")))
            x = self._held(x + self._feed_forward(block, self._norm(x, block + "post_attention_layernorm")))
            if not torch.isfinite(x).all():
                raise StageError(
                    f"{self._checkpoint.directory}: layer {layer} computes values that are not finite"
                )
            after_layer()
        return self._norm(x, "model.norm")

    @torch.inference_mode()
    def head(self) -> Tensor:
        """[vocab, hidden]: the output projection, dequantized if it is quantized."""
        return self._weight(self._checkpoint.linear("lm_head").dequantize())

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        model, block = self._architecture, f"model.layers.{layer}.self_attn."
        query, key, value = self._projections(block, x)
        if model.qk_norm:
            query, key = self._norm(query, block + "q_norm"), self._norm(key, block + "k_norm")
        query, key = self._rotate(query), self._rotate(key)
        scales = self._checkpoint.kv_scales(layer)
        if scales is not None:  # the cache holds keys after the rotation
            scales = scales if self._kv_scale is None else (self._kv_scale, self._kv_scale)
            key, value = round_e4m3(key, scales[0]), round_e4m3(value, scales[1])
        samples = (torch.split(part, self._lengths) for part in (query, key, value))
        outputs = [self._attend(q, k, v, model.windows[layer]) for q, k, v in zip(*samples, strict=True)]
        return self.linear(block + "o_proj", torch.cat(outputs))

    def _projections(self, block: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [tokens, (kv_)heads, head_dim]."""
        model = self._architecture
        heads = (model.heads, model.kv_heads, model.kv_heads)
        if model.fused:
            fused = self.linear(block + "qkv_proj", x).view(len(x), -1, model.head_dim)
            query, key, value = torch.split(fused, list(heads), dim=1)
            return query, key, value
        query, key, value = (
            self.linear(f"{block}{part}_proj", x).view(len(x), count, model.head_dim)
            for part, count in zip("qkv", heads, strict=True)
        )
        return query, key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """[tokens, heads, head_dim] of one sample -> [tokens, heads * head_dim]."""
        tokens, mask = len(query), None
        if window is not None and window < tokens:
            ahead = torch.arange(tokens, device=self._device)
            distance = ahead[:, None] - ahead[None, :]
            mask = (distance >= 0) & (distance < window)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return self._held(attended[0].transpose(0, 1).flatten(1))

    def _feed_forward(self, block: str, x: Tensor) -> Tensor:
        if self._architecture.experts:
            return self._experts(block + "block_sparse_moe.", x)
        if self._architecture.fused:
            gate, up = self.linear(block + "mlp.gate_up_proj", x).chunk(2, dim=-1)
        else:
            gate, up = self.linear(block + "mlp.gate_proj", x), self.linear(block + "mlp.up_proj", x)
        return self.linear(block + "mlp.down_proj", self._held(functional.silu(gate) * up))

    def _experts(self, block: str, x: Tensor) -> Tensor:
        """Each token by the experts that the router ranks highest, in the shares that it gives these."""
        model, result = self._architecture, torch.zeros_like(x)
        shares = torch.softmax(self.linear(block + "gate", x), dim=-1)
        top, chosen = torch.topk(shares, model.experts_per_token, dim=-1)
        top = top / top.sum(dim=-1, keepdim=True)
        for number in range(model.experts):
            tokens, place = torch.where(chosen == number)
            if len(tokens):
                expert, mine = f"{block}experts.{number}.", x[tokens]
                gate, up = self.linear(expert + "w1", mine), self.linear(expert + "w3", mine)
                inner = self._held(functional.silu(gate) * up)
                result.index_add_(0, tokens, self.linear(expert + "w2", inner) * top[tokens, place, None])
        return result

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The output of one linear layer for x [tokens, in]: smoothed, rounded as its kernel would, multiplied."""
        layer = self._checkpoint.linear(name)
        weight = self._weight(layer.dequantize())
        bias = None if layer.bias is None else self._weight(layer.bias)
        smooth = None if layer.pre_quant_scale is None else self._weight(layer.pre_quant_scale)
        scale = None if layer.input_scale is None else float(layer.input_scale.reshape(()))
        outputs = []
        for rows in torch.split(x, _ROWS):
            rows = rows if smooth is None else rows * smooth
            rows = rows if scale is None else round_input(rows, layer.format, scale)
            outputs.append(functional.linear(rows, weight, bias))
        return self._held(torch.cat(outputs))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._array(name + ".weight")
        return self._held(functional.rms_norm(x, weight.shape, weight, self._architecture.norm_epsilon))

    def _rotations(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's position, [tokens, 1, channels that turn]."""
        model = self._architecture
        rope, longest = model.rope, max(self._lengths)
        long = rope.kind == "longrope" and longest > (rope.scaling or {})["original_max_position_embeddings"]
        inverse = rope.inverse_frequencies(model.head_dim, long=long)
        positions = np.concatenate([np.arange(length, dtype=np.float32) for length in self._lengths])
        angles = torch.from_numpy(positions[:, None] * inverse[None, :]).to(self._device)
        both = torch.cat([angles, angles], dim=-1)[:, None, :]
        return both.cos() * rope.attention_factor, both.sin() * rope.attention_factor

    def _rotate(self, x: Tensor) -> Tensor:
        channels = self._cosine.shape[-1]
        x, still = x[..., :channels], x[..., channels:]
        first, second = x.chunk(2, dim=-1)
        turned = x * self._cosine + torch.cat([-second, first], dim=-1) * self._sine
        return self._held(torch.cat([turned, still], dim=-1))

    def _array(self, name: str) -> Tensor:
        return self._weight(self._checkpoint.array(name))

    def _weight(self, values: np.ndarray) -> Tensor:  # type: ignore[type-arg]
        return self._held(torch.from_numpy(values.astype(np.float32)).to(self._device))

    def _held(self, x: Tensor) -> Tensor:
        """x as the next operation gets it."""
        return x.bfloat16().float() if self._bf16 else x


def log_probs(hidden: Tensor, head: Tensor) -> Tensor:
    """Log-probabilities [positions, vocab] of the tokens that follow hidden states [positions, hidden]."""
    return functional.log_softmax(functional.linear(hidden, head), dim=-1)


def rows_at_once(head: Tensor) -> int:
    """Count the positions whose logits are held at once."""
    return max(1, _LOGITS // head.shape[0])


def round_input(x: Tensor, form: Format, scale: float) -> Tensor:
    """Round the inputs x [..., in] of a linear layer as the kernels of `form` do; float32."""
    if form in (Format.FP8, Format.W4A8_AWQ):
        return round_e4m3(x, scale)
    if form is Format.INT8_SQ:
        return (x / scale).round().clamp(-128, 127) * scale
    if form is Format.NVFP4:
        return round_nvfp4(x, scale)
    return x


def round_e4m3(x: Tensor, scale: float | Tensor) -> Tensor:
    """Round x to e4m3 multiples of `scale`, saturating."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def round_nvfp4(x: Tensor, scale: float) -> Tensor:
    """Round x to e2m1 multiples of a scale a block of 16, which is itself an e4m3 multiple of `scale`."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    wanted = blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX
    step = round_e4m3(wanted, scale)
    step = torch.where(step > 0, step, torch.ones_like(step))
    return (round_e2m1(blocks / step) * step).flatten(-2)


def round_e2m1(x: Tensor) -> Tensor:
    """Round x to the nearest of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; a tie goes to the even code."""
    values = torch.tensor(_E2M1, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs().clamp(max=E2M1_MAX)
    above, upto = torch.bucketize(size, middles, right=True), torch.bucketize(size, middles)
    code = torch.where(above % 2 == 0, above, upto)
    return torch.copysign(values[code], x)
