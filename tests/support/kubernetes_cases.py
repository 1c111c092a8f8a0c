"""Deployments of Kubernetes that tests look at, by the name of their golden folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.deploy.package import DeployedPackage
from pipeline.deploy.targets import deployment_files
from pipeline.documents import dump_yaml
from pipeline.recipe import Recipe, load_recipe
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
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
    written = {"golden", "triton", "deploy", "kubernetes"}
    return dump_yaml(recipe.model_dump(mode="json", exclude=written))


def with_sections(recipe: Recipe, **sections: Mapping[str, Any]) -> Recipe:
    """The recipe with other values in these sections, which are not validated."""
    changed = {name: getattr(recipe, name).model_copy(update=dict(new)) for name, new in sections.items()}
    return recipe.model_copy(update=changed)


def cluster_files(
    recipe: Recipe,
    deployment: Deployment = ONE,
    *,
    gpus: tuple[int, ...] = (),
    packaged: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> dict[str, str]:
    """The folder of a deployment, whose gRPC and metrics alone are open.

    Args:
        recipe: Recipe that it is served with.
        deployment: Its deployment.json.
        packaged: Fields of `DeployedPackage`.
        sections: Other values of the recipe.
    """
    recipe = with_sections(recipe, **sections)
    fields = {"deployment": deployment, "folder": package("0"), "recipe": recipe} | dict(packaged or {})
    options = ServeOptions(PORTS, recipe.triton, gpus)
    return deployment_files("kubernetes", DeployedPackage(**fields), options)


@cache
def case(name: str, digits: str = "0") -> dict[str, str]:
    """The files of a deployment, by the name of its golden folder."""
    folder: dict[str, Any] = {"folder": package(digits)}
    own = (f"triton.image='{SERVE}'", f"deploy.gateway_image='{GATEWAY}'")
    match name:
        case "one-node":
            cluster = (
                "kubernetes={min_replicas: 2, max_replicas: 8, hostname: llm.example, expose: ingress:nginx}",
                f"kubernetes.build_image='{BUILD}'",
            )
            recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", "cache.enabled=true", *own, *cluster))
            return cluster_files(recipe, packaged=folder | {"recipe_text": recipe_text(recipe)})
        case "several-nodes":
            parallel = ("runtime.tensor_parallel=8", "runtime.pipeline_parallel=2")
            cluster = (
                "kubernetes={storage_class: fast, hostname: llm.example, expose: 'gateway:infra/public'}",
            )
            recipe = load_recipe("llama-3.3-70b-fp8", ("name=llama", *parallel, *cluster))
            return cluster_files(recipe, MANY, packaged=folder | {"recipe_text": recipe_text(recipe)})
        case "object-store":
            cluster = (
                "triton.memory=96G",
                "kubernetes={packages: 's3://models/packages', redis: 'rediss://redis.shared.svc:6380'}",
            )
            recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", *own, *cluster))
            return cluster_files(recipe, packaged=folder | {"content": "c" * 64, "verify_key": PUBLIC_KEY})
        case _:
            cluster = ("kubernetes={namespace: tiny, min_replicas: 2, max_replicas: 2}",)
            return cluster_files(
                load_recipe("tiny-cpu", ("name=llama", *own, *cluster)), CPU, packaged=folder
            )


CASES = ("one-node", "several-nodes", "object-store", "cpu")
every_case = pytest.mark.parametrize("name", CASES)


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def arguments(name: str) -> list[str]:
    (pod,) = (pod for component, pod in pod_specs(case(name)) if component == "gateway")
    words: list[str] = pod["containers"][0]["args"]
    return words


def gateway_values(words: Sequence[str]) -> dict[str, str]:
    """Values of `--set gateway.KEY=VALUE` by key; the last of a key counts."""
    found = (word.removeprefix("gateway.").partition("=") for word in words if word.startswith("gateway."))
    return {key: value for key, _, value in found}


def run(*words: str, store: Path = Path("/nonexistent/store")) -> Any:
    from pipeline.cli.deploy import command

    return CliRunner().invoke(command, words, env={"PIPELINE_STORE": str(store)})
