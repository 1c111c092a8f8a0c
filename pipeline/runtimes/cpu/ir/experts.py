"""Routed experts, in the form that OpenVINO's CPU plugin turns into products of the chosen ones alone.

The graph says: every expert works on every token, and shares of 0 leave out what the router did not choose. As it is
compiled, `ConvertTiledMoeBlockToGatherMatmuls` (OpenVINO 2026.4) replaces these products by `GatherMatmul`, which
computes and reads the chosen experts only. It knows the graph by its exact form, down to the reshapes that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64


def route(logits: Node, top: int, *, renormalize: bool) -> tuple[Node, Node]:
    """Shares [tokens, top] and experts [tokens, top] (i32) by a router's logits [tokens, experts].

    Args:
        renormalize: Whether the shares sum up to 1, and not those of all experts.
    """
    ranked = logits if renormalize else ops.softmax(logits, 1)
    # The greatest logits are the greatest shares, and shares that are taken of few logits sum up to 1.
    best = ops.topk(ranked, i64(top), 1, "max", "value", index_element_type="i32")
    return ops.softmax(best.output(0), 1) if renormalize else best.output(0), best.output(1)


def routed(x: Node, experts: int, shares: Node, chosen: Node, each: Callable[[Node], Node]) -> Node:
    """[batch, tokens, hidden] -> the same: what the chosen experts make of each token, in their shares.

    Args:
        shares: [tokens, top], of the experts `chosen` (i32).
        each: [experts, tokens, hidden] -> the same, every expert on every token.
    """
    hidden = x.get_output_partial_shape(0)[2].get_length()
    flat = ops.reshape(x, i64([-1, hidden]), special_zero=False)
    tiled = ops.reshape(ops.tile(flat, i64([experts, 1])), i64([experts, -1, hidden]), special_zero=False)
    made = ops.reshape(each(tiled), i64([experts, -1, hidden]), special_zero=False)
    tokens = ops.gather(ops.shape_of(flat, "i64"), i64([0]), i64(0))
    none = ops.broadcast(f32(0.0), ops.concat([tokens, i64([experts])], 0))
    spread = ops.transpose(ops.scatter_elements_update(none, chosen, shares, i64(1)), i64([1, 0]))
    weights = ops.unsqueeze(ops.reshape(spread, i64([experts, -1]), special_zero=False), i64(-1))
    mixed = ops.reduce_sum(ops.multiply(made, weights), i64([0]), keep_dims=False)
    return ops.reshape(mixed, ops.shape_of(x, "i64"), special_zero=False)
