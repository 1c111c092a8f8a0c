"""A deployment for Docker: a script that runs Triton alone, or a compose file of Triton and the gateway.

The script runs NVIDIA's own image by the launch plan, as `pipeline serve` does it, and whoever runs it watches it. The
compose file runs the images of our Dockerfile, with health checks by inference. It follows the Compose Specification
(https://github.com/compose-spec/compose-spec, with inline `configs`: Docker Compose 2.23.1 and newer).
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from pipeline import __version__
from pipeline.errors import UserError
from pipeline.serving.dry_run import shell_lines
from pipeline.serving.launch import ServeOptions, Start
from pipeline.serving.launch_docker import docker_launch
from pipeline.serving.manifests.description import (
    NO_CPU_IMAGE,
    PYTHON,
    RECIPE_FILE,
    Container,
    DeploymentDescription,
    outer_ports,
    start_deadline_s,
)
from pipeline.serving.ports import Listeners, check_container_ports
from pipeline.triton.deployment import Deployment

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
_ASK = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=4)"


def docker_script(deployment: Deployment, package: Path, options: ServeOptions) -> str:
    """Write a script with the `docker run` line of Triton.

    Args:
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package.
        options: Ports, address, image and GPUs.

    Raises:
        UserError: No image carries its runtime, or it cannot have the ports that are open.
    """
    required = deployment.requirements
    if required is None:
        raise UserError(f"{deployment.name} is for this machine's CPU, and {NO_CPU_IMAGE}")
    deadline_s = start_deadline_s(deployment, options)
    check_container_ports(options.ports)
    start = Start(
        Path(), Listeners.at(options.ports, options.launch.address), f"pipeline-{deployment.name}-",
        options.ports, options.launch.address, deadline_s,
    )  # fmt: skip
    # How many slots mpirun finds there is not known here: ranks may be more than that.
    command = docker_launch(
        deployment, package, options.image_of(deployment), start, devices=options.launch.gpus, slots=0,
        name=f"pipeline-{deployment.name}",
    ).command  # fmt: skip
    return (
        "#!/bin/sh\n"
        f"# {deployment.name} behind Triton in a container, by pipeline {__version__}.\n"
        f"# Needs Docker, the NVIDIA Container Toolkit, and a driver from {required.driver} on.\n"
        f"# Ready within {start.deadline_s:.0f} s; it ends with this command. OpenAI's API in front of it:\n"
        f"#   pipeline gateway --package {shlex.quote(str(package.absolute()))} "
        f"--endpoint {start.listeners.grpc_url}\n"
        f"exec {shell_lines(command)}\n"
    )


def compose_file(description: DeploymentDescription) -> str:
    """Write a compose file of Triton and the gateway.

    Args:
        description: Of the deployment.
    """
    more = description.more
    document: dict[str, Any] = {
        "name": _project(description.name),
        "services": {"triton": _triton(description), "gateway": _gateway(description)},
    }
    if more.recipe is not None:
        # Compose replaces $NAME in what it reads.
        document["configs"] = {"recipe": {"content": more.recipe.replace("$", "$$")}}
        document["volumes"] = {"store": {}}
    return _head(description) + yaml.dump(
        document, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=110
    )


def _head(description: DeploymentDescription) -> str:
    options, required = description.options, description.deployment.requirements
    reached = "127.0.0.1" if options.launch.address == "0.0.0.0" else options.launch.address
    needs, built = "", ""
    if required is not None:
        needs = f", the NVIDIA Container Toolkit, and a driver from {required.driver} on"
        built = (
            "# The images are those of the Dockerfile of pipeline, on the image that the engines were built with:\n"
            f"#   docker build --target serve --build-arg TRITON_IMAGE={required.image} \\\n"
            f"#     -t pipeline-serve:{__version__} .\n"
        )
    else:
        built = "# The image of triton is your own, and the gateway's that of the Dockerfile of pipeline:\n"
    return (
        f"# {description.name} behind Triton, and OpenAI's API in front of it, by pipeline {__version__}.\n"
        f"# Needs Docker Compose 2.23.1{needs}.\n"
        "#\n"
        "#   docker compose up --wait          ready when a generation came back\n"
        f"#   curl http://{reached}:{description.more.gateway_port}/v1/models\n"
        "#\n"
        f"{built}"
        f"#   docker build --target gateway -t pipeline-gateway:{__version__} .\n"
    )


def _triton(description: DeploymentDescription) -> dict[str, Any]:
    server, options = description.server, description.options
    published = outer_ports(options)
    resources = server.resources
    service: dict[str, Any] = {
        "image": server.image,
        "environment": dict(server.environment),
        **_HARDENED,
        "tmpfs": _scratch(server),
        "volumes": [_bound(description.package, server)],
        "ports": [
            f"{options.launch.address}:{published[name]}:{inner}"
            for name, inner in server.ports.items()
            if name in published
        ],
        "shm_size": f"{resources.shm_mib}m",
        **({"ulimits": dict(resources.ulimits)} if resources.ulimits else {}),
        "healthcheck": {
            "test": ["CMD", *server.ready.command],
            **_HEALTH,
            "start_period": f"{math.ceil(server.start_s)}s",
        },
        "stop_grace_period": f"{server.stop_s}s",
        # Processes are restarted inside the container; this is for a supervisor that gave up, and for a reboot: what a
        # shutdown ended with code 0 stays down under on-failure.
        "restart": "unless-stopped",
        "logging": _LOG_OPTIONS,
    }
    given: dict[str, Any] = {}
    if resources.memory is not None:
        given["limits"] = {"memory": resources.memory}
    if resources.gpus:
        chosen: dict[str, Any] = {"count": resources.gpus}
        if resources.devices:
            chosen = {"device_ids": [str(device) for device in resources.devices]}
        given["reservations"] = {"devices": [{"driver": "nvidia", **chosen, "capabilities": ["gpu"]}]}
    return service | ({"deploy": {"resources": given}} if given else {})


def _gateway(description: DeploymentDescription) -> dict[str, Any]:
    gateway, options = description.gateway, description.options
    (port,) = gateway.ports.values()
    service: dict[str, Any] = {
        "image": gateway.image,
        "command": list(gateway.arguments),
        **_HARDENED,
        "tmpfs": _scratch(gateway),
        "volumes": [_bound(description.package, gateway)],
        "ports": [f"{options.launch.address}:{description.more.gateway_port}:{port}"],
        "depends_on": {"triton": {"condition": "service_healthy"}},
        "healthcheck": {
            "test": ["CMD", PYTHON, "-c", _ASK.format(port=port, path=gateway.ready.path)],
            **_HEALTH,
            "start_period": f"{math.ceil(gateway.start_s)}s",
        },
        "stop_grace_period": f"{gateway.stop_s}s",
        "restart": "unless-stopped",
        "logging": _LOG_OPTIONS,
    }
    for mount in gateway.mounts:
        if mount.source == "recipe":
            service["configs"] = [{"source": "recipe", "target": RECIPE_FILE}]
        elif mount.source == "store":
            service["volumes"].append({"type": "volume", "source": "store", "target": mount.path})
    return service


def _scratch(container: Container) -> list[str]:
    folders = (mount for mount in container.mounts if mount.source == "scratch")
    return [f"{mount.path}:mode=1777{',exec' if mount.executable else ''}" for mount in folders]


def _bound(package: Path, container: Container) -> dict[str, Any]:
    (target,) = (mount.path for mount in container.mounts if mount.source == "package")
    return {
        "type": "bind",
        "source": str(package.absolute()).replace("$", "$$"),
        "target": target,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def _project(name: str) -> str:
    """A compose project's name has no dots."""
    return f"pipeline-{re.sub(r'[^a-z0-9_-]', '-', name)}"


class BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, lists indented, and nothing by reference."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
