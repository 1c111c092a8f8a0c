"""What servers of a cluster serve, how that is exchanged, and models over several machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InvalidInput
from pipeline.recipe import Recipe, packaged
from pipeline.resources import parse_yaml
from pipeline.serving.launch_gpu import CHECKED, GpuPlace, plan_launch
from tests.support import LLAMA_DRAFT
from tests.support.kubernetes import (
    CASES,
    MANY,
    arguments,
    case,
    containers,
    documents,
    every_case,
    objects,
    pod_specs,
    run,
)


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
    (group,) = (
        manifest for _, manifest in objects(case("several-nodes")) if manifest["kind"] == "LeaderWorkerSet"
    )
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[key]["spec"] for key in ("leaderTemplate", "workerTemplate"))
    per_pod = [int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in (leader, worker)]
    assert per_pod[0] + (template["size"] - 1) * per_pod[1] == MANY.launch.world_size
    environment = {variable["name"]: variable["value"] for variable in leader["containers"][0]["env"]}
    assert environment["PIPELINE_GROUP_GPUS"] == str(per_pod[0])
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in (leader, worker):
        (ssh,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "ssh")
        assert ssh["secretName"] == "llama-ssh"
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    shm = next(volume for volume in leader["volumes"] if volume["name"] == "shm")["emptyDir"]["sizeLimit"]
    alone = plan_launch(MANY, CHECKED).shm_mib
    assert 0 < int(shm.removesuffix("Mi")) < alone


def test_ranks_of_a_model_stay_together_and_groups_apart() -> None:
    """Machines of one group are in one zone, by the key that LeaderWorkerSet gives the pods of each; leaders alone are
    spread, so that nothing pulls a group apart.
    """
    (group,) = (
        manifest for _, manifest in objects(case("several-nodes")) if manifest["kind"] == "LeaderWorkerSet"
    )
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[key]["spec"] for key in ("leaderTemplate", "workerTemplate"))
    for pod in (leader, worker):
        (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]
        assert "nodeAffinity" in pod["affinity"]
    assert "topologySpreadConstraints" not in worker
    (spread,) = leader["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    (deployment,) = (
        manifest
        for _, manifest in objects(case("one-node"))
        if manifest["kind"] == "Deployment" and "triton" in str(manifest["metadata"])
    )
    assert len(deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]) == 2


def test_a_packaged_recipe_is_spread_over_two_machines(tmp_path: Path) -> None:
    """By the command as the recipe says it: a rank for each GPU, started by the leader."""
    name = "llama-3.3-70b-two-nodes"
    (line,) = (
        line for line in packaged()[name].read_text().splitlines() if line.startswith("# Over the machines")
    )
    words = line.partition("pipeline deploy ")[2].split()
    done = run(*words, "--output", str(tmp_path / "cluster"), store=tmp_path / "store")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "cluster/base/server.yaml").read_text()
    (group,) = (document for document in documents(text) if document["kind"] == "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    gpus = template["leaderTemplate"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert (template["size"], gpus) == (2, "4")


def test_a_recipe_with_a_draft_says_how_it_could_be_spread(tmp_path: Path) -> None:
    few = ("--set", "kubernetes.gpus_per_node=2")
    words = ("llama-3.3-70b-fp8", "--set", LLAMA_DRAFT, "--target", "kubernetes", *few, "--dry-run")
    refused = run(*words, store=tmp_path)
    assert isinstance(refused.exception, InvalidInput)
    assert "--set draft=null" in str(refused.exception)
    assert run(*words, "--set", "draft=null", store=tmp_path).exit_code == 0


def test_the_cache_is_one_for_all_gateways() -> None:
    recipe = parse_yaml(case("one-node")["base/recipe.yaml"])
    assert recipe["cache"]["backend"] == {"kind": "redis", "url": "redis://llama-redis:6379/0"}
    load_recipe_text(case("one-node")["base/recipe.yaml"])
    # What is built in the cluster is the recipe as it was given.
    assert parse_yaml(case("one-node")["build/recipe.yaml"])["cache"]["backend"]["kind"] == "sqlite"


def load_recipe_text(text: str) -> None:
    Recipe.model_validate(parse_yaml(text), context={"folder": Path("/")})


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


def test_a_group_is_launched_over_all_its_machines() -> None:
    """Machines that share the ranks are filled one after the other, and one host file holds for all blocks."""
    from pipeline.serving.launch import HostGroup

    group = HostGroup(("a", "b"), 8, "/tmp/hosts", "/tmp/ssh_config")
    plan = plan_launch(MANY, CHECKED, GpuPlace(group=group))
    assert plan.environment["OMPI_MCA_orte_default_hostfile"] == "/tmp/hosts"
    assert plan.environment["OMPI_MCA_plm_rsh_args"] == "-F /tmp/ssh_config"
    assert plan.command[:3] == ("mpirun", "--map-by", "slot")
    assert "--oversubscribe" not in plan.command
    assert plan.command.count(":") == 15
    with pytest.raises(InvalidInput, match="there are 2 machines with 4 GPUs each"):
        plan_launch(MANY, CHECKED, GpuPlace(group=replace(group, slots=4)))
