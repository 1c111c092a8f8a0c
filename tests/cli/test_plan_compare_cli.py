"""`pipeline plan compare`, and the options about speed, as a user calls them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import TypeAdapter

from pipeline.cli.plan import command
from pipeline.cli.render.compared_options import ComparisonDocument, schema_text
from pipeline.errors import InvalidInput, UserError
from tests.support.tensorrt import DRAFTED

GOLDEN = Path(__file__).parent / "golden" / "plan-compare.txt"
ASKED = (
    "compare", "llama-3.1-8b-fp8", "--gpus", "h100-sxm,l4,a100-pcie-40g", "--price", "h100-sxm=2.5",
    "--price", "l4=0.5", "--price", "a100-pcie-40g=1", "--prompt-tokens", "1000", "--output-tokens", "200",
    "--acceptance", "0.8", "--set", *DRAFTED,
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a hub, with a store of its own."""
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_the_page_is_as_it_was(tmp_path: Path) -> None:
    """Write it anew with GOLDEN=1, as after `scripts/fit_performance --write`."""
    drawn = tmp_path / "front.html"
    result = run(*ASKED, "--output", str(drawn))
    assert result.exit_code == 0, result.output
    if os.environ.get("GOLDEN"):
        GOLDEN.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == GOLDEN.read_text(encoding="utf-8")
    page = drawn.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "<p>warning: not checked, and ranked apart: no measurement is of" in page


def test_json_is_as_its_schema_says() -> None:
    """Nothing is missing, and nothing is there that the schema does not name."""
    result = run(*ASKED, "--json")
    assert result.exit_code == 0
    whole: Any = json.loads(result.stdout)
    adapter = TypeAdapter(ComparisonDocument)
    assert adapter.dump_python(adapter.validate_python(whole)) == whole
    schema = json.loads(schema_text())
    assert schema["properties"].keys() == whole.keys()
    assert whole["unit"] == "price"
    assert whole["serving"][0]["cost"]["per_million_output"]["value"] > 0
    assert {row["draft"] for row in whole["serving"]} == {True, False}
    assert len(whole["warnings"]) == 1
    # Brackets are where measurements are, and those that they check are ranked first.
    for row in whole["serving"]:
        for estimate in (row["load"]["tokens_per_s"], row["cost"]["per_million_output"]):
            assert (estimate["low"] is estimate["high"] is None) == bool(row["unchecked"]), row["label"]
        assert isinstance(row["load"]["ttft_p95_ms"], float)
    checked = [not row["unchecked"] for row in whole["serving"]]
    assert checked == sorted(checked, reverse=True)
    for row in whole["front"]:
        assert row["load"]["requests"] >= 1


def test_a_plan_takes_lengths_prices_and_acceptance() -> None:
    plain = json.loads(run("llama-3.3-70b-fp8", "--json").stdout)["performance"]
    asked = (
        "--prompt-tokens",
        "100",
        "--output-tokens",
        "50",
        "--acceptance",
        "0.9",
        "--price",
        "h100-sxm=2",
    )
    other = json.loads(run("llama-3.3-70b-fp8", "--json", *asked).stdout)["performance"]
    assert other["prompt_tokens"] == 100
    assert other["output_tokens"] == 50
    assert other["ttft_ms"]["value"] < plain["ttft_ms"]["value"]
    assert other["itl_ms"]["value"] < plain["itl_ms"]["value"]
    assert plain["cost"] is None
    assert plain["acceptance"] is None
    assert other["cost"]["per_million_output"]["value"] > 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("tiny-cpu", "--set", "runtime.gpu=l4-24g"), InvalidInput, "runtime.gpu"),
        (("compare", "tiny-cpu"), UserError, "this one is for cpu"),
        (("compare", "llama-3.1-8b-fp8", "--output", "a.pdf"), InvalidInput, "must end in .html or .png"),
        (
            ("llama-3.1-8b-fp8", "--acceptance", "80"),
            InvalidInput,
            "--acceptance = 80: must be a number from 0 to 1",
        ),
        (
            ("compare", "llama-3.1-8b-fp8", "--gpus", "h100-sxm-96g"),
            InvalidInput,
            "is not known; near: h100-sxm",
        ),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], error: type[Exception], text: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, error)
    assert text in str(result.exception)
