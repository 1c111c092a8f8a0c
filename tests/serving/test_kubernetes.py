"""The folder for Kubernetes: golden files, published schemas, what a reviewer of a cluster would ask, and kustomize.

`PIPELINE_WRITE_GOLDEN=1 pytest` writes the golden files after a change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline.errors import InvalidInput
from pipeline.gateway.metric_names import OWN_VIEWS
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.yaml_reader import dump_yaml
from pipeline.serving.launch import Ports, ServeOptions
from pipeline.serving.launch_gpu import LaunchContext, plan_launch
from pipeline.serving.manifests import Exposure, KubernetesOptions, ManifestOptions, manifest_files
from pipeline.serving.manifests.kubernetes.cluster import resource_name
from pipeline.serving.monitoring import WatchedDeployment, monitoring_files
from pipeline.triton.deployment import LaunchSpec
from tests.serving.test_monitoring import engine_metrics
from tests.support.deployments import gpu_deployment
from tests.support.kubernetes import Object, documents, faults, objects, pod_specs

GOLDEN = Path(__file__).parent / "golden" / "manifests" / "kubernetes"
VERSIONS = ("1.30", "1.34", "1.37")
PORTS = Ports(8000, 8001, 8002)
ONE = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=8))
MANY = gpu_deployment(
    LaunchSpec(mode="leader", world_size=16, engine_models=("tensorrt_llm",), weights_gib=400), gpus=16
)
CPU = ONE.model_copy(update={"runtime": "cpu", "requirements": None, "launch": LaunchSpec()})
SERVE = "registry.example/serve@sha256:" + "1" * 64
GATEWAY = "registry.example/gateway@sha256:" + "2" * 64
BUILD = "registry.example/build@sha256:" + "3" * 64


def package(digits: str) -> Path:
    return Path("/srv/store/artifacts/package-" + digits * 20)


def recipe_text(recipe: Recipe) -> str:
    return dump_yaml(recipe.model_dump(mode="json", exclude={"golden"}))


@cache
def case(name: str, digits: str = "0") -> dict[str, str]:
    """The files of a deployment, by the name of its golden folder."""
    serve = ServeOptions(PORTS, image=SERVE)
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
                recipe, "llama", packages="s3://models/packages", redis="rediss://redis.shared.svc:6380"
            )
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
    assert [(path, fault) for path, one in found for fault in faults(one, version)] == []


def test_schemas_refuse_what_does_not_exist() -> None:
    """So that the test above means something: a key that does not exist in each kind of object, at its depths."""
    for _, one in objects(case("several-nodes")):
        broken = json.loads(json.dumps(one))
        next(iter(inner(broken.get("spec", broken))))["nonesuch"] = 1
        assert faults(broken, VERSIONS[-1]), one["kind"]


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


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


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


@every_case
def test_whoever_is_to_end_is_left_time_to(name: str) -> None:
    """To be forgotten by those who ask, then for the requests under way, then to end."""
    for component, pod in pod_specs(case(name)):
        if component not in ("triton", "gateway"):
            continue
        (container,) = pod["containers"]
        leaves_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        environment = {one["name"]: one.get("value") for one in container.get("env", ())}
        if component == "triton" and "startupProbe" in container and "exec" in container["startupProbe"]:
            ends_s = int(environment["PIPELINE_STOP_TIMEOUT_S"])
            probe = container["startupProbe"]
            starts_s = int(environment["PIPELINE_START_TIMEOUT_S"])
            assert probe["periodSeconds"] * probe["failureThreshold"] > starts_s
        elif component == "gateway":
            ends_s = int(container["args"][container["args"].index("--drain-s") + 1])
        else:
            continue
        assert pod["terminationGracePeriodSeconds"] > leaves_s + ends_s


def test_the_time_to_start_follows_the_bytes() -> None:
    def threshold(gib: float) -> int:
        launch = ONE.launch.model_copy(update={"weights_gib": gib})
        recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
        more = ManifestOptions(kubernetes=KubernetesOptions(recipe, "llama"))
        files = manifest_files(
            "kubernetes", ONE.model_copy(update={"launch": launch}), package("0"), ServeOptions(PORTS), more
        )
        (server,) = (
            one
            for _, one in objects(files)
            if one["kind"] == "Deployment" and "triton" in str(one["metadata"])
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
    assert not any(one["kind"] == "Secret" for _, one in objects(case(name)))


@every_case
def test_selectors_find_pods_and_names_lead_somewhere(name: str) -> None:
    found = [one for _, one in objects(case(name))]
    labels = []
    for one in found:
        parts = one.get("spec", {}).get("leaderWorkerTemplate", one.get("spec", {}))
        labels += [parts[key]["metadata"]["labels"] for key in ("template", "leaderTemplate", "workerTemplate")
                   if key in parts]  # fmt: skip

    def selects(selector: Object) -> bool:
        wanted = {k: v for k, v in selector.items() if not k.startswith("leaderworkerset")}
        return any(wanted.items() <= pod.items() for pod in labels)

    for one in found:
        if one["kind"] == "Service":
            assert selects(one["spec"]["selector"])
        elif one["kind"] in ("Deployment", "PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
            assert selects(one["spec"]["selector"]["matchLabels"])
        elif one["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = one["spec"]["scaleTargetRef"]
            assert any((o["apiVersion"], o["kind"], o["metadata"]["name"]) ==
                       (target["apiVersion"], target["kind"], target["name"]) for o in found)  # fmt: skip
    claims = {one["metadata"]["name"] for one in found if one["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for _, pod in pod_specs(case(name))
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims
    services = {one["metadata"]["name"]: one for one in found if one["kind"] == "Service"}
    gateway = arguments(name)
    endpoint, redis = (gateway[gateway.index(option) + 1] for option in ("--endpoint", "--limits-redis"))
    _, service, port = endpoint.split(":")
    assert services[service]["spec"]["clusterIP"] == "None"
    assert services[service]["spec"]["ports"][0]["port"] == int(port)
    if name != "object-store":
        host, _, rest = redis.removeprefix("redis://").partition(":")
        assert services[host]["spec"]["ports"][0]["port"] == int(rest.partition("/")[0])


def arguments(name: str) -> list[str]:
    (pod,) = (pod for component, pod in pod_specs(case(name)) if component == "gateway")
    words: list[str] = pod["containers"][0]["args"]
    return words


def policies(files: dict[str, str]) -> list[Object]:
    return [one["spec"] for _, one in objects(files) if one["kind"] == "NetworkPolicy"]


def may_pass(files: dict[str, str], sender: str | None, receiver: str | None, port: int) -> bool:
    """What the network does with a connection between components; None is somebody else of the same namespace."""

    def labels(component: str | None) -> dict[str, str]:
        if component is None:
            return {"app": "other"}
        return next(
            template["metadata"]["labels"]
            for _, one in objects(files)
            for template in [one.get("spec", {}).get("template") or
                             one.get("spec", {}).get("leaderWorkerTemplate", {}).get("leaderTemplate") or {}]
            if template and template["metadata"]["labels"]["app.kubernetes.io/name"] == component
        )  # fmt: skip

    def matches(selector: Object, given: dict[str, str]) -> bool:
        out = any(
            given.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ())
            if rule["operator"] == "NotIn"
        )  # fmt: skip
        return not out and selector.get("matchLabels", {}).items() <= given.items()

    def allowed(direction: str, here: dict[str, str], there: dict[str, str]) -> bool:
        of_here = [one for one in policies(files) if matches(one["podSelector"], here)]
        if not of_here:
            return True
        peer = "to" if direction == "egress" else "from"
        return any(
            (
                peer not in rule
                or any(matches(p["podSelector"], there) for p in rule[peer] if "podSelector" in p)
            )
            and ("ports" not in rule or port in [entry["port"] for entry in rule["ports"]])
            for one in of_here
            for rule in one.get(direction, ())
        )

    one, other = labels(sender), labels(receiver)
    return allowed("egress", one, other) and allowed("ingress", other, one)


@every_case
def test_who_may_talk_to_whom(name: str) -> None:
    files = case(name)
    assert may_pass(files, "gateway", "triton", 8001)
    assert may_pass(files, None, "gateway", 8080)
    assert not may_pass(files, None, "triton", 8001)
    assert not may_pass(files, None, "triton", 8000)
    assert not may_pass(files, "gateway", "triton", 8000)
    assert not may_pass(files, "triton", "gateway", 8080)
    assert may_pass(files, "triton", "triton", 2222) is (name == "several-nodes")
    if name == "object-store":
        assert may_pass(files, "triton", None, 443)
        assert may_pass(files, "gateway", None, 6380)
    else:
        assert may_pass(files, "gateway", "redis", 6379)
        assert not may_pass(files, None, "redis", 6379)
        assert not may_pass(files, "triton", "redis", 6379)
        assert not may_pass(files, "triton", None, 443)


@pytest.mark.parametrize("name", CASES[:2])
def test_what_is_led_in_from_outside_asks_for_keys(name: str) -> None:
    """The API with its keys, and nothing that everybody may read, such as the metrics of all tenants."""
    (way,) = (one for _, one in objects(case(name)) if one["kind"] in ("Ingress", "HTTPRoute"))
    (rule,) = way["spec"]["rules"]
    paths = [one["path"] for one in rule["http"]["paths"]] if "http" in rule else [
        one["path"]["value"] for one in rule["matches"]
    ]  # fmt: skip
    assert set(paths) == {"/v1", "/openai"}
    overlay = yaml.safe_load(case(name)["overlays/production/kustomization.yaml"])
    assert {"../../components/expose", "../../components/api-keys"} <= set(overlay["components"])
    assert "components" not in yaml.safe_load(case(name)["overlays/plain/kustomization.yaml"])


# What is served, and how it is exchanged.


def test_a_rollout_is_a_change_of_the_digest_alone() -> None:
    """And goes back by the change back: nothing else differs, so that Kubernetes exchanges pods, and nothing more."""
    old, new = case("one-node", "a"), case("one-node", "b")
    assert old.keys() == new.keys()
    changed = {path for path in old if old[path] != new[path]}
    assert changed == {"base/kustomization.yaml", "base/server.yaml", "base/gateway.yaml", "build/job.yaml",
                       "build/kustomization.yaml"}  # fmt: skip
    for path in changed:
        assert old[path].replace("a" * 20, "b" * 20).replace("a" * 10, "b" * 10) == new[path].replace(
            "a" * 10, "b" * 10
        )


def test_ranks_of_several_machines_are_started_by_the_leader() -> None:
    """As many as there are GPUs, on machines that have their share of them, and each pod sees the key."""
    (group,) = (one for _, one in objects(case("several-nodes")) if one["kind"] == "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[key]["spec"] for key in ("leaderTemplate", "workerTemplate"))
    per_pod = [int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in (leader, worker)]
    assert per_pod[0] + (template["size"] - 1) * per_pod[1] == MANY.launch.world_size
    environment = {one["name"]: one["value"] for one in leader["containers"][0]["env"]}
    assert environment["PIPELINE_GROUP_GPUS"] == str(per_pod[0])
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in (leader, worker):
        (ssh,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "ssh")
        assert ssh["secretName"] == "llama-ssh"
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    shm = next(volume for volume in leader["volumes"] if volume["name"] == "shm")["emptyDir"]["sizeLimit"]
    alone = plan_launch(MANY, LaunchContext(PORTS, "x-")).shm_mib
    assert 0 < int(shm.removesuffix("Mi")) < alone


def test_the_cache_is_one_for_all_gateways() -> None:
    recipe = yaml.safe_load(case("one-node")["base/recipe.yaml"])
    assert recipe["cache"]["backend"] == {"kind": "redis", "url": "redis://llama-redis:6379/0"}
    load_recipe_text(case("one-node")["base/recipe.yaml"])
    # What is built in the cluster is the recipe as it was given.
    assert yaml.safe_load(case("one-node")["build/recipe.yaml"])["cache"]["backend"]["kind"] == "sqlite"


def load_recipe_text(text: str) -> None:
    Recipe.model_validate(yaml.safe_load(text), context={"folder": Path("/")})


@every_case
def test_what_the_gateway_is_told_are_options_that_it_has(name: str) -> None:
    from pipeline.cli.gateway import command

    words = arguments(name)
    assert words[0] == "gateway"
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_what_is_fetched_and_built_are_commands_that_there_are() -> None:
    from pipeline.cli.main import cli

    for name in CASES:
        for component, pod in pod_specs(case(name)):
            for container in containers(pod):
                words = container.get("args", [])
                words = words[1:] if words[:1] == ["pipeline"] else words
                if component == "redis" or words[:1] not in (["store"], ["build"]):
                    continue
                command: Any = cli
                for word in words:
                    if not hasattr(command, "get_command"):
                        break
                    command = command.get_command(None, word)
                known = {option for parameter in command.params for option in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= known, words


# Scaling and monitoring.


def test_scaling_reads_metrics_that_there_are() -> None:
    known = {view.name for view in OWN_VIEWS} | {
        f"{view.name}_bucket" for view in OWN_VIEWS if view.kind == "histogram"
    }
    known |= set(engine_metrics())
    for name in CASES:
        (scaled,) = (one for _, one in objects(case(name)) if one["kind"] == "ScaledObject")
        for trigger in scaled["spec"]["triggers"]:
            query = re.sub(r'"[^"]*"', "", trigger["metadata"]["query"])
            read = set(re.findall(r"\b(?:pipeline|nv)_[a-z0-9_]+", query))
            assert read
            assert read <= known


def test_scaling_follows_the_target_of_the_recipe() -> None:
    (scaled,) = (one for _, one in objects(case("one-node")) if one["kind"] == "ScaledObject")
    triggers = {one["name"]: one for one in scaled["spec"]["triggers"]}
    assert set(triggers) == {"requests", "queue-time", "kv-cache"}
    # Half of the 500 ms of slo.ttft_p95_ms.
    assert float(triggers["queue-time"]["metadata"]["threshold"]) == 0.25
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 8)
    (without,) = (one for _, one in objects(case("cpu")) if one["kind"] == "ScaledObject")
    assert "queue-time" not in {one["name"] for one in without["spec"]["triggers"]}


def test_rules_and_dashboard_are_those_of_one_machine() -> None:
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", "cache.enabled=true"))
    made = monitoring_files([WatchedDeployment(recipe, ("g:1",), ("t:1",))], runbook_url="how-to/alerts.html")
    files = case("one-node")
    assert files["components/monitoring/dashboard.json"] == made["dashboard.json"]
    rules = yaml.safe_load(files["components/monitoring/rules.yaml"])
    assert rules["spec"] == yaml.safe_load(made["alerts.yaml"])
    jobs = {
        relabeling["replacement"]
        for one in documents(files["components/monitoring/monitors.yaml"])
        for endpoint in (*one["spec"].get("endpoints", ()), *one["spec"].get("podMetricsEndpoints", ()))
        for relabeling in endpoint["relabelings"]
        if relabeling.get("targetLabel") == "job"
    }
    scraped = yaml.safe_load(made["prometheus.yml"])["scrape_configs"]
    assert jobs == {one["job_name"] for one in scraped}


# What is refused, and the command line.


def test_what_cannot_be_run_is_refused_with_all_reasons() -> None:
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
    options = KubernetesOptions(
        recipe, "llama", replicas=(4, 2), gpus_per_node=3, expose=Exposure("ingress", "nginx")
    )
    serve = ServeOptions(PORTS, devices=(0, 1))
    with pytest.raises(InvalidInput) as caught:
        manifest_files("kubernetes", MANY, Path("/a folder"), serve, ManifestOptions(kubernetes=options))
    for word in ("package", "--replicas = 4:2", "--gpus = 0,1", "--gpus-per-node = 3", "--hostname"):
        assert word in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        manifest_files("kubernetes", CPU, package("0"), serve, ManifestOptions(kubernetes=options))
    for word in ("--image: no image carries that runtime", "--replicas = 4:2", "--gpus = 0,1", "--hostname"):
        assert word in str(caught.value)


def test_workers_of_one_machine_cannot_be_spread() -> None:
    """TensorRT-LLM's orchestrator starts its workers where it is itself."""
    launch = LaunchSpec(
        mode="orchestrator", world_size=8, engine_models=("tensorrt_llm",),
        gpu_device_ids={"tensorrt_llm": (tuple(range(8)), tuple(range(8, 16)))},
    )  # fmt: skip
    recipe = load_recipe("llama-3.3-70b-fp8", ("name=llama",))
    more = ManifestOptions(kubernetes=KubernetesOptions(recipe, "llama"))
    with pytest.raises(InvalidInput, match="cannot be spread over several"):
        manifest_files("kubernetes", gpu_deployment(launch, gpus=16), package("0"), ServeOptions(PORTS), more)


def test_names_are_those_of_kubernetes() -> None:
    label = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
    for name in ("llama-3.1-8b-fp8", "4o", "a" * 63, "x.y-" + "z" * 50 + ".1", "-"):
        made = resource_name(name)
        assert label.fullmatch(made)
        assert len(f"{made}-triton-0-15") <= 63
    assert resource_name("a" * 63) != resource_name("a" * 62 + "b")


def run(*words: str) -> Any:
    from pipeline.cli.deploy import command

    return CliRunner().invoke(command, words, env={"PIPELINE_STORE": "/nonexistent/store"})


def test_the_command_writes_a_recipe_that_is_not_built_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    from pipeline.cli.deploy import command

    words = ["llama-3.1-8b-fp8", "--target", "kubernetes", "--offline", "--output", str(tmp_path / "cluster")]
    done = CliRunner().invoke(
        command, [*words, "--hostname", "llm.example", "--expose", "gateway:infra/public"]
    )
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'cluster'}" in done.stdout
    assert "build/ in the cluster" in done.stderr
    job = yaml.safe_load((tmp_path / "cluster/build/job.yaml").read_text())
    server = (tmp_path / "cluster/base/server.yaml").read_text()
    (named,) = set(re.findall(r"subPath: artifacts/(package-[0-9a-f]{20})", server))
    assert job["metadata"]["name"].endswith(named.removeprefix("package-")[:10])
    assert "components/expose" in (tmp_path / "cluster/overlays/production/kustomization.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--target", "compose", "--namespace", "x", "--replicas", "2"), "--namespace, --replicas: goes with"),
        (("--target", "kubernetes", "--expose", "nginx"), "write ingress:CLASS"),
        (("--target", "kubernetes", "--packages", "models"), "write s3://bucket/folder"),
        (("--target", "kubernetes", "--redis", "redis://user:secret@host:6379"), "write redis://HOST:PORT"),
        (("--target", "kubernetes", "--replicas", "3:1"), "LEAST:MOST"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = run("llama-3.1-8b-fp8", *words, "--output", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert text in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("name", CASES[:2])
def test_kustomize_puts_it_together(name: str, tmp_path: Path) -> None:
    """Every folder that is applied: with the recipe's ConfigMap found by its hash, and patches that hit."""
    for path, text in case(name).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    folders = ["namespace", "overlays/plain", "overlays/production"]
    folders += ["build"] if (tmp_path / "build").exists() else []
    for folder in folders:
        done = subprocess.run(
            ["kubectl", "kustomize", str(tmp_path / folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        made = documents(done.stdout)
        assert [fault for one in made for fault in faults(one, VERSIONS[-1])] == []
        configs = {one["metadata"]["name"] for one in made if one["kind"] == "ConfigMap"}
        for _, pod in pod_specs({"made.yaml": done.stdout}):
            mounted = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
            assert mounted <= configs
        if folder == "overlays/production":
            servers = [one for one in made if one["kind"] in ("Deployment", "LeaderWorkerSet")]
            counted = {one["metadata"]["name"] for one in servers if "replicas" in one["spec"]}
            assert counted <= {"llama-redis"}
            gateway = next(one for one in servers if one["metadata"]["name"] == "llama-gateway")
            assert "--keys" in gateway["spec"]["template"]["spec"]["containers"][0]["args"]


def test_a_deployment_alone_does_not_change(tmp_path: Path) -> None:
    """What a cluster is given changes nothing for one machine."""
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
    plain = ManifestOptions(recipe=recipe_text(recipe))
    cluster = replace(plain, kubernetes=KubernetesOptions(recipe, "llama"))
    for target in ("docker", "compose", "systemd"):
        one, other = (
            manifest_files(target, ONE, tmp_path, ServeOptions(PORTS), more)  # type: ignore[arg-type]
            for more in (plain, cluster)
        )
        assert one == other


def test_a_group_is_launched_over_all_its_machines() -> None:
    """Machines that share the ranks are filled one after the other, and one host file holds for all blocks."""
    from pipeline.serving.launch import HostGroup

    group = HostGroup(("a", "b"), 8, "/tmp/hosts", "/tmp/ssh_config")
    plan = plan_launch(MANY, LaunchContext(PORTS, "x-", group=group))
    assert plan.environment["OMPI_MCA_orte_default_hostfile"] == "/tmp/hosts"
    assert plan.environment["OMPI_MCA_plm_rsh_args"] == "-F /tmp/ssh_config"
    assert plan.command[:3] == ("mpirun", "--map-by", "slot")
    assert "--oversubscribe" not in plan.command
    assert plan.command.count(":") == 15
    with pytest.raises(InvalidInput, match="there are 2 machines with 4 GPUs each"):
        plan_launch(MANY, LaunchContext(PORTS, "x-", group=replace(group, slots=4)))
