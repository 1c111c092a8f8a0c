"""Lines about GPUs, memory, processors, disks and limits."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.report import Check, State
from pipeline.machine.disks import Disk
from pipeline.machine.gpus import GpuSeen
from pipeline.machine.inventory import Inventory
from pipeline.machine.topology import Topology
from pipeline.plan.machine_facts import contract_name
from pipeline.store import human_bytes

_LEAST_SHM = 1 << 30  # Docker's own default is 64 MiB
_STACK = 64 << 20  # the documented --ulimit stack of containers with TensorRT-LLM
_OPEN_FILES = 1024


def unknown(subject: str, found: Inventory, probe: str) -> Check:
    """The line of a probe without an answer."""
    return Check(subject, "unknown", found.late.get(probe, "not looked at"))


def gpus(found: Inventory) -> Iterator[Check]:
    """Each GPU, its driver, and the ways between them."""
    seen = found.gpus
    if seen is None:
        yield unknown("GPU", found, "gpus")
        return
    if not seen.gpus:
        slow = (
            "--timeout-s waits longer; nvidia-smi -pm 1 keeps the driver loaded; a stuck one needs a reboot"
        )
        yield Check(
            "GPU", "missing", seen.problem, slow if seen.late else "recipes with runtime.kind cpu need none"
        )
        if seen.nvml_problem:
            yield Check("NVML", "note", seen.nvml_problem)
        return
    for gpu in seen.gpus:
        yield Check(f"GPU {gpu.index}", "ok", _gpu(gpu))
    drivers = ", ".join(sorted({gpu.driver for gpu in seen.gpus}))
    cuda = f", CUDA up to {seen.cuda}" if seen.cuda else ""
    yield Check("driver", "ok", f"{drivers}{cuda}, by {seen.source}")
    if seen.nvml_problem:
        yield Check("NVML", "note", seen.nvml_problem)
    if len(seen.gpus) > 1:
        yield _links(found.topology, found)


def _gpu(gpu: GpuSeen) -> str:
    known = contract_name(gpu.facts())
    name = f"{gpu.name}, in recipes {known}" if known else f"{gpu.name}, of which nothing is known"
    memory = f"{gpu.free_mib / 1024:.1f} of {gpu.memory_mib / 1024:.1f} GiB free"
    return f"{name}; compute capability {gpu.capability}; {memory}"


def _links(topology: Topology | None, found: Inventory) -> Check:
    if topology is None:
        return unknown("links", found, "topology")
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


def host(found: Inventory) -> Iterator[Check]:
    """Memory, processors, disks, limits."""
    if found.memory is None:
        yield unknown("memory", found, "memory")
    else:
        memory = found.memory
        limit = ", the container's limit" if memory.limit_bytes is not None else ""
        text = f"{human_bytes(memory.available_bytes)} of {human_bytes(memory.total_bytes)} available{limit}"
        yield Check("memory", "ok", f"{text}; swap {human_bytes(memory.swap_bytes)}")
    if found.processors is None:
        yield unknown("processors", found, "processors")
    else:
        one = found.processors
        quota = f"; the container's share is {one.quota:g}" if one.quota is not None else ""
        yield Check("processors", "ok", f"{one.cores} cores, {one.threads} threads{quota}")
    yield _shm(found)
    yield _disk("store", found.store, found)
    yield _disk("temporary", found.temporary, found)
    yield from _limits(found)


def _shm(found: Inventory) -> Check:
    if found.shm_bytes is None:
        late = "shm_bytes" in found.late
        return (
            unknown("/dev/shm", found, "shm_bytes") if late else Check("/dev/shm", "missing", "there is none")
        )
    few = found.shm_bytes < _LEAST_SHM
    fix = "docker run --shm-size=2g, or --ipc=host" if few else ""
    return Check("/dev/shm", "warning" if few else "ok", human_bytes(found.shm_bytes), fix)


def _disk(subject: str, disk: Disk | None, found: Inventory) -> Check:
    if disk is None:
        return unknown(subject, found, subject)
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


def _limits(found: Inventory) -> Iterator[Check]:
    if found.ulimits is None:
        yield unknown("limits", found, "ulimits")
        return
    limits = found.ulimits
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
