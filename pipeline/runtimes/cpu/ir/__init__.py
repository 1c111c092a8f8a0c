"""Checkpoints as OpenVINO models: `build_ir` reads safetensors and writes the graph, without torch."""

from pipeline.runtimes.cpu.ir.build import build_ir

__all__ = ["build_ir"]
