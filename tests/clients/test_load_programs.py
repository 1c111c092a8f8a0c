"""Programs that put load on a server and measure it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.programs import Program

REQUESTS, TOKENS = 6, 24


def test_aiperf(program: Callable[[str], Program], variables: dict[str, str], tmp_path: Path) -> None:
    """Each answer has as many tokens as are asked for, because it goes on after its end."""
    aiperf = program("aiperf")
    aiperf.call(
        [
            aiperf.command("aiperf"), "profile", "--model", variables["MODEL"], "--url", variables["GATEWAY_URL"],
            "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--tokenizer", variables["TOKENIZER"],
            "--concurrency", 2, "--request-count", REQUESTS, "--synthetic-input-tokens-mean", 40,
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"max_tokens:{TOKENS}",
            "--output-artifact-dir", tmp_path, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            "--workers-max", 1, "--record-processor-service-count", 1,
        ],
        timeout_s=900,
    )  # fmt: skip
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_request_count", {}).get("avg")
    lengths = report["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (TOKENS, TOKENS)
