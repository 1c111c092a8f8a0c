"""Files by which NVIDIA Dynamo runs a package; tests/clients/test_dynamo.py runs the script with its wheels."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts import read_facts
from pipeline.deploy.containers import DeployedPackage
from pipeline.deploy.targets import deployment_files
from pipeline.errors import UserError
from pipeline.recipe import load_recipe
from pipeline.resources import parse_yaml
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.triton.deployment import LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.kubernetes import faults, least_level
from tests.support.waiting import wait_for

FACTS = read_facts("dynamo.yaml")
ENGINE = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=8))
CPU = ENGINE.model_copy(update={"name": "tiny-cpu", "runtime": "cpu", "requirements": None})
SIXTEEN = gpu_deployment(
    LaunchSpec(mode="leader", world_size=16, engine_models=("tensorrt_llm",), weights_gib=64), gpus=16
)


def files(
    deployment: Any = ENGINE,
    *sets: str,
    folder: Path = Path("/srv/package"),
    grpc: int | None = 8001,
    program: str = "/opt/pipeline/bin/pipeline",
) -> dict[str, str]:
    recipe = load_recipe("tiny-cpu", sets)
    options = ServeOptions(Ports(None, grpc, 8002), recipe.triton)
    return deployment_files("dynamo", DeployedPackage(deployment, folder, recipe), options, (program,))


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    found: dict[str, Any] = parse_yaml(files()["graph.yaml"])
    return found


def test_variables_are_known_to_dynamo() -> None:
    known = {name for variable in FACTS["variables"].values() for name in variable["names"]}
    written = set(re.findall(r"\b(?:DYN|ETCD)_\w+", "\n".join(files().values())))
    assert len(written) > 5
    assert written <= known


def test_the_script_serves_the_package_by_options_of_serve() -> None:
    from pipeline.cli.serve import command

    (text,) = files(CPU, "triton.grpc_port=9001", folder=Path("/srv/my $package"), grpc=9001).values()
    known = {name for parameter in command.params for name in parameter.opts}
    (serve,) = re.findall(r"^  /opt/pipeline/bin/pipeline .*?&$", text, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"(?<=\s)--[\w-]+", serve)) <= known
    assert "--no-gateway" in serve
    assert text.count("'/srv/my $package'") == 2
    assert "--triton 127.0.0.1:9001" in text
    assert "${DYNAMO_PYTHON:-/opt/pipeline/bin/python}" in text


def test_a_server_that_no_worker_reaches_is_refused() -> None:
    with pytest.raises(UserError, match=r"--set serving\.grpc=true"):
        files(grpc=None)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script, with programs that write down how they were called, and run until they are told to end."""
    for name in ("pipeline", "python"):
        (tmp_path / name).write_text(
            f'#!/bin/sh\ntrap "echo {name} ended >>{tmp_path}/called; exit 0" TERM\n'
            f'echo "{name} $*" >>{tmp_path}/called\n'
            f"for i in $(seq 600); do [ -e {tmp_path}/{name}-dies ] && exit 3; sleep 0.1; done\n"
        )
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "dynamo.sh"
    file.write_text(files(CPU, program=str(tmp_path / "pipeline"))["dynamo.sh"])
    return file


def called(script: Path) -> list[str]:
    file = script.parent / "called"
    return file.read_text("utf-8").splitlines() if file.exists() else []


@pytest.mark.parametrize(("role", "parts"), [((), 3), (("worker",), 2), (("frontend",), 1)])
def test_the_first_part_that_ends_takes_the_others_with_it(
    script: Path, role: tuple[str, ...], parts: int
) -> None:
    process = subprocess.Popen(["bash", str(script), *role])
    wait_for(lambda: len(called(script)) == parts, "the start of all parts")
    started = called(script)
    assert sum("-m pipeline.gateway.dynamo" in line for line in started) == (parts > 1)
    assert sum("-m dynamo.frontend" in line for line in started) == (parts != 2)
    (script.parent / ("pipeline-dies" if parts > 1 else "python-dies")).touch()
    assert process.wait(20) == 3
    assert called(script).count("python ended") == (parts - 1 if parts > 1 else 0)


def test_a_signal_ends_all_parts(script: Path) -> None:
    process = subprocess.Popen(["bash", str(script)])
    wait_for(lambda: len(called(script)) == 3, "the start of all parts")
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert sum("ended" in line for line in called(script)) == 3


def test_an_unknown_role_starts_nothing(script: Path) -> None:
    done = subprocess.run(
        ["bash", str(script), "router"], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert called(script) == []


def test_the_graph_has_the_form_of_dynamos_own(graph: dict[str, Any]) -> None:
    facts = FACTS["graph"]
    assert (graph["apiVersion"], graph["kind"]) == (facts["api_version"], facts["kind"])
    assert set(graph["spec"]) == {"components"}
    for component in graph["spec"]["components"]:
        assert set(component) == set(facts["component"])
        assert component["type"] == facts["types"][component["name"]]
        assert component["podTemplate"]["spec"]["containers"][0]["name"] == facts["container"]


@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_pods_are_those_of_kubernetes_and_restricted(graph: dict[str, Any], version: str) -> None:
    for component in graph["spec"]["components"]:
        template = component["podTemplate"]
        manifest = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "x"},
            "template": template,
        }
        assert faults(manifest, version) == []
        assert least_level(template["spec"]) == "restricted"
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        # The operator's account may look for workers.
        assert "serviceAccountName" not in template["spec"]


def test_the_worker_asks_the_triton_of_its_pod(graph: dict[str, Any]) -> None:
    worker, triton = graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"]
    host, port = worker["command"][-1].split(":")
    assert host == "127.0.0.1"
    assert int(port) in {port["containerPort"] for port in triton["ports"]}
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert worker["volumeMounts"][0] == triton["volumeMounts"][0]


def test_no_graph_is_written_without_an_image_or_for_several_machines() -> None:
    assert set(files(CPU)) == {"dynamo.sh"}
    assert set(files(CPU, "triton.image='own/serve:1'")) == {"dynamo.sh", "graph.yaml"}
    with pytest.raises(UserError, match="needs 2 machines for one server"):
        files(SIXTEEN)
