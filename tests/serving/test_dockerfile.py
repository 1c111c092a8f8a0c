"""The Dockerfile and what lies beside it: what a linter would look for, and that they agree with the contracts."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.contracts.images import image_facts, serving_image
from pipeline.contracts.launching import launch_facts
from pipeline.contracts.releases import container, joined, releases
from pipeline.deploy.package import DeployedPackage
from pipeline.deploy.targets import deployment_files
from pipeline.machine.image_build import CONSTRAINTS, REQUIREMENTS
from pipeline.recipe import load_recipe
from pipeline.recipe.library import packaged
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.triton.deployment import CONTAINER_ROOT, LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.machines import put_tool
from tests.support.pods import parse

ROOT = Path(__file__).resolve().parents[2]
FILE = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
ENGINE = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",)))
NEWEST = max(
    (container(release.version) for release in releases() if "tensorrt" in release.tracks),
    key=lambda release: release.release or "",
)


def test_what_builds_and_serves_is_made_from_the_newest_container_with_engines() -> None:
    assert FILE.arguments["TRITON_IMAGE"] == NEWEST.image
    assert {stage.name: stage.image for stage in FILE.stages} == {
        "wheel": "${PYTHON_IMAGE}", "build": "${TRITON_IMAGE}", "models": "${TRITON_IMAGE}", "serve": "models",
        "group": "serve", "gateway": "${PYTHON_IMAGE}", "dynamo": "${PYTHON_IMAGE}", "accept": "serve",
        "plain-triton": "${PLAIN_TRITON_IMAGE}", "joined": "${TRTLLM_IMAGE}",
    }  # fmt: skip


@pytest.mark.parametrize("version", [release.version for release in releases()])
def test_commands_that_build_an_image_name_stages_and_arguments_that_are_there(version: str) -> None:
    image = serving_image(version, "pytorch")
    stages = {stage.name for stage in FILE.stages}
    assert set(image.arguments) <= set(FILE.arguments)
    words = shlex.split(" ".join(line.removesuffix("\\") for line in image.build_command()))
    assert words[:4] == ["docker", "build", "--target", "models"]
    assert "models" in stages
    base = image.arguments["TRITON_IMAGE"]
    assert base in stages or base.startswith("nvcr.io/nvidia/")


def test_triton_is_joined_with_what_its_check_looks_for() -> None:
    copied = [instruction.arguments[-1] for instruction in FILE.stage("joined").all("COPY")]
    for file in image_facts()["libraries"]:
        assert any(file.startswith(f"{folder}/") for folder in copied), file
    usual = (FILE.arguments["TRTLLM_IMAGE"], FILE.arguments["PLAIN_TRITON_IMAGE"])
    assert usual in {container.joins for container in joined()}
    run = FILE.stage("models").all("RUN")[0].rest
    assert all(f"/tmp/image/{file}" in run for file in (CONSTRAINTS, REQUIREMENTS))
    assert modules(shlex.split(run)).count("pipeline.machine.image_build") == 2


@pytest.mark.parametrize("name", ["build", "serve", "group", "gateway", "dynamo", "accept"])
def test_what_is_run_is_not_root(name: str) -> None:
    users = FILE.stage(name).all("USER")
    assert users
    user, group = users[-1].rest.split(":")
    assert int(user) >= 1000
    assert int(group) >= 1000
    order = [instruction.name for instruction in FILE.stage(name).instructions]
    last = len(order) - 1 - order[::-1].index("USER")
    assert last > max(index for index, name in enumerate(order) if name == "RUN")
    assert "ENTRYPOINT" not in order or order.index("ENTRYPOINT") > last


def ignored(path: str) -> bool:
    """As Docker decides it: the last line that matches counts, and one that names a folder is for all below it."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    answer = False
    for line in lines:
        pattern = line.removeprefix("!")
        tails = [path, *(str(parent) for parent in Path(path).parents)]
        if any(
            fnmatch.fnmatch(tail, pattern.removeprefix("**/"))
            or fnmatch.fnmatch(Path(tail).name, pattern.removeprefix("**/"))
            if pattern.startswith("**/")
            else fnmatch.fnmatch(tail, pattern) and ("/" not in tail or "/" in pattern)
            for tail in tails
        ):
            answer = not line.startswith("!")
    return answer


def test_everything_that_is_copied_is_there_and_nothing_else_is_sent() -> None:
    copied = set()
    for stage in FILE.stages:
        for instruction in stage.all("COPY"):
            if any(flag.startswith("--from=") for flag in instruction.flags):
                continue
            for source in instruction.arguments[:-1]:
                assert (ROOT / source).exists(), source
                assert not ignored(source), source
                copied.add(source)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    for secret in (".git", ".venv", "tests", "store", "pipeline/__pycache__", "recipes/x.pyc", ".env"):
        assert ignored(secret), secret


def test_the_wheel_finds_all_that_pyproject_names() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "LICENSE"}
    assert needed <= {
        name for instruction in FILE.stage("wheel").all("COPY") for name in instruction.arguments
    }
    for name in ("build", "gateway", "accept"):
        extras = re.findall(r"\$\{wheel\}\[([\w,]+)\]", FILE.stage(name).all("RUN")[0].rest)[0].split(",")
        assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_layers_are_lean_and_loud_and_shell(tmp_path: Path) -> None:
    names = {stage.name for stage in FILE.stages}
    for stage in FILE.stages:
        assert "latest" not in str(stage.image)
        for instruction in stage.all("RUN"):
            for flag in instruction.flags:
                assert re.search(r"from=(\w+)", flag)[1] in names  # type: ignore[index]
            assert "sudo" not in instruction.rest
            assert "curl" not in instruction.rest
            for install in re.findall(r"-m pip (?:--python \S+ )?(?:install|wheel)[^&]*", instruction.rest):
                assert "--no-cache-dir" in install
            if "apt-get" in instruction.rest:
                assert "rm -rf /var/lib/apt/lists/*" in instruction.rest
                assert "--no-install-recommends" in instruction.rest
            assert ";" not in instruction.rest, "a failing command must fail the build"
            assert " | " not in instruction.rest, "the code of a pipe is that of its last command"
            script = tmp_path / "run.sh"
            script.write_text(" ".join(instruction.arguments))
            assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0, instruction.rest
        assert not stage.all("ADD")
        assert not stage.all("MAINTAINER")


def modules(command: list[str]) -> list[str]:
    return [command[index + 1] for index, part in enumerate(command) if part == "-m"]


def test_entrypoint_and_health_check_are_ours() -> None:
    serve = FILE.stage("serve")
    entrypoint = json.loads(serve.all("ENTRYPOINT")[0].rest)
    health = json.loads(serve.all("HEALTHCHECK")[0].rest.partition("CMD ")[2])
    assert modules(entrypoint) == ["pipeline.serving.entrypoint"]
    assert modules(health) == ["pipeline.serving.health"]
    for name in (*modules(entrypoint), *modules(health)):
        assert callable(importlib.import_module(name).main)
    environment = " ".join(instruction.rest for instruction in serve.all("ENV"))
    assert f"PIPELINE_PACKAGE={CONTAINER_ROOT}" in environment
    assert "start-period=30m" in serve.all("HEALTHCHECK")[0].rest
    assert serve.all("EXPOSE")[0].arguments == ["8001", "8002"]


def test_the_script_for_a_gpu_runs_the_stage_that_checks_with_what_upstream_asks_for(tmp_path: Path) -> None:
    """Docker is a program that writes down how it was called."""
    calls = tmp_path / "calls"
    put_tool(tmp_path / "bin", "docker", does=f"open({str(calls)!r}, 'a').write(repr(arguments) + '\\n')")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_TOKEN": "hf_never_told",
    }
    script = [str(ROOT / "scripts" / "accept_on_gpu"), "llama-3.1-8b-fp8", "--dry-run"]
    subprocess.run(script, env=environment, cwd=tmp_path, check=True, timeout=60)
    build, run = map(ast.literal_eval, calls.read_text().splitlines())
    assert build[:3] == ["build", "--target", FILE.stages[-1].name]
    assert run[-3:] == [build[-2], "llama-3.1-8b-fp8", "--dry-run"]
    limits = list(launch_facts(NEWEST.trtllm).container_options)
    assert limits == [word for word in run if word in limits]
    entrypoint = json.loads(FILE.stage("accept").all("ENTRYPOINT")[0].rest)
    assert entrypoint[-1] == "accept"
    stores = [
        instruction.rest
        for instruction in FILE.stage("accept").all("ENV")
        if "PIPELINE_STORE" in instruction.rest
    ]
    mounted = {word.partition("target=")[2] for word in run if "target=" in word}
    assert mounted == {stores[0].partition("=")[2], FILE.stage("accept").all("WORKDIR")[0].rest}
    assert "hf_never_told" not in calls.read_text()
    assert run[run.index("--env") + 1] == "HF_TOKEN"


def default(text: str) -> str:
    """What compose puts in where a variable is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_services_are_the_stages() -> None:
    targets = {name: service["build"]["target"] for name, service in COMPOSE["services"].items()}
    assert targets == {"build": "build", "triton": "serve", "gateway": "gateway"}
    for name in ("build", "triton"):
        service = COMPOSE["services"][name]
        assert default(service["build"]["args"]["TRITON_IMAGE"]) == NEWEST.image
        assert set(service["build"]["args"]) <= set(FILE.arguments)
        facts = launch_facts(NEWEST.trtllm)
        assert default(service["shm_size"]) == f"{facts.shared_memory_mib}m"
        limits = [
            part for key, value in service["ulimits"].items() for part in ("--ulimit", f"{key}={value}")
        ]
        assert limits == list(facts.container_options)
    assert COMPOSE["services"]["build"]["profiles"] == ["build"]
    assert not any("profiles" in COMPOSE["services"][name] for name in ("triton", "gateway"))


def test_the_services_are_those_that_are_written_for_a_package(tmp_path: Path) -> None:
    """But for what a package settles: its folder, name, recipe and deadline."""
    options = ServeOptions(Ports(None, 8001, 8002))
    package = DeployedPackage(ENGINE, tmp_path, load_recipe("tiny-cpu"))
    (text,) = deployment_files("compose", package, options).values()
    written = yaml.safe_load(text)["services"]
    for name in ("triton", "gateway"):
        ours = yaml.safe_load(default(yaml.safe_dump(COMPOSE["services"][name])))
        assert set(ours) - {"build"} == set(written[name])
        for service in (ours, written[name]):
            service.pop("build", None)
            (volume,) = service.pop("volumes")
            assert (volume["target"], volume["read_only"]) == (CONTAINER_ROOT, True)
            service["healthcheck"].pop("start_period")
            service.get("environment", {}).pop("PIPELINE_START_TIMEOUT_S", None)
        assert ours == written[name]


def test_the_health_checks_are_those_of_the_images() -> None:
    for name, stage in (("triton", "serve"), ("gateway", "gateway")):
        (check,) = FILE.stage(stage).all("HEALTHCHECK")
        ours = COMPOSE["services"][name]["healthcheck"]
        assert ours["test"] == ["CMD", *json.loads(check.rest.partition("CMD ")[2])]
        for option in ("interval", "timeout", "retries"):
            assert f"--{option}={ours[option]}" in check.flags


def test_the_commands_of_its_first_lines_find_what_they_name() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    commands = [
        shlex.split(line.lstrip("# ")) for line in text.splitlines() if "run --rm build build" in line
    ]
    recipes = [command[command.index("build", command.index("--rm") + 2) + 1] for command in commands]
    mounted = {
        volume["target"] for volume in COMPOSE["services"]["build"]["volumes"] if isinstance(volume, dict)
    }
    folder = FILE.stage("build").all("WORKDIR")[-1].rest
    own = [recipe for recipe in recipes if recipe not in packaged()]
    assert len(own) < len(recipes)
    assert {str((Path(folder) / recipe).parent) for recipe in own} <= mounted


def test_the_store_belongs_to_the_user_of_the_image() -> None:
    """Docker gives a new volume the owner of the image's folder; a folder of the host that it makes is root's."""
    build, serve = COMPOSE["services"]["build"], COMPOSE["services"]["triton"]
    name = build["volumes"][0].partition(":")[0]
    assert name in COMPOSE["volumes"]
    stage = FILE.stage("build")
    user, group = stage.all("USER")[-1].rest.split(":")
    assert f"install --directory --owner={user} --group={group} /store" in stage.all("RUN")[-1].rest
    (package,) = serve["volumes"]
    assert (package["type"], package["source"]) == ("volume", name)
    assert package["volume"]["subpath"].startswith("artifacts/")
