"""Whether a second server of a deployment fits beside the first, by the plan's forecast and what is free now.

While a package is exchanged, both servers lie in memory. A server takes its KV cache when it starts and keeps it, so
one that starts in what another leaves may hold fewer requests for as long as it runs: that counts as not fitting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.contracts import engine_memory
from pipeline.errors import UserError
from pipeline.machine.host import read_memory
from pipeline.machine.inventory import take
from pipeline.plan.memory import MemoryPlan, plan_memory
from pipeline.prepare.report import make_report
from pipeline.recipe import Recipe
from pipeline.store import Store
from pipeline.triton.deployment import REPOSITORY, Deployment

_PROBE_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class MemoryBeside:
    """Memory that a second server needs, and memory that there is for it.

    Attributes:
        needed_bytes: On the fullest GPU, or of the host's memory: without its KV cache if `sequences` is known.
        free_bytes: Free now, while the first server runs.
        sequences: Whole requests that its KV cache would hold; None: not known.
        wanted: Whole requests that it would hold alone; None: not known.
        basis: Where the figures come from.
    """

    needed_bytes: int
    free_bytes: int
    sequences: int | None
    wanted: int | None
    basis: str

    @property
    def fits(self) -> bool:
        """Whether it would be as good as alone."""
        if self.sequences is not None and self.wanted is not None:
            return self.sequences >= max(1, self.wanted)
        return self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        figures = f"{self.needed_bytes / 2**30:.2f} GiB needed, {self.free_bytes / 2**30:.2f} GiB free"
        if self.sequences is None:
            return f"{figures} ({self.basis})"
        return f"{figures}, KV cache for {self.sequences} of {self.wanted} whole requests at a time ({self.basis})"


def memory_beside(package: Path, recipe: Recipe | None, store: Store) -> MemoryBeside:
    """Compare what a package would take with what is free on this machine.

    Args:
        recipe: The recipe of the package; None if it is not known: then only its files are counted.

    Raises:
        UserError: This machine shows no GPUs, and the package needs some.
    """
    deployment = Deployment.load(package)
    free = _free_bytes(deployment)
    memory = None if recipe is None else make_report(recipe, store, offline=True).memory
    if memory is None:
        return _by_files(package, deployment, free)
    return beside(memory, free)


def beside(memory: MemoryPlan, free_bytes: int) -> MemoryBeside:
    """Plan the same deployment again, in what is free (on the GPU with the least, or of the host's memory). Pure."""
    squeezed = plan_memory(replace(memory.spec, capacity=free_bytes))
    fullest = memory.tightest
    needed = fullest.used - fullest.group("kv_cache")
    if memory.spec.pool_bytes is not None:
        # The cache has a fixed size, and is needed whole.
        needed = fullest.used
    return MemoryBeside(
        needed, free_bytes, squeezed.sequences, memory.concurrency, "by the plan of its recipe"
    )


def _by_files(package: Path, deployment: Deployment, free_bytes: int) -> MemoryBeside:
    files = sum(path.stat().st_size for path in (package / REPOSITORY).rglob("*") if path.is_file())
    ranks = 1 if deployment.requirements is None else max(1, deployment.requirements.gpus)
    runtime = (
        engine_memory.cpu_process_bytes() if deployment.runtime == "cpu" else engine_memory.other_bytes()
    )
    basis = "its files and the runtime, without a KV cache; its recipe is not known"
    return MemoryBeside(files // ranks + runtime, free_bytes, None, None, basis)


def _free_bytes(deployment: Deployment) -> int:
    if deployment.requirements is None:
        return read_memory().available_bytes
    gpus = take(only=("gpus",), deadline_s=_PROBE_DEADLINE_S).facts().gpus
    free = sorted((device.free_mib << 20 for device in gpus or ()), reverse=True)[
        : deployment.requirements.gpus
    ]
    if len(free) < deployment.requirements.gpus:
        raise UserError(
            f"{deployment.name} needs {deployment.requirements.gpus} GPUs, and this machine shows {len(free)}"
        )
    return free[-1]
