"""Graphs of the semantic layer, loaded by ONNX Runtime so that 8-bit weights mean the same on every processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Without VNNI, ONNX Runtime sums pairs of 8-bit products in 16 bits, which do not hold them: a probability of 0.34 came
# out as 0.04. Products of unsigned numbers, which it makes then, are exact and slower; with VNNI nothing changes.
_EXACT = ("session.x64quantprecision", "1")


def load_graph(graph: Path, threads: int) -> Any:
    """Load a graph: an `onnxruntime.InferenceSession`.

    Args:
        graph: file of the graph.
        threads: that one call may use.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry(*_EXACT)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
