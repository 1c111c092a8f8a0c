"""`pipeline rules` and `--allow`, as a user calls them."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from pipeline.cli import build, rules, serve
from pipeline.cli.store import command as store_command
from pipeline.contracts.rules import rules as all_rules
from pipeline.errors import InvalidInput, UserError
from pipeline.store import Store

# A recipe for a GPU that its release does not know: nothing of it is run here.
NEW_GPU = (
    "tiny-cpu", "--set", "runtime={kind: pytorch, version: 1.0.0, gpu: b300-sxm-288g}", "--set", "quantization={}",
    "--set", "draft=null",
)  # fmt: skip
ALLOWED = ("--allow", "gpu.since")


def ok(done: Result) -> Result:
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_all_rules_are_listed() -> None:
    listed = ok(CliRunner().invoke(rules.command, ["--json"])).stdout
    assert [row["id"] for row in json.loads(listed)] == [rule.id for rule in all_rules()]
    table = ok(CliRunner().invoke(rules.command, [])).stdout
    assert all(f"  {rule.id} " in table for rule in all_rules())
    some = ok(CliRunner().invoke(rules.command, ["host", "note", "cpu"]))
    assert [line.split()[0] for line in some.stdout.splitlines() if line.startswith("  ")] == ["host.ports"]


def test_one_rule_with_its_sources() -> None:
    text = ok(CliRunner().invoke(rules.command, ["rt.spec_same_vocab"])).stdout
    assert "error with tensorrt, warning with pytorch, error with cpu" in text
    assert "NVIDIA/TensorRT-LLM examples/draft_target_model/README.md" in text
    assert "no: accepted tokens would be others than were proposed" in text
    assert "before 1.3.0rc29" in ok(CliRunner().invoke(rules.command, ["rt.ngram_size"])).stdout
    assert "model_repo/tensorrt_llm_bls" in ok(CliRunner().invoke(rules.command, ["rt.spec_batch"])).stdout


def test_an_unknown_rule_names_the_nearest() -> None:
    done = CliRunner().invoke(rules.command, ["tp.awq_blocks"])
    assert isinstance(done.exception, UserError)
    assert "did you mean tp.awq_block" in str(done.exception)


def test_what_may_not_be_allowed_is_said_at_once(shelf: Store) -> None:
    arguments = [*NEW_GPU, "--allow", "gpu.sinse", "--allow", "release", "--allow", "tp.attention_heads"]
    error = CliRunner().invoke(build.command, arguments).exception
    assert isinstance(error, InvalidInput)
    text = str(error)
    assert "--allow = gpu.sinse: there is no such rule (did you mean gpu.since" in text
    assert "--allow = release: may not be allowed: nothing is known of the release" in text
    assert "--allow = tp.attention_heads: may not be allowed: the checkpoint cannot be split" in text
    assert not shelf.root.exists()


def test_an_error_stops_a_build_and_nothing_is_written(shelf: Store) -> None:
    done = CliRunner().invoke(build.command, [*NEW_GPU])
    assert isinstance(done.exception, InvalidInput)
    assert "support for B300 and GB300 came with TensorRT-LLM 1.1.0" in str(done.exception)
    assert "[gpu.since]" in str(done.exception)
    assert shelf.list() == ()


def test_what_was_allowed_is_recorded(shelf: Store) -> None:
    ok(CliRunner().invoke(build.command, [*NEW_GPU, *ALLOWED]))
    for stage in ("build", "package"):
        (artifact,) = [artifact for artifact in shelf.list() if artifact.manifest.stage == stage]
        (record,) = [record for record in artifact.manifest.facts["preflight"] if record["allowed"]]  # type: ignore[index,union-attr,call-overload]
        assert (record["rule"], record["severity"]) == ("gpu.since", "error")  # type: ignore[index,call-overload]
        shown = ok(CliRunner().invoke(store_command, ["show", artifact.name])).stdout
        assert "\npreflight\n  allowed gpu.since: runtime.gpu = b300-sxm-288g: " in shown
    again = CliRunner().invoke(serve.command, [*NEW_GPU])  # the store has it, and it is not allowed any more
    assert isinstance(again.exception, InvalidInput)


def test_warnings_are_recorded(shelf: Store) -> None:
    newer = [*NEW_GPU[:2], "runtime={kind: pytorch, version: 1.2.1, gpu: b300-sxm-288g}", *NEW_GPU[3:]]
    ok(CliRunner().invoke(build.command, [*newer, "--set", "limits.max_input_tokens=800"]))
    (package,) = [artifact for artifact in shelf.list() if artifact.manifest.stage == "package"]
    records = package.manifest.facts["preflight"]
    assert [(record["rule"], record["allowed"]) for record in records] == [("limits.positions", False)]  # type: ignore[index,union-attr,call-overload]
