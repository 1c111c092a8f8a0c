"""`pipeline deploy --target kubernetes`: what is refused, and what is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.deploy.cluster import resource_name
from pipeline.errors import InvalidInput, UserError
from pipeline.recipe import load_recipe
from pipeline.resources import parse_yaml
from pipeline.triton.deployment import LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.kubernetes import (
    CPU,
    MANY,
    PUBLIC_KEY,
    cluster_files,
    run,
)


def test_what_cannot_be_run_is_refused_with_all_reasons() -> None:
    recipe = load_recipe(
        "llama-3.1-8b-fp8",
        ("name=llama", "kubernetes.gpus_per_node=3", "gateway.limits_redis='redis://x:1/0'"),
    )
    with pytest.raises(InvalidInput) as caught:
        cluster_files(recipe, MANY, gpus=(0, 1), packaged={"folder": Path("/a folder")})
    for word in ("package", "--gpus = 0,1", "kubernetes.gpus_per_node = 3", "kubernetes.redis, without"):
        assert word in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        cluster_files(recipe, CPU, gpus=(0, 1))
    for word in ("triton.image: no image carries that runtime", "--gpus = 0,1"):
        assert word in str(caught.value)


def test_workers_of_one_machine_cannot_be_spread() -> None:
    """TensorRT-LLM's orchestrator starts its workers where it is itself."""
    launch = LaunchSpec(
        mode="orchestrator", world_size=8, engine_models=("tensorrt_llm",),
        gpu_device_ids={"tensorrt_llm": (tuple(range(8)), tuple(range(8, 16)))},
    )  # fmt: skip
    recipe = load_recipe("llama-3.3-70b-fp8", ("name=llama",))
    with pytest.raises(InvalidInput, match="cannot be spread over several"):
        cluster_files(recipe, gpu_deployment(launch, gpus=16))


def test_names_are_those_of_kubernetes() -> None:
    label = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
    for name in ("llama-3.1-8b-fp8", "4o", "a" * 63, "x.y-" + "z" * 50 + ".1", "-"):
        made = resource_name(name)
        assert label.fullmatch(made)
        assert len(f"{made}-triton-0-15") <= 63
    assert resource_name("a" * 63) != resource_name("a" * 62 + "b")


def test_the_command_writes_a_recipe_that_is_not_built_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from pipeline.cli.deploy import command

    words = ["llama-3.1-8b-fp8", "--target", "kubernetes", "--output", str(tmp_path / "cluster")]
    way_in = "kubernetes={hostname: llm.example, expose: 'gateway:infra/public'}"
    done = CliRunner().invoke(command, [*words, "--set", way_in])
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'cluster'}" in done.stdout
    assert "build/ in the cluster" in done.stderr
    job = parse_yaml((tmp_path / "cluster/build/job.yaml").read_text())
    server = (tmp_path / "cluster/base/server.yaml").read_text()
    (named,) = set(re.findall(r"subPath: artifacts/(package-[0-9a-f]{20})", server))
    assert job["metadata"]["name"].endswith(named.removeprefix("package-")[:10])
    assert "components/expose" in (tmp_path / "cluster/overlays/production/kustomization.yaml").read_text()


def test_what_a_person_changed_is_not_written_again(tmp_path: Path) -> None:
    words = ("llama-3.1-8b-fp8", "--target", "kubernetes", "--output", str(tmp_path / "cluster"))
    assert run(*words, store=tmp_path).exit_code == 0
    own, other = (
        tmp_path / f"cluster/{path}" for path in ("overlays/site/kustomization.yaml", "base/server.yaml")
    )
    for file in (own, other):
        file.write_text("# changed\n")
    assert run(*words, store=tmp_path).exit_code == 0
    assert own.read_text() == "# changed\n"
    assert other.read_text() != "# changed\n"


def test_the_key_of_the_environment_is_that_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages.pem").write_text(PUBLIC_KEY)
    monkeypatch.setenv("PIPELINE_VERIFY_KEY", str(tmp_path / "packages.pem"))
    words = ("llama-3.1-8b-fp8", "--target", "kubernetes", "--output", str(tmp_path / "cluster"))
    done = run(*words, store=tmp_path)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "cluster/base/packages.pem").read_text() == PUBLIC_KEY
    monkeypatch.setenv("PIPELINE_VERIFY_KEY", str(tmp_path / "none.pem"))
    refused = run(*words, store=tmp_path)
    assert isinstance(refused.exception, UserError)
    assert "PIPELINE_VERIFY_KEY" in str(refused.exception)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("kubernetes.expose=nginx", "write ingress:CLASS"),
        ("kubernetes.packages=models", "write s3://bucket/folder"),
        ("kubernetes.redis='redis://user:secret@host:6379'", "write redis://HOST:PORT"),
        ("kubernetes.min_replicas=5", "kubernetes.max_replicas: is less than kubernetes.min_replicas, which is 5"),
        ("kubernetes.expose='ingress:nginx'", "add kubernetes.hostname"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(override: str, text: str, tmp_path: Path) -> None:
    words = ("--target", "kubernetes", "--set", override, "--output", str(tmp_path / "out"))
    done = run("llama-3.1-8b-fp8", *words)
    assert getattr(done.exception, "exit_code", done.exit_code) == 2
    assert text in f"{done.output}{done.exception}"
    assert not (tmp_path / "out").exists()
