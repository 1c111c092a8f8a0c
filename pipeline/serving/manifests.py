"""What others run a package by: a `docker run` script, a compose file, a systemd unit. Pure text; nothing is started.

    docker    Triton alone, in NVIDIA's own image; whoever runs it watches it
    compose   Triton and the OpenAI gateway, in the images of our Dockerfile, with health checks by inference
    systemd   `pipeline serve` of this installation as a service of the machine, whatever it is made of

The compose file follows the Compose Specification (https://github.com/compose-spec/compose-spec, with inline `configs`:
Docker Compose 2.23.1 and newer), the unit systemd.service(5) and systemd.exec(5) of systemd 247 and newer.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pipeline import __version__
from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.serving.dry_run import shell_lines
from pipeline.serving.launch import ServeOptions, Start
from pipeline.serving.launch_docker import INSIDE, DockerLauncher
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

ManifestTarget = Literal["docker", "compose", "systemd"]

GATEWAY_PORT = 8080  # in the container
_RECIPE = "/etc/pipeline/recipe.yaml"
_PYTHON = "/opt/pipeline/bin/python"
_STOP_GRACE_S = 60
_USER_HOME = "/var/lib/pipeline"
_LOG_OPTIONS = {"driver": "json-file", "options": {"max-size": "50m", "max-file": "5"}}
# Both checks are cheap, and one that fails counts: what dies is unhealthy within five seconds.
_HEALTH = {"interval": "2s", "timeout": "5s", "retries": 1}
# Neither container can become more than it is, or keep anything but what is mounted.
_HARDENED: dict[str, Any] = {
    "init": True,
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """What a deployment that others run is given, besides `ServeOptions`.

    Attributes:
        gateway_port: Where the gateway listens, on the address of `ServeOptions`.
        gateway_image: Image of the gateway; None for the one of our Dockerfile.
        memory: Hard limit of the host's memory as Docker and systemd write it ("64G"); None for none.
        recipe: The recipe, all values resolved, as YAML; None where only the package is known.
        user: Whose process the unit is.
        program: Words that start `pipeline` on this machine.
    """

    gateway_port: int = 8080
    gateway_image: str | None = None
    memory: str | None = None
    recipe: str | None = None
    user: str = "pipeline"
    program: tuple[str, ...] = ("pipeline",)


def manifest(
    target: ManifestTarget,
    deployment: Deployment,
    package: Path,
    options: ServeOptions,
    more: ManifestOptions,
) -> tuple[str, str]:
    """Write what others run a package by.

    Args:
        target: Which kind.
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package.
        options: Ports, address, image and GPUs.
        more: What only such a deployment is given.

    Returns:
        The name of the file, and its text.

    Raises:
        UserError: The target cannot run this package.
    """
    if target == "systemd":
        return f"pipeline-{deployment.name}.service", _unit(deployment, package, options, more)
    if deployment.requirements is None:
        raise UserError(
            f"{deployment.name} is for this machine's CPU, and no image carries that runtime: "
            "pipeline serve runs it, --target systemd makes it a service"
        )
    if target == "docker":
        return "docker-run.sh", _script(deployment, package, options)
    return "compose.yaml", _compose(deployment, package, options, more)


def _start(deployment: Deployment, options: ServeOptions) -> Start:
    deadline_s = options.start_deadline_s or deployment.start_deadline_s
    return Start(Path(), options.ports, f"pipeline-{deployment.name}-", options.address, deadline_s)


def _launcher(deployment: Deployment, package: Path, options: ServeOptions) -> DockerLauncher:
    # How many slots mpirun finds there is not known here: ranks may be more than that.
    return DockerLauncher(deployment, package, options.image_of(deployment), options.devices, slots=0)


# Docker


def _script(deployment: Deployment, package: Path, options: ServeOptions) -> str:
    launcher, start = _launcher(deployment, package, options), _start(deployment, options)
    command = launcher.launch(start, name=f"pipeline-{deployment.name}").command
    return (
        "#!/bin/sh\n"
        f"# {deployment.name} behind Triton in a container, by pipeline {__version__}.\n"
        f"# Needs Docker, the NVIDIA Container Toolkit, and a driver from {_driver(deployment)} on.\n"
        f"# Ready within {start.deadline_s:.0f} s; it ends with this command. OpenAI's API in front of it:\n"
        f"#   pipeline gateway --package {shlex.quote(str(package.absolute()))} "
        f"--endpoint {start.grpc_url}\n"
        f"exec {shell_lines(command)}\n"
    )


def _driver(deployment: Deployment) -> str:
    assert deployment.requirements is not None, "it is for a GPU"
    return deployment.requirements.driver


# Compose


def _compose(deployment: Deployment, package: Path, options: ServeOptions, more: ManifestOptions) -> str:
    services = {
        "triton": _triton_service(deployment, package, options, more),
        "gateway": _gateway_service(package, options, more),
    }
    document: dict[str, Any] = {"name": _project(deployment.name), "services": services}
    if more.recipe is not None:
        # Compose replaces $NAME in what it reads.
        document["configs"] = {"recipe": {"content": more.recipe.replace("$", "$$")}}
        document["volumes"] = {"store": {}}
    assert deployment.requirements is not None, "it is for a GPU"
    head = (
        f"# {deployment.name} behind Triton, and OpenAI's API in front of it, by pipeline {__version__}.\n"
        f"# Needs Docker Compose 2.23.1, the NVIDIA Container Toolkit, and a driver from {_driver(deployment)} on.\n"
        "#\n"
        "#   docker compose up --wait          ready when a generation came back\n"
        f"#   curl http://{_reached(options)}:{more.gateway_port}/v1/models\n"
        "#\n"
        "# The images are those of the Dockerfile of pipeline, on the image that the engines were built with:\n"
        f"#   docker build --target serve --build-arg TRITON_IMAGE={deployment.requirements.image} \\\n"
        f"#     -t pipeline-serve:{__version__} .\n"
        f"#   docker build --target gateway -t pipeline-gateway:{__version__} .\n"
    )
    return head + yaml.dump(document, Dumper=_ComposeDumper, sort_keys=False, allow_unicode=True, width=110)


def _triton_service(
    deployment: Deployment, package: Path, options: ServeOptions, more: ManifestOptions
) -> dict[str, Any]:
    requirements = deployment.requirements
    assert requirements is not None, "it is for a GPU"
    start = _start(deployment, options)
    plan = _launcher(deployment, package, options).plan(start)
    ports, facts = options.ports, launch_facts(requirements.tensorrt_llm)
    published = ((ports.http, INSIDE.http), (ports.grpc, INSIDE.grpc), (ports.metrics, INSIDE.metrics))
    devices: dict[str, Any] = {"driver": "nvidia"}
    if options.devices:
        devices["device_ids"] = [str(device) for device in options.devices]
    else:
        devices["count"] = requirements.gpus
    limits = {} if more.memory is None else {"limits": {"memory": more.memory}}
    return {
        "image": options.image or f"pipeline-serve:{__version__}",
        "environment": {
            "PIPELINE_START_TIMEOUT_S": f"{start.deadline_s:.0f}",
            "PIPELINE_STOP_TIMEOUT_S": str(_STOP_GRACE_S - 15),
        },
        **_HARDENED,
        "tmpfs": ["/tmp:mode=1777", "/home/pipeline:mode=1777,exec"],
        "volumes": [_bound(package)],
        "ports": [f"{options.address}:{outer}:{inner}" for outer, inner in published],
        "shm_size": f"{plan.shm_mib}m",
        "ulimits": _ulimits(facts.container_options),
        "healthcheck": {
            "test": ["CMD", _PYTHON, "-m", "pipeline.serving.health"],
            **_HEALTH,
            "start_period": f"{math.ceil(start.deadline_s)}s",
        },
        "stop_grace_period": f"{_STOP_GRACE_S}s",
        # What dies inside is started again inside; this is for what that gave up.
        "restart": "on-failure:3",
        "logging": _LOG_OPTIONS,
        "deploy": {
            "resources": {**limits, "reservations": {"devices": [{**devices, "capabilities": ["gpu"]}]}}
        },
    }


def _gateway_service(package: Path, options: ServeOptions, more: ManifestOptions) -> dict[str, Any]:
    recipe = () if more.recipe is None else (_RECIPE,)
    service: dict[str, Any] = {
        "image": more.gateway_image or f"pipeline-gateway:{__version__}",
        "command": [
            *("gateway", *recipe, "--package", CONTAINER_ROOT),
            *("--endpoint", f"triton:{INSIDE.grpc}"),
            *("--host", "0.0.0.0", "--port", str(GATEWAY_PORT)),
        ],
        **_HARDENED,
        "tmpfs": ["/tmp:mode=1777"],
        "volumes": [_bound(package)],
        "ports": [f"{options.address}:{more.gateway_port}:{GATEWAY_PORT}"],
        "depends_on": {"triton": {"condition": "service_healthy"}},
        "healthcheck": {
            "test": ["CMD", _PYTHON, "-c", _READYZ.format(port=GATEWAY_PORT)],
            **_HEALTH,
            "start_period": "60s",
        },
        "stop_grace_period": f"{_STOP_GRACE_S}s",
        "restart": "unless-stopped",
        "logging": _LOG_OPTIONS,
    }
    if more.recipe is not None:
        service["configs"] = [{"source": "recipe", "target": _RECIPE}]
        service["volumes"].append({"type": "volume", "source": "store", "target": "/store"})
    return service


_READYZ = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/readyz', timeout=4)"


def _bound(package: Path) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": str(package.absolute()).replace("$", "$$"),
        "target": CONTAINER_ROOT,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def _ulimits(options: Sequence[str]) -> dict[str, int]:
    """`--ulimit name=value …` of `docker run` as compose writes it."""
    return {name: int(value) for name, _, value in (one.partition("=") for one in options[1::2])}


def _project(name: str) -> str:
    """A compose project's name has no dots."""
    return f"pipeline-{re.sub(r'[^a-z0-9_-]', '-', name)}"


def _reached(options: ServeOptions) -> str:
    return "127.0.0.1" if options.address == "0.0.0.0" else options.address


class _ComposeDumper(yaml.SafeDumper):
    """Texts of several lines as blocks, lists indented, and nothing by reference."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


_ComposeDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


# systemd


def _unit(deployment: Deployment, package: Path, options: ServeOptions, more: ManifestOptions) -> str:
    name, in_container = deployment.name, deployment.requirements is not None
    ports = options.ports
    recipe = (
        options.recipe[: options.recipe.index("--store")] if "--store" in options.recipe else options.recipe
    )
    command = (
        *more.program,
        "serve",
        *recipe,
        *("--package", str(package.absolute()), "--store", _USER_HOME, "--offline"),
        *("--address", options.address, "--host", options.address, "--port", str(more.gateway_port)),
        *(
            "--http-port",
            str(ports.http),
            "--grpc-port",
            str(ports.grpc),
            "--metrics-port",
            str(ports.metrics),
        ),
        *(() if options.start_deadline_s is None else ("--start-timeout-s", f"{options.start_deadline_s:g}")),
        *(() if options.image is None else ("--image", options.image)),
        *(("--gpus", ",".join(map(str, options.devices))) if options.devices else ()),
        *(word for rule in sorted(options.allowed) for word in ("--allow", rule)),
    )
    after = "network-online.target docker.service" if in_container else "network-online.target"
    memory = [] if more.memory is None else [f"MemoryMax={more.memory}"]
    unit = f"pipeline-{name}.service"
    lines = [
        f"# {name} behind Triton, with OpenAI's API in front of it, by pipeline {__version__}.",
        "#",
        f"#   sudo useradd --system --home-dir {_USER_HOME} --shell /usr/sbin/nologin {more.user}",
        *([f"#   sudo usermod --append --groups docker {more.user}"] if in_container else []),
        f"#   sudo install --mode 644 {unit} /etc/systemd/system/",
        f"#   sudo systemctl daemon-reload && sudo systemctl enable --now {unit}",
        f"#   journalctl --unit {unit} --follow",
        f"#   sudo -u {more.user} {shlex.join(more.program)} ps --store {_USER_HOME}",
        "#",
        f"# {more.user} must be able to read the package, the recipe and the program that are named below.",
        "[Unit]",
        f"Description=pipeline: {name} behind NVIDIA Triton",
        "Wants=network-online.target",
        f"After={after}",
        "# What dies is started again inside; a service that gives up five times in an hour stays down.",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        f"User={more.user}",
        f"StateDirectory={Path(_USER_HOME).name}",
        "StateDirectoryMode=0700",
        f"Environment=HOME={_USER_HOME} PYTHONUNBUFFERED=1",
        f"ExecStart={_exec_line(command)}",
        "Restart=on-failure",
        "RestartSec=10s",
        "# 2: what cannot be served does not become better by trying.",
        "RestartPreventExitStatus=2",
        "# The supervisor drains requests and ends what it started; what is left then is killed.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_GRACE_S}s",
        "OOMPolicy=continue",
        "LimitMEMLOCK=infinity",
        "LimitSTACK=64M",
        "LimitNOFILE=65536",
        *memory,
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=full",
        "ProtectHome=read-only",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join(lines)


def _exec_line(words: Sequence[str]) -> str:
    """Words as systemd.service(5) reads them: its own quotes, and % and $ doubled."""
    return " ".join(_exec_word(word) for word in words)


def _exec_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./\\$-]+", escaped):
        return escaped
    return '"' + escaped.replace('"', '\\"') + '"'
