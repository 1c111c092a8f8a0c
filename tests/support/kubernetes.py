"""Objects of Kubernetes held against the schemas that Kubernetes and the makers of its extensions publish."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

CRDS = yaml.safe_load((Path(__file__).resolve().parents[1] / "deploy" / "crds.yaml").read_text("utf-8"))
Object = dict[str, Any]


def objects(files: Mapping[str, str]) -> Iterator[tuple[str, Object]]:
    """All objects that the files of `pipeline deploy --target kubernetes` apply, with the path of their file."""
    for name, text in files.items():
        if name.endswith(".yaml") and not name.endswith(("kustomization.yaml", "recipe.yaml")):
            yield from ((name, one) for one in documents(text))


@cache
def documents(text: str) -> tuple[Object, ...]:
    """The documents of a file of YAML, which nobody changes."""
    return tuple(yaml.load_all(text, Loader=yaml.CSafeLoader))


def pod_specs(files: Mapping[str, str]) -> Iterator[tuple[str, Object]]:
    """All pods: the name of the component, and the spec."""
    for _, one in objects(files):
        spec = one.get("spec", {})
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
    own = [one.get("securityContext", {}) for one in containers]
    added = {name for one in own for name in one.get("capabilities", {}).get("add", ())}
    host = any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    host = host or any("hostPath" in volume for volume in pod["volumes"])
    if host or any(one.get("privileged") for one in own) or not added <= _BASELINE:
        return "privileged"
    security = pod.get("securityContext", {})
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    restricted = (
        security.get("runAsNonRoot") is True
        and security.get("runAsUser") != 0
        and security.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost")
        and added <= {"NET_BIND_SERVICE"}
        and all("ALL" in one.get("capabilities", {}).get("drop", ()) for one in own)
        and all(one.get("allowPrivilegeEscalation") is False for one in own)
        and kinds <= {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    )
    return "restricted" if restricted else "baseline"


def faults(one: Object, version: str) -> list[str]:
    """What is wrong with an object for a version of Kubernetes, or with one of an extension for the release of that."""
    validator = (
        _own(one["kind"]) if one["kind"] in CRDS else _builtin(version, one["kind"], one["apiVersion"])
    )
    found = [f"{one['kind']}: {error.json_path}: {error.message}" for error in validator.iter_errors(one)]
    if one["kind"] == "LeaderWorkerSet":
        template = one["spec"]["leaderWorkerTemplate"]
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
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _closed(one) for name, one in value.items()} if key == "properties" else _closed(value)
        for key, value in schema.items()
    }
    return made | ({"additionalProperties": False} if "properties" in made else {})
