"""Which recipes are runnable on which machine, and what is said where they are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pipeline.doctor.report import Text, Verdict
from pipeline.doctor.sections import sections
from pipeline.doctor.verdicts import DoctorFacts, judge
from pipeline.machine.docker import Docker
from pipeline.machine.gpus import GpuSurvey
from pipeline.machine.host import Memory
from pipeline.machine.inventory import Inventory
from pipeline.machine.network import Hub, Listener
from pipeline.machine.packages import Extra, Package, read_python
from pipeline.machine.programs import EngineBuilder, Software, TritonProgram
from pipeline.plan.preflight import findings
from pipeline.recipe import load_recipe
from tests.support.machines import DISK, GIB, H100, h100s

NAMES = ("", "hub", "calibrate", "cpu", "cache", "gateway", "server")
EXTRAS = tuple(Extra(name, (Package(f"of-{name or 'core'}", ">=1", "1.0"),)) for name in NAMES)
UTF8 = Text("UTF-8", "utf-8", "utf-8", "C.UTF-8")


def found(
    machine: Inventory,
    *,
    lacking: str | None = None,  # an extra that is not installed
    server_problem: str = "",
    in_store: Mapping[str, int] | None = None,
) -> DoctorFacts:
    extras = tuple(
        Extra(extra.name, (replace(extra.packages[0], installed=None),)) if extra.name == lacking else extra
        for extra in EXTRAS
    )
    return DoctorFacts(machine, extras, server_problem, in_store or {})


def verdict(recipe: str, machine: Inventory) -> Verdict:
    return of(recipe, found(machine))


def of(recipe: str, all_found: DoctorFacts) -> Verdict:
    loaded = load_recipe(recipe)
    return judge(recipe, loaded, findings(loaded), all_found)


def obstacles(said: Verdict) -> Mapping[str, list[str]]:
    """Way -> what it is stopped by."""
    return {way.name: [obstacle.rule or obstacle.subject for obstacle in way.obstacles] for way in said.ways}


def test_a_host_with_docker_and_the_gpu_builds_and_deploys_in_containers() -> None:
    said = verdict("llama-3.1-8b-fp8", h100s(1))
    assert said.runnable
    assert obstacles(said) == {"build": [], "local": ["port.version", "host.programs"], "docker": []}
    assert (said.runtime, said.gpus, said.gpu) == ("tensorrt", 1, "h100-sxm-80g")


def test_inside_the_container_no_docker_is_needed() -> None:
    inside = replace(
        h100s(1),
        docker=Docker(None, "there is no docker on PATH", "install Docker"),
        triton=TritonProgram("/opt/tritonserver/bin/tritonserver", "26.07", "2.60.0"),
        software=Software("1.2.1", "10.14.1.48", "26.07"),
        builder=EngineBuilder("/usr/local/bin/trtllm-build", "1.2.1"),
    )
    said = verdict("llama-3.1-8b-fp8", inside)
    assert said.runnable
    assert obstacles(said) == {"build": [], "local": [], "docker": ["host.docker"]}


def test_no_gpu_stops_engines_but_not_the_build_for_pytorch() -> None:
    without = replace(h100s(0), gpus=GpuSurvey((), "there is no nvidia-smi", ""))
    engine = obstacles(verdict("llama-3.1-8b-fp8", without))
    assert all("host.gpus" in said for said in engine.values())
    unified = obstacles(verdict("llama-3.1-8b-eagle3", without))
    assert "host.gpus" not in unified["build"]
    assert "host.gpus" in unified["local"]
    assert "host.gpus" in unified["docker"]
    assert verdict("tiny-cpu", without).runnable


def test_too_few_gpus_and_another_architecture() -> None:
    assert "host.gpus" in obstacles(verdict("llama-3.3-70b-fp8", h100s(2)))["docker"]
    assert "host.gpus" not in obstacles(verdict("llama-3.3-70b-fp8", h100s(2)))["build"], (
        "ranks one after the other"
    )
    assert verdict("llama-3.3-70b-fp8", h100s(4)).runnable
    assert "port.arch" in obstacles(verdict("llama-3.1-8b-int4-awq", h100s(1)))["docker"]


def test_an_old_driver_stops_everything_on_the_gpu() -> None:
    old = replace(h100s(1), gpus=GpuSurvey((replace(H100, driver="535.104.05"),), "", "NVML"))
    assert all("host.driver" in said for said in obstacles(verdict("llama-3.1-8b-fp8", old)).values())


def test_pcie_between_ranks_is_a_warning() -> None:
    said = verdict("llama-3.3-70b-fp8", h100s(4, way="SYS"))
    assert said.runnable
    assert "host.nvlink" in [warning.rule for warning in said.warnings]


def test_a_full_disk_stops_the_build_alone_and_what_the_store_has_counts() -> None:
    small = replace(h100s(1), store=replace(DISK, free_bytes=20 * GIB))
    assert "host.disk" in obstacles(verdict("llama-3.1-8b-fp8", small))["build"]
    assert "host.disk" not in obstacles(verdict("llama-3.1-8b-fp8", small))["docker"]
    there = {"meta-llama/Llama-3.1-8B-Instruct": 200 * GIB}
    assert "host.disk" not in obstacles(of("llama-3.1-8b-fp8", found(small, in_store=there)))["build"]


def test_memory_to_calibrate_stops_the_build_alone() -> None:
    small = replace(
        h100s(0), gpus=GpuSurvey((), "there is no nvidia-smi", ""), memory=Memory(24 * GIB, 22 * GIB, 0, None)
    )
    said = obstacles(verdict("llama-3.1-8b-eagle3", small))
    assert "host.calibration" in said["build"]
    assert "host.calibration" not in said["docker"]


def test_docker_without_gpus_or_without_a_daemon() -> None:
    for docker in (Docker("28.3.2", gpu_runtime=False), Docker(None, "docker does not answer within 2 s")):
        said = verdict("llama-3.1-8b-fp8", replace(h100s(1), docker=docker))
        assert "host.docker" in obstacles(said)["docker"]
        assert ("trtllm-build" in obstacles(said)["build"]) is bool(docker.problem)
        assert not said.runnable


def test_a_builder_of_another_version_does_not_count() -> None:
    other = replace(
        h100s(1), docker=Docker(None, "no daemon"), builder=EngineBuilder("/usr/bin/trtllm-build", "1.0.0")
    )
    assert "trtllm-build" in obstacles(verdict("llama-3.1-8b-fp8", other))["build"]
    assert "trtllm-build" not in obstacles(verdict("llama-3.1-8b-eagle3", other))["build"]


@pytest.mark.parametrize(
    "hub",
    [
        Hub("https://hub", offline=True, token=None),
        Hub("https://hub", offline=False, token=None, problem="no route"),
    ],
    ids=["offline", "unreachable"],
)
def test_without_a_hub_only_what_the_store_has_is_built(hub: Hub) -> None:
    machine = replace(h100s(1), hub=hub)
    assert "hub" in obstacles(verdict("llama-3.1-8b-fp8", machine))["build"]
    other = {"meta-llama/Llama-3.2-1B-Instruct": GIB}
    assert "hub" in obstacles(of("llama-3.1-8b-fp8", found(machine, in_store=other)))["build"]
    both = other | {"meta-llama/Llama-3.1-8B-Instruct": GIB}
    assert "hub" not in obstacles(of("llama-3.1-8b-fp8", found(machine, in_store=both)))["build"]
    assert verdict("tiny-cpu", machine).runnable


def test_a_gated_repository_stops_the_build_unless_the_store_has_it() -> None:
    repo = "meta-llama/Llama-3.1-8B-Instruct"
    gated = replace(h100s(1), hub=Hub("https://hub", offline=False, token=None, repositories={repo: 401}))
    assert obstacles(verdict("llama-3.1-8b-int4-awq", gated))["build"].count("source.gated") == 1
    assert "source.gated" not in obstacles(verdict("llama-3.1-8b-int4-awq", gated))["docker"]
    assert (
        "source.gated"
        not in obstacles(of("llama-3.1-8b-int4-awq", found(gated, in_store={repo: 1})))["build"]
    )


@pytest.mark.parametrize(
    ("extra", "ways"),
    [
        ("", {"build", "local"}),
        ("calibrate", {"build"}),
        ("cpu", {"build"}),
        ("server", {"local"}),
        ("hub", set()),
    ],
)
def test_missing_packages_stop_what_needs_them(extra: str, ways: set[str]) -> None:
    said = of("tiny-cpu", found(h100s(0), lacking=extra))
    assert {way for way, names in obstacles(said).items() if "packages" in names} == ways
    for way in said.ways:
        for obstacle in way.obstacles:
            assert obstacle.fix.startswith("pip install")


def test_a_server_that_cannot_run_stops_the_deployment() -> None:
    problem = "Triton's Python stub does not find libpython3.11.so.1.0"
    said = of("tiny-cpu", found(h100s(0), server_problem=problem))
    assert obstacles(said) == {"build": [], "local": ["Triton"]}


def test_what_nobody_could_tell_is_said_and_stops_nothing() -> None:
    nothing = Inventory(late={"gpus": "no answer within 2 s", "docker": "no answer within 2 s"})
    lines = [check for section in sections(found(nothing), read_python(), UTF8) for check in section.checks]
    assert {check.subject for check in lines if check.state == "unknown"} >= {
        "GPU",
        "docker",
        "memory",
        "hub",
        "ports",
    }
    assert [check.text for check in lines if check.subject == "GPU"] == ["no answer within 2 s"]
    assert verdict("tiny-cpu", nothing).runnable


def lines_of(all_found: DoctorFacts, text: Text = UTF8) -> dict[str, tuple[str, str, str]]:
    said = sections(all_found, read_python(), text)
    return {
        check.subject: (check.state, check.text, check.fix) for section in said for check in section.checks
    }


def test_lines_about_a_machine_with_gpus() -> None:
    lines = lines_of(found(h100s(2)))
    assert lines["GPU 1"][1] == (
        "NVIDIA H100 80GB HBM3, in recipes h100-sxm-80g; compute capability 9.0; 79.1 of 79.6 GiB free"
    )
    assert lines["driver"][1] == "590.44.01, CUDA up to 13.1, by NVML"
    assert lines["links"][:2] == ("ok", "NV18 between all")
    assert lines["docker"][1] == "28.3.2, images in /var/lib/docker"
    assert lines["GPUs in containers"][1] == "by nvidia runtime"
    assert lines["MPI"][1] == "Open MPI 4.1.8, 32 slots"
    assert lines["clock"][1] == "agrees with the hub's"
    assert lines["limits"] == ("ok", "locked memory unlimited, stack 64.0 MiB, open files 1048576", "")
    assert lines["port 8000"][1] == "free, for Triton's HTTP"


def test_lines_that_ask_for_something() -> None:
    poor = replace(
        h100s(2, way="SYS"),
        shm_bytes=64 << 20,
        store=replace(DISK, writable=False),
        temporary=replace(DISK, free_files=0),
        docker=Docker("28.3.2", gpu_runtime=False),
        hub=Hub("https://hub", offline=False, token=None, clock_ahead_s=-300.0, repositories={"a/b": 403}),
        listeners={8001: Listener(8001, 77, "tritonserver"), 8080: Listener(8080, None, None)},
    )
    lines = lines_of(found(poor, lacking="hub"), Text("ISO-8859-1", "ascii", "utf-8", "C"))
    assert lines["/dev/shm"][0] == "warning"
    assert "--shm-size" in lines["/dev/shm"][2]
    assert lines["links"][:2] == ("note", "SYS between all")
    assert "cannot be written" in lines["store"][1]
    assert "inodes" in lines["temporary"][1]
    assert lines["GPUs in containers"][0] == "missing"
    assert (lines["hub"][0], "a/b (403)" in lines["hub"][1]) == ("missing", True) or lines["hub"][
        0
    ] == "warning"
    assert lines["clock"][1] == "300 s behind the hub's"
    assert "process 77 (tritonserver)" in lines["port 8001"][1]
    assert "cannot see" in lines["port 8080"][1]
    assert lines["text"][0] == "warning"
