"""LoRA adapters of an engine: all are in the graph, and each token of a step takes the one of its sequence.

    y = W x + B_k A_k x           k: the token's adapter; B is scaled already

Rows of all adapters' A (and columns of B) are one matrix of each layer. A step names the rows of the adapters that are
in it, and a mask [tokens, 1, rows] that keeps each token to its own; so one product serves any mixture of adapters and
base. A step without adapters has no rows, and its products are empty.

The file is numpy's npz: `names`; `rank`, that all adapters are padded to; and "LAYER.A" [adapters * rank, inputs] and
"LAYER.B" [adapters * rank, outputs], float32, for each layer that an adapter changes.
"""

from __future__ import annotations

from collections import abc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

ADAPTER_INPUTS = ("adapter_rows", "adapter_mask")


class AdapterStack:
    """The adapters of a file."""

    def __init__(self, file: Path) -> None:
        with np.load(file, allow_pickle=False) as arrays:
            self.names: tuple[str, ...] = tuple(arrays["names"].tolist())
            self._rank = int(arrays["rank"])
            self._matrices = {name: arrays[name] for name in arrays.files if name.endswith((".A", ".B"))}

    def join(self, model: ov.Model, linears: abc.Mapping[str, abc.Sequence[str]]) -> None:
        """Add the adapters to a model, and the inputs `ADAPTER_INPUTS`.

        Args:
            linears: Layer -> names of the nodes of its input and its output.
        """
        rows = _parameter(ADAPTER_INPUTS[0], [-1], ov.Type.i32)
        mask = _parameter(ADAPTER_INPUTS[1], [-1, -1, -1], ov.Type.f32)
        nodes = {node.get_friendly_name(): node for node in model.get_ops()}
        for layer in sorted({name[:-2] for name in self._matrices}):
            before, after = (nodes[name].output(0) for name in linears[layer])
            readers = list(after.get_target_inputs())
            first, second = (
                ops.gather(ops.constant(self._matrices[f"{layer}.{part}"][None]), rows, ops.constant(1))
                for part in "AB"
            )
            inner = ops.multiply(ops.matmul(before, first, False, True), mask)
            total = ops.add(after, ops.matmul(inner, second, False, False)).output(0)
            for reader in readers:
                reader.replace_source_output(total)
        model.add_parameters([rows, mask])
        model.validate_nodes_and_infer_types()

    def select(
        self, pieces: abc.Sequence[tuple[int, int]]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Rows [rows] and mask [tokens, 1, rows] of a step.

        Rows are padded to a power of two of adapters, which the mask keeps out: see `paged_model` on kernels by sizes.

        Args:
            pieces: (number of its adapter, tokens) of each part of the step.
        """
        used = sorted({number for number, _ in pieces if number})
        room = 1 << (len(used) - 1).bit_length() if used else 0
        numbers = np.array([*used, *[1] * (room - len(used))], np.int32)
        rows = (numbers[:, None] - 1) * self._rank + np.arange(self._rank, dtype=np.int32)
        mask = np.zeros((sum(tokens for _, tokens in pieces), 1, room, self._rank), np.float32)
        at = 0
        for number, tokens in pieces:
            if number:
                mask[at : at + tokens, 0, used.index(number)] = 1
            at += tokens
        return rows.reshape(-1).astype(np.int32), mask.reshape(len(mask), 1, room * self._rank)


def _parameter(name: str, shape: list[int], kind: ov.Type) -> ov.Node:
    node = ops.parameter(ov.PartialShape(shape), kind, name=name)
    node.output(0).get_tensor().set_names({name})
    return node
