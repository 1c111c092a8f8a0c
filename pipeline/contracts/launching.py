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
from importlib import resources
from typing import Any

from pipeline.contracts.releases import release
from pipeline.contracts.version_range import precedes
from pipeline.resources import parse_yaml


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """How one version of TensorRT-LLM is started. {…} in an argument is to be filled in."""

    server: str  # the program, as a container has it
    mpirun: str
    llmapi_wrapper: str | None  # goes before the server where the LLM API spans several ranks
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
    llmapi_instances: bool  # whether `llmapi` spreads instances by gpu_device_ids
    environment: Mapping[str, str]
    container_options: tuple[str, ...]  # of `docker run`
    shared_memory_mib: int  # of one rank
    shared_memory_mib_of_a_further_rank: int
    least_shared_memory_mib: int  # for more than one rank
    gave_up: tuple[str, ...]  # in the log: nothing will become ready any more

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
    return tuple(
        KnownCause(re.compile(entry["pattern"]), entry["meaning"], entry["fix"])
        for entry in _data()["causes"]
    )


@cache
def restricted() -> tuple[str, ...]:
    """Options of every Triton that listens: nobody may administer it, over HTTP or gRPC; the same for all versions."""
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
    found = () if http is not None else tuple(arguments["no_http"]["value"])
    for protocol, at in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        if at is not None:
            found += tuple(one.format(address=at[0], port=at[1]) for one in arguments[protocol]["value"])
    return found


def tracing(url: str) -> tuple[str, ...]:
    """Options of a Triton that exports spans of the requests that bear a trace context; the same for all versions.

    Args:
        url: at which an OTLP/HTTP receiver takes traces.
    """
    return tuple(argument.format(traces=url) for argument in _data()["arguments"]["tracing"]["value"])


@cache
def upstream_clients() -> str:
    """Folder of upstream's own clients in the containers; the same for all versions."""
    return str(_data()["programs"]["upstream_clients"]["value"])


@cache
def launch_facts(version: str) -> LaunchFacts:
    """Look up how a version of TensorRT-LLM is started.

    Raises:
        UserError: the version is not known; the nearest known ones are named.
    """
    release(version)
    data = _data()

    def fact(section: str, name: str, otherwise: Any = None) -> Any:
        entry = data[section][name]
        return entry["value"] if _holds(entry, version) else otherwise

    return LaunchFacts(
        server=fact("programs", "server"),
        mpirun=fact("programs", "mpirun"),
        llmapi_wrapper=fact("programs", "llmapi_wrapper"),
        worker=fact("programs", "worker"),
        as_root=fact("mpirun", "as_root"),
        oversubscribe=fact("mpirun", "oversubscribe"),
        unbound=tuple(fact("mpirun", "unbound")),
        by_slot=tuple(fact("mpirun", "by_slot")),
        group_environment=fact("mpirun", "group_environment"),
        block=tuple(fact("mpirun", "block")),
        separator=fact("mpirun", "separator"),
        every_rank=tuple(fact("arguments", "every_rank")),
        all_models=tuple(fact("arguments", "all_models")),
        one_model=tuple(fact("arguments", "one_model")),
        load=fact("arguments", "load"),
        restricted=restricted(),
        silent=tuple(fact("arguments", "silent")),
        orchestrator_environment=fact("orchestrator", "environment"),
        orchestrator_arguments=tuple(fact("orchestrator", "arguments")),
        orchestrator_arguments_of_a_gpu=fact("orchestrator", "arguments_of_a_gpu"),
        llmapi_instances=fact("llmapi", "instances_by_gpu_device_ids", otherwise=False),
        environment=fact("bls", "environment"),
        container_options=tuple(fact("container", "options")),
        shared_memory_mib=fact("container", "shared_memory_mib"),
        shared_memory_mib_of_a_further_rank=fact("container", "shared_memory_mib_of_a_further_rank"),
        least_shared_memory_mib=fact("container", "least_shared_memory_mib"),
        gave_up=tuple(fact("log", "gave_up")),
    )


def _holds(entry: Mapping[str, Any], version: str) -> bool:
    since, until = entry.get("since"), entry.get("until")
    return (since is None or not precedes(version, since)) and (until is None or precedes(version, until))


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.contracts") / "data" / "launching.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
