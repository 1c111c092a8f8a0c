"""Deployments of Kubernetes that tests look at, by the name of their golden folder; and their objects, held against the
schemas that Kubernetes and the makers of its extensions publish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from pipeline.deploy.containers import DeployedPackage
from pipeline.deploy.targets import deployment_files
from pipeline.documents import dump_yaml
from pipeline.recipe import Recipe, load_recipe
from pipeline.resources import parse_yaml
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment

CRDS = parse_yaml((Path(__file__).resolve().parents[1] / "deploy" / "crds.yaml").read_text("utf-8"))
Object = dict[str, Any]


def objects(files: Mapping[str, str]) -> Iterator[tuple[str, Object]]:
    """All objects that the files of `pipeline deploy --target kubernetes` apply, with the path of their file."""
    for name, text in files.items():
        if name.endswith(".yaml") and not name.endswith(("kustomization.yaml", "recipe.yaml")):
            yield from ((name, document) for document in documents(text))


@cache
def documents(text: str) -> tuple[Object, ...]:
    """The documents of a file of YAML, which nobody changes."""
    return tuple(yaml.load_all(text, Loader=yaml.CSafeLoader))


def pod_specs(files: Mapping[str, str]) -> Iterator[tuple[str, Object]]:
    """All pods: the name of the component, and the spec."""
    return pods_of(manifest for _, manifest in objects(files))


def pods_of(manifests: Iterable[Object]) -> Iterator[tuple[str, Object]]:
    """The same of objects."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        parts = spec.get("leaderWorkerTemplate", spec)
        for key in ("template", "leaderTemplate", "workerTemplate"):
            if key in parts:
                template = parts[key]
                yield template["metadata"]["labels"]["app.kubernetes.io/name"], template["spec"]


# Capabilities that may be added below "privileged"; "restricted" takes NET_BIND_SERVICE alone.
# https://kubernetes.io/docs/concepts/security/pod-security-standards/
_BASELINE = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip


def least_level(pod: Object) -> str:
    """The strictest of the Pod Security Standards that admits a pod."""
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    own = [container.get("securityContext", {}) for container in containers]
    added = {name for context in own for name in context.get("capabilities", {}).get("add", ())}
    host = any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    host = host or any("hostPath" in volume for volume in pod["volumes"])
    if host or any(context.get("privileged") for context in own) or not added <= _BASELINE:
        return "privileged"
    security = pod.get("securityContext", {})
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    restricted = (
        security.get("runAsNonRoot") is True
        and security.get("runAsUser") != 0
        and security.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost")
        and added <= {"NET_BIND_SERVICE"}
        and all("ALL" in context.get("capabilities", {}).get("drop", ()) for context in own)
        and all(context.get("allowPrivilegeEscalation") is False for context in own)
        and kinds <= {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    )
    return "restricted" if restricted else "baseline"


def faults(manifest: Object, version: str) -> list[str]:
    """What is wrong with an object for a version of Kubernetes, or with one of an extension for the release of that."""
    validator = (
        _own(manifest["kind"])
        if manifest["kind"] in CRDS
        else _builtin(version, manifest["kind"], manifest["apiVersion"])
    )
    found = [
        f"{manifest['kind']}: {error.json_path}: {error.message}" for error in validator.iter_errors(manifest)
    ]
    if manifest["kind"] == "LeaderWorkerSet":
        template = manifest["spec"]["leaderWorkerTemplate"]
        for key in ("leaderTemplate", "workerTemplate"):
            pod = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "x"},
                "template": template[key],
            }
            found += [f"{key}: {fault}" for fault in faults(pod, version)]
    return found


@cache
def _definitions(version: str) -> Registry[Any]:
    contents = schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
    resource = Resource.from_contents(contents, default_specification=DRAFT202012)
    return resource @ Registry()


@cache
def _builtin(version: str, kind: str, api_version: str) -> Draft202012Validator:
    group, _, name = api_version.rpartition("/")
    suffix = f"{group.partition('.')[0]}-{name}" if group else name
    file = f"kubernetes-json-schema/v{version}.0-local-strict/{kind.lower()}-{suffix}.json"
    return Draft202012Validator(schema_contents(file, version), registry=_definitions(version))


@cache
def _own(kind: str) -> Draft202012Validator:
    known = CRDS[kind]
    top = {
        "apiVersion": {"const": known["apiVersion"]},
        "kind": {"const": kind},
        "metadata": {},
        "spec": known["spec"],
    }
    return Draft202012Validator(_closed({"type": "object", "required": [*top], "properties": top}))


def _closed(schema: Any) -> Any:
    """What the API server makes of a structural schema: keys that it does not name are refused."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _closed(part) for name, part in value.items()} if key == "properties" else _closed(value)
        for key, value in schema.items()
    }
    return made | ({"additionalProperties": False} if "properties" in made else {})


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

    return CliRunner().invoke(command, words, env={"PIPELINE_STORE": str(store), "HF_HUB_OFFLINE": "1"})
