"""What a decoder asks of its checkpoint: embedding, norms, linear layers, the rounding of its cache.

Whatever is asked for is remembered, so that no tensor of a file can be left out silently.
"""

from __future__ import annotations

import openvino.opset15 as ops
from openvino import Type

from pipeline.errors import UserError
from pipeline.models import Checkpoint, Format
from pipeline.models.inspection import PARTS
from pipeline.runtimes.cpu.ir.constants import Constants, widen
from pipeline.runtimes.cpu.ir.linear import Linears
from pipeline.runtimes.cpu.ir.nodes import Node, i64
from pipeline.runtimes.cpu.ir.numerics import round_e4m3, round_int8

FORMATS = (Format.NONE, Format.FP8, Format.INT4_AWQ, Format.W4A8_AWQ, Format.INT8_SQ)
CACHES = {"FP8": round_e4m3, "INT8": round_int8}
_FOLLOWS_FROM_CONFIG = "rotary_emb.inv_freq"  # old checkpoints carry it


class Weights:
    """The tensors of one checkpoint as graph operations.

    With `simulate`, the inputs of quantized layers, keys and values are rounded as the calibrated model does.
    """

    def __init__(self, checkpoint: Checkpoint, *, simulate: bool) -> None:
        form, cache = checkpoint.quantization.format, checkpoint.quantization.kv_cache
        if form not in FORMATS:
            raise UserError(f"{form} weights cannot be built for the cpu runtime; {', '.join(FORMATS)} can")
        if cache is not None and cache not in CACHES:
            raise UserError(f"a {cache} cache cannot be built for the cpu runtime; {', '.join(CACHES)} can")
        self.constants = Constants()
        self._checkpoint, self._simulate = checkpoint, simulate
        self._linears = Linears(self.constants, round_inputs=simulate)
        self._read: set[str] = set()

    def embed(self, token_ids: Node) -> Node:
        """[batch, tokens] i64 -> [batch, tokens, hidden] f32."""
        table = self._plain(self._checkpoint.architecture.embedding)
        return widen(ops.gather(table, ops.convert(token_ids, Type.i32), i64(0)))

    def norm(self, name: str) -> Node:
        """[size] f32: the weight of the norm `name`."""
        return widen(self._plain(f"{name}.weight"))

    def linear(self, x: Node, name: str) -> Node:
        """[..., in] -> [..., out]: the linear layer `name`, its bias included."""
        return self._apply(x, name, name)

    def head(self, x: Node) -> Node:
        """[..., hidden] -> [..., vocab]: the output projection, or the embedding where they are tied."""
        shape = self._checkpoint.architecture.output_projection()
        return self._apply(x, shape.name, self._checkpoint.stored_name(shape))

    def cached(self, layer: int, key: Node, value: Node) -> tuple[Node, Node]:
        """Keys and values as the cache of the calibrated model holds them, if it is quantized."""
        scales, kind = self._checkpoint.kv_scales(layer), self._checkpoint.quantization.kv_cache
        if scales is None or kind is None:
            return key, value
        block = f"model.layers.{layer}.self_attn."
        self._read |= {f"{block}k_proj.k_scale", f"{block}v_proj.v_scale"}
        if not self._simulate:
            return key, value
        return CACHES[kind](key, scales[0]), CACHES[kind](value, scales[1])

    def unread(self) -> list[str]:
        """The tensors of the files that nothing has asked for."""
        names = (name for name in self._checkpoint.tensors if not name.endswith(_FOLLOWS_FROM_CONFIG))
        return sorted(set(names) - self._read)

    def _apply(self, x: Node, name: str, stored: str) -> Node:
        layer = self._checkpoint.linear(name)
        self._read |= {f"{stored}.{part}" for part in PARTS if getattr(layer, part) is not None}
        product = self._linears.product(x, layer, f"{stored}.weight")
        return product if layer.bias is None else ops.add(product, widen(self._plain(f"{name}.bias")))

    def _plain(self, name: str) -> Node:
        self._read.add(name)
        return self.constants.add(self._checkpoint.tensors[name], name)
