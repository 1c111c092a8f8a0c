"""Lines about containers, servers, and what is reached over a network."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.hardware import unknown
from pipeline.doctor.report import Check, State
from pipeline.extras import install_line
from pipeline.machine.hub import Hub
from pipeline.machine.inventory import Inventory
from pipeline.machine.packages import version_of
from pipeline.machine.ports import Listener
from pipeline.serving.launch_embedded import WHEEL

_NAMES = {8000: "Triton's HTTP", 8001: "Triton's gRPC", 8002: "Triton's metrics", 8080: "the gateway"}
_SKEW_S = 60.0  # beyond it, certificates and tokens may be refused
_HUB_TOKEN = "HF_TOKEN, or hf auth login, for repositories that ask for it"


def containers(found: Inventory) -> Iterator[Check]:
    """Docker and whether containers can have GPUs."""
    docker = found.docker
    if docker is None:
        yield unknown("docker", found, "docker")
    elif docker.problem:
        yield Check("docker", "missing", docker.problem, docker.fix)
    else:
        rootless = ", rootless" if docker.rootless else ""
        folder = f", images in {docker.folder}" if docker.folder else ""
        yield Check("docker", "ok", f"{docker.version}{rootless}{folder}")
        if docker.gpu_runtime:
            yield Check("GPUs in containers", "ok", f"by {docker.gpu_how}")
        else:
            fix = "install the NVIDIA Container Toolkit: nvidia-ctk runtime configure --runtime=docker"
            yield Check("GPUs in containers", "missing", "no nvidia runtime and no CDI devices", fix)


def serving(found: Inventory, server_problem: str) -> Iterator[Check]:
    """Triton in its two forms, TensorRT-LLM and MPI."""
    if server_problem:
        fix = "" if "pip install" in server_problem else install_line("server")
        yield Check("embedded Triton", "missing", server_problem, fix)
    else:
        yield Check("embedded Triton", "ok", f"{WHEEL} {version_of(WHEEL)}")
    triton = found.triton
    if triton is None:
        yield unknown("tritonserver", found, "triton")
    elif triton.path is None:
        yield Check("tritonserver", "note", "none outside this environment; containers have one")
    else:
        of = f", container {triton.release}" if triton.release else ""
        yield Check("tritonserver", "ok", f"{triton.path}, {triton.version or 'version not known'}{of}")
    yield _tensorrt_llm(found)
    yield _mpi(found)


def _tensorrt_llm(found: Inventory) -> Check:
    if found.software is None or found.builder is None:
        return unknown("TensorRT-LLM", found, "software" if found.software is None else "builder")
    have, path = found.software, found.builder.path
    if have.tensorrt_llm is None and path is None:
        return Check("TensorRT-LLM", "note", "not installed; containers have it")
    builder = (
        f"trtllm-build of {found.builder.version or 'no known version'} at {path}"
        if path
        else "no trtllm-build"
    )
    tensorrt = f", TensorRT {have.tensorrt}" if have.tensorrt else ""
    return Check(
        "TensorRT-LLM", "ok", f"{have.tensorrt_llm or 'not for Triton’s Python'}{tensorrt}; {builder}"
    )


def _mpi(found: Inventory) -> Check:
    if found.mpi is None:
        return unknown("MPI", found, "mpi")
    slots = f"{found.processors.cores} slots" if found.processors else "slots not known"
    if found.mpi.problem:
        return Check("MPI", "note", f"{found.mpi.problem}; several GPUs outside of a container need it")
    return Check("MPI", "ok", f"{found.mpi.family} {found.mpi.version}, {slots}")


def network(found: Inventory) -> Iterator[Check]:
    """The hub, the clock against it, and the ports that servers take."""
    if found.hub is None:
        yield unknown("hub", found, "hub")
    else:
        yield _hub(found.hub)
        where = found.hub.token
        yield (
            Check("hub token", "ok", f"in {where}")
            if where
            else Check("hub token", "note", "none", _HUB_TOKEN)
        )
        yield _clock(found.hub.clock_ahead_s)
    if found.listeners is None:
        yield unknown("ports", found, "listeners")
        return
    for port, name in _NAMES.items():
        listener = found.listeners.get(port)
        if listener is None:
            yield Check(f"port {port}", "ok", f"free, for {name}")
        else:
            fix = "another is taken unless it is named" if port != 8080 else "pipeline gateway --port …"
            yield Check(f"port {port}", "note", f"taken by {_holder(listener)}, usual for {name}", fix)


def _hub(hub: Hub) -> Check:
    if hub.offline:
        return Check("hub", "note", "HF_HUB_OFFLINE is set: only what the store has can be built")
    if hub.problem:
        return Check("hub", "missing", hub.problem, "set HF_ENDPOINT to a mirror, or HTTPS_PROXY")
    refused = [f"{repo} ({status})" for repo, status in hub.repositories.items() if status >= 400]
    if refused:
        return Check(
            "hub", "warning", f"{hub.endpoint} answers, but not for {', '.join(refused)}", _HUB_TOKEN
        )
    return Check("hub", "ok", f"{hub.endpoint} answers")


def _clock(ahead_s: float | None) -> Check:
    if ahead_s is None:
        return Check("clock", "unknown", "nobody to compare it with was reached")
    off = abs(ahead_s) > _SKEW_S
    state: State = "warning" if off else "ok"
    direction = "ahead of" if ahead_s > 0 else "behind"
    text = f"{abs(ahead_s):.0f} s {direction} the hub's" if off else "agrees with the hub's"
    return Check("clock", state, text, "set it: timedatectl set-ntp true" if off else "")


def _holder(listener: Listener) -> str:
    if listener.pid is None:
        return "a process that this user cannot see"
    return f"process {listener.pid} ({listener.program})"
