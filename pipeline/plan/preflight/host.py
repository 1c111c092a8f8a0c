"""Rules about memory, disks, limits and ports of a machine, and how mpirun starts ranks there.

Each function is one rule of contracts/data/rules/host.yaml, under its id in CHECKS: it compares what is needed with
what is there, so that a recipe is judged by it before its build, and a package before its start. What is not known of
a machine is not judged.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from pipeline.contracts.rules import rule
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.preflight.finding import Objection
from pipeline.plan.preflight.needs import MachineCheck, MachineNeeds
from pipeline.store import human_bytes

TENSOR, KIND, HOST_CACHE = "runtime.tensor_parallel", "runtime.kind", "kv_cache.host_memory_gib"
FORMAT, PRECISION = "quantization.format", "runtime.precision"
PORTS = (8001, 8002)  # Triton's own, without HTTP, which few recipes open
_MIB, _GIB = 2**20, 2**30


def _memory(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    have, free = here.memory_bytes, here.memory_available_bytes
    if have is not None and have < needs.host_cache_bytes:
        yield Objection(
            (HOST_CACHE,),
            _lacks("host memory", needs.host_cache_bytes, have),
            "fewer, or a machine with more",
        )
    elif have is not None and have < needs.build_memory_bytes:
        text = _lacks("host memory to build", needs.build_memory_bytes, have)
        yield Objection((HOST_CACHE,), text, "build on a machine with more, or over more ranks", "warning")
    elif free is not None and free < max(needs.host_cache_bytes, needs.build_memory_bytes):
        text = _lacks("host memory", max(needs.host_cache_bytes, needs.build_memory_bytes), free, "are free")
        yield Objection((HOST_CACHE,), text, "end what else runs here", "warning")


def _calibration(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    """On GPUs, what they do not hold lies in host memory; without one, all of it."""
    facts, free = rule("host.calibration").facts, here.memory_available_bytes
    if free is None or not needs.calibrated_weights:
        return
    elsewhere = "calibrate on a machine with more memory, or with a GPU that holds it"
    if not here.gpus:
        needed = needs.calibrated_weights * facts["cpu_bytes"]
        if free < needed:
            yield Objection(
                (FORMAT,), _lacks("memory to calibrate on a CPU", needed, free, "are free"), elsewhere
            )
        return
    needed = needs.calibrated_weights * facts["gpu_bytes"]
    on_gpus = sum(seen.free_mib for seen in here.gpus) * _MIB
    if on_gpus + free < needed:
        text = _lacks("memory to calibrate", needed, on_gpus + free, "are free on GPUs and host together")
        yield Objection((FORMAT,), text, elsewhere)
    elif on_gpus < needed:
        text = _lacks(
            "GPU memory to calibrate",
            needed,
            on_gpus,
            "are free; the rest lies in host memory, which is slow",
        )
        yield Objection((FORMAT,), text, elsewhere, "warning")


def _bf16(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    if needs.bf16 and here.bf16 is False:
        yield Objection((PRECISION,), "this processor has no bf16 arithmetic", f"--set {PRECISION}=f32")


def _disk(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    if here.store is None or needs.build_bytes is None:
        return
    lacking = needs.build_bytes - here.store.held_bytes
    if here.store.free_bytes < lacking:
        text = _lacks("disk", lacking, here.store.free_bytes, f"are free in {here.store.folder}")
        collect = shlex.join(("pipeline", "store", "gc", "--store", here.store.folder))
        yield Objection(("model.source",), text, f"free some ({collect}), or name another --store")


def _temporary(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    del needs  # whatever it is
    least = int(rule("host.temporary").facts["least_gib"] * _GIB)
    if here.temporary is not None and here.temporary.free_bytes < least:
        text = _lacks(
            "temporary files", least, here.temporary.free_bytes, f"are free in {here.temporary.folder}"
        )
        yield Objection((KIND,), text, "free some, or set TMPDIR")


def _lacks(what: str, needed: int, there: int, how: str = "are there") -> str:
    return f"it needs {human_bytes(needed)} of {what}, {human_bytes(there)} {how}"


def _shared_memory(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    wanted = needs.serving
    if here.shm_bytes is None or wanted is None or needs.where == "docker":
        return  # a container is given its own
    if here.shm_bytes >= wanted.shm_mib * _MIB:
        return
    spans = wanted.gpus > 1 and here.shm_bytes < wanted.least_shm_mib * _MIB
    yield Objection(
        (TENSOR,),
        f"/dev/shm has {here.shm_bytes // _MIB} MiB, {wanted.shm_mib} MiB are wanted",
        f"docker run --shm-size={wanted.shm_mib}m, or --ipc=host",
        "error" if spans else None,
    )


def _locked_memory(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    ranks = needs.serving.gpus if needs.serving is not None else 1
    if here.memlock_limited and ranks > 1 and needs.where != "docker":
        yield Objection(
            (TENSOR,),
            f"a process may lock {(here.memlock_bytes or 0) >> 10} KiB of memory only",
            "docker run --ulimit memlock=-1, or ulimit -l unlimited",
        )


def _ports(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    taken = sorted((here.taken_ports or frozenset()) & set(PORTS))
    if taken and needs.where == "anywhere":  # a start names the ports that it takes
        others = "pipeline serve chooses others, or name them: --grpc-port, --metrics-port"
        yield Objection(("name",), f"ports {', '.join(map(str, taken))} are taken by another process", others)


def _spawning(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    if here.batch_system and needs.spawns and needs.where != "docker":  # which hides the job
        yield Objection(
            ("draft",),
            f"two engines are served by ranks that MPI spawns; within a job of {here.batch_system} it cannot",
            "serve outside of the job, or build without a draft",
        )


def _slots(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    ranks = needs.serving.gpus if needs.serving is not None else 1
    if here.mpi_slots is not None and ranks > 1 and here.mpi_slots < ranks:
        by_hand = "pipeline serve passes --oversubscribe; by hand, pass it or widen the host file"
        yield Objection(
            (TENSOR,), f"it needs {ranks} ranks, mpirun counts {here.mpi_slots} slots here", by_hand
        )


def _root(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    if here.is_root and needs.serving is not None and needs.serving.gpus > 1:
        yield Objection(
            (TENSOR,), "mpirun refuses root without --allow-run-as-root", "pipeline serve passes it"
        )


CHECKS: Mapping[str, MachineCheck] = {
    "host.memory": _memory,
    "host.calibration": _calibration,
    "host.bf16": _bf16,
    "host.disk": _disk,
    "host.temporary": _temporary,
    "host.shm": _shared_memory,
    "host.memlock": _locked_memory,
    "host.ports": _ports,
    "mpi.orchestrator": _spawning,
    "mpi.slots": _slots,
    "mpi.root": _root,
}
