"""What is read from a server's log."""

from __future__ import annotations

import stat
from pathlib import Path

from pipeline.serving import triton_log
from pipeline.serving.server import TritonServer

TEXT = r"""I1121 03:32:29.1 8968 server.cc:241] "starting"
E1121 03:32:30.466668 8968 model_lifecycle.cc:654] "failed to load 'a' version 1: Internal: bad\n\nAt:\n  model.py(7)"
E1121 03:32:30.466668 8968 model_lifecycle.cc:654] "failed to load 'a' version 1: Internal: bad\n\nAt:\n  model.py(7)"
W1121 03:32:30.466668 8968 pinned_memory_manager.cc:271] "Unable to allocate pinned system memory: CUDA"
E1121 03:32:31.466668 8968 cuda_memory_manager.cc:107] "CUDA memory pool"
[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine
[1,1]<stderr>:[TensorRT-LLM][ERROR] 6: The engine plan file is generated on an incompatible device
[trtllm] Failed to start engine: no config
mpirun noticed that process rank 1 with PID 7 on node a exited on signal 9 (Killed).
error: creating server: Internal - failed to load all models
"""


def test_a_log_can_be_read_by_its_owner_alone(server: TritonServer) -> None:
    """It may hold questions and answers."""
    assert stat.S_IMODE(server.log_file.stat().st_mode) == 0o600


def test_errors_are_said_once_whoever_says_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(TEXT)
    found = triton_log.errors(path, 10, noise=("CUDA",))
    assert found == [
        "failed to load 'a' version 1: Internal: bad",
        "[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine",
        "[TensorRT-LLM][ERROR] 6: The engine plan file is generated on an incompatible device",
        "[trtllm] Failed to start engine: no config",
        "mpirun noticed that process rank 1 with PID 7 on node a exited on signal 9 (Killed).",
    ]
    assert "CUDA memory pool" in triton_log.errors(path, 10)
    assert len(triton_log.errors(path)) == 5


def test_causes_and_phrases(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(TEXT)
    (cause,) = triton_log.causes(path)
    assert cause.startswith("the engine was built for another GPU: build again")
    assert triton_log.causes(path, noise=("incompatible",)) == []
    assert triton_log.contains(path, ("no such phrase", "creating server:"))
    assert not triton_log.contains(path, ())
    assert triton_log.tail(path, 1) == ["error: creating server: Internal - failed to load all models"]


def test_no_log_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert (
        triton_log.tail(path),
        triton_log.errors(path),
        triton_log.causes(path),
        triton_log.contains(path, ("x",)),
    ) == ([], [], [], False)
