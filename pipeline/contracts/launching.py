"""How Triton with TensorRT-LLM is started, by version: programs, arguments, environment, container options.

The facts are data (`data/launching.yaml`, each with its source); this answers from them. Commands are put together
elsewhere (`pipeline.serving.launch_gpu`).

>>> launch_facts("1.2.1").llmapi_wrapper
'trtllm-llmapi-launch'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.contracts import read_facts, record
from pipeline.contracts.releases import release
from pipeline.contracts.version_range import holds

_SECTIONS = ("programs", "mpirun", "arguments", "orchestrator", "llmapi", "bls", "container", "log")


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """How one version of TensorRT-LLM is started, by the entries of the data. {…} in an argument is to be filled in."""

    server: str  # the program, as a container has it
    mpirun: str
    llmapi_wrapper: str  # goes before the server where the LLM API spans several ranks
    worker: str  # what the C++ backend spawns in orchestrator mode
    as_root: str
    oversubscribe: str
    unbound: tuple[str, ...]  # ranks may run on all cores
    by_slot: tuple[str, ...]  # one machine is filled after the other
    group_environment: Mapping[str, str]  # of mpirun over several machines
    block: tuple[str, ...]  # begins the arguments of one rank
    separator: str  # stands between the blocks of two ranks
    every_rank: tuple[str, ...]
    all_models: tuple[str, ...]  # rank 0: those of the repository, fixed at the start
    one_model: tuple[str, ...]  # ranks above 0: only the models that are named are loaded
    load: str  # names one of them
    restricted: tuple[str, ...]  # rank 0: administration is refused on both protocols
    silent: tuple[str, ...]  # ranks above 0
    orchestrator_environment: Mapping[str, str]
    orchestrator_arguments: tuple[str, ...]
    orchestrator_arguments_of_a_gpu: str
    environment: Mapping[str, str]
    container_options: tuple[str, ...]  # of `docker run`
    shared_memory_mib: int  # of one rank
    shared_memory_mib_of_a_further_rank: int
    least_shared_memory_mib: int  # for more than one rank
    gave_up: tuple[str, ...]  # in the log: nothing will become ready any more
    llmapi_instances: bool = False  # whether `llmapi` spreads instances by gpu_device_ids

    def shm_mib(self, ranks: int, models_mib: int = 0) -> int:
        """Shared memory in MiB that a container with so many ranks is given, whose Python models use `models_mib`.

        >>> launch_facts("1.2.1").shm_mib(1), launch_facts("1.2.1").shm_mib(4)
        (2048, 3584)
        """
        own = max(self.shared_memory_mib, models_mib)
        return own + self.shared_memory_mib_of_a_further_rank * (ranks - 1)


@dataclass(frozen=True, slots=True)
class KnownCause:
    """Known meaning of a line of a server's log."""

    pattern: re.Pattern[str]
    meaning: str
    fix: str


@cache
def known_causes() -> tuple[KnownCause, ...]:
    """Why servers fail, as their logs say it; the same for all versions."""
    return tuple(record(KnownCause, entry) for entry in _data()["causes"])


@cache
def restricted() -> tuple[str, ...]:
    """Options of every Triton that listens, in all versions: they disable administration over HTTP and gRPC."""
    return tuple(_data()["arguments"]["restricted"]["value"])


def listening(
    *, grpc: tuple[str, int], http: tuple[str, int] | None, metrics: tuple[str, int]
) -> tuple[str, ...]:
    """Options of a Triton that listens; the same for all versions.

    Args:
        grpc: Address and port of gRPC. The address `unix:/path` is the socket /path:port.
        http: Address and port of HTTP; None turns it off. The address `unix:/path` is the socket /path.
        metrics: Address and port of the page of metrics.
    """
    arguments = _data()["arguments"]
    options = () if http is not None else tuple(arguments["no_http"]["value"])
    for protocol, at in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        if at is not None:
            options += tuple(
                argument.format(address=at[0], port=at[1]) for argument in arguments[protocol]["value"]
            )
    return options


def tracing(url: str) -> tuple[str, ...]:
    """Options of a Triton that exports spans of the requests that bear a trace context; the same for all versions."""
    return tuple(argument.format(traces=url) for argument in _data()["arguments"]["tracing"]["value"])


@cache
def upstream_clients() -> str:
    """Folder of upstream's own clients in the containers; the same for all versions."""
    return str(_data()["programs"]["upstream_clients"]["value"])


@cache
def launch_facts(version: str) -> LaunchFacts:
    """Look up how a version of TensorRT-LLM is started."""
    release(version)
    entries = [pair for section in _SECTIONS for pair in _data()[section].items()]
    applicable = {
        name: entry for name, entry in entries if holds(version, entry.get("since"), entry.get("until"))
    }
    return record(LaunchFacts, {name: entry["value"] for name, entry in applicable.items()})


def _data() -> Mapping[str, Any]:
    return read_facts("launching.yaml")
