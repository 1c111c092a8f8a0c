"""Which values of `--set` a rollout applies, before the record of a deployment that runs; nothing is exchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.main import cli
from pipeline.recipe.catalog import copy_recipe
from pipeline.recipe.library import find_recipe
from pipeline.serving.exchange import find_running, next_recipe
from pipeline.store import Store
from pipeline.triton.running import RunningServer
from tests.support.deployments import ADDRESSES

EARLIER = ("limits.max_concurrency=4", "limits.max_output_tokens=64")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return copy_recipe(find_recipe("tiny-cpu"), str(tmp_path / "chat.yaml"), force=False)


@pytest.fixture
def store(tmp_path: Path, file: Path) -> Store:
    """`tiny-cpu` runs, from a recipe's file with two values of `--set`."""
    shelf = Store(tmp_path / "store")
    words = (str(file), *(word for name in EARLIER for word in ("--set", name)), "--store", str(shelf.root))
    record = RunningServer.of(ADDRESSES, tmp_path / "package", state="ready")
    replace(record, recipe=words).write(shelf.running, "tiny-cpu")
    return shelf


def rollout(store: Store, *words: str) -> Result:
    """It ends with what it lacks: the package is not built."""
    done = CliRunner().invoke(
        cli, ["rollout", *words, "--store", str(store.root)], env={"HF_HUB_OFFLINE": "1"}
    )
    assert "is not built, or its recipe has changed since" in str(done.exception)
    return done


def test_earlier_values_are_applied_again_and_said_to_be(store: Store, file: Path) -> None:
    done = rollout(store, "tiny-cpu")
    again = f"applied again: --set {EARLIER[0]} --set {EARLIER[1]}\n"
    assert done.stderr.endswith(f"{again}to drop them: pipeline rollout {file}\n")
    assert all(f"--set {name}" in str(done.exception) for name in EARLIER)


def test_a_key_given_anew_replaces_its_value(store: Store) -> None:
    done = rollout(store, "tiny-cpu", "--set", "limits.max_concurrency=2")
    assert f"applied again: --set {EARLIER[1]}\n" in done.stderr
    assert f"no longer applied: --set {EARLIER[0]}\n" in done.stderr
    assert EARLIER[0] not in str(done.exception)
    name, server = find_running("tiny-cpu", (), store)
    recipe = next_recipe("tiny-cpu", name, server, ("limits.max_concurrency=2",), list[str]().append)
    assert recipe.provenance.overrides == (EARLIER[1], "limits.max_concurrency=2")


def test_the_path_of_the_file_drops_them_all(store: Store, file: Path) -> None:
    done = rollout(store, str(file))
    assert "applied again" not in done.stderr
    assert f"no longer applied: --set {EARLIER[0]} --set {EARLIER[1]}\n" in done.stderr
    assert "--set" not in str(done.exception)


def test_values_of_sections_that_no_package_depends_on_stay_without_a_word(store: Store, file: Path) -> None:
    """Settings of a start, such as a log, are not named by a rollout."""
    of_start = ("gateway.max_waiting=3", "triton.log=/tmp/log")
    name, server = find_running("tiny-cpu", (), store)
    server = replace(server, recipe=(str(file), *(word for option in of_start for word in ("--set", option))))
    said = list[str]()
    assert next_recipe(name, name, server, (), said.append).provenance.overrides == of_start
    next_recipe(str(file), name, server, (), said.append)
    assert said == []
    next_recipe(name, name, server, ("gateway.workers=2",), said.append)
    assert said == ["applied at the next start: --set gateway.workers=2"]


def test_the_record_and_ps_show_them(store: Store, file: Path) -> None:
    shown = CliRunner().invoke(cli, ["ps", "--store", str(store.root)]).output
    assert f"recipe   {file} --set {EARLIER[0]} --set {EARLIER[1]}\n" in shown
    (row,) = json.loads(CliRunner().invoke(cli, ["ps", "--json", "--store", str(store.root)]).output)
    assert [word for word in row["recipe"] if "=" in word] == list(EARLIER)


def test_an_earlier_value_that_is_at_fault_now_is_said_before_the_fault(store: Store, file: Path) -> None:
    file.write_text(file.read_text().replace("max_draft_tokens: 4", "max_draft_tokens: 64"))
    done = CliRunner().invoke(cli, ["rollout", "tiny-cpu", "--store", str(store.root)])
    assert "must be less than limits.max_output_tokens, which is 64" in str(done.exception)
    assert f"--set {EARLIER[1]}\n" in done.stderr
