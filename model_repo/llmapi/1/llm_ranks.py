"""One model over several GPUs, where MPI started a process for each: the first leads, the others work for it.

Importing this imports tensorrt_llm. As in upstream's model: where MPI has one rank (also below `trtllm-llmapi-launch`,
which hides MPI from the server), the LLM starts what it needs by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorrt_llm._utils import global_mpi_rank, global_mpi_size


def rank() -> int:
    """Rank of this process."""
    number: int = global_mpi_rank()
    return number


def is_leader() -> bool:
    """Whether this process makes the LLM and takes requests."""
    return rank() == 0


def with_session(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the LLM; where MPI started workers, with a session over them."""
    if global_mpi_size() <= 1:
        return dict(arguments)
    from mpi4py.MPI import COMM_WORLD
    from tensorrt_llm.llmapi import MpiCommSession

    session = MpiCommSession(comm=COMM_WORLD, n_workers=COMM_WORLD.Get_size())
    return {**arguments, "_mpi_session": session}


def work_for_leader() -> None:
    """Do what the leader sends, until it ends."""
    from mpi4py.futures import MPICommExecutor
    from mpi4py.MPI import COMM_WORLD

    with MPICommExecutor(COMM_WORLD) as executor:
        if executor is not None:
            raise RuntimeError(f"rank{COMM_WORLD.rank} is a worker, but MPI made it the leader")
