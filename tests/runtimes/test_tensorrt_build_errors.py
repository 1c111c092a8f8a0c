"""Known failures of trtllm-build, on lines as they were reported."""

from __future__ import annotations

from pathlib import Path

from pipeline.runtimes.tensorrt.executors.builder import LogReader, build_errors, diagnose

_LINES = (Path(__file__).parent / "build_errors.txt").read_text(encoding="utf-8").splitlines()[1:]
REPORTED = {line: name.strip() for name, _, line in (row.partition("| ") for row in _LINES)}
HARMLESS = (
    "[TRT] [W] Requested amount of GPU memory (24793579520 bytes) could not be allocated.",
    "[TRT] [W] UNSUPPORTED_STATESkipping tactic 2 due to insufficient memory on requested size of 33555480576 detected",
    "[TRT-LLM] [W] Invalid timing cache, using freshly created one",
    "[TRT-LLM] [I] Total time of building all engines: 00:00:47",
    "AssertionError: Engine building failed, please check error log.",
)


def test_reported_lines() -> None:
    for line, name in REPORTED.items():
        assert [error.id for error in diagnose([line], exit_code=1)] == [name], line


def test_what_also_happens_in_good_builds_is_no_cause() -> None:
    for line in HARMLESS:
        assert diagnose([line], exit_code=1) == (), line


def test_every_error_is_tried() -> None:
    assert {error.id for error in build_errors()} - set(REPORTED.values()) == {"wrong_device"}


def test_a_silent_end_by_a_signal() -> None:
    assert [error.id for error in diagnose([], exit_code=137)] == ["host_memory"]
    assert [error.id for error in diagnose([], exit_code=139)] == ["crash"]
    said = ["torch.cuda.OutOfMemoryError: CUDA out of memory."]
    assert [error.id for error in diagnose(said, exit_code=137)] == ["gpu_memory"], "what is said comes first"


def test_at_most_three_causes() -> None:
    assert len(diagnose(list(REPORTED), exit_code=1)) == 3


LOG = """\
[10/12/2024-15:46:00] [TRT-LLM] [I] Total time of constructing network from module object 2.79 seconds
[10/12/2024-15:46:00] [TRT-LLM] [I] Build TensorRT engine Unnamed Network 0
[10/12/2024-15:46:01] [TRT] [W] Unused Input: position_ids
[10/12/2024-15:46:23] [TRT-LLM] [I] Total time of building Unnamed Network 0: 00:00:22
[10/12/2024-15:46:23] [TRT-LLM] [I] Build phase peak memory: 40294.03 MB, children: 16.96 MB
[10/12/2024-15:46:23] [TRT-LLM] [I] Serializing engine to /app/rank0.engine...
[10/12/2024-15:46:42] [TRT-LLM] [I] Engine serialized. Total time: 00:00:19
[10/12/2024-15:46:42] [TRT-LLM] [RANK 1] [W] Overriding paged_state to False
[10/12/2024-15:46:43] [TRT-LLM] [I] Total time of building all engines: 00:00:47"""


def test_a_log() -> None:
    reader = LogReader()
    said = [text for line in LOG.splitlines() if (text := reader.feed(line)) is not None]
    assert said == [
        "weights loaded and network made in 2.79 s",
        "TensorRT looks for the fastest kernels",
        "engine built in 00:00:22",
        "writing rank 0",
    ]
    assert (reader.engines, reader.peak_memory_mib) == (1, 40310.99)
    assert reader.warnings == ["Overriding paged_state to False"], "TensorRT's own are noise"
