"""Reservations of pods beside what they write: packaged recipes of every kind, by a volume and by an object store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.gateway.api.batches.endpoints import _UPLOADS_OF_TENANT
from pipeline.gateway.api.batches.storage import StorageLimits
from pipeline.models.adapter import Adapter
from pipeline.plan.artifact_sizes import ArtifactSizes, artifact_sizes
from pipeline.plan.memory import plan_memory
from pipeline.plan.memory.recipe_spec import deployment_spec
from pipeline.plan.model_facts import facts_from_sizes
from pipeline.plan.parallelism import parallelism
from pipeline.plan.preflight.context import make_context
from pipeline.plan.preflight.needs import build_bytes, build_memory_bytes, calibrated_weights
from pipeline.prepare.model_probe import probe_models
from pipeline.recipe import Recipe, load_recipe, packaged
from pipeline.runtimes import runtime_of
from pipeline.store import Store
from tests.support.kubernetes import (
    Object,
    cluster_files,
    objects,
    pod_specs,
    recipe_text,
)

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
PLACES = {"volume": None, "object store": "s3://models/packages"}
# GPUs of a machine; a recipe that can be spread is, where it has more.
MACHINES = {"one machine": 8, "several machines": 4}
SPREAD = "llama-3.3-70b-two-nodes"
# Drafted, with an Eagle-3 head, calibrated to four bits, split for ranks, published quantized.
RECIPES = (
    "llama-3.3-70b-fp8", "llama-3.1-8b-eagle3", "llama-3.1-8b-int4-awq", "llama-3.3-70b-nvfp4", "mixtral-8x7b", SPREAD,
    "gpt-oss-120b", "deepseek-r1", "nemotron-3-super", "tiny-cpu",
)  # fmt: skip


def size(text: str) -> int:
    return int(text[:-2]) * _UNITS[text[-2:]]


@cache
def known(name: str) -> tuple[Recipe, Mapping[str, Any]]:
    recipe = load_recipe(name, ("cache.enabled=true",))
    probes = probe_models(recipe, Store(Path("/nonexistent/store")), offline=True)
    return recipe, {role: probe.sizes for role, probe in probes.items() if probe.sizes is not None}


@cache
def files(name: str, place: str, machine: str, *, sized: bool = True) -> dict[str, str]:
    recipe, models = known(name)
    deployment = runtime_of(recipe).preview_deployment(recipe, models)
    sizes = artifact_sizes(recipe, models) if sized else None
    image = "own/serve:1" if deployment.requirements is None else None
    return cluster_files(
        recipe,
        deployment,
        packaged={"recipe_text": recipe_text(recipe), "sizes": sizes},
        triton={"image": image},
        kubernetes={"packages": PLACES[place], "gpus_per_node": MACHINES[machine]},
    )


def every_deployment() -> Iterator[Any]:
    for name in RECIPES:
        for place in PLACES:
            for machine in MACHINES if name == SPREAD else ("one machine",):
                yield pytest.param(name, place, machine, id=f"{name}, {place}, {machine}")


every = pytest.mark.parametrize(("name", "place", "machine"), [*every_deployment()])


def limit(pod: Object, resource: str) -> int:
    """The limit of a pod as a kubelet works it out: all containers together, or an init container alone."""

    def of(container: Object) -> int:
        return size(container["resources"]["limits"].get(resource, "0Gi"))

    return max(sum(map(of, pod["containers"])), *map(of, pod.get("initContainers", ())), 0)


def volumes(pod: Object) -> dict[str, Object]:
    return {volume["name"]: volume for volume in pod["volumes"]}


@every
def test_no_pod_is_evicted_for_what_it_may_write(name: str, place: str, machine: str) -> None:
    """Folders on the node's disk and logs within `ephemeral-storage`, folders in memory within `memory`; and all that
    is allowed is reserved, so that the scheduler looks for a node that has it.
    """
    pods = list(pod_specs(files(name, place, machine)))
    assert {component for component, _ in pods} >= {"triton", "gateway", "redis"}
    for component, pod in pods:
        empty = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
        on_disk = sum(size(volume["sizeLimit"]) for volume in empty if "medium" not in volume)
        in_memory = sum(size(volume["sizeLimit"]) for volume in empty if volume.get("medium") == "Memory")
        # Five files of 10 MiB, for each container.
        logs = 50 * 2**20 * len([*pod.get("initContainers", ()), *pod["containers"]])
        assert on_disk + logs <= limit(pod, "ephemeral-storage"), component
        assert in_memory < limit(pod, "memory"), component
        for container in pod["containers"]:
            resources = container["resources"]
            for resource in ("ephemeral-storage", "memory"):
                assert resources["requests"][resource] == resources["limits"][resource]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert {volume["name"] for volume in pod["volumes"]} - {"verify"} <= mounted


@every
def test_a_package_fits_into_the_folder_that_it_is_fetched_into(name: str, place: str, machine: str) -> None:
    recipe, models = known(name)
    spec = deployment_spec(recipe, models, ram_bytes=64 * 2**30)
    assert spec is not None
    memory = plan_memory(spec)
    planned = sum(line.bytes for rank in memory.ranks for line in rank.lines if line.group == "weights")
    servers = [pod for component, pod in pod_specs(files(name, place, machine)) if component == "triton"]
    assert len(servers) == (2 if machine == "several machines" else 1)
    for pod in servers:
        package = volumes(pod)["package"]
        if place == "object store":
            assert size(package["emptyDir"]["sizeLimit"]) > planned
        in_memory = size(volumes(pod)["shm"]["emptyDir"]["sizeLimit"])
        assert limit(pod, "memory") > in_memory + planned / len(servers)


@every
def test_the_job_reserves_what_a_build_leaves(name: str, place: str, machine: str) -> None:
    """Checkpoints, calibrated ones, engines, the package; memory to load what is calibrated, and to compile."""
    recipe, models = known(name)
    made = files(name, place, machine)
    context = make_context(recipe, facts_from_sizes(models))
    least, sizes = build_bytes(context), artifact_sizes(recipe, models)
    assert least is not None
    # An adapter is fetched, and packaged.
    lora = {"tone": Adapter(file_bytes=7 * 2**30)}
    with_lora = make_context(
        recipe, {role: replace(facts, adapters=lora) for role, facts in facts_from_sizes(models).items()}
    )
    assert build_bytes(with_lora) == least + 14 * 2**30
    assert artifact_sizes(recipe, models, lora).build >= sizes.build + 14 * 2**30
    store = [manifest for _, manifest in objects(made) if manifest["kind"] == "PersistentVolumeClaim"]
    jobs = [pod for component, pod in pod_specs(made) if component == "build"]
    assert len(jobs) == (0 if name == "tiny-cpu" else 1)
    if place == "volume":
        (claim,) = store
        # Roll-backs need packages that were served before.
        assert size(claim["spec"]["resources"]["requests"]["storage"]) > least + 5 * sizes.package
    for pod in jobs:
        if place == "object store":
            assert not store
            assert size(volumes(pod)["store"]["emptyDir"]["sizeLimit"]) > least + sizes.weights
        (builder,) = (
            container
            for container in (*pod.get("initContainers", ()), *pod["containers"])
            if container["name"] == "build"
        )
        memory = size(builder["resources"]["limits"]["memory"])
        assert memory > max(build_memory_bytes(context), 2 * calibrated_weights(context))


@every
def test_a_gateway_has_room_for_the_uploads_of_a_tenant(name: str, place: str, machine: str) -> None:
    """They come into /tmp, and are kept on a server or not at all; of its own, a gateway has encoders alone."""
    (pod,) = (pod for component, pod in pod_specs(files(name, place, machine)) if component == "gateway")
    uploads = _UPLOADS_OF_TENANT * (StorageLimits().file_bytes + 2**20)
    assert size(volumes(pod)["tmp"]["emptyDir"]["sizeLimit"]) > uploads
    assert any(word.startswith("gateway.limits_redis=") for word in pod["containers"][0]["args"])
    assert ("store" in volumes(pod)) is (known(name)[0].cache.semantic is not None)


@pytest.mark.parametrize("name", [name for name in packaged() if "pytorch" in packaged()[name].read_text()])
def test_servers_of_a_packaged_recipe_have_its_gpus(name: str) -> None:
    """One pod, or a leader and workers, each with all GPUs of its machine; and a process of the launch for each GPU."""
    recipe, models = known(name)
    ranks = parallelism(recipe, "target").world
    machines = -(-ranks // MACHINES["one machine"])
    servers = [
        pod for component, pod in pod_specs(files(name, "volume", "one machine")) if component == "triton"
    ]
    assert len(servers) == min(machines, 2)
    for pod in servers:
        (gpus,) = {
            found
            for container in pod["containers"]
            if (found := container["resources"]["limits"].get("nvidia.com/gpu"))
        }
        assert int(gpus) * machines == ranks
    assert runtime_of(recipe).preview_deployment(recipe, models).launch.world_size == ranks


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "tiny-cpu"])
def test_a_package_of_which_only_the_weights_are_known_has_room(name: str) -> None:
    """As `--package` alone has it: what a recipe would reserve, or more."""
    recipe, models = known(name)
    exact = artifact_sizes(recipe, models)
    bound = ArtifactSizes.of_weights(exact.weights)
    assert bound.package >= exact.package
    assert bound.build >= exact.build
    (pod,) = (
        pod for component, pod in pod_specs(files(name, "object store", "one machine", sized=False))
        if component == "triton"
    )  # fmt: skip
    package = size(volumes(pod)["package"]["emptyDir"]["sizeLimit"])
    assert limit(pod, "ephemeral-storage") > package
