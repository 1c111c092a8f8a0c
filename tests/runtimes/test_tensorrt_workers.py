"""How many ranks are built at a time, by the memory and the GPUs that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtimes import ExecutorChoice
from pipeline.runtimes.tensorrt.building import offered, workers
from tests.support.machines import line, put_nvidia_smi

GIB = 2**30
NATIVE = ExecutorChoice("native")


@pytest.mark.parametrize(
    ("rank_gib", "gpus", "memory_gib", "count"),
    [
        ([16], 1, 64, 1),
        ([16], 1, 1, 1),  # the builder tries
        ([18] * 4, 4, 240, 4),
        ([18] * 4, 4, 239, 3),
        ([18] * 4, 2, 2000, 2),
        ([18] * 8, 16, 2000, 8),
        ([2, 2, 2, 18], 4, 120, 2),  # the largest rank counts
    ],
)
def test_workers(rank_gib: list[int], gpus: int, memory_gib: int, count: int) -> None:
    assert workers([gib * GIB for gib in rank_gib], gpus, memory_gib * GIB) == count


@given(
    st.lists(st.integers(1, 100 * GIB), min_size=1, max_size=16),
    st.integers(1, 16),
    st.integers(0, 4000 * GIB),
)
def test_workers_fit(sizes: list[int], gpus: int, memory: int) -> None:
    count = workers(sizes, gpus, memory)
    assert 1 <= count <= min(len(sizes), gpus)
    if count > 1:
        assert count * max(sizes) < memory
    assert workers(sizes, gpus, memory * 2) >= count


@pytest.mark.parametrize("name", ["print", "adopt"])
def test_another_machine(name: str) -> None:
    choice = ExecutorChoice(name, devices=(3,))  # type: ignore[arg-type]
    assert offered(choice, ranks=4, gpu_bytes=80 * GIB) == (4, 320 * GIB)


def test_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put_nvidia_smi(tmp_path, monkeypatch, "\n".join(line(index) for index in range(8)))
    assert offered(NATIVE, ranks=4, gpu_bytes=0)[0] == 8
    assert offered(ExecutorChoice("docker", devices=(6, 7)), ranks=4, gpu_bytes=0)[0] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert offered(NATIVE, ranks=4, gpu_bytes=0)[0] == 3


def test_a_driver_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "", code=9)
    assert offered(NATIVE, ranks=4, gpu_bytes=0)[0] == 4, "the builder itself will say what it lacks"
