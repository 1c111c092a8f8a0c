"""Runtimes: how a model is built, packaged and launched, by TensorRT-LLM's engines, its PyTorch backend, or on a CPU.

`base` has the protocol. Only `runtime_of` knows which runtimes there are, so each of the folders can be taken out.
"""

from __future__ import annotations

from pipeline.recipe import Recipe
from pipeline.runtimes.base import AUTO, EngineBuildRequest, Engines, ExecutorChoice, Runtime

__all__ = ["AUTO", "EngineBuildRequest", "Engines", "ExecutorChoice", "Runtime", "runtime_of"]


def runtime_of(recipe: Recipe) -> Runtime:
    """Return the runtime that `runtime.kind` names; its module is imported here."""
    match recipe.runtime.kind:
        case "cpu":
            from pipeline.runtimes.cpu.runtime import CpuBackend

            return CpuBackend()
        case "tensorrt":
            from pipeline.runtimes.tensorrt.runtime import TensorRTBackend

            return TensorRTBackend()
        case "pytorch":
            from pipeline.runtimes.pytorch.runtime import PyTorchBackend

            return PyTorchBackend()
