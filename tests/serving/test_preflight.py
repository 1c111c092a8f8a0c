"""What a machine is refused for, before anything is loaded, and what is said to do about it."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.contracts.gpus import gpus
from pipeline.errors import InvalidInput
from pipeline.machine.gpus import GpuSeen, read_gpus, visible
from pipeline.machine.programs import Software
from pipeline.plan.machine_facts import DiskFacts, DockerFacts, GpuFacts, GpuLink, MachineFacts, contract_name
from pipeline.plan.preflight import Finding, allow
from pipeline.plan.preflight.machine import release_of
from pipeline.plan.preflight.needs import Where
from pipeline.serving.launch import Launch, ServeOptions
from pipeline.serving.launch_gpu import CHECKED, plan_launch
from pipeline.serving.ports import Ports
from pipeline.serving.preflight import check_local, port_findings, preflight, refuse
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.machines import line, put_nvidia_smi

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


def only(machine: MachineFacts = FITTING, software: Software | None = SOFTWARE) -> Finding:
    (one,) = found(machine, software)
    return one


def test_nothing_is_said_of_a_machine_that_fits() -> None:
    assert found(FITTING) == ()


def test_no_gpu() -> None:
    one = only(replace(FITTING, gpus=(), gpu_problem="there is no nvidia-smi"))
    assert str(one) == "runtime.gpu = h100-sxm-80g: there is no nvidia-smi; it needs 2 x h100-sxm-80g"


def test_too_few_gpus_name_the_build_that_would_fit() -> None:
    one = only(replace(FITTING, gpus=(H100,)))
    assert one.problem == "1 GPUs may be used, it needs 2"
    assert one.fix == "pipeline build llama --set runtime.tensor_parallel=1"


def test_another_compute_capability_names_the_build_for_it() -> None:
    a100 = GpuFacts(1, "NVIDIA A100-SXM4-80GB", 80, 81920, 81000, "590.44.01")
    one = only(replace(FITTING, gpus=(H100, a100)))
    assert one.severity == "error"
    assert one.rule == "port.arch"
    assert "NVIDIA A100-SXM4-80GB (GPU 1): compute capability 8.0, it is for 9.0" in str(one)
    assert one.fix == "pipeline build llama --set runtime.gpu=a100-sxm-80g"


def test_gpus_that_would_not_be_used_do_not_count() -> None:
    old = GpuFacts(2, "Tesla T4", 75, 15360, 200, "590.44.01")
    assert found(replace(FITTING, gpus=(*(FITTING.gpus or ()), old))) == ()


def test_where_others_would_do_they_are_named() -> None:
    old = GpuFacts(0, "Tesla T4", 75, 15360, 15000, "590.44.01")
    right = (replace(H100, index=1), replace(H100, index=3))
    errors = [one for one in found(replace(FITTING, gpus=(old, *right))) if one.rule == "port.arch"]
    assert [one.fix for one in errors] == ["--gpus 1,3"]


def test_a_sibling_of_the_same_capability_is_warned_about() -> None:
    h200 = replace(H100, name="NVIDIA H200", memory_mib=143771, free_mib=143000)
    one, two = found(replace(FITTING, gpus=(h200, replace(h200, index=1))))
    assert one.severity == two.severity == "warning"
    assert "at another speed" in one.problem
    assert one.fix == "pipeline build llama --set runtime.gpu=h200-sxm-141g"


def test_less_memory_than_the_limits_were_made_for() -> None:
    small = replace(H100, name="NVIDIA H100 64GB", memory_mib=65536, free_mib=65000)
    one, two = found(replace(FITTING, gpus=(small, replace(small, index=1))))
    assert one.severity == two.severity == "error"
    assert "has 65536 MiB, the limits were made for 81559 MiB" in one.problem


def test_memory_that_others_use() -> None:
    busy = replace(H100, free_mib=30000)
    one = only(replace(FITTING, gpus=(busy, replace(H100, index=1))))
    assert (one.severity, one.rule) == ("error", "host.gpu_memory")
    assert "30000 MiB free, the weights alone need 35840 MiB" in one.problem
    one = only(replace(FITTING, gpus=(replace(H100, free_mib=70000), replace(H100, index=1))))
    assert one.severity == "warning"
    assert "11559 MiB are in use by others" in one.problem


@pytest.mark.parametrize(
    ("driver", "fits"),
    [("590.44.01", True), ("590.48", True), ("600.1", True), ("590.44", False), ("580.95.05", False)],
)
def test_the_driver_may_be_newer_but_not_older(driver: str, fits: bool) -> None:
    machine = replace(FITTING, gpus=(replace(H100, driver=driver), replace(H100, index=1, driver=driver)))
    if fits:
        assert found(machine) == ()
    else:
        assert f"{driver} is older than 590.44.01, the oldest that nvcr.io" in only(machine).problem


def test_another_version_of_tensorrt_llm_names_both_ways_out() -> None:
    one = only(software=replace(SOFTWARE, tensorrt_llm="1.1.0"))
    assert one.problem == "TensorRT-LLM 1.1.0 is installed, it was made for 1.2.1"
    assert "pipeline serve llama --set triton.container=true" in one.fix
    assert "pipeline build llama --set runtime.version=1.1.0" in one.fix


@pytest.mark.parametrize(
    ("have", "fits"), [("10.14.1.48", True), ("10.14.1", True), ("10.14.2.1", False), ("10.13.3.9", False)]
)
def test_tensorrt_is_the_one_that_the_engines_were_built_with(have: str, fits: bool) -> None:
    software = replace(SOFTWARE, tensorrt=have)
    if fits:
        assert found(software=software) == ()
    else:
        problem = only(software=software).problem
        assert problem == f"TensorRT {have} is installed, engines are built with 10.14.1.48"


def test_nothing_is_installed() -> None:
    one = only(software=replace(SOFTWARE, tensorrt_llm=None, tensorrt=None, release=None))
    assert one.problem == "TensorRT-LLM is not installed in this machine"


def test_another_release_with_the_same_versions_is_a_warning() -> None:
    one = only(software=replace(SOFTWARE, release="26.04"))
    assert (one.severity, one.problem) == ("warning", "it is container 26.04; it was made for 26.07")


def test_modules_that_the_models_import() -> None:
    one = only(software=replace(SOFTWARE, missing=("grpc", "tritonclient")))
    assert "the models import grpc, tritonclient, which Triton's Python does not have" in one.problem


def test_programs_that_the_command_runs() -> None:
    one = only(software=replace(SOFTWARE, programs=frozenset({PLAN.programs[-1]})))
    assert one.problem == "there is no mpirun"


def test_shared_memory_and_locked_memory() -> None:
    one = only(replace(FITTING, shm_bytes=64 * MIB))
    assert (one.severity, one.problem) == ("error", "/dev/shm has 64 MiB, 2560 MiB are wanted")
    assert "--shm-size=2560m" in one.fix
    assert only(replace(FITTING, shm_bytes=2000 * MIB)).severity == "warning"
    assert only(replace(FITTING, memlock_bytes=8 * MIB, memlock_limited=True)).rule == "host.memlock"


def test_limits_of_this_machine_do_not_count_for_an_image() -> None:
    image = replace(SOFTWARE, own=False, programs=None)
    small = replace(FITTING, shm_bytes=64 * MIB, memlock_bytes=MIB, memlock_limited=True)
    assert found(small, image) == ()
    assert found(small, None) == ()


def test_ranks_that_nvlink_does_not_join_are_a_warning() -> None:
    apart = replace(FITTING, links={(0, 1): GpuLink("SYS")})
    one = only(apart)
    assert (one.severity, one.rule) == ("warning", "host.nvlink")
    assert (
        "GPU 0 and GPU 1, which share each layer, are joined by the link between CPU sockets" in one.problem
    )
    single = gpu_deployment(LaunchSpec(engine_models=("tensorrt_llm",)), gpus=1)
    assert found(apart, deployment=single, plan=plan_launch(single, CHECKED)) == ()


def test_docker_that_has_no_gpus_to_give() -> None:
    bare = replace(FITTING, docker=DockerFacts("28.3.2", gpu_runtime=False))
    assert found(bare) == ()  # nobody needs a container
    assert found(FITTING, None) == ()
    assert found(replace(FITTING, docker=None), None) == ()
    one = only(bare, None)
    assert (one.severity, one.rule) == ("error", "host.docker")


def test_ports_that_are_taken() -> None:
    (one,) = port_findings(["port 8001 is taken"])
    assert (one.severity, one.rule, one.problem) == ("error", "host.ports", "port 8001 is taken")


@pytest.mark.parametrize("movable", [True, False])
def test_only_ports_that_were_asked_for_refuse_a_start(movable: bool, tmp_path: Path) -> None:
    cpu = DEPLOYMENT.model_copy(update={"runtime": "cpu", "requirements": None})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = replace(Ports.free(), grpc=taken.getsockname()[1], movable=movable)
        rules = [one.rule for one in check_local(cpu, tmp_path, ServeOptions(ports))]
    assert ("host.ports" in rules) is not movable


def test_what_is_not_known_of_a_machine_is_not_judged() -> None:
    assert found(MachineFacts()) == ()


def test_a_full_disk_counts_for_the_cpu_as_well() -> None:
    cpu = DEPLOYMENT.model_copy(update={"runtime": "cpu", "requirements": None})
    full = replace(FITTING, gpus=(), temporary=DiskFacts("/tmp", 7, GIB // 5))
    (one,) = found(full, None, cpu, None)
    assert one.rule == "host.temporary"


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
    refuse(DEPLOYMENT, [one for one in found(bad, software) if one.severity == "warning"])
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


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(
        tmp_path, monkeypatch, "\n".join([line(0), line(1, "NVIDIA L4", "8.9", 23034, 23000, "550.1")])
    )
    seen, problem = read_gpus()
    assert problem == ""
    assert seen[0] == GpuSeen(0, "GPU-0abc", "NVIDIA H100 80GB HBM3", 90, 81559, 81000, "590.44.01")
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
