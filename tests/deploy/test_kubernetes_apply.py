"""Folders for Kubernetes as `kubectl` reads and applies them: kustomize, and numbers that scaling holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from pipeline.resources import parse_yaml
from tests.support.api_server import ApiServer
from tests.support.kubernetes import (
    VERSIONS,
    Object,
    case,
    documents,
    every_case,
    faults,
    gateway_values,
    least_level,
    pods_of,
)

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


# A process that ends at once needs no garbage collection.
SHORT = {"GOGC": "off"}
Made = Callable[..., tuple[Object, ...]]


def written(files: dict[str, str], folder: Path) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def built(folder: Path) -> tuple[Object, ...]:
    """What `kubectl apply -k` would apply."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | SHORT,
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Put the folder of a case together, each once."""
    roots: dict[tuple[str, str], Path] = {}

    @cache
    def made(name: str, folder: str, digits: str = "0") -> tuple[Object, ...]:
        if (name, digits) not in roots:
            roots[name, digits] = written(case(name, digits), tmp_path_factory.mktemp(name))
        return built(roots[name, digits] / folder)

    return made


def applied_folders(files: dict[str, str]) -> set[str]:
    """Folders that are applied by themselves."""
    heads = {path.rpartition("/")[0] for path in files if path.endswith("kustomization.yaml")}
    return {folder for folder in heads if not folder.startswith(("components/", "base"))}


@every_case
def test_kustomize_puts_every_folder_together(name: str, made_of: Made) -> None:
    """With ConfigMaps found by their hashes, and patches that hit."""
    files = case(name)
    assert {"overlays/plain", "overlays/production", "overlays/site", "overlays/site-namespace"} <= (
        applied_folders(files)
    )
    for each in applied_folders(files):
        made = made_of(name, each)
        assert [fault for manifest in made for fault in faults(manifest, VERSIONS[-1])] == [], each
        configs = {manifest["metadata"]["name"] for manifest in made if manifest["kind"] == "ConfigMap"}
        for _, pod in pods_of(made):
            mounted = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
            assert mounted <= configs


LEVELS = ("restricted", "baseline", "privileged")


@pytest.mark.parametrize(
    ("overlay", "namespace"),
    [("plain", "namespace"), ("production", "namespace"), ("rdma", "overlays/rdma-namespace")],
)
def test_the_namespace_admits_the_pods(overlay: str, namespace: str, made_of: Made) -> None:
    """Pod security admission, as the label of the namespace says; and no more is allowed than is needed."""
    (place,) = (
        manifest for manifest in made_of("several-nodes", namespace) if manifest["kind"] == "Namespace"
    )
    level = place["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    made = made_of("several-nodes", f"overlays/{overlay}")
    needed = max((least_level(pod) for _, pod in pods_of(made)), key=LEVELS.index)
    assert needed == level


def test_rdma_gives_ranks_a_device_and_pinned_memory(made_of: Made) -> None:
    """A capability counts for root alone; ssh takes no key that others may read."""
    made = made_of("several-nodes", "overlays/rdma")
    (group,) = (manifest for manifest in made if manifest["kind"] == "LeaderWorkerSet")
    for role in ("leaderTemplate", "workerTemplate"):
        pod = group["spec"]["leaderWorkerTemplate"][role]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["rdma/rdma_shared_device_a"] == "1"
        capabilities = container["securityContext"]["capabilities"]
        assert capabilities["drop"] == ["ALL"]
        assert "IPC_LOCK" in capabilities["add"]
        assert pod["securityContext"]["runAsUser"] == 0
        (ssh,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "ssh")
        assert ssh["defaultMode"] == 0o400
        assert "fsGroup" not in pod["securityContext"]


def test_a_group_may_have_a_domain_of_the_network_of_its_own(tmp_path: Path) -> None:
    """The annotation of ExclusiveKeyAnnotationKey in api/leaderworkerset/v1/leaderworkerset_types.go of LWS."""
    folder = written(case("several-nodes"), tmp_path)
    head = folder / "overlays/production/kustomization.yaml"
    head.write_text(
        head.read_text().replace("components:\n", "components:\n  - ../../components/exclusive-topology\n")
    )
    (group,) = (manifest for manifest in built(head.parent) if manifest["kind"] == "LeaderWorkerSet")
    key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert group["metadata"]["annotations"][key] == "topology.kubernetes.io/zone"


# What a person changes.


def taken(text: str) -> str:
    """All examples of a file, with the # before them taken away; what is said of them has a # of its own."""
    _, begin, rest = text.partition("apiVersion")
    return begin + re.sub(r"^#", "", re.sub(r"^# +#.*\n", "", rest, flags=re.MULTILINE), flags=re.MULTILINE)


@every_case
def test_examples_of_the_site_do_what_they_say(name: str, tmp_path: Path) -> None:
    files = case(name)
    folder = written(files, tmp_path)
    for overlay in ("site", "site-namespace"):
        path = f"overlays/{overlay}/kustomization.yaml"
        (folder / path).write_text(taken(files[path]))
        assert parse_yaml(taken(files[path])).keys() > parse_yaml(files[path]).keys()
    accounts = [
        manifest
        for manifest in built(folder / "overlays/site-namespace")
        if manifest["kind"] == "ServiceAccount"
    ]
    assert len(accounts) == 2
    for account in accounts:
        assert "eks.amazonaws.com/role-arn" in account["metadata"]["annotations"]
        assert account["imagePullSecrets"] == [{"name": "registry"}]
    made = built(folder / "overlays/site")
    assert [fault for manifest in made for fault in faults(manifest, VERSIONS[-1])] == []
    pods = list(pods_of(made))
    (gateway,) = (pod for component, pod in pods if component == "gateway")
    assert gateway_values(gateway["containers"][0]["args"])["max_waiting"] == "64"
    for component, pod in pods:
        if component == "triton":
            assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("models-reader", "inference")
        elif component == "redis":
            assert pod["containers"][0]["image"].startswith("registry.example/valkey:")
    if name == "object-store":
        (server,) = (pod for component, pod in pods if component == "triton")
        (package,) = (volume for volume in server["volumes"] if volume["name"] == "package")
        assert "emptyDir" not in package
        assert package["ephemeral"]["volumeClaimTemplate"]["spec"]["storageClassName"] == "fast"


# Numbers.


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


def kubectl(server: ApiServer, objects: tuple[Object, ...], *words: str) -> None:
    """Run a command of kubectl with the Deployments among some objects that somebody scales."""
    made = [
        object_
        for object_ in objects
        if object_["kind"] == "Deployment" and "redis" not in object_["metadata"]["name"]
    ]
    with TemporaryDirectory() as cache_dir:
        line = ["kubectl", "--server", server.url, "--cache-dir", cache_dir, "--namespace", "llama"]
        done = subprocess.run(
            [*line, *words, "--filename", "-"], input=yaml.safe_dump_all(made), capture_output=True, text=True,
            timeout=60, check=False, env=os.environ | SHORT,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr


def counts(server: ApiServer) -> dict[str, int]:
    return {name: object_["spec"]["replicas"] for name, object_ in server.objects.items()}


def test_scaled_numbers_survive_every_apply(server: ApiServer, made_of: Made) -> None:
    """`kubectl apply` removes what it wrote before and finds no longer, and Kubernetes puts 1 in its place: so no
    manifest that is scaled has a number, and the plain one's is forgotten before.
    """
    apply = ("apply", "--validate=false")
    kubectl(server, made_of("one-node", "overlays/plain"), *apply)
    assert counts(server) == {"llama-triton": 2, "llama-gateway": 2}
    # As the first lines of overlays/plain say it.
    kubectl(server, made_of("one-node", "base"), "apply", "set-last-applied")
    kubectl(server, made_of("one-node", "overlays/production"), *apply)
    assert counts(server) == {"llama-triton": 2, "llama-gateway": 2}
    # Scaling takes over, and another package is rolled out.
    server.objects["llama-triton"]["spec"]["replicas"] = 7
    kubectl(server, made_of("one-node", "overlays/production", "b"), *apply)
    assert counts(server) == {"llama-triton": 7, "llama-gateway": 2}
    assert (
        "package-bbbb"
        in server.objects["llama-triton"]["spec"]["template"]["metadata"]["labels"][
            "app.kubernetes.io/version"
        ]
    )
    assert not any("replicas" in patch.get("spec", {}) for _, patch in server.patches)


def test_without_that_step_there_would_be_a_dip(server: ApiServer, made_of: Made) -> None:
    """So that the test above means something."""
    for overlay in ("plain", "production"):
        kubectl(server, made_of("one-node", f"overlays/{overlay}"), "apply", "--validate=false")
    assert counts(server) == {"llama-triton": 1, "llama-gateway": 1}
