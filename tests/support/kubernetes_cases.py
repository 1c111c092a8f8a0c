"""Deployments of Kubernetes that tests look at, by the name of their golden folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.documents import dump_yaml
from pipeline.recipe import Recipe, load_recipe
from pipeline.serving.launch import ServeOptions
from pipeline.serving.manifests import Exposure, KubernetesOptions, ManifestOptions, manifest_files
from pipeline.serving.ports import Ports
from pipeline.serving.settings import LaunchSettings
from pipeline.triton.deployment import LaunchSpec
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


@cache
def case(name: str, digits: str = "0") -> dict[str, str]:
    """The files of a deployment, by the name of its golden folder."""
    serve = ServeOptions(PORTS, LaunchSettings(image=SERVE))
    match name:
        case "one-node":
            recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", "cache.enabled=true"))
            options = KubernetesOptions(
                recipe, "llama", replicas=(2, 8), hostname="llm.example", expose=Exposure("ingress", "nginx"),
                build_image=BUILD,
            )  # fmt: skip
            more = ManifestOptions(gateway_image=GATEWAY, recipe=recipe_text(recipe), kubernetes=options)
            deployment = ONE
        case "several-nodes":
            recipe = load_recipe(
                "llama-3.3-70b-fp8",
                ("name=llama", "runtime.tensor_parallel=8", "runtime.pipeline_parallel=2"),
            )
            options = KubernetesOptions(
                recipe, "llama", hostname="llm.example", expose=Exposure("gateway", "infra/public"),
                storage_class="fast",
            )  # fmt: skip
            more = ManifestOptions(recipe=recipe_text(recipe), kubernetes=options)
            deployment, serve = MANY, ServeOptions(PORTS)
        case "object-store":
            recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
            options = KubernetesOptions(
                recipe, "llama", packages="s3://models/packages", redis="rediss://redis.shared.svc:6380",
                content="c" * 64, verify_key=PUBLIC_KEY,
            )  # fmt: skip
            more = ManifestOptions(gateway_image=GATEWAY, memory="96G", kubernetes=options)
            deployment = ONE
        case _:
            recipe = load_recipe("tiny-cpu", ("name=llama",))
            options = KubernetesOptions(recipe, "tiny", replicas=(2, 2))
            more = ManifestOptions(gateway_image=GATEWAY, kubernetes=options)
            deployment = CPU
    return manifest_files("kubernetes", deployment, package(digits), serve, more)


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

    return CliRunner().invoke(command, words, env={"PIPELINE_STORE": str(store)})
