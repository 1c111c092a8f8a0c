"""`pipeline recipes`, as a user calls it: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.result import json_schema as result_schema
from pipeline.cli.build import command as build
from pipeline.cli.plan import command as plan
from pipeline.cli.render.compared_options import schema_text as comparison_schema
from pipeline.doctor.report import schema_text as report_schema
from pipeline.errors import InvalidInput
from pipeline.models import Architecture
from pipeline.prepare.report_json import schema_text as plan_schema
from pipeline.recipe import load_recipe, packaged
from pipeline.recipe.catalog import SCHEMA_FILE, schema_text
from tests.cli.conftest import Run


@pytest.fixture
def recipes(run: Run) -> Run:
    """Runs `pipeline recipes …`."""
    return partial(run, "recipes")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.yaml"
    file.write_text("name: bad\nmodel: {source: local:m}\nlimits: {max_input_tokens: 0}\n")
    return file


def test_ls(recipes: Run) -> None:
    done = recipes("ls")
    assert done.code == 0
    header, *rows = done.out.splitlines()
    assert header.split()[:3] == ["NAME", "RUNTIME", "QUANTIZATION"]
    assert [row.split()[0] for row in rows] == list(packaged())
    (line,) = [row for row in rows if row.startswith("tiny-cpu ")]
    assert line.split()[1:3] == ["cpu", "fp8"]
    purpose = packaged()["tiny-cpu"].read_text().splitlines()[0].removeprefix("# ")
    assert line.endswith(purpose)
    (tiny,) = [row for row in recipes("ls", "--json").json if row["name"] == "tiny-cpu"]
    assert (tiny["runtime"], tiny["quantization"], Path(tiny["file"]).is_file()) == ("cpu", "fp8", True)


def test_show_prints_the_file_valid_or_not(recipes: Run, bad: Path) -> None:
    assert recipes("show", str(bad)).out == bad.read_text()
    assert recipes("show", "tiny-cpu").out == packaged()["tiny-cpu"].read_text()
    assert recipes("show", str(bad), "--resolved").code == 2


def test_show_resolved_is_the_same_recipe(recipes: Run, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(recipes("show", "tiny-cpu", "--resolved").out)
    assert load_recipe(tmp_path / "r.yaml") == load_recipe("tiny-cpu")
    assert "max_queue_delay_us: 0" in (tmp_path / "r.yaml").read_text()


def test_show_with_overrides(recipes: Run) -> None:
    done = recipes("show", "tiny-cpu", "--set", "limits.max_concurrency=3", "--set", "kv_cache.reuse=false")
    shown = yaml.safe_load(done.out)
    assert shown["limits"]["max_concurrency"] == 3
    assert shown["kv_cache"]["reuse"] is False


def test_show_beside_upstream(recipes: Run) -> None:
    done = recipes("show", "deepseek-r1", "--upstream")
    assert done.out.startswith(
        "deepseek-r1 follows examples/configs/curated/deepseek-r1-throughput.yaml @180e9756f04b, for "
        "deepseek-ai/DeepSeek-R1-0528 on H100, H200\nthe same: "
    )
    assert "\nmax_batch_size: upstream 1024, here 16\n    128 requests on eight GPUs, " in done.out
    rows = {
        difference["key"]: difference
        for difference in recipes("show", "deepseek-r1", "--upstream", "--json").json["differences"]
    }
    assert (rows["max_batch_size"]["upstream"], rows["model"]["upstream"]) == ("1024", None)
    changed = recipes("show", "deepseek-r1", "--upstream", "--set", "limits.max_concurrency=8")
    assert "\nmax_batch_size: upstream 1024, here 1\n    not explained\n" in changed.out
    assert recipes("show", "glm-4.5-air", "--upstream").out.startswith("glm-4.5-air: upstream keeps no ")
    assert recipes("show", "tiny-cpu", "--upstream").code == 2
    assert recipes("show", "deepseek-r1", "--upstream", "--resolved").code == 2


def test_copy(recipes: Run, tmp_path: Path) -> None:
    target = tmp_path / "my.yaml"
    done = recipes("copy", "tiny-cpu", str(target))
    assert done.code == 0
    assert done.out.splitlines()[0] == f"wrote {target}, a copy of {packaged()['tiny-cpu']}"
    assert load_recipe(target) == load_recipe("tiny-cpu")
    again = recipes("copy", "tiny-cpu", str(target))
    assert again.code == 2
    assert again.err == f"pipeline: {target} exists; give --force to overwrite it, or name another file\n"
    assert recipes("copy", "tiny-cpu", str(target), "--force").code == 0


def test_validate_all_packaged(recipes: Run) -> None:
    done = recipes("validate")
    assert done.code == 0
    said = [line for line in done.out.splitlines() if not line.startswith(("  note: ", "  warning: "))]
    assert said == [f"{name}: valid" for name in packaged()]


def test_validate_prints_all_faults_of_all_files(recipes: Run, bad: Path) -> None:
    done = recipes("validate", "tiny-cpu", str(bad), "nosuch")
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


def test_validate_json(recipes: Run, bad: Path) -> None:
    done = recipes("validate", "tiny-cpu", str(bad), "--json")
    assert done.code == 2
    assert done.err == ""
    good, wrong = done.json
    assert good == {"recipe": "tiny-cpu", "valid": True, "faults": [], "findings": []}
    assert wrong["valid"] is False
    assert [fault["rule"] for fault in wrong["faults"]] == ["source.files", "", "", ""]
    assert wrong["faults"][1] == {
        "where": str(bad), "line": 3, "key": "limits.max_input_tokens", "value": "0",
        "problem": "must be 1 to 10000000", "fix": "", "rule": "",
    }  # fmt: skip


def test_validate_with_overrides(recipes: Run, bad: Path) -> None:
    limits = "limits={max_input_tokens: 8, max_output_tokens: 8, max_concurrency: 1}"
    assert recipes("validate", str(bad), "--set", limits, "--set", "model.source=hf:org/model").code == 0
    done = recipes("validate", "tiny-cpu", "--set", "limits.max_concurrency=0")
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
    kind: str, recipes: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with what is supported; and a build says the same before it makes anything."""
    runtime, supported = RUNTIMES[kind]
    (checkpoint / "config.json").write_text(json.dumps(GPT2))
    file = recipe_of(checkpoint, runtime)
    done = recipes("validate", str(file))
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


def test_validate_looks_at_local_folders(recipes: Run, checkpoint: Path) -> None:
    """What a build would only find when it comes to it: no folder, no weights, no tokenizer, values that we refuse."""
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "gelu", "vocab_size": None}))
    for name in ("tokenizer.json", "model.safetensors"):
        (checkpoint / name).unlink()
    done = recipes(
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
    samples: str, recipes: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """Without one a model is served for completions, which is worth a warning."""
    (tmp_path / "conversations.jsonl").write_text('\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "Hi"}\n')
    (checkpoint / "chat_template.jinja").unlink()
    file = recipe_of(checkpoint)
    plain = recipes("validate", str(file))
    assert plain.code == 0
    assert "warning: model.source = local:" in plain.out
    assert "has no chat template: it is served for completions of text" in plain.out
    dataset = f"local:{samples}" if samples.endswith("l") else samples
    quantized = f"quantization={{format: fp8, calibration: {{dataset: '{dataset}'}}}}"
    done = recipes("validate", str(file), "--set", quantized)
    assert done.code == (0 if samples == "texts.jsonl" else 2)
    assert ("[source.template]" in done.err) == (samples != "texts.jsonl")


def test_validate_looks_for_the_samples(recipes: Run, checkpoint: Path) -> None:
    quantized = "quantization={format: fp8, calibration: {dataset: 'local:nowhere.jsonl'}}"
    done = recipes("validate", str(recipe_of(checkpoint)), "--set", quantized)
    assert done.code == 2
    assert "there is no such file [source.dataset]" in done.err


def test_schema(recipes: Run) -> None:
    assert recipes("schema").out == schema_text() == SCHEMA_FILE.read_text()
    assert recipes("schema", "doctor").out == report_schema()
    assert recipes("schema", "bench").out == result_schema()
    assert recipes("schema", "plan").out == plan_schema()
    assert recipes("schema", "comparison").out == comparison_schema()
    assert set(recipes("schema", "load").json["properties"]) == set(LoadSettings.model_fields)


def test_wrong_use_is_exit_code_2(recipes: Run) -> None:
    assert recipes("copy", "tiny-cpu").code == 2
    assert recipes("show", "tiny-cpuu").code == 2
    assert recipes("show", "tiny-cpu", "--set", "nonsense").code == 2
