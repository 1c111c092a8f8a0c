"""Facts of starting a server: every entry has its source, every version its answer."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import yaml

from pipeline.contracts.launching import known_causes, launch_facts
from pipeline.contracts.releases import releases
from pipeline.errors import UserError

DATA: dict[str, Any] = yaml.safe_load(
    (resources.files("pipeline.contracts") / "data" / "launching.yaml").read_text("utf-8")
)


def entries() -> list[tuple[str, dict[str, Any]]]:
    sections = {name: content for name, content in DATA.items() if name not in ("sources", "causes")}
    found = [(f"{name}.{key}", entry) for name, section in sections.items() for key, entry in section.items()]
    return found + [(f"causes.{entry['meaning']}", entry) for entry in DATA["causes"]]


@pytest.mark.parametrize(("name", "entry"), entries(), ids=[name for name, _ in entries()])
def test_every_entry_names_its_sources(name: str, entry: dict[str, Any]) -> None:
    assert entry["source"], name
    assert set(entry["source"]) <= set(DATA["sources"]), name


def test_every_source_is_used() -> None:
    used = {source for _, entry in entries() for source in entry["source"]}
    unused = set(DATA["sources"]) - used
    assert not unused


@pytest.mark.parametrize("version", [one.version for one in releases()])
def test_every_release_can_be_started(version: str) -> None:
    facts = launch_facts(version)
    assert facts.server == "/opt/tritonserver/bin/tritonserver"
    assert (facts.llmapi_wrapper is not None) == (int(version.split(".")[0]) >= 1)
    assert not facts.llmapi_instances
    assert facts.least_shared_memory_mib <= facts.shared_memory_mib
    assert facts.shm_mib(8) > facts.shm_mib(1, models_mib=100) == facts.shared_memory_mib
    assert facts.shm_mib(1, models_mib=9000) == 9000


def test_candidates_have_what_their_release_will_have() -> None:
    assert launch_facts("1.3.0rc4").llmapi_instances


def test_unknown_versions_are_refused() -> None:
    with pytest.raises(UserError, match=r"TensorRT-LLM 1\.2\.9 is not known; known: .*1\.2\.1"):
        launch_facts("1.2.9")


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (
            "[TensorRT-LLM][ERROR] 1: Error Code 1: Serialization (Serialization assertion stdVersionRead == "
            "kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 226, Serialized Engine "
            "Version: 228)",
            "another version of TensorRT",
        ),
        (
            "[TRT] [E] 6: The engine plan file is generated on an incompatible device, expecting compute 8.0 got "
            "compute 8.9, please rebuild.",
            "another GPU",
        ),
        (
            "CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory",
            "memory does not suffice",
        ),
        (
            "Failed to initialize executor on rank 1: Executor creation failed due to insufficient GPU memory.",
            "memory",
        ),
        (
            "Unable to initialize shared memory key 'triton_python_backend_shm_region_2' to requested size",
            "/dev/shm",
        ),
        (
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-NzwJ7O (size 9637888)",
            "/dev/shm",
        ),
        ("There are not enough slots available in the system to satisfy the 4", "fewer slots"),
        ("All nodes which are allocated for this job are already filled.", "fewer slots"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "no driver"),
    ],
)
def test_what_servers_are_known_to_say(line: str, meaning: str) -> None:
    found = [cause for cause in known_causes() if cause.pattern.search(line)]
    assert len(found) == 1
    assert meaning in found[0].meaning
    assert found[0].fix
