"""Files by which NVIDIA Dynamo runs a package: a script for one machine, or for each of several, and a manifest.

The script starts Triton by `pipeline serve`, a worker (`pipeline.gateway.dynamo`) and Dynamo's frontend. The manifest
is a DynamoGraphDeployment for Dynamo's operator, whose pods have Triton as `--target kubernetes` runs it, and the
worker. Facts of Dynamo are in `contracts/data/dynamo.yaml`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml
from markupsafe import Markup

from pipeline import __version__
from pipeline.contracts import read_facts
from pipeline.deploy.kubernetes import make_cluster
from pipeline.deploy.package import DeployedPackage
from pipeline.deploy.templates import render, yaml_block
from pipeline.errors import UserError
from pipeline.serving.dry_run import shell_lines
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import GRPC
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
    parts = yaml.safe_load(
        render("dynamo-pod.yaml", root=CONTAINER_ROOT, triton=f"127.0.0.1:{GRPC}", **values)
    )
    pod = parts["server"]
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key not in _OPERATORS}
    # The operator takes the first container for its own.
    pod["spec"]["containers"].insert(0, parts["worker"])
    return render("dynamo-graph.yaml", pod=Markup(yaml_block(pod).rstrip()), **values)
