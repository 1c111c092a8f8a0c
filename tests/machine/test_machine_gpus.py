"""GPUs and the ways between them, from what the driver's tools print."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.machine import gpus as module
from pipeline.machine.gpus import DetectedGpu, Link, parse, read_gpus, read_topology, survey_gpus, visible
from pipeline.machine.nvml import survey
from pipeline.machine.probe import CommandOutput
from pipeline.plan.machine_facts import GpuLink
from tests.support.machines import HANGS, line, put_nvidia_smi, put_tool

# As drivers 525 to 590 print it: tabs between columns, the heading underlined, network cards beside the GPUs.
FOUR_H100 = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPXB\tSYS\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-51,104-155\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPXB\t52-103,156-207\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPXB\t52-103,156-207\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
TWO_L40S = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tSYS\t0-15\t0
GPU1\tSYS\t X \t16-31\t1
"""
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tPHB\tNODE\t0-31\t\tN/A
GPU1\tNV4\t X \tNODE\tPIX\t0-31\t\tN/A
GPU2\tPHB\tNODE\t X \tNV4\t0-31\t\tN/A
GPU3\tNODE\tPIX\tNV4\t X \t0-31\t\tN/A
"""


def test_nvlink_between_all() -> None:
    found = parse(FOUR_H100)
    assert len(found.links) == 6
    assert set(found.facts().values()) == {GpuLink("NV", 18)}


def test_sockets_and_pairs() -> None:
    assert parse(TWO_L40S).links == (Link((0, 1), "SYS"),)
    facts = parse(PAIRS).facts()
    assert facts[0, 1] == facts[2, 3] == GpuLink("NV", 4)
    assert [facts[pair].path for pair in ((0, 2), (0, 3), (1, 3))] == ["PHB", "NODE", "PIX"]


def test_one_gpu_has_no_links() -> None:
    found = parse("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n")
    assert (found.links, found.problem) == ((), "")


def test_a_text_without_gpus_is_a_finding() -> None:
    assert "shows no GPU" in parse("No devices were found\n").problem


def test_topology_comes_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tool(tmp_path, "nvidia-smi", TWO_L40S, does="assert arguments == ['topo', '-m'], arguments")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_topology(20).links == (Link((0, 1), "SYS"),)


def test_an_nvidia_smi_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tool(tmp_path, "nvidia-smi", does=HANGS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus(0.3) == ((), "nvidia-smi does not answer within 0.3 s")
    assert read_topology(0.3).problem == "nvidia-smi does not answer within 0.3 s"


def test_nvml_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        '{"driver": "590.44.01", "cuda": "13.1", "gpus": [{"index": 0, "uuid": "GPU-0", "name": "NVIDIA H200", '
        '"sm": 90, "memory_mib": 143771, "free_mib": 143000}]}'
    )
    monkeypatch.setattr(module, "ask_nvml", lambda _: CommandOutput(said))
    found = survey_gpus(5)
    assert found.gpus == (DetectedGpu(0, "GPU-0", "NVIDIA H200", 90, 143771, 143000, "590.44.01"),)
    assert (found.source, found.cuda, found.problem) == ("NVML", "13.1", "")


def test_without_nvml_nvidia_smi_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_nvml", lambda _: CommandOutput(problem="nvidia-ml-py is not installed"))
    put_nvidia_smi(tmp_path, monkeypatch, line())
    found = survey_gpus(20)
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3"]
    assert (found.source, found.nvml_problem) == ("nvidia-smi", "nvidia-ml-py is not installed")


def test_neither_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        module, "ask_nvml", lambda _: CommandOutput(problem="NVML: NVML Shared Library Not Found")
    )
    found = survey_gpus(20)
    assert found.gpus == ()
    assert "there is no nvidia-smi" in found.problem


def test_what_the_library_says_becomes_our_units() -> None:
    memory = SimpleNamespace(total=85520809984, free=84932558848)
    nvml = SimpleNamespace(
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlSystemGetDriverVersion=lambda: "590.44.01",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}",
        nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda _: memory,
        nvmlDeviceGetUUID=lambda _: "GPU-7",
        nvmlDeviceGetName=lambda _: "NVIDIA H100 80GB HBM3",
    )
    found = survey(nvml)
    assert (found["driver"], found["cuda"]) == ("590.44.01", "13.1")
    assert found["gpus"] == [
        {
            "index": 0,
            "uuid": "GPU-7",
            "name": "NVIDIA H100 80GB HBM3",
            "sm": 90,
            "memory_mib": 81559,
            "free_mib": 80998,
        }
    ]


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(
        tmp_path, monkeypatch, "\n".join([line(0), line(1, "NVIDIA L4", "8.9", 23034, 23000, "550.1")])
    )
    seen, problem = read_gpus()
    assert problem == ""
    assert seen[0] == DetectedGpu(0, "GPU-0abc", "NVIDIA H100 80GB HBM3", 90, 81559, 81000, "590.44.01")
    assert seen[1].sm == 89
    assert [gpu.index for gpu in visible(seen, (1,), {})] == [1]
    assert [gpu.index for gpu in visible(seen, (), {"CUDA_VISIBLE_DEVICES": "0"})] == [0]
    assert [gpu.index for gpu in visible(seen, (), {"CUDA_VISIBLE_DEVICES": "GPU-1abc"})] == [1]
    assert visible(seen, (), {"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "couldn't communicate"),
        ("0, GPU-0, NVIDIA H100, [N/A], 1, 1, 590", 0, "what cannot be read"),
        ("", 0, "lists no GPU"),
    ],
    ids=["driver", "text", "none"],
)  # fmt: skip
def test_a_sick_nvidia_smi_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, said: str
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, text, code)
    seen, problem = read_gpus()
    assert seen == ()
    assert said in problem


def test_no_nvidia_smi_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nvidia-smi" in read_gpus()[1]
