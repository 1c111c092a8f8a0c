"""The report of an acceptance run: what is written can be read again, tells its failures, and holds nothing private."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.accept.report import (
    AcceptanceCheck,
    AcceptanceReport,
    AcceptanceStep,
    page,
    private_texts,
    scrubbed,
)
from pipeline.errors import InvalidInput


def report(*steps: AcceptanceStep, finished: bool = True) -> AcceptanceReport:
    return AcceptanceReport(
        recipe="tiny-cpu",
        command="pipeline accept tiny-cpu",
        started="2026-11-22T12:00:00+00:00",
        settings={"name": "tiny-cpu"},
        machine={"GPUs": ["none"]},
        versions={"pipeline": "0.1.0"},
        package="0123abcd",
        steps=steps,
        finished=finished,
    )


SLOW = AcceptanceCheck(
    "first token", "failed", "10 ms (9 to 11)", "20 ms", 20.0, "ms", 10.0, (9.0, 11.0), "a | b"
)
FINE = AcceptanceCheck("package", "passed", "a package", "0123abcd")
STEPS = (
    AcceptanceStep("build", "Makes the package", (FINE,), 1.5),
    AcceptanceStep("latency", "Measures", (SLOW,), 2.0, {"alone": {"ttft_ms": 20.0}}, ("a line of the log",)),
)


def test_what_is_written_can_be_read_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    file, made = tmp_path / "reports" / "accept.json", report(*STEPS)
    made.write(file)
    made.write(file)
    assert AcceptanceReport.read(file) == made
    assert sorted(path.name for path in file.parent.iterdir()) == ["accept.json", "accept.md"]
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}


def test_the_page_names_what_failed_with_deviation_and_bracket() -> None:
    text = page(report(*STEPS).to_json())
    assert text.startswith("# tiny-cpu: NOT accepted\n")
    assert "1 passed, 1 failed" in text
    assert "- **latency, first token**: expected 10 ms (9 to 11); 20 ms; a | b" in text
    assert "| first token | 10 ms (9 to 11) | 20 ms | +100.0 % | no | failed |" in text
    assert "a line of the log" in text
    assert page(report(STEPS[0]).to_json()).startswith("# tiny-cpu: accepted\n")


def test_a_run_that_was_broken_off_is_not_accepted() -> None:
    unfinished = report(STEPS[0], finished=False)
    assert not unfinished.accepted
    assert page(unfinished.to_json()).startswith("# tiny-cpu: not finished\n")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": [1]}', '{"steps": []}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(InvalidInput, match="is not the report of an acceptance run"):
        AcceptanceReport.read(file)


ENVIRONMENT = {"HF_TOKEN": "abcdefgh1234", "AWS_SECRET_ACCESS_KEY": "s3cr3t-value", "SHELL": "/bin/bash"}
PRIVATE = private_texts(ENVIRONMENT, home=Path("/home/jane"), host="node-17")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=json_values, secret=st.sampled_from([*list(ENVIRONMENT.values())[:2], "/home/jane/.ssh", "node-17"])
)
def test_no_secret_is_left_wherever_it_stands(value: Any, secret: str) -> None:
    told = json.dumps(scrubbed({"a": [value, f"before {secret} after"], f"key {secret}": 1}, PRIVATE))
    for private in (*list(ENVIRONMENT.values())[:2], "/home/jane", "before node-17"):
        assert private not in told


def test_what_is_not_private_stays() -> None:
    kept = "h100-sxm-80g node-177 node-17x /home/janet /bin/bash --set model.source=hf:org/name 12 tokens"
    assert scrubbed(kept, PRIVATE) == kept
    assert scrubbed("redis://me:hunter2@cache:6379 hf_abcdefghijkl", PRIVATE) == "redis://me:…@cache:6379 …"
    assert re.search("~/store", scrubbed("/home/jane/store", PRIVATE))
