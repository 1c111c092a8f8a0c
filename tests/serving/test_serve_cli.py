"""`pipeline serve` and `pipeline deploy` without a GPU: what they refuse, and what they would run."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.cli.deploy import command as deploy_command
from pipeline.cli.serve import command as serve_command
from pipeline.errors import PipelineError, UserError
from pipeline.progress import Lines, Silent
from pipeline.recipe import load_recipe
from pipeline.serving.announcement import Announcement
from pipeline.serving.ports import Ports
from pipeline.triton.running import RunningServer


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(serve_command, arguments)


def deploy(*arguments: str) -> Result:
    return CliRunner().invoke(deploy_command, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a RECIPE, or a folder with --package"),
        (["tiny-cpu", "--json"], "--json goes with --dry-run"),
        (["tiny-cpu", "--no-wait"], "--no-wait goes with --detach"),
        (["one", "two", "--package", "/tmp"], "--package: name one RECIPE then"),
    ],
)
def test_what_serve_cannot_be_asked_for(arguments: list[str], said: str) -> None:
    done = serve(*arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a RECIPE, or a folder with --package"),
        (
            ["tiny-cpu", "--target", "local"],
            "'local' is not one of 'docker', 'compose', 'systemd', 'kubernetes'",
        ),
        (["tiny-cpu", "--target", "podman"], "is not one of 'docker', 'compose', 'systemd', 'kubernetes'"),
    ],
)
def test_what_deploy_cannot_be_asked_for(arguments: list[str], said: str) -> None:
    done = deploy(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    memory = deploy("tiny-cpu", "--set", "triton.memory=plenty").exception
    assert isinstance(memory, UserError)
    assert "triton.memory = plenty: is not accepted (write a number and K, M, G or T, like 64G)" in str(
        memory
    )


def test_a_package_for_the_cpu_needs_no_container(cpu_package: Path, tmp_path: Path) -> None:
    done = serve(
        "--package",
        str(cpu_package),
        "--store",
        str(tmp_path),
        "--set",
        "triton.container=true",
        "--no-gateway",
    )
    assert isinstance(done.exception, PipelineError)
    assert "support is for this machine's CPU: no container serves it" in str(done.exception)


def test_what_others_run_is_written_and_nothing_is_run(
    gpu_package: Path, cpu_package: Path, tmp_path: Path
) -> None:
    """A compose file of a recipe has the recipe in it, with its response cache; a dry run writes nothing."""
    store, into = ("--store", str(tmp_path / "store")), tmp_path / "deployment"
    sets = ("--set", "name=support", "--set", "cache.enabled=true")
    words = ("tiny-cpu", *sets, "--package", str(gpu_package), "--target", "compose", "--output", str(into))
    shown = deploy(*words, *store, "--dry-run", "--set", "triton.memory=64G")
    assert shown.exit_code == 0, shown.output
    assert not into.exists()
    assert deploy(*words, *store, "--set", "triton.memory=64G").exit_code == 0
    written = (into / "compose.yaml").read_text()
    assert written == shown.stdout
    services = yaml.safe_load(written)
    assert services["services"]["triton"]["deploy"]["resources"]["limits"] == {"memory": "64G"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(services["configs"]["recipe"]["content"].replace("$$", "$"))
    assert load_recipe(recipe) == load_recipe("tiny-cpu", (*sets[1::2], "golden=null"))
    made = json.loads(deploy("--package", str(cpu_package), *store, "--json").stdout)
    assert (made["target"], made["built"], made["written"]) == ("systemd", True, None)
    unit = made["files"]["pipeline-support.service"]
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line)
    words = words[words.index("serve") :]
    assert words[:3] == ["serve", "--package", str(cpu_package)]
    # What the unit starts is what `serve` understands.
    words[words.index("--store") + 1] = str(tmp_path / "store")
    run = json.loads(serve(*words[1:], "--dry-run", "--json").stdout)
    assert run["ports"]["gRPC"] == 8001
    assert not (tmp_path / "store").exists()


def test_dry_run_of_a_package_for_the_cpu(cpu_package: Path, tmp_path: Path) -> None:
    free = Ports.free()
    done = serve(
        *("--package", str(cpu_package), "--store", str(tmp_path), "--dry-run", "--json"),
        *("--set", f"triton.grpc_port={free.grpc}", "--set", "triton.start_timeout_s=90"),
    )
    made = json.loads(done.stdout)
    assert made["command"][0].endswith("/bin/tritonserver")
    assert made["ports"]["gRPC"] == free.grpc
    assert "--allow-http=false" in made["command"]
    assert made["docker"] == []
    assert made["start_deadline_s"] == 90
    assert made["environment"] == {"PIPELINE_TRITON_GRPC": "unix:/tmp/pipeline-triton/grpc:1"}
    assert not (tmp_path / "running").exists()


def test_a_server_that_cannot_be_announced_is_served_all_the_same(tmp_path: Path) -> None:
    """Its store may be one that is only read."""
    (tmp_path / "running").write_text("no folder")
    told = io.StringIO()
    record = RunningServer(
        1, "localhost:1", "http://localhost:2", "http://localhost:3", tmp_path, "2026-01-01"
    )
    announcement = Announcement(tmp_path / "running", "r", record, ["triton"])
    with pytest.raises(UserError, match="serve Triton alone with --no-gateway"):
        announcement.claim(Silent(), needed=True)
    announcement.claim(Lines(told))
    announcement.set_state("triton", "ready")
    announcement.withdraw()
    assert f"{tmp_path / 'running'} cannot be written (File exists)" in told.getvalue()
    assert "--url" in told.getvalue()


def test_what_is_let_pass_is_marked_and_refuses_no_more(
    gpu_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver, no Docker
    arguments = (
        "--package",
        str(gpu_package),
        "--store",
        str(tmp_path / "store"),
        "--set",
        "triton.container=false",
    )
    allowed = ("--allow", "host.gpus", "--allow", "port.version")
    shown = serve(*arguments, *allowed, "--dry-run", "--json")
    marks = {finding["rule"]: finding["allowed"] for finding in json.loads(shown.stdout)["findings"]}
    assert {name: marks[name] for name in ("host.gpus", "port.version", "host.programs")} == {
        "host.gpus": True, "port.version": True, "host.programs": False,
    }  # fmt: skip
    done = serve(*arguments, *allowed)
    assert isinstance(done.exception, UserError)
    assert "[host.programs]" in str(done.exception)
    assert "[host.gpus]" not in str(done.exception)
    assert "allowed: runtime.gpu = h100-sxm-80g: there is no nvidia-smi" in done.output
