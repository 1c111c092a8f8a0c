"""The machine, as lines that a person reads: what is there, what is not, what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.contracts import engine_memory
from pipeline.doctor.report import Check, Section, State, Text
from pipeline.doctor.verdicts import DoctorFacts
from pipeline.extras import install_line
from pipeline.machine.gpus import Topology
from pipeline.machine.host import Disk
from pipeline.machine.inventory import Inventory
from pipeline.machine.network import Hub, Listener
from pipeline.machine.packages import Extra, PythonFacts, version_of
from pipeline.plan.machine_facts import GpuFacts, contract_name
from pipeline.serving.launch_embedded import WHEEL
from pipeline.store import human_bytes


def sections(facts: DoctorFacts, python: PythonFacts, text: Text) -> tuple[Section, ...]:
    """All of them, in the order of the table."""
    return (
        Section("Python", tuple(_python(python, facts.extras, text))),
        Section("GPU", tuple(_gpus(facts.machine))),
        Section("Machine", tuple(_host(facts.machine))),
        Section("Containers", tuple(_containers(facts.machine))),
        Section("Serving", tuple(_serving(facts.machine, facts.server_problem))),
        Section("Network", tuple(_network(facts.machine))),
    )


def _python(python: PythonFacts, extras: Sequence[Extra], text: Text) -> Iterator[Check]:
    kind = "virtual environment" if python.environment else "no virtual environment"
    yield Check(
        "Python",
        "ok" if python.fits else "missing",
        f"{python.version}, {kind}, {python.executable}",
        "" if python.fits else f"make an environment with Python {python.wanted}",
    )
    for extra in extras:
        yield _extra(extra)
    names = f"files {text.encoding}, output {text.output}, file names {text.file_names}"
    state: State = "ok" if text.is_utf8 else "warning"
    fix = "" if text.is_utf8 else "export PYTHONUTF8=1, or a UTF-8 locale such as LANG=C.UTF-8"
    yield Check("text", state, f"{names}; locale {text.language or 'not set'}", fix)


def _extra(extra: Extra) -> Check:
    name = f"extra {extra.name}" if extra.name else "packages"
    if not extra.lacking:
        return Check(
            name, "ok", ", ".join(f"{package.name} {package.installed}" for package in extra.packages)
        )
    lacking = [
        f"{package.name}{package.wanted} is missing"
        if package.installed is None
        else f"{package.name} is {package.installed}, not {package.wanted}"
        for package in extra.lacking
    ]
    return Check(name, "missing", ", ".join(lacking), extra.install)


_LEAST_SHM = 1 << 30  # Docker's own default is 64 MiB
_STACK = 64 << 20  # the documented --ulimit stack of containers with TensorRT-LLM
_OPEN_FILES = 1024


def _unknown(subject: str, inventory: Inventory, probe: str) -> Check:
    """The line of a probe without an answer."""
    return Check(subject, "unknown", inventory.late.get(probe, "not looked at"))


def _gpus(inventory: Inventory) -> Iterator[Check]:
    """Each GPU, its driver, and the ways between them."""
    survey = inventory.gpus
    if survey is None:
        yield _unknown("GPU", inventory, "gpus")
        return
    if not survey.gpus:
        slow = (
            "--timeout-s waits longer; nvidia-smi -pm 1 keeps the driver loaded; a stuck one needs a reboot"
        )
        yield Check(
            "GPU",
            "missing",
            survey.problem,
            slow if survey.late else "recipes with runtime.kind cpu need none",
        )
        if survey.nvml_problem:
            yield Check("NVML", "note", survey.nvml_problem)
        return
    for gpu in survey.gpus:
        yield Check(f"GPU {gpu.index}", "ok", _gpu(gpu))
    drivers = ", ".join(sorted({gpu.driver for gpu in survey.gpus}))
    cuda = f", CUDA up to {survey.cuda}" if survey.cuda else ""
    yield Check("driver", "ok", f"{drivers}{cuda}, by {survey.source}")
    if survey.nvml_problem:
        yield Check("NVML", "note", survey.nvml_problem)
    if len(survey.gpus) > 1:
        yield _links(inventory.topology, inventory)


def _gpu(gpu: GpuFacts) -> str:
    known = contract_name(gpu)
    name = f"{gpu.name}, in recipes {known}" if known else f"{gpu.name}, of which nothing is known"
    memory = f"{gpu.free_mib / 1024:.1f} of {gpu.memory_mib / 1024:.1f} GiB free"
    return f"{name}; compute capability {gpu.capability}; {memory}"


def _links(topology: Topology | None, inventory: Inventory) -> Check:
    if topology is None:
        return _unknown("links", inventory, "topology")
    if topology.problem:
        return Check("links", "unknown", topology.problem)
    ways: dict[str, list[str]] = {}
    for link in topology.links:
        name = f"NV{link.lanes}" if link.way == "NV" else link.way
        ways.setdefault(name, []).append("-".join(map(str, link.gpus)))
    text = "; ".join(f"{way} between {', '.join(pairs)}" for way, pairs in ways.items())
    nvlink = all(link.way == "NV" for link in topology.links)
    return Check(
        "links", "ok" if nvlink else "note", text if len(ways) > 1 else f"{''.join(ways)} between all"
    )


def _host(inventory: Inventory) -> Iterator[Check]:
    """Memory, processors, disks, limits."""
    if inventory.memory is None:
        yield _unknown("memory", inventory, "memory")
    else:
        memory = inventory.memory
        limit = ", the container's limit" if memory.limit_bytes is not None else ""
        text = f"{human_bytes(memory.available_bytes)} of {human_bytes(memory.total_bytes)} available{limit}"
        yield Check("memory", "ok", f"{text}; swap {human_bytes(memory.swap_bytes)}")
    if inventory.processors is None:
        yield _unknown("processors", inventory, "processors")
    else:
        processors = inventory.processors
        quota = f"; the container's share is {processors.quota:g}" if processors.quota is not None else ""
        bf16 = {True: ", bf16 arithmetic", False: ", no bf16 arithmetic", None: ""}[processors.bf16]
        yield Check(
            "processors", "ok", f"{processors.cores} cores, {processors.threads} threads{bf16}{quota}"
        )
        if processors.bf16 is not None:
            yield Check("cpu runtime", "ok", _auto_precision(bf16=processors.bf16))
    yield _shm(inventory)
    yield _disk("store", inventory.store, inventory)
    yield _disk("temporary", inventory.temporary, inventory)
    yield from _limits(inventory)


def _auto_precision(*, bf16: bool) -> str:
    """Say what `runtime.precision: auto` computes in here, and why."""
    least = engine_memory.cpu_bf16_hidden()
    if bf16:
        return (
            f"auto computes in bf16 from a hidden size of {least} on, in f32 below, where bf16 gains nothing"
        )
    return (
        f"auto computes in f32, for want of bf16 arithmetic; from a hidden size of {least} on, keys and values are "
        "held in f16, and the output projection of int8 and int4 in 8 bits"
    )


def _shm(inventory: Inventory) -> Check:
    if inventory.shm_bytes is None:
        late = "shm_bytes" in inventory.late
        return (
            _unknown("/dev/shm", inventory, "shm_bytes")
            if late
            else Check("/dev/shm", "missing", "there is none")
        )
    few = inventory.shm_bytes < _LEAST_SHM
    fix = "docker run --shm-size=2g, or --ipc=host" if few else ""
    return Check("/dev/shm", "warning" if few else "ok", human_bytes(inventory.shm_bytes), fix)


def _disk(subject: str, disk: Disk | None, inventory: Inventory) -> Check:
    if disk is None:
        return _unknown(subject, inventory, subject)
    fix = "name another folder with --store or PIPELINE_STORE" if subject == "store" else "set TMPDIR"
    if disk.problem:
        return Check(subject, "missing", disk.problem, fix)
    kind = (
        f"{disk.kind}{', a network' if disk.network else ''}"
        if disk.kind
        else "a file system of no known kind"
    )
    quota = "; quotas hold, which may leave less" if disk.quota else ""
    text = f"{disk.folder}: {human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} free, {kind}{quota}"
    if not disk.writable:
        return Check(subject, "missing", f"{text}; it cannot be written", fix)
    if disk.free_files == 0:
        return Check(subject, "missing", f"{text}; no more files can be made (inodes)", fix)
    return Check(subject, "ok", text)


def _limits(inventory: Inventory) -> Iterator[Check]:
    if inventory.ulimits is None:
        yield _unknown("limits", inventory, "ulimits")
        return
    limits = inventory.ulimits
    shown, fixes = list[str](), list[str]()
    for name, value, least, fix in (
        ("locked memory", limits.memlock_bytes, None, "ulimit -l unlimited (docker run --ulimit memlock=-1)"),
        ("stack", limits.stack_bytes, _STACK, "ulimit -s 65536 (docker run --ulimit stack=67108864)"),
    ):
        shown.append(f"{name} {'unlimited' if value is None else human_bytes(value)}")
        if value is not None and (least is None or value < least):
            fixes.append(fix)
    files = limits.open_files
    shown.append(f"open files {'unlimited' if files is None else files}")
    if files is not None and files < _OPEN_FILES:
        fixes.append("ulimit -n 65536")
    state: State = "note" if fixes else "ok"
    yield Check("limits", state, ", ".join(shown), f"for GPUs: {'; '.join(fixes)}" if fixes else "")


_NAMES = {8000: "Triton's HTTP", 8001: "Triton's gRPC", 8002: "Triton's metrics", 8080: "the gateway"}
_SKEW_S = 60.0  # beyond it, certificates and tokens may be refused
_HUB_TOKEN = "HF_TOKEN, or hf auth login, for repositories that ask for it"


def _containers(inventory: Inventory) -> Iterator[Check]:
    """Docker and whether containers can have GPUs."""
    docker = inventory.docker
    if docker is None:
        yield _unknown("docker", inventory, "docker")
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


def _serving(inventory: Inventory, server_problem: str) -> Iterator[Check]:
    """Triton in its two forms, TensorRT-LLM and MPI."""
    if server_problem:
        fix = "" if "pip install" in server_problem else install_line("server")
        yield Check("embedded Triton", "missing", server_problem, fix)
    else:
        yield Check("embedded Triton", "ok", f"{WHEEL} {version_of(WHEEL)}")
    triton = inventory.triton
    if triton is None:
        yield _unknown("tritonserver", inventory, "triton")
    elif triton.path is None:
        yield Check("tritonserver", "note", "none outside this environment; containers have one")
    else:
        of = f", container {triton.release}" if triton.release else ""
        yield Check("tritonserver", "ok", f"{triton.path}, {triton.version or 'version not known'}{of}")
    yield _tensorrt_llm(inventory)
    yield _mpi(inventory)


def _tensorrt_llm(inventory: Inventory) -> Check:
    if inventory.software is None or inventory.builder is None:
        return _unknown("TensorRT-LLM", inventory, "software" if inventory.software is None else "builder")
    have, path = inventory.software, inventory.builder.path
    if have.tensorrt_llm is None and path is None:
        return Check("TensorRT-LLM", "note", "not installed; containers have it")
    builder = (
        f"trtllm-build of {inventory.builder.version or 'no known version'} at {path}"
        if path
        else "no trtllm-build"
    )
    tensorrt = f", TensorRT {have.tensorrt}" if have.tensorrt else ""
    return Check(
        "TensorRT-LLM", "ok", f"{have.tensorrt_llm or 'not for Triton’s Python'}{tensorrt}; {builder}"
    )


def _mpi(inventory: Inventory) -> Check:
    if inventory.mpi is None:
        return _unknown("MPI", inventory, "mpi")
    slots = f"{inventory.processors.cores} slots" if inventory.processors else "slots not known"
    if inventory.mpi.problem:
        return Check("MPI", "note", f"{inventory.mpi.problem}; several GPUs outside of a container need it")
    return Check("MPI", "ok", f"{inventory.mpi.family} {inventory.mpi.version}, {slots}")


def _network(inventory: Inventory) -> Iterator[Check]:
    """The hub, the clock against it, and the ports that servers take."""
    if inventory.hub is None:
        yield _unknown("hub", inventory, "hub")
    else:
        yield _hub(inventory.hub)
        where = inventory.hub.token
        yield (
            Check("hub token", "ok", f"in {where}")
            if where
            else Check("hub token", "note", "none", _HUB_TOKEN)
        )
        yield _clock(inventory.hub.clock_ahead_s)
    if inventory.listeners is None:
        yield _unknown("ports", inventory, "listeners")
        return
    for port, name in _NAMES.items():
        listener = inventory.listeners.get(port)
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
