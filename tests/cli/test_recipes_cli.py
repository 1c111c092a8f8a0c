"""`pipeline recipes`, as a user calls it: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline.bench.result import json_schema as result_schema
from pipeline.bench.settings import LoadSettings
from pipeline.cli.build import command as build
from pipeline.cli.main import main
from pipeline.cli.plan import command as plan
from pipeline.doctor.report import schema_text as report_schema
from pipeline.errors import InvalidInput
from pipeline.models import Architecture
from pipeline.recipe import load_recipe, packaged
from pipeline.recipe.catalog import SCHEMA_FILE, schema_text


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `pipeline recipes …` through the entry point."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["pipeline", "recipes", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Done(int(caught.value.code or 0), out, err)

    return run


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.yaml"
    file.write_text("name: bad\nmodel: {source: local:m}\nlimits: {max_input_tokens: 0}\n")
    return file


def test_ls(run: Run) -> None:
    done = run("ls")
    assert done.code == 0
    header, *rows = done.out.splitlines()
    assert header.split()[:3] == ["NAME", "RUNTIME", "QUANTIZATION"]
    assert [row.split()[0] for row in rows] == list(packaged())
    (tiny,) = [row for row in rows if row.startswith("tiny-cpu ")]
    assert tiny.split()[1:3] == ["cpu", "fp8"]
    purpose = packaged()["tiny-cpu"].read_text().splitlines()[0].removeprefix("# ")
    assert tiny.endswith(purpose)


def test_ls_json(run: Run) -> None:
    (tiny,) = [row for row in run("ls", "--json").json if row["name"] == "tiny-cpu"]
    assert tiny["runtime"] == "cpu"
    assert tiny["quantization"] == "fp8"
    assert Path(tiny["file"]).is_file()


def test_show_prints_the_file(run: Run) -> None:
    assert run("show", "tiny-cpu").out == packaged()["tiny-cpu"].read_text()


def test_show_prints_a_file_that_is_not_valid(run: Run, bad: Path) -> None:
    assert run("show", str(bad)).out == bad.read_text()
    assert run("show", str(bad), "--resolved").code == 2


def test_show_resolved_is_the_same_recipe(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(run("show", "tiny-cpu", "--resolved").out)
    assert load_recipe(tmp_path / "r.yaml") == load_recipe("tiny-cpu")
    assert "max_queue_delay_us: 0" in (tmp_path / "r.yaml").read_text()


def test_show_with_overrides(run: Run) -> None:
    done = run("show", "tiny-cpu", "--set", "limits.max_concurrency=3", "--set", "kv_cache.reuse=false")
    shown = yaml.safe_load(done.out)
    assert shown["limits"]["max_concurrency"] == 3
    assert shown["kv_cache"]["reuse"] is False


def test_show_json(run: Run) -> None:
    assert run("show", "tiny-cpu", "--json").json == load_recipe("tiny-cpu").model_dump(mode="json")


def test_copy(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "my.yaml"
    done = run("copy", "tiny-cpu", str(target))
    assert done.code == 0
    assert done.out.splitlines()[0] == f"wrote {target}, a copy of {packaged()['tiny-cpu']}"
    assert load_recipe(target) == load_recipe("tiny-cpu")
    again = run("copy", "tiny-cpu", str(target))
    assert again.code == 2
    assert again.err == f"pipeline: {target} exists; give --force to overwrite it, or name another file\n"
    assert run("copy", "tiny-cpu", str(target), "--force").code == 0


def test_validate_all_packaged(run: Run) -> None:
    done = run("validate")
    assert done.code == 0
    said = [line for line in done.out.splitlines() if not line.startswith(("  note: ", "  warning: "))]
    assert said == [f"{name}: valid" for name in packaged()]


def test_validate_prints_all_faults_of_all_files(run: Run, bad: Path) -> None:
    done = run("validate", "tiny-cpu", str(bad), "nosuch")
    assert done.code == 2
    assert done.out == "tiny-cpu: valid\n"
    missing = "is missing"
    lines = done.err.splitlines()
    assert lines[0] == f"{bad}: 4 faults"
    assert f"  {bad}:2: model.source = local:m: there is no such folder [source.files]" in lines
    assert f"  {bad}:3: limits.max_input_tokens = 0: must be 1 to 10000000" in lines
    assert f"  {bad}:3: limits.max_output_tokens: {missing} (1 to 1000000)" in lines
    assert f"  {bad}:3: limits.max_concurrency: {missing} (1 to 8192)" in lines
    assert lines[5] == "nosuch: 1 fault"


def test_validate_json(run: Run, bad: Path) -> None:
    done = run("validate", "tiny-cpu", str(bad), "--json")
    assert done.code == 2
    assert done.err == ""
    good, wrong = done.json
    assert good == {"recipe": "tiny-cpu", "valid": True, "faults": [], "findings": []}
    assert wrong["valid"] is False
    assert [one["rule"] for one in wrong["faults"]] == ["source.files", "", "", ""]
    assert wrong["faults"][1] == {
        "where": str(bad), "line": 3, "key": "limits.max_input_tokens", "value": "0",
        "problem": "must be 1 to 10000000", "fix": "", "rule": "",
    }  # fmt: skip


def test_validate_with_overrides(run: Run, bad: Path) -> None:
    limits = "limits={max_input_tokens: 8, max_output_tokens: 8, max_concurrency: 1}"
    assert run("validate", str(bad), "--set", limits, "--set", "model.source=hf:org/model").code == 0
    done = run("validate", "tiny-cpu", "--set", "limits.max_concurrency=0")
    assert done.code == 2
    assert "--set: limits.max_concurrency = 0: must be 1 to 8192" in done.err


GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}
RUNTIMES = {
    "cpu": ("{kind: cpu}", "run with runtime.kind cpu (one of LlamaForCausalLM, "),
    "tensorrt": ("{kind: tensorrt, version: 1.2.1, gpu: l4-24g}", "converted (one of LlamaForCausalLM, "),
    "pytorch": ("{kind: pytorch, version: 1.2.1, gpu: l4-24g}", "GptOssForCausalLM, "),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to take files from."""
    return Path(
        shutil.copytree(packaged()["tiny-cpu"].parent / "checkpoints/support-target", tmp_path / "model")
    )


def recipe_of(checkpoint: Path, runtime: str = "{kind: cpu}") -> Path:
    file = checkpoint.parent / "own.yaml"
    file.write_text(
        f"name: own\nmodel: {{source: 'local:{checkpoint}'}}\nruntime: {runtime}\n"
        "limits: {max_input_tokens: 64, max_output_tokens: 16, max_concurrency: 2}\n"
    )
    return file


@pytest.mark.parametrize("kind", RUNTIMES)
def test_validate_names_an_architecture_that_is_not_supported_and_nothing_that_follows(
    kind: str, run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with what is supported; and a build says the same before it makes anything."""
    runtime, supported = RUNTIMES[kind]
    (checkpoint / "config.json").write_text(json.dumps(GPT2))
    file = recipe_of(checkpoint, runtime)
    done = run("validate", str(file))
    assert done.code == 2
    header, fault = done.err.splitlines()
    assert header == f"{file}: 1 fault"
    assert f"{file}:2: model.source = local:" in fault
    assert "is a GPT2LMHeadModel, which " in fault
    assert supported in fault
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    built = CliRunner().invoke(build, [str(file)])
    assert str(built.exception).splitlines()[1:] == [fault]
    assert not list((tmp_path / "store").rglob("manifest.json"))
    planned = CliRunner().invoke(plan, [str(file)], env={"HF_HUB_OFFLINE": "1"})
    assert planned.exit_code == 2
    assert planned.output.count("GPT2LMHeadModel, which ") == 1
    assert "the target is a GPT2LMHeadModel, whose sizes cannot be read" in planned.output
    with pytest.raises(InvalidInput, match=r"1 fault\n.*GPT2LMHeadModel"):
        Architecture.read(checkpoint)


def test_validate_looks_at_local_folders(run: Run, checkpoint: Path) -> None:
    """What a build would only find when it comes to it: no folder, no weights, no tokenizer, values that we refuse."""
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "gelu", "vocab_size": None}))
    for name in ("tokenizer.json", "model.safetensors"):
        (checkpoint / name).unlink()
    done = run(
        "validate",
        str(recipe_of(checkpoint)),
        "--set",
        "draft={source: 'local:/nowhere', max_draft_tokens: 2}",
    )
    assert done.code == 2
    assert done.err.splitlines()[0].endswith(": 5 faults")
    for said in (
        "has no weights: neither model.safetensors nor model.safetensors.index.json [source.files]",
        "has no tokenizer.json (",
        "config.json: vocab_size: must be a positive number of at most 2147483647 [source.config]",
        "config.json: hidden_act = gelu: is not supported (silu) [source.config]",
        "draft.source = local:/nowhere: there is no such folder [source.files]",
    ):
        assert said in done.err


@pytest.mark.parametrize("samples", ["support", "conversations.jsonl", "texts.jsonl"])
def test_validate_asks_for_a_chat_template_where_samples_are_conversations(
    samples: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """Without one a model is served for completions, which is worth a warning."""
    (tmp_path / "conversations.jsonl").write_text('\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "Hi"}\n')
    (checkpoint / "chat_template.jinja").unlink()
    file = recipe_of(checkpoint)
    plain = run("validate", str(file))
    assert plain.code == 0
    assert "warning: model.source = local:" in plain.out
    assert "has no chat template: it is served for completions of text" in plain.out
    dataset = f"local:{samples}" if samples.endswith("l") else samples
    quantized = f"quantization={{format: fp8, calibration: {{dataset: '{dataset}'}}}}"
    done = run("validate", str(file), "--set", quantized)
    assert done.code == (0 if samples == "texts.jsonl" else 2)
    assert ("[source.template]" in done.err) == (samples != "texts.jsonl")


def test_validate_looks_for_the_samples(run: Run, checkpoint: Path) -> None:
    quantized = "quantization={format: fp8, calibration: {dataset: 'local:nowhere.jsonl'}}"
    done = run("validate", str(recipe_of(checkpoint)), "--set", quantized)
    assert done.code == 2
    assert "there is no such file [source.dataset]" in done.err


def test_schema(run: Run) -> None:
    assert run("schema").out == schema_text() == SCHEMA_FILE.read_text()
    assert run("schema", "doctor").out == report_schema()
    assert run("schema", "bench").out == result_schema()
    assert set(json.loads(run("schema", "load").out)["properties"]) == set(LoadSettings.model_fields)


@pytest.mark.parametrize("verb", ["ls", "show", "copy", "validate", "schema"])
def test_help_shows_an_example(run: Run, verb: str) -> None:
    done = run(verb, "--help")
    assert done.code == 0
    assert f"  pipeline recipes {verb}" in done.out


def test_wrong_use_is_exit_code_2(run: Run) -> None:
    assert run("copy", "tiny-cpu").code == 2
    assert run("show", "tiny-cpuu").code == 2
    assert run("show", "tiny-cpu", "--set", "nonsense").code == 2


def test_as_a_process(bad: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", "recipes", "validate", bad.name],
        cwd=bad.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        "bad.yaml: 4 faults\n  bad.yaml:2: model.source = local:m: there is no such folder [source.files]\n"
    )
