"""Programs that put load on a server and measure it.

Each asks for answers of one length, which go on after their end, and finds that all have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.programs import Program

REQUESTS, STREAMS, PROMPT_TOKENS, TOKENS = 6, 2, 40, 24
Programs = Callable[[str], Program]


def test_aiperf(program: Programs, variables: dict[str, str], tmp_path: Path) -> None:
    aiperf = program("aiperf")
    aiperf.call(
        [
            aiperf.command("aiperf"), "profile", "--model", variables["MODEL"], "--url", variables["GATEWAY_URL"],
            "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--tokenizer", variables["TOKENIZER"],
            "--concurrency", STREAMS, "--request-count", REQUESTS, "--synthetic-input-tokens-mean", PROMPT_TOKENS,
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


def test_guidellm(program: Programs, variables: dict[str, str], tmp_path: Path) -> None:
    guidellm, report = program("guidellm"), tmp_path / "report.json"
    guidellm.call(
        [
            guidellm.command("guidellm"), "run",
            "--backend", f"kind=openai_http,target={variables['GATEWAY_URL']},model={variables['MODEL']}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={variables['TOKENIZER']}",
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--output", f"kind=json,path={report}", "--disable-console-interactive",
        ],
        timeout_s=900,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == REQUESTS
    assert not requests["errored"]
    assert {request["output_tokens"] for request in requests["successful"]} == {TOKENS}


def test_inference_perf(program: Programs, variables: dict[str, str], tmp_path: Path) -> None:
    """Its configuration is JSON, which is YAML."""
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": {"min": 10, "max": PROMPT_TOKENS, "mean": 20, "std_dev": 5},
            "output_distribution": {"min": TOKENS, "max": TOKENS, "mean": TOKENS, "std_dev": 0},
        },
        "load": {"type": "constant", "stages": [{"rate": STREAMS, "duration": REQUESTS // STREAMS}], "num_workers": 1},
        "server": {
            "type": "vllm", "model_name": variables["MODEL"], "base_url": variables["GATEWAY_URL"], "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": variables["TOKENIZER"]},
        "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": True}},
        "storage": {"local_storage": {"path": str(tmp_path / "reports")}},
    }  # fmt: skip
    (tmp_path / "config.yml").write_text(json.dumps(config))
    inference_perf = program("inference_perf")
    inference_perf.call(
        [inference_perf.command("inference-perf"), "--config_file", tmp_path / "config.yml"], timeout_s=900
    )
    reports = tmp_path / "reports"
    summary = json.loads((reports / "summary_lifecycle_metrics.json").read_text())
    assert (summary["successes"]["count"], summary["failures"]["count"]) == (REQUESTS, 0)
    # Its own `output_tokens` count the text, which has no special tokens, over again.
    requests = json.loads((reports / "per_request_lifecycle_metrics.json").read_text())
    usages = [request["info"]["response_metrics"]["server_usage"] for request in requests]
    assert [usage["completion_tokens"] for usage in usages] == [TOKENS] * REQUESTS
