"""The comparison with AIPerf: what it holds, and a stand-in whose own clock proves ours."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from benchmarks.agreement import LATENCIES, PERCENTILES, Figures, Run, compare, table
from benchmarks.common import HERE, running
from pipeline.bench.lengths import Lengths
from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.run import run_bench
from pipeline.bench.subject import Subject
from pipeline.progress import Silent

ASKED = {"requests": 8, "concurrency": 1, "input_tokens": 8, "output_tokens": 8, "rounds": 3, "within": 0.05}


def test_what_we_measure_contains_what_the_server_did(tmp_path: Path) -> None:
    """A request's time by the client's clock begins before, and ends after, its time by the server's."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with running(HERE / "stand_in.py", 20, 2) as (port, _):
        url = f"http://127.0.0.1:{port}"
        subject = Subject("stand-in", "gateway", url, "stand-in", None, max_prompt=64, max_answer=64)
        settings = LoadSettings(
            concurrency=(1,), prompts=prompts, output_tokens=Lengths(8), requests=4, warmup_s=0
        )
        (level,) = run_bench(subject, settings, Silent()).levels
        with urllib.request.urlopen(f"{url}/told", timeout=30) as answer:
            first, *told = json.load(answer)
    assert first["itl"] == [], "the request before the load has one token"
    assert level.requests["complete"] == len(told) == 4
    assert level.samples["output_tokens"] == (8, 8, 8, 8)
    # One after the other, so both are in the same order.
    for name in ("ttft", "total"):
        for ours, server in zip(level.samples[name], told, strict=True):
            assert ours is not None
            # Of figures that are rounded to a microsecond.
            assert ours >= server[name] - 0.001


def test_medians_and_throughput_are_held_and_tails_are_shown() -> None:
    def run(scale: float, tail: float, rate: float) -> Run:
        keys = [(name, percent) for name, _, _ in LATENCIES for percent in PERCENTILES]
        figures = {key: 100.0 * (scale if key[1] == 50 else tail) for key in keys}
        return Run(Figures(figures, rate, 100.0, dict.fromkeys(keys, (90.0, 120.0))), None)

    def differing(ours: Run) -> list[str]:
        rows = compare({"pipeline bench": [ours] * 3, "AIPerf": [run(1.0, 1.0, 500.0)] * 3}, 0.05, 8)
        assert table(ASKED | {"rows": rows}).count("DIFFERS") == len(
            [1 for row in rows if row["agrees"] is False]
        )
        assert all(row.get("within_interval", [3, 3]) == [3, 3] for row in rows)
        return [row["figure"] for row in rows if row["agrees"] is False]

    assert differing(run(1.04, 1.5, 510.0)) == []
    assert differing(run(0.94, 1.0, 500.0)) == [f"{label} p50, ms" for _, _, label in LATENCIES]
    assert differing(run(1.0, 1.0, 530.0)) == ["output tokens/s"]


def test_a_gap_of_zero_is_no_ground_for_a_share() -> None:
    keys = [(name, percent) for name, _, _ in LATENCIES for percent in PERCENTILES]
    zero, one = (Run(Figures(dict.fromkeys(keys, value), 1.0), None) for value in (0.0, 1.0))
    rows = compare({"pipeline bench": [one], "AIPerf": [zero]}, 0.05, 8)
    assert {row["agrees"] for row in rows if row["figure"] != "output tokens/s"} == {None}
    assert "DIFFERS" not in table(ASKED | {"rows": rows})
