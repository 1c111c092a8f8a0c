"""The hidden states that a checkpoint computes, layer by layer, from its files.

One layer is in memory at a time, so a model larger than memory can be judged. All tokens of all samples go
through a layer together (only attention looks at samples), so nothing is padded. Everything is float32; what
quantization does to weights, inputs, keys and values is simulated with the scales that the files hold.

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

from pipeline.errors import StageError
from pipeline.models import Architecture, CheckpointReader, Format, LinearLayer
from pipeline.models.layers import INPUT_GROUP
from pipeline.models.rope import Rope
from pipeline.stages.evaluate.results import Computed

_LOGITS = 1 << 24  # of each model, held at once
_ROWS = 4096  # tokens that go through a linear layer together
E4M3_MAX, E2M1_MAX, BLOCK = 448.0, 6.0, 16
F16_MAX = 65504.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# transformers 5.14, models/gpt_oss/modeling_gpt_oss.py: GptOssExperts.
_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0
_GATED = ("gate_proj", "up_proj", "down_proj")


class Decoder:
    """The layers of one checkpoint, applied to fixed samples.

    Args:
        samples: Tokens of each sample.
        device: "cpu" or "cuda".
        kv_scale: Scale of an FP8 cache, in place of those that the checkpoint holds.
        computed: Roundings of the `cpu` runtime (OpenVINO 2026.4), see `Computed`. In "bf16", it rounds weights,
            activations, keys and values, while sums and logits stay float32; where all weights are integers, also
            inputs and the output projection to 8 bits, as in its short steps. With "f16_cache", it rounds keys and
            values to f16, and the output projection to 8 bits where all weights are integers.
        observe: Keep the largest magnitude of each linear layer's inputs in `largest_inputs`.
    """

    def __init__(
        self,
        checkpoint: CheckpointReader,
        samples: Sequence[Sequence[int]],
        device: str,
        kv_scale: float | None = None,
        *,
        computed: Computed = "f32",
        observe: bool = False,
    ) -> None:
        self._bf16, self._f16_cache = computed == "bf16", computed == "f16_cache"
        self._rounds = self._bf16 and checkpoint.has_integers
        self._rounds_head = computed != "f32" and checkpoint.has_integers
        self._checkpoint, self._device, self._kv_scale = checkpoint, device, kv_scale
        self._architecture: Architecture = checkpoint.architecture
        self._is_gemma = self._architecture.family.startswith("gemma")
        self._lengths = [len(sample) for sample in samples]
        self._tokens = torch.tensor([token for sample in samples for token in sample], device=device)
        turns = self._rotations(self._architecture.rope)
        local = self._architecture.local_rope
        near = turns if local is None else self._rotations(local)
        self._turns = [turns if window is None else near for window in self._architecture.windows]
        self._observe = observe
        self.largest_inputs: dict[str, float] = {}

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
        x = self._rounded(table[self._tokens] * (model.hidden**0.5 if self._is_gemma else 1))
        del table
        for layer in range(model.layers):
            block = f"model.layers.{layer}."
            mixed = self._attention(layer, self._norm(x, block + "input_layernorm"))
            if self._is_gemma:
                x = self._rounded(x + self._norm(mixed, block + "post_attention_layernorm"))
                made = self._feed_forward(layer, self._norm(x, block + "pre_feedforward_layernorm"))
                x = self._rounded(x + self._norm(made, block + "post_feedforward_layernorm"))
            else:
                x = self._rounded(x + mixed)
                x = self._rounded(
                    x + self._feed_forward(layer, self._norm(x, block + "post_attention_layernorm"))
                )
            if not torch.isfinite(x).all():
                raise StageError(
                    f"{self._checkpoint.directory}: layer {layer} computes values that are not finite"
                )
            after_layer()
        x = self._norm(x, "model.norm")
        return round_groups(x) if self._rounds else x

    @torch.inference_mode()
    def head(self) -> Tensor:
        """[vocab, hidden]: the output projection, dequantized if it is quantized."""
        layer = self._checkpoint.linear("lm_head")
        rounded = self._rounds_head and layer.format is Format.NONE
        return self._weight((layer.in_int8() if rounded else layer).dequantize())

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        model, block = self._architecture, f"model.layers.{layer}.self_attn."
        query, key, value = self._projections(block, x)
        if model.qk_norm:
            query, key = self._norm(query, block + "q_norm"), self._norm(key, block + "k_norm")
        query, key = self._rotate(query, layer), self._rotate(key, layer)
        scales = self._checkpoint.kv_scales(layer)
        if scales is not None:  # the cache holds keys after the rotation
            scales = scales if self._kv_scale is None else (self._kv_scale, self._kv_scale)
            key, value = round_e4m3(key, scales[0]), round_e4m3(value, scales[1])
        if self._f16_cache:
            key, value = (part.clamp(-F16_MAX, F16_MAX).half().float() for part in (key, value))
        sinks = self._array(block + "sinks") if block + "sinks" in self._checkpoint.tensors else None
        samples = (
            torch.split(part.transpose(0, 1)[None], self._lengths, dim=2) for part in (query, key, value)
        )
        outputs = [
            causal_attention(
                q, k, v, scale=model.attention_scale, window=model.windows[layer], cap=model.attention_cap, sinks=sinks
            )[0].transpose(0, 1).flatten(1)
            for q, k, v in zip(*samples, strict=True)
        ]  # fmt: skip
        return self.linear(block + "o_proj", self._rounded(torch.cat(outputs)))

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

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        model, block = self._architecture, f"model.layers.{layer}."
        if model.sparse[layer]:
            return self._experts(block, x)
        if model.fused:
            gate, up = self.linear(block + "mlp.gate_up_proj", x).chunk(2, dim=-1)
        else:
            gate, up = (self.linear(f"{block}mlp.{name}", x) for name in _GATED[:2])
        gate = functional.gelu(gate, approximate="tanh") if self._is_gemma else functional.silu(gate)
        return self.linear(block + "mlp.down_proj", self._rounded(gate * up))

    def _experts(self, block: str, x: Tensor) -> Tensor:
        """Each token by the experts that the router ranks highest, in the shares that it gives these."""
        model, result = self._architecture, torch.zeros_like(x)
        is_mixtral = model.family == "mixtral"
        place = block + ("block_sparse_moe." if is_mixtral else "mlp.")
        logits = self.linear(place + ("router" if model.stacked else "gate"), x)
        top, chosen = torch.topk(logits, model.experts_per_token, dim=-1)
        shares = torch.softmax(top, dim=-1)
        if not model.renormalize:
            shares = torch.softmax(logits, dim=-1).gather(1, chosen)
        for number in range(model.experts):
            tokens, rank = torch.where(chosen == number)
            if not len(tokens):
                continue
            routed = x[tokens]
            if model.stacked:
                made = self._stacked_expert(f"{place}experts.", number, routed)
            else:
                expert = f"{place}experts.{number}."
                gate, up, down = (expert + name for name in (("w1", "w3", "w2") if is_mixtral else _GATED))
                inner = self._rounded(functional.silu(self.linear(gate, routed)) * self.linear(up, routed))
                made = self.linear(down, inner)
            result.index_add_(0, tokens, made * shares[tokens, rank, None])
        return result

    def _stacked_expert(self, place: str, number: int, x: Tensor) -> Tensor:
        """One of gpt-oss: gates are the even outputs of the first projection, the others the odd ones."""
        both = self._product(self._checkpoint.expert(place + "gate_up_proj", number), x)
        gate = both[:, 0::2].clamp(max=_SWIGLU_LIMIT)
        up = both[:, 1::2].clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT) + 1
        inner = self._rounded(up * gate * torch.sigmoid(gate * _SWIGLU_ALPHA))
        return self._product(self._checkpoint.expert(place + "down_proj", number), inner)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The output of one linear layer for x [tokens, in]: smoothed, rounded as its kernel would, multiplied."""
        return self._product(self._checkpoint.linear(name), x)

    def _product(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._observe:
            largest = float(x.abs().max())
            self.largest_inputs[layer.name] = max(self.largest_inputs.get(layer.name, 0.0), largest)
        weight = self._weight(layer.dequantize())
        bias = None if layer.bias is None else self._weight(layer.bias)
        smooth = None if layer.pre_quant_scale is None else self._weight(layer.pre_quant_scale)
        scale = None if layer.input_scale is None else float(layer.input_scale.reshape(()))
        outputs = []
        for rows in torch.split(x, _ROWS):
            rows = rows if smooth is None else rows * smooth
            rows = rows if scale is None else round_input(rows, layer.format, scale)
            rows = round_groups(rows) if self._rounds else rows
            outputs.append(functional.linear(rows, weight, bias))
        return self._rounded(torch.cat(outputs))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._array(name + ".weight") + (1 if self._is_gemma else 0)
        return self._rounded(functional.rms_norm(x, weight.shape, weight, self._architecture.norm_epsilon))

    def _rotations(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's position, [tokens, 1, channels that turn]."""
        longest = max(self._lengths)
        long = rope.kind == "longrope" and longest > (rope.scaling or {})["original_max_position_embeddings"]
        inverse = rope.inverse_frequencies(self._architecture.head_dim, long=long)
        positions = np.concatenate([np.arange(length, dtype=np.float32) for length in self._lengths])
        angles = torch.from_numpy(positions[:, None] * inverse[None, :]).to(self._device)
        both = torch.cat([angles, angles], dim=-1)[:, None, :]
        return both.cos() * rope.attention_factor, both.sin() * rope.attention_factor

    def _rotate(self, x: Tensor, layer: int) -> Tensor:
        cosine, sine = self._turns[layer]
        channels = cosine.shape[-1]
        x, still = x[..., :channels], x[..., channels:]
        first, second = x.chunk(2, dim=-1)
        turned = x * cosine + torch.cat([-second, first], dim=-1) * sine
        return self._rounded(torch.cat([turned, still], dim=-1))

    def _array(self, name: str) -> Tensor:
        return self._weight(self._checkpoint.array(name))

    def _weight(self, values: np.ndarray) -> Tensor:  # type: ignore[type-arg]
        return self._rounded(torch.from_numpy(values.astype(np.float32)).to(self._device))

    def _rounded(self, x: Tensor) -> Tensor:
        """Round activations to bfloat16 if the model computes in it."""
        return x.bfloat16().float() if self._bf16 else x


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to what came before.

    Args:
        query: [samples, heads, tokens, head_dim], the last of the keys and values [samples, kv_heads, …, head_dim].
        scale: By which scores are multiplied; None: the root of head_dim divides them.
        window: Positions that a token sees, its own included.
        cap: Scores are `cap * tanh(score / cap)`.
        sinks: [heads]: a score of each head that no key has.

    Returns:
        [samples, heads, tokens, head_dim].
    """
    tokens, mask = key.shape[2], None
    if cap is not None or sinks is not None or (window is not None and window < tokens):
        at = torch.arange(tokens, device=query.device)
        distance = at[-query.shape[2] :, None] - at[None, :]
        mask = (distance >= 0) & (distance < (tokens if window is None else window))
    if cap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    assert mask is not None, "made above"
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1) @ value
    beside = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], dim=-1).softmax(dim=-1)[..., :-1] @ value


def log_probs(hidden: Tensor, head: Tensor, cap: float | None = None) -> Tensor:
    """Log-probabilities [positions, vocab] of the tokens that follow hidden states [positions, hidden].

    Args:
        cap: Logits are `cap * tanh(logit / cap)`.
    """
    logits = functional.linear(hidden, head)
    return functional.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), dim=-1)


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


def round_groups(x: Tensor) -> Tensor:
    """Round x to 8 bits by the largest magnitude of each `INPUT_GROUP` neighbours."""
    groups = x.reshape(-1, INPUT_GROUP) if x.shape[-1] % INPUT_GROUP == 0 else x
    step = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / step).round() * step).reshape(x.shape)


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
