"""Sections about the programs around a package: their values, what depends on them, and what several recipes share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput, UserError
from pipeline.frontend.serve import ServeStart, _check_distinct
from pipeline.gateway.settings import GatewaySettings, GatewayStart, ListenSettings
from pipeline.plan.settings import PackageSettings
from pipeline.prepare import prepare
from pipeline.recipe import SERVED_SECTIONS, Recipe, load_recipe
from pipeline.serving.ports import Ports
from pipeline.store import Store

CHANGED = (
    "gateway={max_waiting: 3, allowed_hosts: [llm.example], workers: 2, traces: 'http://localhost:4318'}",
    "triton={grpc_port: 9001, image: other, memory: 64G, container: false, log: triton.log}",
    "deploy={port: 9000, user: model, gateway_image: other}",
    "kubernetes={namespace: models, min_replicas: 2, hostname: llm.example, expose: 'ingress:nginx'}",
)


def recipes(*overrides: str) -> list[Recipe]:
    """Two recipes; the overrides are those of the second."""
    return [load_recipe("tiny-cpu"), load_recipe("tiny-cpu", ("name=other", *overrides))]


def test_nothing_that_is_built_depends_on_them(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    names = {override.partition("=")[0] for override in CHANGED}
    assert names == SERVED_SECTIONS - {"cache"}
    before, after = (
        prepare(load_recipe("tiny-cpu", sets), store, offline=True).plan for sets in ((), CHANGED)
    )
    assert [step.key.digest for step in before] == [step.key.digest for step in after]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gateway.max_waiting=-1", "must be at least 0"),
        ("gateway.workers=0", "must be at least 1"),
        ("gateway.metric_names=[other]", "one of vllm, gen_ai"),
        ("gateway.limits_redis='http://x'", "is not the address of a Redis or Valkey server"),
        ("gateway.limits_redis='redis://:secret@x:1'", "holds a password"),
        ("triton.grpc_port=70000", "must be 1 to 65535"),
        ("triton.http_port=8000", "is given, but serving.http is false"),
        ("triton.start_timeout_s=0", "must be at least 1"),
        ("kubernetes.namespace=A_b", "write at most 63 lower-case letters"),
    ],
)
def test_values_that_cannot_be_are_refused(override: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_recipe("tiny-cpu", (override,))
    (fault,) = caught.value.faults
    assert fault.key.startswith(override.partition("=")[0])
    assert said in f"{fault.problem} {fault.fix}"


def test_paths_are_relative_to_the_folder_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = "name: mine\nmodel: {source: 'local:x'}\n"
    text += "limits: {max_input_tokens: 8, max_output_tokens: 8, max_concurrency: 1}\n"
    file.write_text(f"{text}gateway: {{batch_folder: batches}}\ntriton: {{log: /var/log/triton.log}}\n")
    recipe = load_recipe(file)
    assert recipe.gateway.batch_folder == tmp_path / "batches"
    assert recipe.triton.log == Path("/var/log/triton.log")


def test_one_gateway_has_the_section_that_all_its_recipes_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_LIMITS_REDIS", raising=False)
    same = ("gateway.max_waiting=3", "gateway.metric_names=[vllm]")
    agreed = [load_recipe("tiny-cpu", same), load_recipe("tiny-cpu", ("name=other", *same))]
    settings = GatewaySettings.of(ListenSettings(host="::1"), agreed)
    assert (settings.host, settings.max_waiting, settings.metric_names) == ("::1", 3, ("vllm",))
    assert GatewaySettings.of(settings, agreed) == settings
    assert GatewaySettings.of(ListenSettings(), []) == GatewaySettings()
    with pytest.raises(InvalidInput) as caught:
        GatewaySettings.of(ListenSettings(), recipes(*same))
    told = {fault.key: (fault.problem, fault.fix) for fault in caught.value.faults}
    assert told.keys() == {"gateway.max_waiting", "gateway.metric_names"}
    assert told["gateway.max_waiting"] == (
        "differs: 256 in tiny-cpu, 3 in other",
        "--set gateway.max_waiting=VALUE sets it in all",
    )


def test_the_environment_names_the_server_of_limits_where_the_recipe_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPELINE_LIMITS_REDIS", "redis://environment:6379/0")
    own = load_recipe("tiny-cpu", ("gateway.limits_redis='redis://own:6379/0'",))
    assert GatewaySettings.of(ListenSettings(), [own]).limits_redis == "redis://own:6379/0"
    assert GatewaySettings.of(ListenSettings(), recipes()).limits_redis == "redis://environment:6379/0"
    monkeypatch.setenv("PIPELINE_LIMITS_REDIS", "http://x")
    with pytest.raises(UserError, match=r"\$PIPELINE_LIMITS_REDIS: http://x: is not the address"):
        GatewaySettings.of(ListenSettings(), recipes())


def test_a_message_to_a_child_has_all_of_it(tmp_path: Path) -> None:
    recipe = load_recipe("tiny-cpu", CHANGED)
    settings = GatewaySettings.of(ListenSettings(port=0), [recipe])
    start = GatewayStart(recipes=("tiny-cpu",), settings=settings, store=tmp_path)
    assert GatewayStart.from_descriptor(os.dup(start.to_descriptor())) == start
    served = ServeStart(
        recipes=("tiny-cpu",), overrides=CHANGED, store=None, wanted=PackageSettings(), gpus=(0, 1)
    )
    assert ServeStart.from_descriptor(os.dup(served.to_descriptor())) == served


def test_several_recipes_have_ports_and_logs_of_their_own() -> None:
    _check_distinct(recipes("triton={grpc_port: 9001, metrics_port: 9001}"))
    both = ("triton={grpc_port: 9001, log: /tmp/triton.log}",)
    with pytest.raises(InvalidInput) as caught:
        _check_distinct([load_recipe("tiny-cpu", both), load_recipe("tiny-cpu", ("name=other", *both))])
    assert [str(fault.value) for fault in caught.value.faults] == ["9001", "/tmp/triton.log"]
    assert all("tiny-cpu and by other" in fault.problem for fault in caught.value.faults)
    second = Ports.choose(load_recipe("tiny-cpu", ("triton.grpc_port=9001",)), usual=False)
    assert (second.grpc, second.metrics == 8002, second.movable) == (9001, False, False)
