"""Values in templates: whatever they hold, they are one scalar, and add no key, line or variable."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from pipeline.deploy.package import DeployedPackage
from pipeline.deploy.targets import deployment_files
from pipeline.deploy.templates import render, yaml_block, yaml_scalar
from pipeline.errors import UserError
from pipeline.recipe import load_recipe
from pipeline.serving.launch import ServeOptions
from tests.support.kubernetes import (
    ONE,
    PORTS,
    cluster_files,
    documents,
    objects,
    pod_specs,
    with_sections,
)

HOSTILE = (
    "", "true", "8080", "1e3", "null", "~", "a: b", "a #b", "- a", "{a: b}", "[a", "a, b}", "'", '"', "\\",
    "*a", "&a", "!!a", "%a", "@a", "`a", "two\nlines", "two\n\nlines: x\n", "tab\there", " blank ",
    "\u2028", "\x7f", "😀 ü", "{{ c.name }}",
    "{% raw %}", "$HOME ${HOME}", "---", "...", "x\r\ny", "<b>&amp;",
)  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_scalar_wherever_it_stands(value: str) -> None:
    text = yaml_scalar(value)
    assert "\n" not in text
    assert yaml.safe_load(f"a: {text}\nb: [{{c: {text}}}, {text}] # {text}\n") == {
        "a": value,
        "b": [{"c": value}, value],
    }
    assert yaml.safe_load(yaml_block({"a": [value]})) == {"a": [value]}


@cache
def cluster_of(own: str) -> dict[str, str]:
    """A cluster with a value of the user wherever one may stand."""
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama",))
    return cluster_files(
        recipe, packaged={"recipe_text": "model: {source: 'hf:a/b'}\n"}, triton={"image": own or "image"},
        deploy={"gateway_image": own or "image", "runbook_url": own},
        kubernetes={"build_image": own, "storage_class": own, "hostname": own, "expose": f"ingress:{own}"},
    )  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_in_a_cluster(value: str) -> None:
    plain, hostile = cluster_of("x"), cluster_of(value)
    pods = dict(pod_specs(hostile))
    assert pods["triton"]["containers"][0]["image"] == (value or "image")
    assert pods["gateway"]["containers"][0]["image"] == (value or "image")
    (ingress,) = (manifest for _, manifest in objects(hostile) if manifest["kind"] == "Ingress")
    assert ingress["spec"]["ingressClassName"] == value
    assert ingress["spec"]["rules"][0]["host"] == value
    assert plain.keys() == hostile.keys()
    for path in plain:
        if path.endswith(".yaml"):
            assert len(documents(plain[path])) == len(documents(hostile[path])), path


@pytest.mark.parametrize("value", [value for value in HOSTILE if value])
def test_hostile_values_in_a_compose_file(value: str) -> None:
    recipe = with_sections(load_recipe("tiny-cpu"), triton={"image": value})
    package = DeployedPackage(ONE, Path("/srv") / value, recipe, recipe_text=value)
    (text,) = deployment_files("compose", package, ServeOptions(PORTS, recipe.triton)).values()
    made = yaml.safe_load(text)
    triton = made["services"]["triton"]
    assert triton["image"].replace("$$", "$") == value
    assert triton["volumes"][0]["source"].replace("$$", "$") == str(package.folder)
    assert made["configs"]["recipe"]["content"].replace("$$", "$") == value
    assert "$" not in text.replace("$$", "")


@pytest.mark.parametrize("value", ["a\nExecStartPre=/bin/rm", "a\rb", "a\x00b"])
def test_a_line_break_in_a_unit_is_refused(value: str) -> None:
    recipe = load_recipe("tiny-cpu")
    for served, folder in ((with_sections(recipe, deploy={"user": value}), "x"), (recipe, value)):
        with pytest.raises(UserError, match="cannot hold"):
            deployment_files(
                "systemd", DeployedPackage(ONE, Path("/srv") / folder, served), ServeOptions(PORTS)
            )


def test_a_name_that_a_template_has_and_nobody_gives_is_an_error() -> None:
    with pytest.raises(Exception, match="is undefined"):
        render("monitoring/prometheus.yml")
