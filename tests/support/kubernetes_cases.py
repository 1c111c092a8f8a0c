"""Deployments of Kubernetes that tests look at, by the name of their golden folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.deploy.settings import ClusterSettings, DeployedPackage, DeploySettings
from pipeline.deploy.targets import deployment_files
from pipeline.documents import dump_yaml
from pipeline.recipe import Recipe, load_recipe
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.serving.settings import LaunchSettings
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.kubernetes import Object, pod_specs

VERSIONS = ("1.30", "1.34", "1.37")
PORTS = Ports(None, 8001, 8002)
ONE = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=8))
MANY = gpu_deployment(
    LaunchSpec(mode="leader", world_size=16, engine_models=("tensorrt_llm",), weights_gib=400), gpus=16
)
CPU = ONE.model_copy(update={"runtime": "cpu", "requirements": None, "launch": LaunchSpec()})
SERVE = "registry.example/serve@sha256:" + "1" * 64
GATEWAY = "registry.example/gateway@sha256:" + "2" * 64
BUILD = "registry.example/build@sha256:" + "3" * 64


PUBLIC_KEY = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
"""


def package(digits: str) -> Path:
    return Path("/srv/store/artifacts/package-" + digits * 20)


def recipe_text(recipe: Recipe) -> str:
    return dump_yaml(recipe.model_dump(mode="json", exclude={"golden"}))


def cluster_files(
    recipe: Recipe,
    deployment: Deployment = ONE,
    launch: ServeOptions | None = None,
    settings: DeploySettings | None = None,
    *,
    packaged: Mapping[str, Any] | None = None,
    **cluster: Any,
) -> dict[str, str]:
    """The folder of a deployment.

    Args:
        recipe: Recipe that it is served with.
        deployment: Its deployment.json.
        launch: Launch options; by default gRPC and metrics alone.
        settings: Settings besides those of the cluster.
        packaged: Fields of `DeployedPackage`.
        cluster: Fields of `ClusterSettings`.
    """
    package_ = DeployedPackage(
        **{"deployment": deployment, "folder": package("0"), "recipe": recipe} | dict(packaged or {})
    )
    return deployment_files(
        "kubernetes",
        package_,
        launch or ServeOptions(PORTS),
        settings or DeploySettings(),
        ClusterSettings(**cluster),
    )


@cache
def case(name: str, digits: str = "0") -> dict[str, str]:
    """The files of a deployment, by the name of its golden folder."""
    serve, settings = ServeOptions(PORTS, LaunchSettings(image=SERVE)), DeploySettings(gateway_image=GATEWAY)
    folder: dict[str, Any] = {"folder": package(digits)}
    match name:
        case "one-node":
            recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", "cache.enabled=true"))
            return cluster_files(
                recipe, ONE, serve, settings, packaged=folder | {"recipe_text": recipe_text(recipe)},
                replicas={"least": 2, "most": 8}, hostname="llm.example", build_image=BUILD,
                expose={"kind": "ingress", "name": "nginx"},
            )  # fmt: skip
        case "several-nodes":
            parallel = ("runtime.tensor_parallel=8", "runtime.pipeline_parallel=2")
            recipe = load_recipe("llama-3.3-70b-fp8", ("name=llama", *parallel))
            return cluster_files(
                recipe, MANY, packaged=folder | {"recipe_text": recipe_text(recipe)}, storage_class="fast",
                hostname="llm.example", expose={"kind": "gateway", "name": "infra/public"},
            )  # fmt: skip
        case "object-store":
            return cluster_files(
                load_recipe("llama-3.1-8b-fp8", ("name=llama",)), ONE, serve,
                DeploySettings(gateway_image=GATEWAY, memory="96G"),
                packaged=folder | {"content": "c" * 64, "verify_key": PUBLIC_KEY},
                packages="s3://models/packages", redis="rediss://redis.shared.svc:6380",
            )  # fmt: skip
        case _:
            return cluster_files(
                load_recipe("tiny-cpu", ("name=llama",)), CPU, serve, settings, packaged=folder, namespace="tiny",
                replicas={"least": 2, "most": 2},
            )  # fmt: skip


CASES = ("one-node", "several-nodes", "object-store", "cpu")
every_case = pytest.mark.parametrize("name", CASES)


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def arguments(name: str) -> list[str]:
    (pod,) = (pod for component, pod in pod_specs(case(name)) if component == "gateway")
    words: list[str] = pod["containers"][0]["args"]
    return words


def run(*words: str, store: Path = Path("/nonexistent/store")) -> Any:
    from pipeline.cli.deploy import command

    return CliRunner().invoke(command, words, env={"PIPELINE_STORE": str(store), "HF_HUB_OFFLINE": "1"})
