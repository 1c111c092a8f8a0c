"""Paged attention with capped scores (Gemma 2): cap * tanh(score / cap), which OpenVINO's PagedAttention does not have.

`uncap_attention` puts plain attention in place of the capped one, so that OpenVINO makes PagedAttention of it, which
writes keys and values into the blocks. `cap_paged_attention` then computes the result beside it, of the blocks of all
sequences in the step: exact, but each query is compared with the keys of all of them. So a step costs as much as its
sequences together for each of them, and scores take 4 bytes for each query, head and key of the step.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Node, Output, Type

CAPPED = "attention.capped."  # beginning of the name of such a node, behind which the layer stands
_MASKED = -65504.0  # the score of a key that must not be seen
# Inputs of PagedAttention (OpenVINO 2026.4).
_QUERY, _KEY, _VALUE, _KEY_CACHE, _VALUE_CACHE = range(5)
_PAST, _BEGINS, _BLOCKS, _BLOCK_BEGINS, _SCALE, _WINDOW = range(5, 11)


def uncap_attention(model: ov.Model) -> None:
    """Replace capped attention by the operation that OpenVINO knows."""
    for node in [
        operation for operation in model.get_ops() if operation.get_friendly_name().startswith(CAPPED)
    ]:
        values = node.input_value(1)
        masked = _source(node, 0, 0)  # softmax, and the sum of scores and mask below it
        mask = masked.input_value(1)
        scaled = _source(masked, 0, 0, 0, 0)  # below cap, tanh and 1 / cap
        product, scale = scaled.input_value(0).get_node(), scaled.input_value(1)
        query, keys = product.input_value(0), product.input_value(1)
        plain = ops.scaled_dot_product_attention(query, keys, values, mask, scale, causal=False)
        _replace(node.output(0), plain.output(0))
    model.validate_nodes_and_infer_types()


def cap_paged_attention(model: ov.Model, cap: float) -> None:
    """Compute what PagedAttention does, but with capped scores; it still writes keys and values."""
    places: dict[str, tuple[Node, Node]] = {}
    for node in [
        operation for operation in model.get_ops() if operation.get_type_name() == "PagedAttentionExtension"
    ]:
        inputs = [node.input_value(index) for index in range(node.get_input_size())]
        group = inputs[_PAST].get_node().get_friendly_name()
        if group not in places:
            places[group] = _places(inputs)
        info = node.get_rt_info()
        sizes = (info["num_k_heads"].astype(int), info["k_head_size"].astype(int))
        mixed = _attention(inputs, *places[group], *sizes, cap)
        _replace(node.output(0), mixed.output(0))
        # Or nothing would ask for the operation, and nothing be written.
        written = ops.result(node.output(0))
        written.output(0).get_tensor().set_names({f"written.{node.get_friendly_name()}"})
        model.add_results([written])
    model.validate_nodes_and_infer_types()


def _source(node: Node, *inputs: int) -> Node:
    for index in inputs:
        node = node.input_value(index).get_node()
    return node


def _replace(old: Output, new: Output) -> None:
    for target in old.get_target_inputs():
        target.replace_source_output(new)


def _i32(value: int | list[int]) -> Node:
    return ops.constant(np.asarray(value, np.int32))


def _f32(value: float) -> Node:
    return ops.constant(np.float32(value))


def _places(inputs: list[Output]) -> tuple[Node, Node]:
    """Distances [tokens, keys] from each token back to each key, and whether it may see it.

    Keys are the places of all blocks, one block after the other, and then the tokens of the step.
    """
    past, begins, blocks, block_begins = (inputs[at] for at in (_PAST, _BEGINS, _BLOCKS, _BLOCK_BEGINS))
    tokens = ops.gather(ops.shape_of(inputs[_QUERY], "i32"), _i32(0), _i32(0))
    size = ops.gather(ops.shape_of(inputs[_KEY_CACHE], "i32"), _i32(2), _i32(0))
    owner, order = _owners(tokens, begins)
    position = ops.add(ops.gather(past, owner, _i32(0)), order)
    block_owner, block_order = _owners(
        ops.gather(ops.shape_of(blocks, "i32"), _i32(0), _i32(0)), block_begins
    )
    within = ops.unsqueeze(ops.range(_i32(0), size, _i32(1), Type.i32), _i32([0]))
    cached_position = ops.add(ops.multiply(ops.unsqueeze(block_order, _i32([1])), size), within)
    filled = ops.less(cached_position, ops.unsqueeze(ops.gather(past, block_owner, _i32(0)), _i32([1])))
    # A place that is not filled belongs to no sequence.
    owners = ops.select(filled, ops.unsqueeze(block_owner, _i32([1])), _i32(-1))
    all_owners, all_positions = (
        ops.concat([ops.reshape(cached, _i32([-1]), special_zero=False), computed], 0)
        for cached, computed in ((owners, owner), (cached_position, position))
    )
    distance = ops.subtract(ops.unsqueeze(position, _i32([1])), ops.unsqueeze(all_positions, _i32([0])))
    same = ops.equal(ops.unsqueeze(owner, _i32([1])), ops.unsqueeze(all_owners, _i32([0])))
    return distance, ops.logical_and(same, ops.greater_equal(distance, _i32(0)))


def _owners(count: Node, begins: Output) -> tuple[Node, Node]:
    """Sequence of each entry, and its position there, [count] each; `begins`: first entry of each sequence."""
    entries = ops.range(_i32(0), count, _i32(1), Type.i32)
    begun = ops.less_equal(ops.unsqueeze(begins, _i32([0])), ops.unsqueeze(entries, _i32([1])))
    owner = ops.subtract(ops.reduce_sum(ops.convert(begun, Type.i32), _i32([1])), _i32(1))
    return owner, ops.subtract(entries, ops.gather(begins, owner, _i32(0)))


def _attention(
    inputs: list[Output], distance: Node, visible: Node, kv_heads: int, head_dim: int, cap: float
) -> Node:
    """[tokens, heads * head_dim]: what the tokens of the step see in the blocks and in the step itself."""
    window = inputs[_WINDOW]
    near = ops.logical_or(ops.equal(window, _i32(0)), ops.less(distance, window))
    mask = ops.select(ops.logical_and(visible, near), _f32(0.0), _f32(_MASKED))

    def everything(cache: Output, current: Output) -> Node:
        """[kv_heads, 1, keys, head_dim]"""
        cached = ops.convert(ops.gather(cache, inputs[_BLOCKS], _i32(0)), Type.f32)
        cached = ops.reshape(
            ops.transpose(cached, _i32([1, 0, 2, 3])), _i32([kv_heads, 1, -1, head_dim]), False
        )
        new = ops.reshape(current, _i32([-1, kv_heads, 1, head_dim]), False)
        return ops.concat([cached, ops.transpose(new, _i32([1, 2, 0, 3]))], 2)

    keys, values = (
        everything(inputs[_KEY_CACHE], inputs[_KEY]),
        everything(inputs[_VALUE_CACHE], inputs[_VALUE]),
    )
    # [kv_heads, heads that share one, tokens, head_dim]
    query = ops.transpose(
        ops.reshape(inputs[_QUERY], _i32([0, kv_heads, -1, head_dim]), True), _i32([1, 2, 0, 3])
    )
    scores = ops.multiply(ops.matmul(query, keys, False, True), inputs[_SCALE])
    scores = ops.multiply(ops.tanh(ops.multiply(scores, _f32(1 / cap))), _f32(cap))
    mixed = ops.matmul(ops.softmax(ops.add(scores, mask), -1), values, False, False)
    return ops.reshape(ops.transpose(mixed, _i32([2, 0, 1, 3])), _i32([0, -1]), True)
