"""`pipeline doctor` as users run it: on this machine without a GPU, and on one whose tools hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import TypeAdapter

from pipeline.cli.main import cli
from pipeline.doctor.report import SCHEMA_FILE, Report, json_schema, schema_text
from pipeline.recipe import packaged
from tests.support.machines import HANGS, put_tool

SECRET = "hf_verysecrettoken"


HERE = {"HF_HUB_OFFLINE": "1", "HF_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": ""}


def doctor(tmp_path: Path, *arguments: str, **environment: str) -> Result:
    """The command, where no GPU may be seen, no hub is asked and a token is set."""
    words = ["doctor", "--store", str(tmp_path / "store"), *arguments]
    return CliRunner().invoke(cli, words, env=HERE | environment)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = doctor(tmp_path_factory.mktemp("doctor"), "--json")
    assert done.exit_code == 0
    assert SECRET not in done.output
    made: dict[str, Any] = json.loads(done.output)
    return made


def test_tiny_cpu_is_runnable_here_and_recipes_for_gpus_are_not_each_with_reasons(
    report: dict[str, Any],
) -> None:
    verdicts = {verdict["recipe"]: verdict for verdict in report["recipes"]}
    assert verdicts.keys() == packaged().keys()
    assert [name for name, verdict in verdicts.items() if verdict["runnable"]] == ["tiny-cpu"]
    assert report["runnable"] is True
    for name, verdict in verdicts.items():
        if name == "tiny-cpu":
            continue
        for way in verdict["ways"]:
            assert way["possible"] is not bool(way["obstacles"])
            assert all(obstacle["problem"] for obstacle in way["obstacles"])
        rules = {obstacle["rule"] for way in verdict["ways"] for obstacle in way["obstacles"]}
        assert "host.gpus" in rules, name


def test_the_object_is_what_its_schema_says(report: dict[str, Any]) -> None:
    read = TypeAdapter(Report).validate_python(report)
    assert read.as_json() == report
    assert set(report) == set(json_schema()["properties"])


def test_the_schema_is_checked_in() -> None:
    assert schema_text() == SCHEMA_FILE.read_text(encoding="utf-8"), (
        f"pipeline recipes schema doctor > {SCHEMA_FILE}"
    )


def test_the_table_names_what_is_there_and_what_would_help(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.exit_code == 0
    assert SECRET not in done.output
    for word in (
        "extra calibrate",
        "memory",
        "/dev/shm",
        "embedded Triton",
        "port 8001",
        "HF_HUB_OFFLINE is set",
    ):
        assert word in done.output
    assert f"1 of {len(packaged())} recipes are runnable here" in done.output


def test_recipes_that_are_named_decide_the_exit_code(tmp_path: Path) -> None:
    assert doctor(tmp_path, "tiny-cpu").exit_code == 0
    done = doctor(tmp_path, "tiny-cpu", "phi-4-fp8", "no-such-recipe")
    assert done.exit_code == 2
    assert "1 of 3 recipes are runnable here" in done.output
    assert "is neither a packaged recipe nor a file" in done.output


def test_a_recipe_with_faults_shows_all_of_them(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: Mine\nmodle: x\nruntime: {kind: gpu}\n")
    done = doctor(tmp_path, str(recipe), "--json")
    assert done.exit_code == 2
    (verdict,) = json.loads(done.output)["recipes"]
    assert (verdict["runnable"], verdict["runtime"]) == (False, None)
    said = " ".join(obstacle["problem"] for obstacle in verdict["ways"][0]["obstacles"])
    for word in ("name", "modle", "runtime"):
        assert word in said


def test_tools_that_hang_do_not_hang_it(tmp_path: Path) -> None:
    for name in ("nvidia-smi", "docker", "mpirun", "python3", "ldd"):
        put_tool(tmp_path / "tools", name, does=HANGS)
    put_tool(tmp_path / "tools", "trtllm-build")
    words = [
        "doctor",
        "--store",
        str(tmp_path / "store"),
        "tiny-cpu",
        "phi-4-fp8",
        "--timeout-s",
        "1",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | HERE | {"PATH": str(tmp_path / "tools")},
    )
    made = json.loads(done.stdout)
    lines = {check["subject"]: check["text"] for section in made["sections"] for check in section["checks"]}
    for subject in ("docker", "MPI", "TensorRT-LLM", "embedded Triton"):
        assert "answer" in lines[subject], (subject, lines[subject])
    assert "answer" in lines["GPU"] or made["machine"]["gpus"]["source"] == "NVML"
    assert made["machine"]["memory"]["total_bytes"] > 0, "what does not hang is told"
    assert done.returncode == 2


def test_tools_that_fail_are_quoted(tmp_path: Path) -> None:
    put_tool(
        tmp_path / "tools",
        "nvidia-smi",
        complains="Failed to initialize NVML: Driver/library version mismatch",
        code=18,
    )
    put_tool(tmp_path / "tools", "docker", complains="permission denied while trying to connect", code=1)
    done = doctor(tmp_path, "phi-4-fp8", PATH=str(tmp_path / "tools"))
    assert done.exit_code == 2
    assert "usermod -aG docker" in done.output
    assert "version mismatch" in done.output or "by NVML" in done.output
