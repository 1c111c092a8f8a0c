"""The page of measurements: its tables are what is kept, and each command that it names is there."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.__main__ import PAGE, RESULTS, kept_of, main, page_of
from benchmarks.common import ROOT
from benchmarks.measurements import MEASUREMENTS
from pipeline.machine.host import processor_name


def test_the_page_is_what_is_kept() -> None:
    assert main(["--check"]) == 0
    page, results = PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8"))
    for name in MEASUREMENTS:
        assert f"<!-- measured: {name} -->" in page
    assert results.keys() <= MEASUREMENTS.keys()


def test_a_place_is_written_by_what_is_kept_and_else_left_alone() -> None:
    page = "# Figures\n\n<!-- measured: cache -->\nold\n<!-- end -->\n\n<!-- measured: client -->\nold\n<!-- end -->\n"
    pair = {"ours": "pipeline.client", "beside": "tritonclient", "times_tokens_per_s": 1.25, "later_ms": -0.5}
    made = datetime(2026, 11, 23, tzinfo=UTC)

    def kept(name: str, printed: str) -> dict[str, Any]:
        measurement = MEASUREMENTS[name]
        found = kept_of(measurement, measurement.line, printed, made, 0.1, 0)
        assert found is not None
        return found

    page_ = page_of(page, {"client": kept("client", json.dumps({"rows": [], "pairs": [pair]}))})
    assert "| pipeline.client beside tritonclient | -0.500 ms | 1.25 times |" in page_
    assert "`python benchmarks/client.py --rounds 60`, 2026-11-23, " in page_
    assert f" processors ({processor_name()}), load 0.1 before it:" in page_
    assert page_.count("old") == 1
    both = page_of(page_, {"cache": kept("cache", "a hit  11 µs \n")})
    assert "```text\na hit  11 µs\n```" in both
    assert "old" not in both
    assert kept_of(MEASUREMENTS["client"], "", "not JSON", made, None, 1) is None
    with pytest.raises(KeyError, match="nothing"):
        page_of("<!-- measured: nothing -->\n<!-- end -->", {})


def test_commands_name_files_that_are_there() -> None:
    for measurement in MEASUREMENTS.values():
        assert "--json" not in measurement.command
        program = next(word for word in shlex.split(measurement.line) if word != "python")
        assert (ROOT / program).is_file()
