"""What others run a package by: a `docker run` script, a compose file, a systemd unit, a folder for Kubernetes.

    docker      Triton alone, in NVIDIA's own image; whoever runs it watches it
    compose     Triton and the OpenAI gateway, in the images of our Dockerfile, with health checks by inference
    systemd     `pipeline serve` of this installation as a service of the machine, whatever it is made of
    kubernetes  as many of both as are needed, on many machines

Pure text; nothing is started. What the containers are is decided once, in `description`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.serving.launch import ServeOptions
from pipeline.serving.manifests.description import (
    Exposure,
    KubernetesOptions,
    ManifestOptions,
    ScalingPolicy,
    describe,
)
from pipeline.serving.manifests.docker import compose_file, docker_script
from pipeline.serving.manifests.kubernetes import kubernetes_files
from pipeline.serving.manifests.systemd import systemd_unit
from pipeline.triton.deployment import Deployment

__all__ = [
    "Exposure",
    "KubernetesOptions",
    "ManifestOptions",
    "ManifestTarget",
    "ScalingPolicy",
    "manifest_files",
]

ManifestTarget = Literal["docker", "compose", "systemd", "kubernetes"]


def manifest_files(
    target: ManifestTarget,
    deployment: Deployment,
    package: Path,
    options: ServeOptions,
    more: ManifestOptions,
) -> dict[str, str]:
    """Write what others run a package by.

    Args:
        target: Which kind.
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package.
        options: Ports, address, image and GPUs.
        more: What only such a deployment is given.

    Returns:
        Path of each file, relative to a folder -> its text.

    Raises:
        UserError: The target cannot run this package.
    """
    match target:
        case "docker":
            return {"docker-run.sh": docker_script(deployment, package, options)}
        case "compose":
            return {"compose.yaml": compose_file(describe(deployment, package, options, more))}
        case "systemd":
            unit = systemd_unit(deployment, package, options, more)
            return {f"pipeline-{deployment.name}.service": unit}
        case "kubernetes":
            return kubernetes_files(deployment, package, options, more)
