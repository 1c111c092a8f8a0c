"""Files by which other tools run a package: golden files, the specifications, a shell and systemd that read them.

`PIPELINE_WRITE_GOLDEN=1 pytest` writes the golden files after a change.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pipeline import __version__
from pipeline.contracts.images import serving_image
from pipeline.contracts.releases import joined
from pipeline.deploy.containers import DeployedPackage
from pipeline.deploy.targets import DeployTarget, deployment_files
from pipeline.errors import UserError
from pipeline.recipe import load_recipe
from pipeline.resources import parse_yaml
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.serving.triton_component import refuse_to_pull
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment

GOLDEN = Path(__file__).parent / "golden"
COMPOSE = Draft202012Validator(json.loads((Path(__file__).parent / "compose-spec.json").read_text("utf-8")))
PACKAGE = Path("/srv/package")
PORTS = Ports(None, 8001, 8002)
ENGINE = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=8))
FOUR = gpu_deployment(
    LaunchSpec(mode="leader", world_size=4, engine_models=("tensorrt_llm",), weights_gib=64), gpus=4
)
CPU = ENGINE.model_copy(update={"name": "tiny-cpu", "runtime": "cpu", "requirements": None})
RECIPE = "name: llama\ncache: {enabled: true, note: $HOME and ${HOME}}\n"


def files(
    target: DeployTarget,
    deployment: Deployment = ENGINE,
    folder: Path = PACKAGE,
    *,
    ports: Ports = PORTS,
    gpus: tuple[int, ...] = (),
    named: tuple[str, ...] = (),
    program: tuple[str, ...] = ("pipeline",),
    text: str | None = None,
    sets: tuple[str, ...] = (),
) -> dict[str, str]:
    recipe = load_recipe("tiny-cpu", sets)
    options = ServeOptions(ports, recipe.triton, gpus, recipe=named)
    package = DeployedPackage(deployment, folder, recipe, recipe_text=text)
    return deployment_files(target, package, options, program)


KINDS: dict[str, dict[str, Any]] = {
    "docker-run.sh": {"target": "docker"},
    "compose.yaml": {"target": "compose"},
    "compose-four.yaml": {
        "target": "compose",
        "deployment": FOUR,
        "ports": Ports(9000, 9001, 9002),
        "gpus": (0, 1, 2, 3),
        "sets": (
            "triton={address: 0.0.0.0, image: 'registry/serve:7', memory: 96G, max_restarts: 3}",
            "deploy={host: 0.0.0.0, port: 9080, gateway_image: 'registry/gateway:7'}",
            "gateway.drain_s=120",
        ),
        "text": RECIPE,
    },
    "llama.service": {"target": "systemd", "gpus": (1,), "sets": ("triton.memory=96G",)},
    "tiny-cpu.service": {
        "target": "systemd",
        "deployment": CPU,
        "named": (
            "/srv/my recipes/50% $more.yaml",
            "--set",
            "triton.grpc_port=8001",
            "--store",
            "/home/me/store",
        ),
        "sets": ("triton.grpc_port=8001", "deploy.user=model"),
        "program": ("/opt/pipeline/bin/pipeline",),
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_golden(name: str) -> None:
    (text,) = files(**KINDS[name]).values()
    path = GOLDEN / name
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_an_image_that_is_built_first_is_named_with_its_command() -> None:
    """Compose and Kubernetes build a stage that serves on it; `docker run` and `pipeline serve` take it as it is."""
    (version,) = [release.trtllm for release in joined()][-1:]
    image = serving_image(version, "pytorch")
    made = gpu_deployment(
        LaunchSpec(mode="llmapi", engine_models=("tensorrt_llm",), weights_gib=8), version=version
    )
    assert made.requirements is not None
    made = made.model_copy(
        update={"requirements": made.requirements.model_copy(update={"image": image.name})}
    )
    (script,) = files("docker", made).values()
    for line in image.build_command():
        assert f"#   {line}" in script.splitlines()
    assert f"  {image.name} \\" in script.splitlines()
    (compose,) = files("compose", made).values()
    for line in image.build_command("serve", f"pipeline-serve:{__version__}"):
        assert f"#   {line}" in compose.splitlines()
    own = files("docker", made, sets=("triton.image=registry/own:1",))
    assert "docker build" not in "".join(own.values())
    with pytest.raises(UserError, match=f"(?s){image.name} is built first.*docker build --target models"):
        refuse_to_pull(made, image.name)
    refuse_to_pull(made, "registry/own:1")


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("compose")])
def test_compose_has_keys_of_the_specification_and_names_what_is_there(name: str) -> None:
    found = parse_yaml((GOLDEN / name).read_text("utf-8"))
    assert [f"{error.json_path}: {error.message}" for error in COMPOSE.iter_errors(found)] == []
    configs, volumes = found.get("configs", {}), found.get("volumes", {})
    for service in found["services"].values():
        assert set(service.get("depends_on", ())) <= set(found["services"])
        assert {release["source"] for release in service.get("configs", ())} <= set(configs)
        assert {release["source"] for release in service["volumes"] if release["type"] == "volume"} <= set(
            volumes
        )
        # A device has a number or ids, never both.
        resources = service.get("deploy", {}).get("resources", {})
        for device in resources.get("reservations", {}).get("devices", ()):
            assert ("count" in device) != ("device_ids" in device)
    if configs:
        text = configs["recipe"]["content"]
        assert text.replace("$$", "$") == RECIPE
        assert "$H" not in text.replace("$$", "")


@pytest.mark.parametrize(
    "name", [name for name in KINDS if name.startswith("compose")] + ["of the repository"]
)
def test_everything_is_up_again_after_a_planned_reboot(name: str) -> None:
    """A shutdown ends containers with code 0: `on-failure` leaves them down when the daemon is back, and `always` also
    starts what an operator stopped (https://docs.docker.com/engine/containers/start-containers-automatically/).
    """
    file = GOLDEN / name if name in KINDS else GOLDEN.parents[2] / "compose.yaml"
    services = parse_yaml(file.read_text("utf-8"))["services"]
    policies = {
        name: release.get("restart") for name, release in services.items() if "profiles" not in release
    }
    assert policies == {"triton": "unless-stopped", "gateway": "unless-stopped"}


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith(".service")])
def test_the_unit_is_started_at_boot(name: str) -> None:
    lines = (GOLDEN / name).read_text("utf-8").splitlines()
    assert "WantedBy=multi-user.target" in lines
    assert any("systemctl enable --now" in line or "enable --now" in line for line in lines)


def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False)
    return asked.returncode == 0


@pytest.mark.skipif(not _has_compose(), reason="there is no docker compose")
@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("compose")])
def test_docker_compose_reads_it(name: str) -> None:
    words = ["docker", "compose", "--file", str(GOLDEN / name), "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_compose_refuses_what_does_not_exist() -> None:
    """So that the test above means something."""
    found = parse_yaml((GOLDEN / "compose-four.yaml").read_text("utf-8"))
    triton = found["services"]["triton"]
    for part in (found, triton, triton["healthcheck"], triton["volumes"][0], triton["deploy"]["resources"]):
        part["nonesuch"] = 1
        assert list(COMPOSE.iter_errors(found))
        del part["nonesuch"]
    assert not list(COMPOSE.iter_errors(found))


def test_what_the_gateway_is_told_are_options_that_it_has() -> None:
    from pipeline.cli.gateway import command

    services = parse_yaml((GOLDEN / "compose-four.yaml").read_text("utf-8"))["services"]
    words = services["gateway"]["command"]
    assert words[0] == "gateway"
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith(".service")])
def test_what_the_unit_runs_are_options_of_serve(name: str) -> None:
    from pipeline.cli.serve import command

    (line,) = [
        line for line in (GOLDEN / name).read_text("utf-8").splitlines() if line.startswith("ExecStart=")
    ]
    known = {name for parameter in command.params for name in parameter.opts}
    words = shlex.split(line.partition("=")[2])
    assert {word for word in words if word.startswith("--")} <= known
    if name.startswith("tiny"):
        assert words[2] == "/srv/my recipes/50%% $$more.yaml"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith(".service")])
def test_systemd_reads_the_unit(name: str, tmp_path: Path) -> None:
    ((unit, text),) = files(**KINDS[name] | {"program": (sys.executable,)}).items()
    (tmp_path / unit).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    # What else is wrong on this machine is not the unit's fault.
    assert [line for line in (done.stdout + done.stderr).splitlines() if unit in line] == []


def test_a_shell_reads_the_script(tmp_path: Path) -> None:
    """Its one command is the line of the container, whatever the name of the package's folder is."""
    (text,) = files("docker", folder=tmp_path / "my $package").values()
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(text)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", str(script)], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    said = done.stdout.splitlines()
    assert said[:2] == ["run", "--rm"]
    assert f"type=bind,source={tmp_path}/my $package,target=/deployment,readonly" in said


def test_an_image_of_ones_own_runs_the_cpu() -> None:
    """What is then written asks for no GPU."""
    (text,) = files("compose", CPU, sets=("triton.image='own/serve:1'",)).values()
    found = parse_yaml(text)
    assert not list(COMPOSE.iter_errors(found))
    triton = found["services"]["triton"]
    assert triton["image"] == "own/serve:1"
    assert "deploy" not in triton
    assert "NVIDIA" not in text


@pytest.mark.parametrize("target", ["docker", "compose"])
def test_no_image_is_made_up_for_the_cpu(target: DeployTarget) -> None:
    with pytest.raises(UserError, match="no image carries that runtime: pipeline serve runs it") as caught:
        files(target, CPU)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith(".service")])
def test_a_unit_exposes_little(name: str, tmp_path: Path) -> None:
    """As `systemd-analyze security` scores it, from 0 to 10: 8.6 is a unit without protection."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    (text,) = files(**KINDS[name]).values()
    unit = tmp_path / name
    unit.write_text(text)
    command = [program, "security", "--offline=true", "--threshold=30", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze looks at units that run only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout
    checked = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)
    faults = [line for line in checked.stderr.splitlines() if "is not executable" not in line]
    assert faults == []
