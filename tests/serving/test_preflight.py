"""What a machine is refused for, before anything is loaded, and what is said to do about it."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.contracts.gpus import gpus
from pipeline.errors import InvalidInput
from pipeline.machine.programs import Software
from pipeline.plan.machine_facts import DiskFacts, DockerFacts, GpuFacts, GpuLink, MachineFacts, contract_name
from pipeline.plan.preflight import Finding, allow
from pipeline.plan.preflight.machine import release_of
from pipeline.plan.preflight.needs import Where
from pipeline.serving.launch import Launch, ServeOptions
from pipeline.serving.launch_gpu import CHECKED, plan_launch
from pipeline.serving.ports import Ports
from pipeline.serving.preflight import check_local, preflight, refuse
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment

MIB, GIB = 1 << 20, 1 << 30
H100 = GpuFacts(0, "NVIDIA H100 80GB HBM3", 90, 81559, 81000, "590.44.01")
TWO = LaunchSpec(mode="leader", world_size=2, engine_models=("tensorrt_llm",), weights_gib=70)
DEPLOYMENT = gpu_deployment(TWO, gpus=2)
PLAN = plan_launch(DEPLOYMENT, CHECKED)
SOFTWARE = Software("1.2.1", "10.14.1.48", "26.07", (), frozenset(PLAN.programs), own=True)
FITTING = MachineFacts(
    gpus=(H100, replace(H100, index=1)),
    links={(0, 1): GpuLink("NV", 18)},
    temporary=DiskFacts("/tmp", 7, 100 * GIB),
    shm_bytes=4096 * MIB,
    docker=DockerFacts("28.3.2", gpu_runtime=True),
)


def found(
    machine: MachineFacts = FITTING,
    software: Software | None = SOFTWARE,
    deployment: Deployment = DEPLOYMENT,
    plan: Launch | None = PLAN,
) -> tuple[Finding, ...]:
    where: Where = "local" if software is not None and software.own else "docker"
    return preflight(deployment, plan, machine, software, where, ("llama",))


A100 = GpuFacts(1, "NVIDIA A100-SXM4-80GB", 80, 81920, 81000, "590.44.01")
T4 = GpuFacts(0, "Tesla T4", 75, 15360, 15000, "590.44.01")


def with_gpus(*gpus: GpuFacts) -> MachineFacts:
    return replace(FITTING, gpus=gpus)


def with_driver(driver: str) -> MachineFacts:
    return with_gpus(replace(H100, driver=driver), replace(H100, index=1, driver=driver))


IMAGE = replace(SOFTWARE, own=False, programs=None)
SMALL = replace(FITTING, shm_bytes=64 * MIB, memlock_bytes=8 * MIB, memlock_limited=True)
NO_GPU_DOCKER = replace(FITTING, docker=DockerFacts("28.3.2", gpu_runtime=False))


@pytest.mark.parametrize(
    ("machine", "software"),
    [
        (FITTING, SOFTWARE),
        (with_gpus(*(FITTING.gpus or ()), replace(T4, index=2, free_mib=200)), SOFTWARE),
        (with_driver("600.1"), SOFTWARE),
        (FITTING, replace(SOFTWARE, tensorrt="10.14.1")),
        (NO_GPU_DOCKER, SOFTWARE),
        (FITTING, None),
        (replace(FITTING, docker=None), None),
        (SMALL, IMAGE),
        (SMALL, None),
        (MachineFacts(), SOFTWARE),
    ],
    ids=["fits", "others", "newer driver", "patch of TensorRT", "no container", "no image", "no Docker",
         "limits of an image", "limits of no image", "unknown"],
)  # fmt: skip
def test_nothing_is_said_of_a_machine_that_fits(machine: MachineFacts, software: Software | None) -> None:
    assert found(machine, software) == ()


@pytest.mark.parametrize(
    ("machine", "software", "rule", "problem", "fix"),
    [
        (with_gpus(H100), SOFTWARE, "host.gpus", "1 GPUs may be used, it needs 2",
         "pipeline build llama --set runtime.tensor_parallel=1"),
        (with_gpus(H100, A100), SOFTWARE, "port.arch", "compute capability 8.0, it is for 9.0",
         "pipeline build llama --set runtime.gpu=a100-sxm-80g"),
        (with_driver("590.44"), SOFTWARE, "host.driver", "590.44 is older than 590.44.01, the oldest that nvcr.io", ""),
        (with_gpus(replace(H100, free_mib=30000), replace(H100, index=1)), SOFTWARE, "host.gpu_memory",
         "30000 MiB free, the weights alone need 35840 MiB", ""),
        (FITTING, replace(SOFTWARE, tensorrt_llm="1.1.0"), "port.version",
         "TensorRT-LLM 1.1.0 is installed, it was made for 1.2.1", "pipeline serve llama --set triton.container=true"),
        (FITTING, replace(SOFTWARE, tensorrt="10.14.2.1"), "port.version",
         "TensorRT 10.14.2.1 is installed, engines are built with 10.14.1.48", ""),
        (FITTING, replace(SOFTWARE, tensorrt_llm=None, tensorrt=None, release=None), "port.version",
         "TensorRT-LLM is not installed in this machine", ""),
        (FITTING, replace(SOFTWARE, missing=("grpc", "tritonclient")), "host.modules",
         "the models import grpc, tritonclient, which Triton's Python does not have", ""),
        (FITTING, replace(SOFTWARE, programs=frozenset({PLAN.programs[-1]})), "host.programs",
         "there is no mpirun", ""),
        (replace(FITTING, shm_bytes=64 * MIB), SOFTWARE, "host.shm", "/dev/shm has 64 MiB, 2560 MiB are wanted",
         "--shm-size=2560m"),
        (NO_GPU_DOCKER, None, "host.docker", "", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_keeps_it_from_serving(
    machine: MachineFacts, software: Software | None, rule: str, problem: str, fix: str
) -> None:
    (finding,) = found(machine, software)
    assert (finding.severity, finding.rule) == ("error", rule)
    assert problem in finding.problem
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("machine", "software", "problem"),
    [
        (with_gpus(replace(H100, free_mib=70000), replace(H100, index=1)), SOFTWARE, "11559 MiB are in use by others"),
        (FITTING, replace(SOFTWARE, release="26.04"), "it is container 26.04; it was made for 26.07"),
        (replace(FITTING, shm_bytes=2000 * MIB), SOFTWARE, ""),
        (replace(FITTING, links={(0, 1): GpuLink("SYS")}), SOFTWARE,
         "GPU 0 and GPU 1, which share each layer, are joined by the link between CPU sockets"),
    ],
    ids=["memory", "release", "shared memory", "links"],
)  # fmt: skip
def test_what_is_only_warned_about(machine: MachineFacts, software: Software, problem: str) -> None:
    (finding,) = found(machine, software)
    assert finding.severity == "warning"
    assert problem in finding.problem


def test_no_gpu_where_others_would_do_and_siblings() -> None:
    (finding,) = found(replace(FITTING, gpus=(), gpu_problem="there is no nvidia-smi"))
    assert str(finding) == "runtime.gpu = h100-sxm-80g: there is no nvidia-smi; it needs 2 x h100-sxm-80g"
    mixed = with_gpus(T4, replace(H100, index=1), replace(H100, index=3))
    assert [finding.fix for finding in found(mixed) if finding.rule == "port.arch"] == ["--gpus 1,3"]
    h200 = replace(H100, name="NVIDIA H200", memory_mib=143771, free_mib=143000)
    finding, _ = found(with_gpus(h200, replace(h200, index=1)))
    assert (finding.severity, finding.fix) == (
        "warning",
        "pipeline build llama --set runtime.gpu=h200-sxm-141g",
    )
    small = replace(H100, name="NVIDIA H100 64GB", memory_mib=65536, free_mib=65000)
    finding, _ = found(with_gpus(small, replace(small, index=1)))
    assert finding.severity == "error"
    assert "has 65536 MiB, the limits were made for 81559 MiB" in finding.problem


@pytest.mark.parametrize("movable", [True, False])
def test_only_ports_that_were_asked_for_refuse_a_start(movable: bool, tmp_path: Path) -> None:
    cpu = DEPLOYMENT.model_copy(update={"runtime": "cpu", "requirements": None})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = replace(Ports.free(), grpc=taken.getsockname()[1], movable=movable)
        rules = [finding.rule for finding in check_local(cpu, tmp_path, ServeOptions(ports))]
    assert ("host.ports" in rules) is not movable


def test_a_full_disk_counts_for_the_cpu_as_well() -> None:
    cpu = DEPLOYMENT.model_copy(update={"runtime": "cpu", "requirements": None})
    full = replace(FITTING, gpus=(), temporary=DiskFacts("/tmp", 7, GIB // 5))
    (finding,) = found(full, None, cpu, None)
    assert finding.rule == "host.temporary"


def test_all_errors_are_said_at_once_and_warnings_refuse_nothing() -> None:
    bad = replace(
        FITTING,
        gpus=(replace(H100, driver="535.1"),),
        memlock_bytes=MIB,
        memlock_limited=True,
    )
    software = replace(SOFTWARE, tensorrt_llm="1.1.0", tensorrt="10.13.3.9")
    with pytest.raises(InvalidInput) as caught:
        refuse(DEPLOYMENT, found(bad, software))
    text = str(caught.value)
    assert text.startswith("llama cannot be served here: 4 faults\n")
    for subject in (": 1 GPUs may", "driver 535.1", "TensorRT-LLM 1.1.0", "TensorRT 10.13.3.9"):
        assert subject in text
    assert "[port.version]" in text
    refuse(DEPLOYMENT, [finding for finding in found(bad, software) if finding.severity == "warning"])
    refuse(DEPLOYMENT, allow(found(bad, software), frozenset({"host.gpus", "host.driver", "port.version"})))


@pytest.mark.parametrize("known", gpus(), ids=lambda known: known.name)
def test_every_gpu_of_the_contracts_is_recognized(known) -> None:  # type: ignore[no-untyped-def]
    pcie = " PCIe" if "pcie" in known.name else ""
    seen = GpuFacts(0, f"NVIDIA {known.chip}{pcie}", known.sm, known.driver_mib, known.driver_mib, "1")
    assert contract_name(seen) == known.name


def test_unknown_gpus_have_no_name() -> None:
    assert contract_name(replace(H100, name="NVIDIA T4", sm=75)) is None


def test_release_of() -> None:
    assert release_of("nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3") == "26.07"
    assert release_of("own/image:1.0") is None
