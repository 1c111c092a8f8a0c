"""Files of each target; those for one machine are made here: a `docker run` script, a compose file, a systemd unit.

The script runs NVIDIA's own image by the launch plan, as `pipeline serve` does it, and whoever runs it watches it. The
compose file runs the images of our Dockerfile, with health checks by inference; it follows the Compose Specification
(https://github.com/compose-spec/compose-spec, with inline `configs`: Docker Compose 2.23.1 and newer). The unit runs
`pipeline serve` of this installation, which starts Triton and the gateway by itself, in containers or as processes
(systemd.service(5) and systemd.exec(5) of systemd 247 and newer).

For NVIDIA Dynamo, a script starts Triton by `pipeline serve`, a worker (`pipeline.gateway.dynamo`) and Dynamo's
frontend. The manifest is a DynamoGraphDeployment for Dynamo's operator, whose pods have Triton as `--target kubernetes`
runs it, and the worker. Facts of Dynamo are in `contracts/data/dynamo.yaml`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from pipeline import __version__
from pipeline.contracts import read_facts
from pipeline.deploy.containers import (
    NO_CPU_IMAGE,
    DeployedPackage,
    base_image,
    gateway_container,
    server_container,
)
from pipeline.deploy.kubernetes import kubernetes_files, make_cluster
from pipeline.deploy.templates import exec_argument, render, yaml_block
from pipeline.errors import UserError
from pipeline.resources import parse_yaml
from pipeline.serving.dry_run import shell_lines
from pipeline.serving.launch import ServeOptions, Start
from pipeline.serving.launch_docker import docker_launch
from pipeline.serving.ports import GRPC, Listeners, check_container_ports
from pipeline.triton.deployment import CONTAINER_ROOT

# What the operator gives a pod itself.
_OPERATORS = ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks")


def dynamo_script(
    package: DeployedPackage, options: ServeOptions, program: Sequence[str], serve: Sequence[str]
) -> str:
    """Write the script.

    Args:
        program: Beginning of a command line that starts `pipeline` on this machine.
        serve: Command that serves the package without a gateway.

    Raises:
        UserError: Triton's gRPC is off.
    """
    if options.ports.grpc is None:
        raise UserError("a worker of Dynamo asks Triton over gRPC: --set serving.grpc=true")
    deploy = package.recipe.deploy
    return render(
        "dynamo.sh",
        name=package.name,
        facts=read_facts("dynamo.yaml"),
        serve=Markup(shell_lines(tuple(serve))),
        python=shlex.quote(str(Path(program[0]).with_name("python"))),
        folder=shlex.quote(str(package.folder.absolute())),
        triton=f"127.0.0.1:{options.ports.grpc}",
        host=deploy.host,
        port=deploy.port,
        reached="127.0.0.1" if deploy.host == "0.0.0.0" else deploy.host,
    )


def dynamo_graph(package: DeployedPackage, options: ServeOptions) -> str:
    """Write the manifest.

    Raises:
        UserError: No image carries its runtime, or one server spans several machines.
        InvalidInput: It cannot be run in a cluster like that; all reasons.
    """
    cluster = make_cluster(package, options)
    if cluster.nodes > 1:
        raise UserError(
            f"{package.name} needs {cluster.nodes} machines for one server, and a worker of Dynamo has one pod: "
            "--target kubernetes"
        )
    values = {"c": cluster, "facts": read_facts("dynamo.yaml"), "image": f"pipeline-dynamo:{__version__}"}
    parts = parse_yaml(render("dynamo-pod.yaml", root=CONTAINER_ROOT, triton=f"127.0.0.1:{GRPC}", **values))
    pod = parts["server"]
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key not in _OPERATORS}
    # The operator takes the first container for its own.
    pod["spec"]["containers"].insert(0, parts["worker"])
    return render("dynamo-graph.yaml", pod=Markup(yaml_block(pod).rstrip()), **values)


_USER_HOME = "/var/lib/pipeline"
DeployTarget = Literal["docker", "compose", "systemd", "kubernetes", "dynamo"]


def deployment_files(
    target: DeployTarget,
    package: DeployedPackage,
    options: ServeOptions,
    program: Sequence[str] = ("pipeline",),
) -> dict[str, str]:
    """Write what other tools run a package by.

    Args:
        program: Beginning of a command line that starts `pipeline` on this machine.

    Returns:
        Path of each file, relative to a folder -> its text.

    Raises:
        UserError: The target cannot run this package.
    """
    match target:
        case "docker":
            return {"docker-run.sh": docker_script(package, options)}
        case "compose":
            return {"compose.yaml": compose_file(package, options)}
        case "systemd":
            return {f"pipeline-{package.name}.service": systemd_unit(package, options, program)}
        case "kubernetes":
            return kubernetes_files(package, options)
        case "dynamo":
            recipe = options.recipe
            store = recipe[recipe.index("--store") :] if "--store" in recipe else ()
            serve = (
                *_serve_command(package, options, program, store),
                "--no-gateway",
                *_serve_choices(options),
            )
            files = {"dynamo.sh": dynamo_script(package, options, program, serve)}
            if package.deployment.requirements or options.triton.image:
                files["graph.yaml"] = dynamo_graph(package, options)
            return files


def docker_script(package: DeployedPackage, options: ServeOptions) -> str:
    """Write a script with the `docker run` line of Triton.

    Raises:
        UserError: No image carries its runtime, or it cannot have the ports that are open.
    """
    deployment, required = package.deployment, package.deployment.requirements
    if required is None:
        raise UserError(f"{deployment.name} is for this machine's CPU, and {NO_CPU_IMAGE}")
    check_container_ports(options.ports)
    name = f"pipeline-{deployment.name}"
    start = Start(
        Path(), Listeners.at(options.ports, options.triton.address), f"{name}-", options.ports, options.triton.address,
        options.start_deadline_s(deployment),
    )  # fmt: skip
    image, base = options.image_of(deployment), base_image(deployment)
    # The number of mpirun's slots there is not known here: ranks may be more than that.
    launch = docker_launch(
        deployment,
        package.folder,
        image,
        start,
        devices=options.gpus,
        slots=0,
        name=name,
    )
    return render(
        "docker-run.sh",
        # One that is pulled needs no word.
        base=base if base is not None and base.why and base.name == image else None,
        name=deployment.name,
        required=required,
        deadline_s=f"{start.deadline_s:.0f}",
        folder=shlex.quote(str(package.folder.absolute())),
        endpoint=start.listeners.grpc_url,
        command=Markup(shell_lines(launch.command)),
    )


def compose_file(package: DeployedPackage, options: ServeOptions) -> str:
    """Write a compose file of Triton and the gateway.

    Raises:
        UserError: No image carries its runtime.
    """
    server, deploy = server_container(package.deployment, options), package.recipe.deploy
    outer = {"http": options.ports.http, "grpc": options.ports.grpc, "metrics": options.ports.metrics}
    return render(
        "compose.yaml",
        name=package.name,
        # A compose project's name has no dots.
        project=f"pipeline-{re.sub(r'[^a-z0-9_-]', '-', package.name)}",
        required=package.deployment.requirements,
        folder=str(package.folder.absolute()),
        recipe=package.recipe_text,
        address=options.triton.address,
        gateway_address=deploy.host,
        gateway_port=deploy.port,
        reached="127.0.0.1" if deploy.host == "0.0.0.0" else deploy.host,
        published=[(outer[name], inner) for name, inner in server.ports.items() if outer[name] is not None],
        devices=[str(device) for device in options.gpus],
        memory=options.triton.memory,
        server=server,
        gateway=gateway_container(package, f"triton:{GRPC}"),
    )


def systemd_unit(package: DeployedPackage, options: ServeOptions, program: Sequence[str]) -> str:
    """Write a unit file.

    Args:
        program: Beginning of a command line that starts `pipeline` on this machine.
    """
    deploy = package.recipe.deploy
    command = (
        *_serve_command(package, options, program, ("--store", _USER_HOME)),
        *("--host", deploy.host, "--port", str(deploy.port)),
        *_serve_choices(options),
    )
    return render(
        "pipeline.service",
        name=package.name,
        unit=f"pipeline-{package.name}.service",
        home=_USER_HOME,
        user=deploy.user,
        memory=options.triton.memory,
        in_container=package.deployment.requirements is not None,
        program=shlex.join(program),
        command=" ".join(map(exec_argument, command)),
    )


def _serve_command(
    package: DeployedPackage, options: ServeOptions, program: Sequence[str], store: Sequence[str]
) -> tuple[str, ...]:
    """Make the command that serves a package on ports that stay the same."""
    recipe = options.recipe
    if "--store" in recipe:
        recipe = recipe[: recipe.index("--store")]
    # What is free at the start would be another port each time.
    ports = {
        key: port
        for key, port in (
            ("http_port", options.ports.http),
            ("grpc_port", options.ports.grpc),
            ("metrics_port", options.ports.metrics),
        )
        if port is not None and port != getattr(package.recipe.triton, key)
    }
    overrides = () if recipe else package.recipe.provenance.overrides
    return (
        *(*program, "serve", *recipe),
        *("--package", str(package.folder.absolute()), *store),
        *(part for override in overrides for part in ("--set", override)),
        *(part for key, port in ports.items() for part in ("--set", f"triton.{key}={port}")),
    )


def _serve_choices(options: ServeOptions) -> tuple[str, ...]:
    return (
        *(("--gpus", ",".join(map(str, options.gpus))) if options.gpus else ()),
        *(argument for rule in sorted(options.allowed) for argument in ("--allow", rule)),
    )
