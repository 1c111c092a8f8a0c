"""The folder for Kubernetes: golden files, published schemas, and what a reviewer of a cluster would ask.

`PIPELINE_WRITE_GOLDEN=1 pytest` writes the golden files after a change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.recipe import GatewaySection, Recipe, load_recipe, packaged
from pipeline.serving.launch import drain_s
from tests.support.kubernetes import (
    BUILD,
    GATEWAY,
    ONE,
    SERVE,
    VERSIONS,
    Object,
    arguments,
    case,
    cluster_files,
    containers,
    every_case,
    faults,
    gateway_values,
    least_level,
    objects,
    pod_specs,
)

GOLDEN = Path(__file__).parent / "golden" / "kubernetes"


@every_case
def test_golden(name: str) -> None:
    folder = GOLDEN / name
    # The dashboard is that of `pipeline monitoring`, which another test says.
    files = {path: text for path, text in case(name).items() if not path.endswith("dashboard.json")}
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    found = {
        str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*") if path.is_file()
    }
    assert found == files


@pytest.mark.parametrize("version", VERSIONS)
@every_case
def test_every_object_is_one_of_kubernetes_or_of_its_extension(name: str, version: str) -> None:
    found = list(objects(case(name)))
    assert len(found) >= 15
    assert [(path, fault) for path, manifest in found for fault in faults(manifest, version)] == []


def test_schemas_refuse_what_does_not_exist() -> None:
    """So that the test above means something: a key that does not exist in each kind of object, at its depths."""
    for _, manifest in objects(case("several-nodes")):
        broken = json.loads(json.dumps(manifest))
        next(iter(inner(broken.get("spec", broken))))["nonesuch"] = 1
        assert faults(broken, VERSIONS[-1]), manifest["kind"]


def inner(value: Any) -> Iterator[Object]:
    """Mappings, the deepest first, but for those whose keys are free."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        free = key in (
            "matchLabels",
            "labels",
            "annotations",
            "metadata",
            "limits",
            "requests",
            "nodeSelector",
        )
        if isinstance(part, dict | list) and not free:
            yield from inner(part)
    if isinstance(value, dict):
        yield value


# What a reviewer of a cluster asks.


@every_case
def test_pods_are_restricted(name: str) -> None:
    """The Pod Security Standard "restricted", and more: nothing is written but into folders of the pod."""
    pods = list(pod_specs(case(name)))
    assert {component for component, _ in pods} >= {"triton", "gateway"}
    for _, pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert least_level(pod) == "restricted"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        for container in containers(pod):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            names = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
            assert all(port.get("hostPort") is None for port in container.get("ports", ()))


@every_case
def test_every_container_has_limits_and_every_server_probes(name: str) -> None:
    for component, pod in pod_specs(case(name)):
        for container in containers(pod):
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            gpus = container["resources"]["limits"].get("nvidia.com/gpu")
            assert gpus == container["resources"]["requests"].get("nvidia.com/gpu")
        for volume in pod["volumes"]:
            if "emptyDir" in volume and component != "build":
                assert volume["emptyDir"]["sizeLimit"]
        if component in ("triton", "gateway"):
            (container,) = pod["containers"]
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


class Ending:
    """How a pod ends: left alone, then told to end, then killed; in seconds from its deletion."""

    def __init__(self, component: str, pod: Object) -> None:
        (container,) = pod["containers"]
        self.leaves_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        self.killed_s = int(pod["terminationGracePeriodSeconds"])
        if component == "gateway":
            self.drains_s = self.stops_s = int(gateway_values(container["args"])["drain_s"])
            self.waits_s = GatewaySection().max_wait_s
        else:
            environment = {variable["name"]: variable.get("value") for variable in container["env"]}
            self.stops_s = int(environment["PIPELINE_STOP_TIMEOUT_S"])
            self.drains_s = drain_s(self.stops_s)


def longest_answer_s(recipe: Recipe) -> float:
    slo, tokens = recipe.slo, recipe.limits.max_output_tokens
    return ((slo.ttft_p95_ms or 0) + tokens * (slo.itl_p95_ms or 50)) / 1e3


@pytest.mark.parametrize(
    "recipe",
    sorted(sorted({*packaged()} - {"tiny-cpu"}), key=lambda name: longest_answer_s(load_recipe(name)))[-6:],
)
def test_whoever_is_to_end_ends_in_order(recipe: str) -> None:
    """Both are left time for the longest answer. Where all of them are told at once, a gateway's last request, which it
    took in when nobody had forgotten it yet, and which waited as long as it may, finds a server that answers it to its
    end. And nothing takes longer than a cluster waits for a node that it empties (600 s).
    """
    given = load_recipe(recipe)
    limits = ONE.limits.model_copy(update={"max_output_tokens": given.limits.max_output_tokens})
    files = cluster_files(given, ONE.model_copy(update={"limits": limits}))
    pods = {component: Ending(component, pod) for component, pod in pod_specs(files) if component != "redis"}
    gateway, server = pods["gateway"], pods["triton"]
    assert server.drains_s >= longest_answer_s(given)
    assert gateway.drains_s >= gateway.waits_s + server.drains_s
    # The last request goes to a server before that is told to end, and both have the longest answer's time from there.
    assert gateway.leaves_s + gateway.waits_s <= server.leaves_s
    assert gateway.leaves_s + gateway.drains_s <= server.leaves_s + server.drains_s
    # DNS is asked every 5 s, and CoreDNS keeps an answer for 30.
    assert server.leaves_s >= 35
    for pod in (gateway, server):
        assert pod.leaves_s + pod.stops_s < pod.killed_s <= 600


@every_case
def test_a_start_is_left_its_time(name: str) -> None:
    for component, pod in pod_specs(case(name)):
        (container,) = pod["containers"]
        probe = container.get("startupProbe", {})
        if component == "triton" and "exec" in probe:
            environment = {variable["name"]: variable.get("value") for variable in container["env"]}
            assert probe["periodSeconds"] * probe["failureThreshold"] > int(
                environment["PIPELINE_START_TIMEOUT_S"]
            )


def test_the_time_to_start_follows_the_bytes() -> None:
    def threshold(gib: float) -> int:
        launch = ONE.launch.model_copy(update={"weights_gib": gib})
        recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
        files = cluster_files(recipe, ONE.model_copy(update={"launch": launch}))
        (server,) = (
            manifest
            for _, manifest in objects(files)
            if manifest["kind"] == "Deployment" and "triton" in str(manifest["metadata"])
        )
        probe = server["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        assert server["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    # A cold network volume reads 128 MiB a second.
    assert threshold(140) - threshold(8) == pytest.approx(132 * 8, abs=5)


@every_case
def test_images_are_those_that_were_given(name: str) -> None:
    images = {
        c["image"]
        for component, pod in pod_specs(case(name))
        for c in containers(pod)
        if component != "redis"
    }
    assert not any(image.endswith(":latest") or ":" not in image for image in images)
    if name != "several-nodes":
        assert {SERVE, GATEWAY} <= images
    assert (BUILD in images) is (name == "one-node")


@every_case
def test_nothing_is_left_to_be_filled_in(name: str) -> None:
    for path, text in case(name).items():
        if not path.endswith("dashboard.json"):
            assert not re.search(r"\$\{|<[A-Z_]+>|TODO|CHANGEME", text), path
    assert not any(manifest["kind"] == "Secret" for _, manifest in objects(case(name)))


@every_case
def test_selectors_find_pods_and_names_lead_somewhere(name: str) -> None:
    found = [manifest for _, manifest in objects(case(name))]
    labels = []
    for manifest in found:
        parts = manifest.get("spec", {}).get("leaderWorkerTemplate", manifest.get("spec", {}))
        labels += [parts[key]["metadata"]["labels"] for key in ("template", "leaderTemplate", "workerTemplate")
                   if key in parts]  # fmt: skip

    def selects(selector: Object) -> bool:
        wanted = {k: v for k, v in selector.items() if not k.startswith("leaderworkerset")}
        return any(wanted.items() <= pod.items() for pod in labels)

    for manifest in found:
        if manifest["kind"] == "Service":
            assert selects(manifest["spec"]["selector"])
        elif manifest["kind"] in ("Deployment", "PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
            assert selects(manifest["spec"]["selector"]["matchLabels"])
        elif manifest["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = manifest["spec"]["scaleTargetRef"]
            assert any((o["apiVersion"], o["kind"], o["metadata"]["name"]) ==
                       (target["apiVersion"], target["kind"], target["name"]) for o in found)  # fmt: skip
    accounts = {manifest["metadata"]["name"] for manifest in found if manifest["kind"] == "ServiceAccount"}
    named = {pod["serviceAccountName"] for component, pod in pod_specs(case(name)) if component != "redis"}
    assert named <= accounts
    claims = {
        manifest["metadata"]["name"] for manifest in found if manifest["kind"] == "PersistentVolumeClaim"
    }
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for _, pod in pod_specs(case(name))
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims
    services = {manifest["metadata"]["name"]: manifest for manifest in found if manifest["kind"] == "Service"}
    gateway = arguments(name)
    endpoint, redis = gateway[gateway.index("--endpoint") + 1], gateway_values(gateway)["limits_redis"]
    _, service, port = endpoint.split(":")
    assert services[service]["spec"]["clusterIP"] == "None"
    assert services[service]["spec"]["ports"][0]["port"] == int(port)
    if name != "object-store":
        host, _, rest = redis.removeprefix("redis://").partition(":")
        assert services[host]["spec"]["ports"][0]["port"] == int(rest.partition("/")[0])
