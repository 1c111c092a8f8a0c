"""Facts of starting a server: every version has its answer, and what servers say has a meaning."""

from __future__ import annotations

import pytest

from pipeline.contracts import llmapi
from pipeline.contracts.launching import known_causes, launch_facts
from pipeline.contracts.releases import releases
from pipeline.contracts.version_range import is_candidate


@pytest.mark.parametrize("version", [release.version for release in releases()])
def test_every_release_can_be_started(version: str) -> None:
    facts = launch_facts(version)
    assert facts.server == "/opt/tritonserver/bin/tritonserver"
    assert facts.llmapi_instances is llmapi.has_instances(version) is is_candidate(version)
    assert facts.least_shared_memory_mib <= facts.shared_memory_mib
    assert facts.shm_mib(8) > facts.shm_mib(1, models_mib=100) == facts.shared_memory_mib
    assert facts.shm_mib(1, models_mib=9000) == 9000


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
            "Failed to initialize executor on rank 1: Executor creation failed due to insufficient GPU memory.",
            "memory",
        ),
        (
            "Unable to initialize shared memory key 'triton_python_backend_shm_region_2' to requested size",
            "/dev/shm",
        ),
        ("All nodes which are allocated for this job are already filled.", "fewer slots"),
        (
            "ImportError: cannot import name 'PartReasoningText' from 'openai.types.responses'",
            "openai is older",
        ),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "no driver"),
    ],
)
def test_what_servers_are_known_to_say(line: str, meaning: str) -> None:
    found = [cause for cause in known_causes() if cause.pattern.search(line)]
    assert len(found) == 1
    assert meaning in found[0].meaning
    assert found[0].fix
