"""Who may talk to whom in a cluster, what is led in from outside, what is secret, and what is signed."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from pipeline.recipe import load_recipe
from pipeline.resources import parse_yaml
from tests.support.kubernetes import (
    CASES,
    PUBLIC_KEY,
    Object,
    case,
    cluster_files,
    every_case,
    objects,
    pod_specs,
    recipe_text,
)


def policies(files: dict[str, str]) -> list[Object]:
    return [manifest["spec"] for _, manifest in objects(files) if manifest["kind"] == "NetworkPolicy"]


def may_pass(files: dict[str, str], sender: str | None, receiver: str | None, port: int) -> bool:
    """What the network does with a connection between components; None is somebody else of the same namespace."""

    def labels(component: str | None) -> dict[str, str]:
        if component is None:
            return {"app": "other"}
        return next(
            template["metadata"]["labels"]
            for _, manifest in objects(files)
            for template in [manifest.get("spec", {}).get("template") or
                             manifest.get("spec", {}).get("leaderWorkerTemplate", {}).get("leaderTemplate") or {}]
            if template and template["metadata"]["labels"]["app.kubernetes.io/name"] == component
        )  # fmt: skip

    def matches(selector: Object, given: dict[str, str]) -> bool:
        out = any(
            given.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ())
            if rule["operator"] == "NotIn"
        )  # fmt: skip
        return not out and selector.get("matchLabels", {}).items() <= given.items()

    def allowed(direction: str, here: dict[str, str], there: dict[str, str]) -> bool:
        of_here = [policy for policy in policies(files) if matches(policy["podSelector"], here)]
        if not of_here:
            return True
        peer = "to" if direction == "egress" else "from"
        return any(
            (
                peer not in rule
                or any(matches(p["podSelector"], there) for p in rule[peer] if "podSelector" in p)
            )
            and ("ports" not in rule or port in [entry["port"] for entry in rule["ports"]])
            for policy in of_here
            for rule in policy.get(direction, ())
        )

    sent, other = labels(sender), labels(receiver)
    return allowed("egress", sent, other) and allowed("ingress", other, sent)


def reaches(files: dict[str, str], component: str, address: str, port: int) -> bool:
    """Whether pods of a component may connect to an address outside of the cluster."""
    rules = [
        rule for policy in policies(files) for rule in policy.get("egress", ())
        if policy["podSelector"]["matchLabels"].get("app.kubernetes.io/name", component) == component
    ]  # fmt: skip
    here = ip_address(address)
    return any(
        port in [entry["port"] for entry in rule.get("ports", ())]
        and (
            "to" not in rule
            or any(here in ip_network(peer["ipBlock"]["cidr"]) for peer in rule["to"] if "ipBlock" in peer)
        )
        for rule in rules
    )


METADATA, EKS, GKE, WORLD = "169.254.169.254", "169.254.170.23", "169.254.169.252", "52.216.0.1"


@pytest.mark.parametrize(
    ("packages", "open_to", "closed_to"),
    [
        ("s3://models/packages", [(WORLD, 443), (METADATA, 80), (EKS, 80), ("fd00:ec2::23", 80)], [(WORLD, 80)]),
        ("gs://models/packages", [(WORLD, 443), (METADATA, 80), (GKE, 988)], [(EKS, 80)]),
        ("az://models/packages", [(WORLD, 443), (METADATA, 80)], [(EKS, 80)]),
        ("s3://models/packages?endpoint=http://minio:9000", [(WORLD, 9000)], [(WORLD, 443), (METADATA, 80)]),
        ("https://models.example:8443/packages", [(WORLD, 8443)], [(WORLD, 443), (METADATA, 80)]),
        (None, [], [(WORLD, 443), (METADATA, 80)]),
    ],
)  # fmt: skip
def test_pods_reach_what_the_deployment_names(
    packages: str | None, open_to: list[tuple[str, int]], closed_to: list[tuple[str, int]]
) -> None:
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
    files = cluster_files(recipe, kubernetes={"packages": packages})
    for component in ("triton", "gateway"):
        assert [place for place in open_to if not reaches(files, component, *place)] == []
        assert [place for place in closed_to if reaches(files, component, *place)] == []
    assert not any(reaches(files, "redis", *place) for place in (*open_to, *closed_to))


def test_a_gateway_reaches_the_hub_for_encoders_alone() -> None:
    def opened(*overrides: str) -> bool:
        recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", *overrides))
        files = cluster_files(recipe, packaged={"recipe_text": recipe_text(recipe)})
        assert not reaches(files, "triton", "3.5.0.1", 443)
        return reaches(files, "gateway", "3.5.0.1", 443)

    assert opened("cache={enabled: true, semantic: {}}")
    assert not opened("cache={enabled: true}")


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


def test_gateways_reach_the_database_that_the_recipe_names() -> None:
    """It has their files, batches and stored responses, also where no answers are cached in it."""
    url = "postgresql://pipeline@db.infra:5433/state"
    backend = (f"cache.backend={{kind: pgvector, url: '{url}'}}",)
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", *backend))
    files = cluster_files(recipe, packaged={"recipe_text": recipe_text(recipe)})
    assert may_pass(files, "gateway", None, 5433)
    assert not may_pass(files, "triton", None, 5433)
    assert url in files["base/recipe.yaml"]
    (pod,) = (pod for component, pod in pod_specs(files) if component == "gateway")
    secrets = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in pod["containers"][0]["env"]
        if "valueFrom" in variable
    }
    assert secrets == {"PIPELINE_CACHE_PASSWORD": "llama-redis", "PGPASSWORD": "llama-postgres"}


@pytest.mark.parametrize("name", CASES[:2])
def test_what_is_led_in_from_outside_asks_for_keys(name: str) -> None:
    """The API with its keys, and nothing that everybody may read, such as the metrics of all tenants."""
    (way,) = (manifest for _, manifest in objects(case(name)) if manifest["kind"] in ("Ingress", "HTTPRoute"))
    (rule,) = way["spec"]["rules"]
    paths = [path["path"] for path in rule["http"]["paths"]] if "http" in rule else [
        match["path"]["value"] for match in rule["matches"]
    ]  # fmt: skip
    assert set(paths) == {"/v1", "/openai"}
    overlay = parse_yaml(case(name)["overlays/production/kustomization.yaml"])
    assert {"../../components/expose", "../../components/api-keys"} <= set(overlay["components"])
    assert "components" not in parse_yaml(case(name)["overlays/plain/kustomization.yaml"])


# What is secret, and what is signed.


@every_case
def test_redis_asks_for_a_password(name: str) -> None:
    """One that whoever applies the manifests makes; no list of processes shows it, and no file has it."""
    pods = dict(pod_specs(case(name)))
    (gateway,) = pods["gateway"]["containers"]
    (asked,) = (variable for variable in gateway["env"] if variable["name"] == "PIPELINE_CACHE_PASSWORD")
    secret = asked["valueFrom"]["secretKeyRef"]
    if name == "object-store":
        assert secret["optional"] is True, "that server is somebody else's"
        return
    (redis,) = pods["redis"]["containers"]
    (own,) = redis["env"]
    assert own["valueFrom"]["secretKeyRef"] == secret
    assert "optional" not in secret, "without it neither starts"
    assert f"create secret generic {secret['name']} " in case(name)["base/redis.yaml"]
    assert "requirepass" in redis["command"][-1]
    assert "--requirepass" not in redis["command"][-1]


def test_packages_are_fetched_by_their_content_and_held_against_the_key() -> None:
    """A name says what a package was made from; the digest beside it what it holds, and the key by whom."""
    files = case("object-store")
    pods = dict(pod_specs(files))
    for component in ("triton", "gateway"):
        (fetch,) = pods[component]["initContainers"]
        assert f"package-{'0' * 20}@sha256:{'c' * 64}" in fetch["args"]
        assert {variable["name"]: variable["value"] for variable in fetch["env"]} == {
            "PIPELINE_VERIFY_KEY": "/etc/pipeline/verify/packages.pem"
        }
        assert verified_by(pods[component], fetch)
    (server,) = pods["triton"]["containers"]
    assert verified_by(pods["triton"], server), "what is served is held against it again"
    assert files["base/packages.pem"] == PUBLIC_KEY
    assert "PIPELINE_VERIFY_KEY" not in case("one-node")["base/server.yaml"]


def verified_by(pod: Object, container: Object) -> bool:
    """Whether a container has the public key where its environment names it."""
    (path,) = (
        variable["value"] for variable in container["env"] if variable["name"] == "PIPELINE_VERIFY_KEY"
    )
    (mount,) = (
        mount
        for mount in container["volumeMounts"]
        if path.startswith(f"{mount['mountPath']}/") and mount["name"] == "verify"
    )
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    return bool(volume["configMap"]["name"] == "llama-verify")
