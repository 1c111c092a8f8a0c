"""How a server with TensorRT-LLM is started, mode by mode; `PIPELINE_WRITE_GOLDEN=1 pytest` writes the golden files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InvalidInput, UserError
from pipeline.serving.dry_run import shell_lines
from pipeline.serving.launch import Launch, Start
from pipeline.serving.launch_docker import docker_launch
from pipeline.serving.launch_gpu import GpuPlace, launch_faults, plan_launch
from pipeline.serving.ports import Listeners, Ports
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment

GOLDEN = Path(__file__).parent / "golden" / "launch"
PORTS = Ports(None, 9001, 9002)
LISTENERS = Listeners.within(Path("/tmp/pipeline-0"), Ports(8000, None, 8002))
START = Start(Path(), LISTENERS, "pipeline-0123-", deadline_s=300, drain_s=30)
MODES = ("engines", "orchestrator", "instances", "llmapi", "llmapi-no-mpi")
# One rank, and more ranks than there are slots.
SIZES = (1, 2, 8)


def spec(mode: str, size: int) -> LaunchSpec:
    """A launch section as the packages have it."""
    gpus = tuple(range(size))
    match mode:
        case "engines":
            started, devices = "leader" if size > 1 else "single", {"tensorrt_llm": (gpus,)}
        case "orchestrator":
            started, devices = "orchestrator", {"tensorrt_llm": (gpus,), "tensorrt_llm_draft": ((0,),)}
        case "instances":
            started, devices = "orchestrator", {"tensorrt_llm": (gpus, tuple(range(size, 2 * size)))}
        case _:
            mpi = mode == "llmapi"
            return LaunchSpec(mode="llmapi", world_size=size, engine_models=("tensorrt_llm",), mpi=mpi)
    return LaunchSpec.model_validate(
        {"mode": started, "world_size": size, "engine_models": tuple(devices), "gpu_device_ids": devices}
    )


def deployment_of(mode: str, size: int) -> Deployment:
    launch = spec(mode, size)
    return gpu_deployment(launch, gpus=2 * size if mode == "instances" else size)


def blocks(plan: Launch) -> list[list[str]]:
    """The arguments of each rank, without mpirun's own."""
    command = list(plan.command)
    if command[0] != "mpirun":
        return [command]
    found: list[list[str]] = []
    for part in command[command.index("-n") :]:
        if part == "-n":
            found.append([])
        elif part != ":" and not (part == "1" and not found[-1]):
            found[-1].append(part)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_golden(mode: str, size: int) -> None:
    deployment = deployment_of(mode, size)
    plan = plan_launch(deployment, START, GpuPlace(root=True, slots=4))
    docker = docker_launch(
        deployment, Path("/store/package-1"), "registry/image@sha256:0",
        Start(Path("/tmp/stage"), Listeners.at(PORTS), "pipeline-0123-", PORTS), slots=4, name="it",
    )  # fmt: skip
    text = "\n".join(
        [
            f"# {mode}, tensor parallel {size}: {plan.ranks} ranks, {plan.shm_mib} MiB of shared memory",
            *(f"{name}={value}" for name, value in plan.environment.items()),
            shell_lines(plan.command),
            "",
            shell_lines(docker.command),
            "",
        ]
    )
    path = GOLDEN / f"{mode}-tp{size}.txt"
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{mode}-tp{n}.txt" for mode in MODES for n in SIZES}


@settings(max_examples=15)
@given(
    size=st.sampled_from(SIZES),
    mode=st.sampled_from([mode for mode in MODES if mode != "instances"]),
    root=st.booleans(),
    slots=st.none() | st.integers(1, 16),
)
def test_what_holds_of_every_plan(size: int, mode: str, root: bool, slots: int | None) -> None:
    deployment = deployment_of(mode, size)
    plan = plan_launch(deployment, START, GpuPlace(root=root, slots=slots))
    found = blocks(plan)
    assert len(found) == plan.ranks
    assert plan.ranks == (size if mode in ("engines", "llmapi") else 1)
    assert ("--allow-run-as-root" in plan.command) == (root and plan.command[0] == "mpirun")
    processes = plan.ranks + (deployment.launch.workers if mode == "orchestrator" else 0)
    oversubscribed = plan.command[0] == "mpirun" and slots is not None and slots < processes
    assert ("--oversubscribe" in plan.command) == oversubscribed
    assert not any("{" in part for part in plan.command)
    prefixes = [part for block in found for part in block if "shm-region-prefix-name=" in part]
    assert len(set(prefixes)) == plan.ranks
    assert all("=pipeline-0123-" in prefix for prefix in prefixes)
    for rank, block in enumerate(found):
        loaded = [part.removeprefix("--load-model=") for part in block if part.startswith("--load-model=")]
        assert loaded == list(deployment.launch.engine_models if rank > 0 else ())
        assert {part for part in block if "control-mode" in part} == {
            f"--model-control-mode={'explicit' if rank > 0 else 'none'}"
        }
        for protocol, what in (("http", "api"), ("grpc", "protocol")):
            assert sum(part.startswith(f"--{protocol}-port=") for part in block) == (rank == 0)
            assert (f"--allow-{protocol}=false" in block) == (rank > 0)
            closed = [part for part in block if part.startswith(f"--{protocol}-restricted-{what}=")]
            assert closed == [
                f"--{protocol}-restricted-{what}=model-repository,shared-memory,trace,logging:disabled:=disabled"
            ] * (rank == 0)
        assert len(block) == len({part for part in block if "=" not in part} | set(block))
        assert ("trtllm-llmapi-launch" in block) == (mode == "llmapi" and size > 1)
        assert "--disable-auto-complete-config" in block
    assert set(plan.programs) >= {found[0][0]}
    assert plan.shm_mib >= 2048 + 512 * (size - 1)
    assert plan.environment["PIPELINE_TRITON_GRPC"] == "unix:/tmp/pipeline-0/grpc:1"
    assert ("TRTLLM_ORCHESTRATOR" in plan.environment) == (mode == "orchestrator")


def test_devices_are_those_that_were_asked_for() -> None:
    plan = plan_launch(deployment_of("engines", 2), START, GpuPlace(devices=(4, 6)))
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_a_server_behind_an_address_is_called_there() -> None:
    for address, called in (("10.0.0.7", "10.0.0.7"), ("0.0.0.0", "127.0.0.1")):
        start = replace(START, listeners=Listeners.at(Ports(None, 8001, 8002), address))
        plan = plan_launch(deployment_of("engines", 1), start)
        assert plan.environment["PIPELINE_TRITON_GRPC"] == f"{called}:8001"


def test_all_that_is_impossible_is_said_at_once() -> None:
    launch = LaunchSpec(mode="single", world_size=4, engine_models=(), gpu_device_ids={"nobody": ((0, 9),)})
    with pytest.raises(InvalidInput) as caught:
        plan_launch(gpu_deployment(launch, gpus=4), START)
    text = str(caught.value)
    assert "launch.engine_models = nobody: not among the models" in text
    assert "at least one model holds an engine" in text
    assert "launch.mode = single: 4 ranks need leader, orchestrator or llmapi" in text
    assert "launch.gpu_device_ids.nobody = [0, 9]: there are GPUs 0 to 3" in text


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([(0, 1), (2, 3)], ""),
        ([(0,), (1,)], "GPUs of an instance must be as many as its 2 ranks"),
        ([(0, 1), (2,)], "each rank of each instance has one GPU of its own"),
        ([(0, 0), (2, 3)], "each rank of each instance has one GPU of its own"),
    ],
)
def test_instances_have_a_gpu_a_rank(groups: list[tuple[int, ...]], said: str) -> None:
    instances = {"tensorrt_llm": tuple(groups)}
    launch = spec("instances", 2).model_copy(update={"gpu_device_ids": instances})
    faults = launch_faults(gpu_deployment(launch, gpus=4))
    assert [said in fault.problem for fault in faults] == ([True] if said else [])


def test_instances_by_gpu_are_refused_where_the_version_has_none() -> None:
    several = spec("llmapi", 1).model_copy(update={"gpu_device_ids": {"tensorrt_llm": ((0,), (1,))}})
    with pytest.raises(InvalidInput, match=r"llmapi of TensorRT-LLM 1\.2\.1 has one instance"):
        plan_launch(gpu_deployment(several, gpus=2), START)


def test_an_unknown_version_is_refused_with_the_nearest_known() -> None:
    deployment = gpu_deployment(spec("engines", 1), version="1.2.9")
    with pytest.raises(UserError, match=r"1\.2\.9.*1\.2\.1"):
        plan_launch(deployment, START)


def test_a_package_for_the_cpu_has_no_such_plan() -> None:
    cpu = gpu_deployment(spec("engines", 1)).model_copy(update={"requirements": None})
    with pytest.raises(InvalidInput, match="it is not for a GPU"):
        plan_launch(cpu, START)
